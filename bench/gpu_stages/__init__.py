"""The stages of ``bench.gpu_check``, each run as a process of its own."""
