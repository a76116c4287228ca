"""Latency profiles: how long the steps of emulated models take, and how requests travel.

A profile is JSON; ``docs/emulated.md`` describes it. Those that ship with the package lie beside
this file. What is wrong with one is found here, before anything is allocated. Knows no runner, no
router and no server; imports no torch.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Final

import msgspec

from trserve.errors import ConfigError
from trserve.sched.system import InvalidSystem, Latency, make_system

FORMAT: Final = 1
LONGEST_ROW: Final = 131_072
LONGEST_STEP_MS: Final = 60_000.0
"""A step, its prompt tokens aside, ends: so must every wait for it."""

SLOWEST_PREFILL: Final = 1.0
"""Tokens per second."""

NOT_STATED: Final = "not stated"
_LARGEST_FILE: Final = 1 << 20
_FOLDER: Final = Path(__file__).parent / "profiles"
_WIDTH: Final = re.compile(r"[1-9][0-9]{0,8}")
_NAME: Final = re.compile(r"[\w.+-]{1,64}")


class InvalidProfile(ConfigError):
    """A profile that makes no sense; the message names the file and the key."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``source`` says where the numbers are from: published or derived, and how."""

    source: str = NOT_STATED


class StepTime(_Part, frozen=True):
    """``ms`` of a step: one number, or a curve ``{"1": 24.9, "4": 27.5}`` over its rows."""

    ms: float | dict[str, float]

    @property
    def curve(self) -> Latency:
        """As ``trserve.sched.system.interpolate`` takes it."""
        if isinstance(self.ms, dict):
            return dict(sorted((int(width), ms) for width, ms in self.ms.items()))
        return float(self.ms)


class Prefill(_Part, frozen=True):
    """What a step's tokens beyond one a row cost.

    The first ``free_tokens`` of them, over all rows together, cost nothing; each further one takes
    1 / ``tokens_per_s``.
    """

    tokens_per_s: float
    free_tokens: int = 64


class Agreement(_Part, frozen=True):
    """``probability`` with which the model makes the token that the first model makes there."""

    probability: float


class EmulatedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model of a profile."""

    name: str
    step: StepTime
    prefill: Prefill
    agreement: Agreement = Agreement(probability=1.0)


class RoutingProcess(_Part, frozen=True):
    """``P[i][j]``: probability that a step at i sends its request to j; ``C[i][j]``: the tokens
    that it commits then."""

    routing: list[list[float]] = msgspec.field(name="P")
    tokens: list[list[float]] = msgspec.field(name="C")


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Models in their order, the entry model first.

    ``routing`` may be left out where a router is always named, or for one model. ``seed`` chooses
    the tokens that are made up.
    """

    format: int
    name: str
    description: str = ""
    models: list[EmulatedModel]
    routing: RoutingProcess | None = None
    max_model_len: int = 16_384
    seed: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The models' names."""
        return tuple(model.name for model in self.models)

    def model(self, name: str) -> EmulatedModel | None:
        """The model called ``name``, in capitals or not."""
        return next((each for each in self.models if each.name.lower() == name.lower()), None)


