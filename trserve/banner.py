"""What the launcher tells a person. One line on standard output, the rest on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, Final

from trserve.emulated.profile import Profile
from trserve.models.native.library import load_library
from trserve.plan import ServerPlan
from trserve.router_lib.registry import FROM_CHECKPOINT, FROM_PROFILE, TARGET_SHARE


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def show_note(text: str) -> None:
    """One line of news."""
    _say(f"trserve: {text}")


def show_plan(plan: ServerPlan) -> None:
    """What is about to be started."""
    _say(f"trserve: router {plan.router}{_config(plan)}, device {plan.device}")
    if plan.profile is not None:
        _show_profile(plan.profile)
    for index, model in enumerate(plan.models):
        if model.remote:
            where = "dials our edge port" if model.place.is_placeholder else f"is at {model.remote}"
            _say(f"trserve: model {index}: {model.name}, {where}")
            continue
        kind = model.dtype + (", 8-bit weights" if model.int8 else "")
        if plan.profile is not None:
            kind = "emulated"
        _say(
            f"trserve: model {index}: {model.name}, {kind}, "
            f"rows of {model.max_model_len} tokens, "
            f"{model.num_blocks * plan.block_size} tokens of KV cache, "
            f"{model.threads} thread{'s' if model.threads > 1 else ''}"
        )
    if plan.device == "cpu":
        _say(f"trserve: {_kernels()}")
    if not plan.own_tokenizer:
        _say("trserve: the models bring no tokenizer, so text is the embedded pair's")
    _say(f"trserve: slab of {plan.slots} requests, {plan.layout.size / 2**20:.1f} MiB")


def _show_profile(profile: Profile) -> None:
    _say(
        f"trserve: EMULATED: no model computes anything here. A step takes the time that profile "
        f"{profile.name} says, and its tokens are made up; the rest of the server is real"
    )
    if profile.description:
        _say(f"trserve: {profile.name}: {profile.description}")
    for model in profile.models:
        curve = model.step.curve
        points = curve.items() if isinstance(curve, Mapping) else ((1, curve),)
        steps = ", ".join(f"{ms:g} ms" + f" at {width}" * (len(points) > 1) for width, ms in points)
        _say(
            f"trserve: {model.name}: {steps} a step, "
            f"{model.prefill.tokens_per_s:g} prompt tokens/s beyond {model.prefill.free_tokens}"
        )


def _kernels() -> str:
    library = load_library()
    if library is not None:
        return f"compiled CPU kernels for {library.variant}"
    return (
        "no compiled CPU kernels, torch does their work at a fraction of the speed (see setup.py)"
    )


def _config(plan: ServerPlan) -> str:
    # What a checkpoint decides, or nobody set, says nothing here.
    left_out = [(name, FROM_CHECKPOINT) for name in ("threshold", "tau", "eta")]
    left_out += [("p", FROM_PROFILE), ("q", FROM_PROFILE), (TARGET_SHARE.name, 0.0)]
    values = [each for each in plan.router_config.items() if each not in left_out and each[1] != ""]
    if not values:
        return ""
    return " (" + ", ".join(f"{k}={v if isinstance(v, str) else f'{v:g}'}" for k, v in values) + ")"


def show_progress(title: str, done: int, total: int) -> None:
    """How far a worker has loaded."""
    _say(f"trserve: {title} loading, {100 * done // max(1, total)} %")


def show_ready(plan: ServerPlan, host: str, port: int) -> None:
    """The ready line on standard output, and a request to paste on standard error."""
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    models = ",".join(model.name for model in plan.models)
    body: dict[str, Any] = {
        "model": plan.served_names[0],
        "messages": [{"role": "user", "content": _QUESTION}],
        "temperature": 0,
        "stream": True,
    }
    if plan.profile is not None:
        body["max_tokens"] = _MADE_UP_TOKENS  # nothing ends a text that is made up
    _say(
        "\nTry it:\n"
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{json.dumps(body)}'\n"
    )
    ready = f"trserve ready {url} models={models} router={plan.router} device={plan.device}"
    print(ready, flush=True)


_MADE_UP_TOKENS: Final = 200
_QUESTION: Final = (
    "Eva has 71 pencils. Then she gives away 15. Later, she buys 3 bags with 4 pencils in each. "
    "How many pencils does Eva have now?"
)
