"""``trserve train-router``: routers trained on what both models say at the same prefixes."""
