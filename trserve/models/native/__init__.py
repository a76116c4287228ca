"""The steps of a dense decoder on a CPU, compiled; ``decoder`` is where to begin."""
