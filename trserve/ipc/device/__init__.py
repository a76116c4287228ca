"""Links that move suffixes into a GPU's memory. Imports neither torch nor CuPy by itself."""
