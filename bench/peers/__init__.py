"""Other engines, each run by an interpreter of its own; they import nothing of trserve."""
