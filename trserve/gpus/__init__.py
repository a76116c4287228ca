"""The GPUs of this machine: what is there, who gets which, how much memory, and MPS.

Nothing here imports torch or a package for CUDA: it is the launcher's, which must work where there
is no GPU. What the driver knows is asked of the driver's own programs.
"""
