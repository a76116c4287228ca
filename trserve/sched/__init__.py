"""Scheduling decisions: pure Python in, decisions out. No torch, no I/O."""
