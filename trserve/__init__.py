"""trserve: token-level routing between language models behind one endpoint."""

__version__ = "0.1.0"
