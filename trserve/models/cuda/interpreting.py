"""Triton's interpreter, made to work with current numpy. Knows no kernel.

Triton 3.6 turns a loop's bounds, arrays of one element, into integers by ``int``, which numpy 2.4
no longer allows. Used only where kernels are interpreted, never on a device.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def allow_loops() -> None:
    """Let interpreted kernels loop between bounds that they computed."""
    patch = interpreter._patch_lang_tensor

    def patch_and_more(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_more
