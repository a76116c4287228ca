"""``trserve convert-router``: official checkpoints to safetensors and JSON."""
