"""``trserve plan``: what delayed batching would yield, before a server runs."""
