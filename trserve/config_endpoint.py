"""The endpoint's part of the configuration: what clients see, who they are, how much they may ask.

Knows no key's text beyond what a flag says: keys are read by ``trserve/keys.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from trserve.config_option import option
from trserve.config_values import (
    parse_buckets,
    parse_bytes,
    parse_compat,
    parse_keys,
    parse_level,
    parse_names,
    parse_origins,
)
from trserve.errors import ConfigError

MAX_BODY_BYTES: Final = 8 * 2**20
"""To read JSON takes up to 23 times its length, and holds up every stream meanwhile."""

LOG_FORMATS: Final = ("text", "json")
REASONING_PARSERS: Final = ("auto", "none", "qwen3", "deepseek-r1", "deepseek_r1")
TOOL_CALL_PARSERS: Final = ("auto", "hermes", "qwen", "qwen25", "qwen3_coder")


@dataclass(frozen=True)
class EndpointConfig:
    """What clients see."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.")
    served_model_name: tuple[str, ...] = option(
        ("trserve",), "Name(s) of the endpoint's model.", parse=parse_names, metavar="A,B"
    )
    api_key: tuple[str, ...] = option(
        (),
        "Keys that clients must send, separated by commas or the flag repeated; @FILE reads them "
        "from a file, one a line, which keeps them out of the process list. Also "
        "TRSERVE_API_KEY; see `trserve keys new`.  [default: anyone may ask]",
        parse=parse_keys,
        multiple=True,
        metavar="KEY|@FILE",
    )
    admin_key: str = option(
        "",
        "The key that may change routing while the server runs (/v1/trserve/routing), or @FILE. "
        "Also TRSERVE_ADMIN_KEY.  [default: nobody may]",
        metavar="KEY|@FILE",
    )
    protect_metrics: bool = option(False, "Ask for a key at /metrics as well.")
    allowed_origins: tuple[str, ...] = option(
        ("*",),
        "Origins whose web pages may call the endpoint, or * for any; cookies are never involved.",
        parse=parse_origins,
        metavar="*|URL,...",
    )
    ui: bool = option(True, "Serve the web page at /.")
    max_queue: int = option(1024, "Requests that may wait for a slot; more are refused (429).")
    max_requests_per_key: int = option(
        0, "Requests of one key in the server at once, 0: no limit; more are refused (429)."
    )
    tokens_per_minute: int = option(
        0,
        "Tokens of prompts and answers that one key gets in a minute, 0: no limit; a request "
        "beyond is refused (429) until there is room.",
    )
    header_timeout_s: float = option(
        15.0, "Seconds in which a request's headers must be here, 0: no limit (408)."
    )
    body_timeout_s: float = option(
        15.0, "Seconds in which 16 KiB more of a body, or its end, must be here, 0: no limit (408)."
    )
    max_body_bytes: int = option(
        MAX_BODY_BYTES,
        "Longest body of a request, e.g. 32m; more is refused (413). All bodies over 64 KiB that "
        "are read at once may have 32 times as much; more is refused for a while (429).",
        parse=parse_bytes,
        metavar="BYTES",
    )
    chat_template: str = option(
        "",
        "A file with a chat template, or the text of one.  [default: the checkpoint's own]",
        metavar="FILE|TEXT",
    )
    reasoning_parser: str = option(
        REASONING_PARSERS[0],
        "Whether chats tell what stands between <think> and </think> from the answer: auto where "
        "the chat template knows of it, none never; any other name always.",
        choices=REASONING_PARSERS,
    )
    tool_call_parser: str = option(
        TOOL_CALL_PARSERS[0],
        "For launch scripts of other servers: the formats of all names are told apart by "
        "themselves.",
        choices=TOOL_CALL_PARSERS,
    )
    incremental_streaming_output: bool = option(
        False,
        "Events of a /generate stream hold what is new; else each repeats the whole answer.",
    )
    sse_keep_alive_s: float = option(
        0.0, "Seconds of silence in a stream after which a comment is sent, 0: never."
    )
    metrics_compat: tuple[str, ...] = option(
        (),
        "Names under which /metrics shows its core numbers besides: vllm, sglang.  [default: none]",
        parse=parse_compat,
        metavar="vllm,sglang",
    )
    request_buckets_s: tuple[float, ...] = option(
        (),
        "Upper bounds, in seconds, of the histograms of whole requests' times in /metrics.  "
        "[default: 0.0001 to 600]",
        parse=parse_buckets,
        metavar="S,...",
    )
    token_buckets_s: tuple[float, ...] = option(
        (),
        "The same of the time between two tokens.  [default: 0.0001 to 5]",
        parse=parse_buckets,
        metavar="S,...",
    )
    handoff_buckets_s: tuple[float, ...] = option(
        (),
        "The same of the times of handoffs and steps.  [default: 0.0001 to 10]",
        parse=parse_buckets,
        metavar="S,...",
    )
    log_requests: bool = option(
        True,
        "One line a request on standard error: sizes, times and who wrote, never a text.",
        also=("--enable-log-requests",),
        off=("--no-enable-log-requests", "--disable-log-requests"),
    )
    log_level: str = option(
        "info",
        "What is logged: debug, info, warning, error or critical, and worse. Requests are info.",
        parse=parse_level,
        metavar="LEVEL",
    )
    log_format: str = option(LOG_FORMATS[0], "How the gateway writes its log.", choices=LOG_FORMATS)


def check_endpoint(endpoint: EndpointConfig) -> None:
    """Raise ConfigError naming the flag that is out of range."""
    if not 0 <= endpoint.port <= 65535:
        raise ConfigError(f"--port {endpoint.port}: must be 0 to 65535")
    not_negative = {
        "--max-queue": endpoint.max_queue,
        "--max-requests-per-key": endpoint.max_requests_per_key,
        "--tokens-per-minute": endpoint.tokens_per_minute,
        "--header-timeout-s": endpoint.header_timeout_s,
        "--body-timeout-s": endpoint.body_timeout_s,
        "--sse-keep-alive-s": endpoint.sse_keep_alive_s,
    }
    for flag, value in not_negative.items():
        if not 0 <= value < math.inf:
            raise ConfigError(f"{flag} {value:g}: must be 0 or more")
