"""Whether a request's own parameters mean what the same values mean for the whole server.

Knows no other part of the contract.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from trserve.errors import ConfigError
from trserve.router_check.subject import Run, Subject, seed_of, with_router
from trserve.router_check.workplace import Asked
from trserve.router_lib.parameters import Parameter

Agree = Callable[[Run, Run, int], tuple[bool, str]]


def check_parameters(subject: Subject, asked: Sequence[Asked], agree: Agree) -> tuple[str, str]:
    """What is wrong with the first parameter that is not respected, or empty; and what was seen.

    Every value is once the server's and once some requests' own, beside others' in one batch.
    """
    own = [each for each in subject.parameters if each.per_request]
    said = []
    for parameter in own:
        values = _trial_values(parameter)
        wrong, differ = _check(subject, asked, parameter.name, values, agree)
        if wrong:
            return wrong, ""
        said.append(parameter.name if differ else f"{parameter.name} (NOTE without effect here)")
    return "", f"a request's own are respected: {', '.join(said)}" if own else "it has none"


def _check(
    subject: Subject, asked: Sequence[Asked], name: str, values: Sequence[float], agree: Agree
) -> tuple[str, bool]:
    runs = []
    for value in values:
        try:
            runs.append(subject.run(asked, server={name: value}))
        except ConfigError as error:
            return f"{name}={value:g} is within its bounds, but {error}", False
    mixed = [
        with_router(each, {name: values[index % len(values)]}) for index, each in enumerate(asked)
    ]
    run = subject.run(mixed)
    for index in range(len(asked)):
        value = values[index % len(values)]
        same, where = agree(runs[index % len(values)], run, index)
        if not same:
            return (
                f"{name}={value:g} of the server and of the request alone differ{where}; take it "
                f"from result.params[{name!r}] or self.setting(req, {name!r})",
                False,
            )
    return "", any(_ways(runs[0], other, asked) for other in runs[1:])


def _ways(one: Run, other: Run, asked: Sequence[Asked]) -> bool:
    """Whether any request went another way."""
    return any(
        [each.destination for each in one.notes.decisions.get(seed_of(request), ())]
        != [each.destination for each in other.notes.decisions.get(seed_of(request), ())]
        for request in asked
    )


def _trial_values(parameter: Parameter) -> list[float]:
    """Four values over what is allowed, exact in float32, as a request's are held."""
    low, high = parameter.minimum, parameter.maximum
    usual = parameter.default if parameter.default is not None else 1.0
    if math.isinf(low) and math.isinf(high):
        found = [usual - 1.0, usual, usual + 1.0, 4.0 * usual]
    elif math.isinf(high):
        found = [low, low + 1.0, low + 4.0, max(low, usual) + 0.125]
    elif math.isinf(low):
        found = [high, high - 1.0, high - 4.0, min(high, usual) - 0.125]
    else:
        found = [low + (high - low) * share for share in (0.0625, 0.25, 0.75, 0.9375)]
    return found
