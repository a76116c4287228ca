"""Run one stage: ``python -m bench.gpu_stages NAME --device cuda|cpu [--quick] [--until S]``.

Each line on standard output that is a JSON object adds to those before: with ``error`` the stage
failed, with ``unavailable`` there is nothing to check here, ``summary`` is a sentence, ``tables``
are rows by title. Knows no stage.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from typing import Any, Final

from bench.gpu_stages.parts import tell, told

MODULES: Final = {
    "env": "machine",
    "attributes": "machine",
    "host_register": "links",
    "ipc": "links",
    "waits": "links",
    "kernels": "kernels",
    "engine": "engine",
    "flashinfer": "flashinfer",
    "nccl": "links",
    "mps": "served",
    "ablation": "ablation",
    "spread": "spread",
    "end_to_end": "served",
}

BOUNDED: Final = ("kernels", "ablation", "end_to_end")
"""Leave out what they have no time for, if they know how much they have."""


def main() -> int:
    """Returns 0 if the stage held, 1 if not."""
    arguments = argparse.ArgumentParser(prog="python -m bench.gpu_stages")
    arguments.add_argument("stage", choices=MODULES)
    arguments.add_argument("--device", choices=("cuda", "cpu"), required=True)
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--until", type=float, help="when it will be ended (time.monotonic)")
    args = arguments.parse_args()
    try:
        detail = _run(args)
    except Exception as error:
        # Any way of failing is a result; where it began is what a person looks for.
        traceback.print_exc()
        detail = {"error": told(error)}
    tell(detail)
    return int("error" in detail)


def _run(args: argparse.Namespace) -> dict[str, Any]:
    stage = getattr(importlib.import_module(f"bench.gpu_stages.{MODULES[args.stage]}"), args.stage)
    if args.until is None or args.stage not in BOUNDED:
        detail: dict[str, Any] = stage(args.device, args.quick)
    else:  # what its imports took is gone
        detail = stage(args.device, args.quick, args.until - time.monotonic())
    return detail


if __name__ == "__main__":
    sys.exit(main())
