"""``python -m trserve`` is the ``trserve`` command."""

from trserve.cli import main

main(prog_name="trserve")