def shipped_profiles() -> tuple[str, ...]:
    """The names of the profiles that ship with the package."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.json")))


def load_profile(wanted: str) -> Profile:
    """The profile of that name, or in that file. Raises InvalidProfile."""
    if wanted in shipped_profiles():
        return read_profile(_FOLDER / f"{wanted}.json")
    path = Path(wanted).expanduser()
    if not path.is_file():
        raise InvalidProfile(
            f"--profile {wanted}: neither a file nor one of {', '.join(shipped_profiles())}"
        )
    return read_profile(path)


def read_profile(path: Path) -> Profile:
    """The profile in the file ``path``. Raises InvalidProfile."""
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise InvalidProfile(f"--profile {path}: cannot be read: {error.strerror}") from None
    if len(text) > _LARGEST_FILE:
        raise InvalidProfile(f"--profile {path}: more than {_LARGEST_FILE >> 20} MiB is no profile")
    return parse_profile(text, str(path))


def parse_profile(text: bytes, what: str) -> Profile:
    """The profile in ``text``, called ``what`` in messages. Raises InvalidProfile."""
    try:
        profile = msgspec.json.decode(text, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidProfile(f"--profile {what}: {error}") from None
    if problem := _problem(profile):
        raise InvalidProfile(f"--profile {what}: {problem}")
    return profile


def _problem(profile: Profile) -> str | None:
    """The first thing that is wrong, beginning with its key."""
    if profile.format != FORMAT:
        return f"format: {profile.format}; this version reads {FORMAT}"
    if not 2 <= profile.max_model_len <= LONGEST_ROW:
        return f"max_model_len: {profile.max_model_len}; 2 to {LONGEST_ROW} are possible"
    if not 0 <= profile.seed < 2**63:
        return f"seed: {profile.seed}; must be 0 to 2^63 - 1"
    if not profile.models:
        return "models: names none"
    names = [name.lower() for name in profile.names]
    for index, model in enumerate(profile.models):
        if names.index(model.name.lower()) != index:
            return f"models[{index}].name: {model.name!r} stands there twice"
        if problem := _model_problem(model):
            return f"models[{index}].{problem}"
    return _routing_problem(profile)


def _model_problem(model: EmulatedModel) -> str | None:
    if not _NAME.fullmatch(model.name):
        return f"name: {model.name!r}; letters, digits and . _ + - are possible"
    if problem := _step_problem(model.step.ms):
        return f"step.ms: {problem}"
    prefill = model.prefill
    if not SLOWEST_PREFILL <= prefill.tokens_per_s < math.inf:
        return (
            f"prefill.tokens_per_s: {prefill.tokens_per_s:g}; must be {SLOWEST_PREFILL:g} or more"
        )
    if prefill.free_tokens < 0:
        return f"prefill.free_tokens: {prefill.free_tokens}; must be 0 or more"
    if not 0 <= model.agreement.probability <= 1:
        return f"agreement.probability: {model.agreement.probability:g}; must be 0 to 1"
    return None


def _step_problem(ms: float | dict[str, float]) -> str | None:
    curve = ms if isinstance(ms, dict) else {"1": ms}
    if not curve:
        return "a curve needs a point"
    for width, value in curve.items():
        if not _WIDTH.fullmatch(width):
            return f"{width!r} is no number of rows, from 1 up"
        if not 0 < value <= LONGEST_STEP_MS:
            return f"{value:g}; must be above 0 and at most {LONGEST_STEP_MS:g}"
    return None


def _routing_problem(profile: Profile) -> str | None:
    routing = profile.routing
    if routing is None:
        return None
    if len(profile.models) < 2:
        return "routing: one model has nobody to send to; leave it out"
    try:
        curves = [model.step.curve for model in profile.models]
        system = make_system(routing.routing, routing.tokens, curves)
        check_commits(system.routing.tolist(), system.tokens.tolist())
    except InvalidSystem as error:
        return f"routing.{error.parameter}: {error.problem}"
    return None


def check_commits(routing: list[list[float]], tokens: list[list[float]]) -> None:
    """Whether requests can travel along P ``routing`` and commit C ``tokens``.

    A step commits one token or, where it hands a request on, perhaps none; and of two hops in a
    row one commits, or a request could go round for ever. Raises InvalidSystem.
    """
    models = range(len(routing))
    for i in models:
        for j in models:
            if not routing[i][j]:
                continue
            if tokens[i][j] not in (0, 1):
                raise InvalidSystem("C", f"[{i}][{j}] is {tokens[i][j]:g}; a step commits 0 or 1")
            if tokens[i][j]:
                continue
            if i == j:
                raise InvalidSystem("C", f"[{i}][{i}] is 0, but whoever stays commits its token")
            if any(k != j and routing[j][k] and not tokens[j][k] for k in models):
                raise InvalidSystem(
                    "C", f"[{i}][{j}] is 0, and a hop from {j} may commit nothing either"
                )
