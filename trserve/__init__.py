"""trserve: token-level routing between language models behind one endpoint.

The public names are loaded when they are first used, because importing the package must not
import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trserve.engine import (
        Completion,
        Engine,
        EngineError,
        Part,
        SamplingParams,
        TokenLogprob,
    )
    from trserve.records import Recording
    from trserve.router_lib.base import BaseRouter, PeerReq, RequestView, StepResult
    from trserve.router_lib.parameters import Parameter

__version__ = "0.1.0"
__all__ = [
    "BaseRouter",
    "Completion",
    "Engine",
    "EngineError",
    "Parameter",
    "Part",
    "PeerReq",
    "Recording",
    "RequestView",
    "SamplingParams",
    "StepResult",
    "TokenLogprob",
]

_HOMES = {
    "BaseRouter": "trserve.router_lib.base",
    "Completion": "trserve.engine",
    "Engine": "trserve.engine",
    "EngineError": "trserve.engine",
    "Parameter": "trserve.router_lib.parameters",
    "Part": "trserve.offline.answers",
    "PeerReq": "trserve.router_lib.base",
    "Recording": "trserve.records",
    "RequestView": "trserve.router_lib.base",
    "SamplingParams": "trserve.offline.sampling_params",
    "StepResult": "trserve.router_lib.base",
    "TokenLogprob": "trserve.offline.answers",
}


def __getattr__(name: str) -> Any:
    """Import a public name from where it lives (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
