"""A running server from a terminal: what it does, and a chat with it. HTTP is all that it knows."""
