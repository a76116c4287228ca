"""What the gateway is told of its endpoint: limits, formats, and digests in the place of keys."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from trserve.config_endpoint import MAX_BODY_BYTES, EndpointConfig
from trserve.errors import ConfigError
from trserve.keys import (
    ADMIN_VARIABLE,
    API_VARIABLE,
    digest,
    read_admin_key,
    read_api_keys,
)

_TEMPLATE_SIGNS: Final = ("{{", "{%")
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


class EndpointPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of :class:`~trserve.config_endpoint.EndpointConfig` that a gateway needs.

    ``api_keys`` and ``admin_key`` are SHA-256 digests; without any, anyone may ask and nobody may
    administer. ``chat_template`` is the text of one, or None for the checkpoint's.
    """

    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    protect_metrics: bool = False
    allowed_origins: tuple[str, ...] = ("*",)
    ui: bool = True
    max_queue: int = 1024
    max_requests_per_key: int = 0
    tokens_per_minute: int = 0
    header_timeout_s: float = 15.0
    body_timeout_s: float = 15.0
    max_body_bytes: int = MAX_BODY_BYTES
    sse_keep_alive_s: float = 0.0
    incremental_streaming_output: bool = False
    reasoning_parser: str = "auto"
    metrics_compat: tuple[str, ...] = ()
    chat_template: str | None = None
    request_buckets_s: tuple[float, ...] = ()
    token_buckets_s: tuple[float, ...] = ()
    handoff_buckets_s: tuple[float, ...] = ()
    log_requests: bool = True
    log_format: str = "text"

    @property
    def bucket_bounds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The histograms' bounds in seconds, requests' and tokens'; empty for the usual ones."""
        return self.request_buckets_s, self.token_buckets_s


def plan_endpoint(config: EndpointConfig) -> EndpointPlan:
    """Read keys and template and make the plan. Raises ConfigError, which shows no key."""
    keys = read_api_keys(config.api_key)
    admin = read_admin_key(config.admin_key, keys)
    return EndpointPlan(
        api_keys=tuple(digest(key) for key in keys),
        admin_key=None if admin is None else digest(admin),
        protect_metrics=config.protect_metrics,
        allowed_origins=config.allowed_origins,
        ui=config.ui,
        max_queue=config.max_queue,
        max_requests_per_key=config.max_requests_per_key,
        tokens_per_minute=config.tokens_per_minute,
        header_timeout_s=config.header_timeout_s,
        body_timeout_s=config.body_timeout_s,
        max_body_bytes=config.max_body_bytes,
        sse_keep_alive_s=config.sse_keep_alive_s,
        incremental_streaming_output=config.incremental_streaming_output,
        reasoning_parser=config.reasoning_parser,
        metrics_compat=config.metrics_compat,
        chat_template=read_chat_template(config.chat_template),
        request_buckets_s=config.request_buckets_s,
        token_buckets_s=config.token_buckets_s,
        handoff_buckets_s=config.handoff_buckets_s,
        log_requests=config.log_requests and config.log_level in ("debug", "info"),
        log_format=config.log_format,
    )


def read_chat_template(given: str) -> str | None:
    """The template that a file's name or a text stands for. Raises ConfigError: no such file."""
    if not given or any(sign in given for sign in _TEMPLATE_SIGNS):
        return given or None
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {given}: {error}; give a file or a template") from None


def cautions(config: EndpointConfig, plan: EndpointPlan) -> list[str]:
    """What a person should know of these settings, one line each."""
    found: list[str] = []
    given = (*config.api_key, *([config.admin_key] if config.admin_key else ()))
    if any(not key.startswith("@") for key in given):
        found.append(
            "a key on the command line can be seen in the list of processes; give @FILE, or set "
            f"{API_VARIABLE} or {ADMIN_VARIABLE}"
        )
    if not plan.api_keys and config.host not in _LOOPBACK:
        found.append(f"anyone who can reach {config.host} may ask; --api-key changes that")
    return found
