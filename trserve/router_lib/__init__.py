"""Routers: who writes the next token of a request. `base` is the interface, the rest use it."""
