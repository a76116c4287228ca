"""The compiled part of trserve: the CPU kernels, once for each instruction set worth having.

Everything else about the package stands in ``setup.cfg``. An extension that does not compile is
left out (torch does its work then), so a compiler is wanted but not needed.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("trserve/models/native")
X86_VARIANTS = {
    "avx512bf16": ["-march=x86-64-v4", "-mavx512bf16"],
    "avx512": ["-march=x86-64-v4"],
    "avx2": ["-march=x86-64-v3"],
    "baseline": [],
}
OTHER_VARIANTS = {"baseline": []}
FLAGS = ["-O3", "-std=c++17", "-fno-math-errno", "-ffp-contract=fast", "-fvisibility=hidden"]


def _extension(variant: str, flags: list[str]) -> Extension:
    # Without the C interface of Python: a plain shared library, which library.py opens.
    return Extension(
        f"trserve.models.native._{variant}",
        sources=[str(path) for path in sorted(FOLDER.glob("*.cpp"))],
        depends=[str(path) for path in sorted(FOLDER.glob("*.h"))],
        extra_compile_args=[*FLAGS, *flags],
        extra_link_args=["-pthread"],
        language="c++",
        optional=True,
    )


variants = X86_VARIANTS if platform.machine() == "x86_64" else OTHER_VARIANTS
setup(ext_modules=[_extension(name, flags) for name, flags in variants.items()])
