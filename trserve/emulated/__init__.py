"""Emulated devices: a real server around a forward pass that only takes its time."""
