"""What ``trserve.Engine`` is made of; the public names are those of ``trserve``."""
