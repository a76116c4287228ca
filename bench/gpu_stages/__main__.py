"""Run one stage: ``python -m bench.gpu_stages NAME --device cuda|cpu [--quick] [--limit-s S]``.

The last line on standard output is a JSON object: with ``error`` it failed, with ``unavailable``
there is nothing to check here, ``summary`` is a sentence, ``tables`` rows by title. Knows no stage.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from typing import Any, Final

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
    "ablation": "served",
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
    arguments.add_argument("--limit-s", type=float, help="what it will be ended after")
    args = arguments.parse_args()
    bounded = args.limit_s is not None and args.stage in BOUNDED
    more = (args.limit_s,) if bounded else ()
    module = importlib.import_module(f"bench.gpu_stages.{MODULES[args.stage]}")
    try:
        detail: dict[str, Any] = getattr(module, args.stage)(args.device, args.quick, *more)
    except Exception as error:
        # Any way of failing is a result; where it began is what a person looks for.
        traceback.print_exc()
        detail = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(detail, default=str), flush=True)
    return int("error" in detail)


if __name__ == "__main__":
    sys.exit(main())
