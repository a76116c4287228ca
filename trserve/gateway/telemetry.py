"""Whether requests are told to an OpenTelemetry collector; by its own environment variables.

Imports nothing of OpenTelemetry unless they ask for it. Knows no requests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from trserve.gateway.spans import SpanWriter

log = logging.getLogger(__name__)
_EXPORTER: Final = "OTEL_TRACES_EXPORTER"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_OTLP: Final = "otlp"
_CONSOLE: Final = "console"


def wanted_exporter(environment: Mapping[str, str]) -> str | None:
    """``otlp`` or ``console``, or None where nothing is to be told.

    OpenTelemetry's own default would send to a collector on this host; here one of its variables
    must say that there is one.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    named = environment.get(_EXPORTER, "").strip().lower()
    if named == "none":
        return None
    if not named:
        return _OTLP if any(environment.get(name) for name in _ENDPOINTS) else None
    if named in (_OTLP, _CONSOLE):
        return named
    log.warning("%s=%s is neither otlp, console nor none: no spans are made", _EXPORTER, named)
    return None


def span_writer(environment: Mapping[str, str], router: str) -> SpanWriter | None:
    """What writes a span for each request, or None; ``router`` is the name of the server's."""
    exporter = wanted_exporter(environment)
    if exporter is None:
        return None
    try:
        from trserve.gateway.spans import SpanWriter, make_provider

        return SpanWriter(make_provider(exporter, environment), router)
    except ImportError as error:
        log.warning(
            "OpenTelemetry is configured by OTEL_... variables, but a package is missing (%s): no "
            "spans are made; install trserve[otel]",
            error,
        )
        return None
    except Exception as error:
        # OpenTelemetry's constructors read further variables and raise what they like; a server
        # answers without spans, too.
        log.warning(
            "OpenTelemetry refuses one of its OTEL_... variables (%s: %s): no spans are made; "
            "correct it, or unset them all",
            type(error).__name__,
            error,
        )
        return None
