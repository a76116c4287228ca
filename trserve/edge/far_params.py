"""A request's parameters as the other host is to see them: with the home's router values in them.

Knows no sessions and no sockets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import msgspec

from trserve.ipc.layout import PARAMS_BYTES
from trserve.limited_log import LimitedLog
from trserve.params import RequestParams, encode_params

log = logging.getLogger(__name__)


class FarParams:
    """The home's ``values`` of its router's parameters, which count at the other side as well."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = dict(values)
        self._log = LimitedLog(log)

    def configure(self, values: Mapping[str, float]) -> None:
        """Other values, for what is sent from now on."""
        self._values.update(values)

    def blob(self, params: RequestParams) -> bytes:
        """``params`` encoded, at most PARAMS_BYTES; a request's own values come before ours.

        Where there is no room for ours the request goes without them, and a warning says so.
        """
        router = {**self._values, **params.router}
        blob = encode_params(msgspec.structs.replace(params, router=router))
        if len(blob) <= PARAMS_BYTES:
            return blob
        without = encode_params(params)
        self._log.warning(
            time.monotonic(),
            "a request's parameters take %d of %d bytes: no room for this host's router values "
            "(%s), so the other host routes it by its own",
            *(len(without), PARAMS_BYTES, ", ".join(sorted(self._values))),
        )
        return without
