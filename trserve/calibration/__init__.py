"""``trserve calibrate``: the threshold for a share of the large model's tokens."""
