"""Tensor parallelism: one model over several processes, of which rank 0 is the worker."""
