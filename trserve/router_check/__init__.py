"""Checking a router, and beginning one: ``trserve router``. Importing this costs nothing."""
