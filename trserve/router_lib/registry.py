"""Routers by name: which class, which parameters, how many models. Imports no router, no torch.

A router from outside the package is named ``module:Class``, or by an entry point that its package
declares; its parameters are known once a worker has imported it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from trserve.errors import ConfigError
from trserve.router_lib.parameters import (
    Parameter,
    ServerParameter,
    TextParameter,
    WeightsParameter,
)

if TYPE_CHECKING:
    from trserve.router_lib.base import BaseRouter


MODEL: Final = "model"
TOKENIZER: Final = "tokenizer"
"""Parameters that default to where the first model and the tokenizer of the server lie."""

ENTRY_POINTS: Final = "trserve.routers"
"""The group in which an installed package names its routers."""


@dataclass(frozen=True)
class RouterEntry:
    """A router that ships with the package; ``max_models`` None means any number."""

    target: str
    help: str
    parameters: tuple[Parameter, ...] = ()
    min_models: int = 1
    max_models: int | None = None


def _of_two(target: str, help: str, parameters: tuple[Parameter, ...]) -> RouterEntry:
    return RouterEntry(f"trserve.router_lib.{target}", help, parameters, min_models=2, max_models=2)


_HYSTERESIS: Final = "how far back over the threshold a signal must be before {} (0: not at all)"

TARGET_SHARE: Final = ServerParameter(
    "target_share",
    "share of all tokens that the second model writes, kept by moving the first parameter while "
    "serving (0: off)",
    default=0.0,
    minimum=0.0,
    maximum=1.0,
)

VISIT_PARAMETERS: Final = (
    Parameter(
        "hysteresis",
        _HYSTERESIS.format("the first model's token is kept right after the other's"),
        default=0.0,
        minimum=0.0,
    ),
    Parameter(
        "visit_tokens",
        "tokens that the other model writes before it returns",
        default=1.0,
        minimum=1.0,
    ),
)
"""Of every router whose second model returns after a number of tokens."""


def _probability(name: str, help: str, default: float) -> Parameter:
    return Parameter(name, help, default=default, minimum=0.0, maximum=1.0)


R_STITCH_PARAMETERS: Final = (
    _probability("tau", "normalised entropy above which the large model writes (0 to 1)", 0.03),
    Parameter(
        "hysteresis",
        _HYSTERESIS.format("the large model returns"),
        default=0.0,
        minimum=0.0,
    ),
    TARGET_SHARE,
)
ENTROPY_PARAMETERS: Final = (
    _probability("threshold", "normalised entropy above which the second model writes", 0.03),
    *VISIT_PARAMETERS,
    TARGET_SHARE,
)
TOP_PROB_PARAMETERS: Final = (
    _probability("threshold", "largest probability below which the second model writes", 0.9),
    *VISIT_PARAMETERS,
    TARGET_SHARE,
)
MARGIN_PARAMETERS: Final = (
    _probability("threshold", "lead in probability below which the second model writes", 0.8),
    *VISIT_PARAMETERS,
    TARGET_SHARE,
)
RANDOM_PARAMETERS: Final = (
    _probability("p", "probability that the first model hands a token on", 0.1),
    _probability("q", "probability that the second model returns after a token", 1.0),
    TARGET_SHARE,
)
ME_PARAMETERS: Final = (
    WeightsParameter(
        "weights", "one weight for each model, as 0.5/0.3/0.2 (default: equal)", default=""
    ),
)
STEP_LEADER_PARAMETERS: Final = (
    Parameter(
        "tokens",
        "how many tokens of each sentence or line the second model writes",
        default=4.0,
        minimum=0.0,
    ),
    TextParameter(
        TOKENIZER, "folder or GGUF file of the tokenizer (default: the server's)", is_path=True
    ),
)

FROM_CHECKPOINT: Final = -1.0
"""The default of a threshold that a checkpoint states; out of its range, so no value of its own."""

_LEARNED: Final = (
    *VISIT_PARAMETERS,
    TARGET_SHARE,
    TextParameter("checkpoint", "the file or folder of the trained router", is_path=True),
    TextParameter(
        MODEL,
        "folder of the model it was trained for (default: the first of --models)",
        is_path=True,
    ),
)
R2R_PARAMETERS: Final = (
    _probability(
        "threshold",
        "probability of divergence from which on the second model writes (default: the "
        "checkpoint's)",
        FROM_CHECKPOINT,
    ),
    *_LEARNED,
)
CITER_PARAMETERS: Final = (
    _probability(
        "tau",
        "confidence below which the second model writes (default: the checkpoint's, else 0.95)",
        FROM_CHECKPOINT,
    ),
    *_LEARNED,
)
CO_LLM_PARAMETERS: Final = (
    _probability(
        "eta",
        "probability of deferring above which the second model writes (default: the checkpoint's, "
        "else 0.15)",
        FROM_CHECKPOINT,
    ),
    Parameter(
        "warm_up",
        "tokens at an answer's beginning over which eta falls from 1 (0: from the first on)",
        default=0.0,
        minimum=0.0,
    ),
    *_LEARNED,
)
FINAL: Final = "final"
PRE_MLP: Final = "pre-mlp"
TAP: Final = TextParameter(
    "tap",
    "hidden state that the network reads; final: after the final norm; pre-mlp: the input of the "
    "last layer's MLP, which the edge system's networks were trained on",
    default=FINAL,
    choices=(FINAL, PRE_MLP),
)
CONFIDENCE_PARAMETERS: Final = (
    _probability(
        "threshold",
        "confidence below which the second model writes (default: the checkpoint's, else 0.7)",
        FROM_CHECKPOINT,
    ),
    *_LEARNED,
    TAP,
)

FROM_PROFILE: Final = -1.0
"""The default of a probability that a profile or an algorithm states; out of its range."""

EMULATED_PARAMETERS: Final = (
    _probability("p", "of two models: probability that the first hands a token on", FROM_PROFILE),
    _probability("q", "of two models: probability that the second returns", FROM_PROFILE),
    TextParameter(
        "algorithm",
        "travel as this algorithm's requests do: with p, r-stitch with p and q, me with weights",
        default="",
        choices=("", "r2r", "citer", "co-llm", "confidence", "r-stitch", "me"),
    ),
    WeightsParameter("weights", "for algorithm=me, one a model, as 0.5/0.3/0.2", default=""),
    TextParameter(
        "routing",
        "where a step of each model sends its request, as 0.65/0.35:1/0 (default: the profile's)",
        default="",
    ),
    TextParameter(
        "tokens",
        "the tokens that it commits then, 0 or 1, as 1/0:1/1 (default: the profile's)",
        default="",
    ),
)

BUILTIN: Final[dict[str, RouterEntry]] = {
    "none": RouterEntry("trserve.router_lib.none:NoRouter", "the entry model writes everything"),
    "r-stitch": _of_two(
        "r_stitch:RStitch",
        "entropy of the next-token distribution, both ways (arXiv 2507.17307)",
        R_STITCH_PARAMETERS,
    ),
    "r2r": _of_two(
        "r2r:R2R",
        "a network finds tokens that lead elsewhere (arXiv 2505.21600)",
        R2R_PARAMETERS,
    ),
    "citer": _of_two(
        "confidence:Citer",
        "a network's confidence in the first model (arXiv 2502.01976)",
        CITER_PARAMETERS,
    ),
    "co-llm": _of_two(
        "co_llm:CoLLM",
        "a row beside the vocabulary defers (arXiv 2403.03870)",
        CO_LLM_PARAMETERS,
    ),
    "confidence": _of_two(
        "confidence:Confidence",
        "a network's confidence, as in the edge system (arXiv 2504.07878)",
        CONFIDENCE_PARAMETERS,
    ),
    "entropy": _of_two(
        "uncertainty:Entropy",
        "tokens of high entropy are the second model's",
        ENTROPY_PARAMETERS,
    ),
    "top-prob": _of_two(
        "uncertainty:TopProb",
        "tokens of a distribution without a high peak are the second model's",
        TOP_PROB_PARAMETERS,
    ),
    "margin": _of_two(
        "uncertainty:Margin",
        "tokens with a close runner-up are the second model's",
        MARGIN_PARAMETERS,
    ),
    "step-leader": _of_two(
        "step_leader:StepLeader",
        "the first tokens of each sentence or line are the second model's",
        STEP_LEADER_PARAMETERS,
    ),
    "me": RouterEntry(
        "trserve.router_lib.me:MixtureEnsemble",
        "each token by a model drawn from fixed weights (arXiv 2605.00419)",
        ME_PARAMETERS,
        min_models=2,
    ),
    "random": _of_two(
        "random_router:RandomRouter",
        "by chance, with known probabilities",
        RANDOM_PARAMETERS,
    ),
    "emulated": RouterEntry(
        "trserve.router_lib.emulated:EmulatedRouter",
        "by chance, along the matrices of a profile or of an algorithm",
        EMULATED_PARAMETERS,
        min_models=2,
    ),
}


def describe(name: str) -> RouterEntry | None:
    """The entry of a built-in router; None for one from outside the package.

    Raises ConfigError for a name that is neither.
    """
    if entry := BUILTIN.get(name):
        return entry
    if ":" in name or _entry_point(name):
        return None
    known = ", ".join(BUILTIN)
    raise ConfigError(
        f"--router {name}: unknown router; known: {known}, module:Class, or the name of an entry "
        f"point in the group {ENTRY_POINTS}"
    )


def load_router_class(name: str) -> type[BaseRouter]:
    """Import the class of a router. Raises ConfigError when it is not there or is no router."""
    from trserve.router_lib.base import BaseRouter

    entry = describe(name)
    target = entry.target if entry else _entry_point(name) or name
    module_name, _, class_name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--router {name}: cannot import {target}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, BaseRouter)):
        raise ConfigError(f"--router {name}: {target} is not a subclass of trserve.BaseRouter")
    return found


def _entry_point(name: str) -> str | None:
    """``module:Class`` of the installed entry point ``name``, if there is one."""
    points = importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)
    return next((point.value for point in points), None)
