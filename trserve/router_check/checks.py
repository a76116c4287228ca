"""What every router must keep to, checked on a few requests of small models.

Each check is a function of the runs it makes; it passes with a sentence of what it saw, or fails
with the first thing that is wrong. Knows nothing of processes and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trserve.ipc.baton import Finish
from trserve.router_check.subject import Run, Subject, seed_of, with_stop
from trserve.router_check.trials import check_parameters
from trserve.router_check.workplace import Answer, Asked

RESTARTS: Final = (5, 11, 23)
"""Turns before which all workers lose what their routers remember."""
_EMBEDDED: Final = ("tiny", "small")


@dataclass(frozen=True)
class Check:
    """One line of a report; ``passed`` None: it could not be made."""

    name: str
    passed: bool | None
    detail: str


def check_router(
    router: str, config: Mapping[str, Any] | None = None, models: Sequence[str] = _EMBEDDED
) -> list[Check]:
    """Whether ``router`` keeps the contract of :class:`trserve.BaseRouter`.

    Args:
        router: as ``--router``: ``module:Class``, an entry point, or a built-in name.
        config: its ``--router-config``.
        models: as ``--models``, by default the embedded pair; with a learned router, the models
            that it was trained for.

    Raises:
        StartupError: a model or setting is wrong, or the router cannot be made.
    """
    subject = Subject(router, config or {}, models)
    asked = subject.requests()
    base = subject.run(asked)
    found = [_start(subject), *_base_checks(subject, base)]
    whole = all(check.passed for check in found)
    for name, check in _FURTHER.items():
        if whole:
            found.append(_passed(name, check, subject, base))
        else:
            found.append(Check(name, None, "not checked: what is above comes first"))
    return found


def _passed(name: str, check: Further, subject: Subject, base: Run) -> Check:
    try:
        return Check(name, True, check(subject, base))
    except _WrongError as error:
        return Check(name, False, str(error))


class _WrongError(Exception):
    """A check failed; the message is the reason."""


Further = Callable[[Subject, Run], str]


def _start(subject: Subject) -> Check:
    names = ", ".join(parameter.name for parameter in subject.parameters) or "none"
    models = len(subject.names)
    return Check("start", True, f"{subject.class_name} for {models} models; parameters: {names}")


# -- what one run shows ----------------------------------------------------------------------------


def _base_checks(subject: Subject, base: Run) -> list[Check]:
    checks = {"route": _route, "handoff": _handoff, "admit": _admit}
    found = []
    for name, describe in checks.items():
        complaints = base.notes.complaints.get(name, ())
        detail = _summed(complaints) if complaints else describe(subject, base)
        found.append(Check(name, not complaints, detail))
    if all(check.passed for check in found):
        found.append(_passed("progress", _progress, subject, base))
    return found


def _summed(complaints: Sequence[str]) -> str:
    more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
    return complaints[0] + more


def _route(subject: Subject, base: Run) -> str:
    decisions = [each for own in base.notes.decisions.values() for each in own]
    if not decisions:
        return "it was never asked"
    leaving = sum(each.destination != 0 for each in decisions)
    widths = f"{min(base.notes.widths)} to {max(base.notes.widths)} rows at once"
    said = f"{len(decisions)} decisions about {widths}, {leaving} to leave"
    if leaving in (0, len(decisions)):
        said += "; NOTE it always says the same: give --router-config, so that it does not"
    return said


def _handoff(subject: Subject, base: Run) -> str:
    notes = base.notes
    if not notes.sent:
        return "nothing was handed on"
    return f"{notes.sent} sent, {notes.received} received, {notes.extras} bytes of extras at most"


def _admit(subject: Subject, base: Run) -> str:
    return "it chooses the first writer" if subject.asks_admit else "the entry model writes first"


def _progress(subject: Subject, base: Run) -> str:
    if base.stuck is not None:
        raise _WrongError(f"{base.stuck}: {', '.join(map(str, base.stuck.unfinished))}")
    assert base.answers is not None
    tokens = sum(len(answer.tokens) for answer in base.answers)
    hops = sum(answer.hops for answer in base.answers)
    said = f"{len(base.answers)} requests ended: {tokens} tokens, {hops} handoffs"
    if forced := base.notes.forced:
        said += (
            f"; NOTE {forced} tokens were kept by the runtime alone, because two handoffs in a row "
            "would have kept none: should send keep the token at one of the models?"
        )
    return said


# -- what further runs show ------------------------------------------------------------------------


def _finish(subject: Subject, base: Run) -> str:
    """Answers end where they must; a discarded end ends nothing."""
    assert base.answers is not None
    for index, (asked, answer) in enumerate(zip(base.asked, base.answers, strict=True)):
        _check_end(index, asked, answer)
    stops = [_likely_stop(base, index) for index in range(len(base.asked))]
    again = subject.run(
        [with_stop(asked, stop) for asked, stop in zip(base.asked, stops, strict=True)]
    )
    if again.answers is None:
        raise _WrongError(f"with further stop ids, {again.stuck}")
    discarded = 0
    for index, (asked, answer) in enumerate(zip(again.asked, again.answers, strict=True)):
        _check_end(index, asked, answer)
        discarded += stops[index] in base.notes.discarded.get(seed_of(asked), ())
        whole = base.answers[index].tokens
        end = whole.index(stops[index]) + 1 if stops[index] in whole else len(whole)
        same, where = _agree(base, again, index)
        if same and answer.tokens != whole[:end]:
            raise _WrongError(
                f"request {index} was to end with its token {end}, the first committed one that "
                f"may end it, but has {len(answer.tokens)} tokens{where}"
            )
    kinds = {answer.finish.name.lower() for answer in (*base.answers, *again.answers)}
    ends = f"{discarded} requests went on after a discarded end" if discarded else "no end fell"
    return f"by {' and '.join(sorted(kinds))}; {ends}"


def _likely_stop(base: Run, index: int) -> int:
    """A token that is discarded in the answer if there is one, else one that is in it."""
    assert base.answers is not None
    tokens = base.answers[index].tokens
    fallen = base.notes.discarded.get(seed_of(base.asked[index]), [])
    both = [token for token in fallen if token in tokens]
    return next(iter(both or fallen), tokens[len(tokens) // 2])


def _check_end(index: int, asked: Asked, answer: Answer) -> None:
    sampling = asked.params.sampling
    ends = {*sampling.eos_token_ids, *sampling.stop_token_ids}
    *before, last = answer.tokens or (-1,)
    if answer.finish is Finish.STOP and last not in ends:
        raise _WrongError(f"request {index} stopped with token {last}, which ends nothing")
    if answer.finish is Finish.LENGTH and len(answer.tokens) != asked.limit - len(asked.prompt):
        raise _WrongError(f"request {index} ended by length after {len(answer.tokens)} tokens")
    if answer.finish not in (Finish.STOP, Finish.LENGTH):
        raise _WrongError(f"request {index} ended by {answer.finish.name.lower()}")
    if found := [token for token in before if token in ends]:
        raise _WrongError(f"request {index} went on after token {found[0]}, which ends it")


def _twice(subject: Subject, base: Run) -> str:
    return _compared(base, subject.run(base.asked), "the same requests again")


def _alone(subject: Subject, base: Run) -> str:
    compared = ""
    for index, asked in enumerate(base.asked):
        compared = _compared(base, subject.run([asked]), "alone", indices=(index,))
    return compared.replace("1 request", f"each of {len(base.asked)} requests")


def _restart(subject: Subject, base: Run) -> str:
    what = "after all workers were replaced"
    return _compared(base, subject.run(base.asked, restarts=RESTARTS), what)


def _score(subject: Subject, base: Run) -> str:
    run = subject.run(base.asked, scored=True)
    if complaints := run.notes.complaints.get("score"):
        raise _WrongError(_summed(complaints))
    compared = _compared(base, run, "with scores asked for")
    return f"{run.notes.scores} scores; {compared}" if run.notes.scores else "it has none"


def _parameters(subject: Subject, base: Run) -> str:
    wrong, said = check_parameters(subject, base.asked, _agree)
    if wrong:
        raise _WrongError(wrong)
    return said


_FURTHER: Final[dict[str, Further]] = {
    "finish": _finish,
    "twice": _twice,
    "alone": _alone,
    "restart": _restart,
    "score": _score,
    "parameters": _parameters,
}


def _compared(base: Run, run: Run, what: str, indices: Sequence[int] = ()) -> str:
    """Raises where a request of ``run`` went another way than in ``base``."""
    if run.answers is None:
        raise _WrongError(f"{what}: {run.stuck}")
    indices = indices or range(len(base.asked))
    for at, index in enumerate(indices):
        same, where = _agree(base, run, index)
        assert base.answers is not None
        if not same:
            raise _WrongError(f"{what}, request {index} went another way{where}")
        if not where and base.answers[index] != run.answers[at]:
            raise _WrongError(f"{what}, request {index} has another answer")
    count = len(indices)
    return f"{count} request{'s' if count > 1 else ''}, {what}: token for token"


def _agree(base: Run, run: Run, index: int) -> tuple[bool, str]:
    """Whether the router did the same for a request in both runs, and where not.

    What the models computed may differ in the last bits with the batch, where no compiled kernels
    are used: from there on nothing is compared, and the second value is not empty.
    """
    seed = seed_of(base.asked[index])
    ours, theirs = (each.notes.decisions.get(seed, []) for each in (base, run))
    for one, other in zip(ours, theirs, strict=False):
        at = f" at token {one.position}"
        if one.model != other.model:
            return False, f"{at}: model {one.model} had it, and then model {other.model}"
        if one.position != other.position or one.row != other.row:
            return False, f"{at}: send kept a token once and once did not"
        if one.shown != other.shown:
            return True, f" (compared up to token {one.position})"
        if one.destination != other.destination:
            return False, (
                f"{at}, model {one.model}: route said {one.destination}, and then "
                f"{other.destination}, for the same logits, hidden state and token"
            )
    return True, ""
