"""``trserve trace``: what a running server's processes did, as a file that Perfetto opens."""
