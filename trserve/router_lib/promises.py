"""Whether a router keeps what its class promises of some methods. Knows no routers by name."""

from __future__ import annotations

from typing import Final

from trserve.router_lib.base import BaseRouter

_ABOUT: Final = ("route", "score", "signal", "crosses", "bounds", "limits")
"""What decides where a request goes, or may."""


def is_capturable(router: BaseRouter) -> bool:
    """Whether ``router`` may decide within a device's step; see ``BaseRouter.capturable``."""
    return _promises(router, "capturable")


def decides_early(router: BaseRouter) -> bool:
    """Whether it may be asked while the step is computed; see ``BaseRouter.decides_early``."""
    return _promises(router, "decides_early")


def _promises(router: BaseRouter, claim: str) -> bool:
    """What the class says that is nearest to ``claim``; False if one before it overrides it."""
    for each in type(router).__mro__:
        if claim in vars(each):
            return bool(vars(each)[claim])
        if any(name in vars(each) for name in _ABOUT):
            return False
    return False
