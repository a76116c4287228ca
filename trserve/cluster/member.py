"""A trserve command that ends with whoever started it: a group's, on the host that Ray chose.

The launcher of a server ends its children when it ends; nobody would end the launcher if the actor
that started it were killed. Knows nothing of what the command does.
"""

from __future__ import annotations

import sys

from trserve.ipc.process import die_with_parent


def main() -> None:
    """``python -m trserve.cluster.member PARENT_PID ARGUMENT...``."""
    die_with_parent(int(sys.argv[1]))
    from trserve.cli import main as command

    command(sys.argv[2:], prog_name="trserve")


if __name__ == "__main__":
    main()
