"""The engine's part of the configuration: rows and tokens of a step, and memory for KV caches.

Knows no model and no device; values are checked as far as they can be without either.
"""

from __future__ import annotations

from dataclasses import dataclass

from trserve.config_option import option
from trserve.config_values import parse_bytes, parse_counts
from trserve.errors import ConfigError


@dataclass(frozen=True)
class EngineConfig:
    """How much a worker takes on at once."""

    max_num_seqs: int = option(
        64,
        "Requests in one step of a model; of more that are under way, each has its turn.",
        also=("--max-running-requests",),
    )
    max_num_batched_tokens: int = option(
        2048,
        "Tokens in one step of a model.",
        also=("--chunked-prefill-size", "--max-prefill-tokens"),
    )
    max_requests: int = option(256, "Requests in the server at once; more wait in the gateway.")
    memory: int = option(
        0,
        "KV cache of all models together, e.g. 2g.  [default: what the weights leave, a quarter "
        "of the free memory and 4g at most]",
        parse=parse_bytes,
        metavar="BYTES",
    )
    gpu_memory_utilization: float = option(
        0.0,
        "Share of each GPU's memory that weights, KV cache and all else of these models may take "
        "together, if as much is free, e.g. 0.9; 0: of what is free all but one part in 20.",
    )
    mem_fraction_static: float = option(
        0.0,
        "The same as a share of what is free at the start, as SGLang counts it; 0: no limit.",
    )
    kv_tokens: tuple[int, ...] = option(
        (),
        "Tokens of KV cache, one number a model.  [default: the same for all, as many as --memory "
        "holds]",
        parse=parse_counts,
        metavar="65536,65536",
        also=("--max-total-tokens",),
    )
    block_size: int = option(16, "Tokens in one KV block.", also=("--page-size",))
    enable_prefix_caching: bool = option(
        True,
        "Keep the KV of computed prompts and answers for requests that begin alike.",
        off=("--disable-radix-cache",),
    )


def check_engine(engine: EngineConfig) -> None:
    """Raise ConfigError naming the flag that is out of range."""
    positive = {
        "--max-num-seqs": engine.max_num_seqs,
        "--max-num-batched-tokens": engine.max_num_batched_tokens,
        "--max-requests": engine.max_requests,
        "--block-size": engine.block_size,
    }
    for flag, value in positive.items():
        if value < 1:
            raise ConfigError(f"{flag} {value}: must be 1 or more")
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {engine.max_num_batched_tokens}: must be at least "
            f"--max-num-seqs ({engine.max_num_seqs}), one token for each request of a step"
        )
    shares = {
        "--gpu-memory-utilization": engine.gpu_memory_utilization,
        "--mem-fraction-static": engine.mem_fraction_static,
    }
    for flag, share in shares.items():
        if not 0 <= share <= 1:
            raise ConfigError(f"{flag} {share:g}: must be a share of the memory, 0 (no limit) to 1")
