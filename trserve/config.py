"""The configuration tree of a server: one frozen dataclass per group, one field per flag.

Flags are generated from these fields (``trserve/cli.py``), so that a setting is spelled once.
Knows no model, no machine and no click; values are checked here only as far as they can be
without looking at either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Final

from trserve.config_endpoint import EndpointConfig, check_endpoint
from trserve.config_engine import EngineConfig, check_engine
from trserve.config_hosts import HostsConfig, check_hosts
from trserve.config_option import option
from trserve.config_values import (
    parse_assignments,
    parse_counts,
    parse_groups,
    parse_length,
    parse_names,
    parse_thresholds,
)
from trserve.errors import ConfigError
from trserve.places import with_placeholder
from trserve.restarts import ON_PEER_LOSS

DEVICES: Final = ("auto", "cpu", "cuda", "onnx", "emulated")
MPS: Final = ("auto", "on", "off")
DTYPES: Final = ("auto", "float32", "bfloat16")
EARLY_PREFILL: Final = ("idle", "off", "always")
SCHEDULES: Final = ("delayed", "model-sync", "step-sync")
QUANTIZATIONS: Final = ("none", "int8")
LOAD_FORMATS: Final = ("auto", "safetensors", "gguf", "dummy")

SHORTEST_WATCHDOG_S: Final = 2.0


@dataclass(frozen=True)
class ModelConfig:
    """Which models, in which precision."""

    models: tuple[str, ...] = option(
        ("tiny", "small"),
        "Models, the entry model first: aliases (0.6b 1.7b 4b 8b 14b 32b tiny small), hub ids in "
        "the local cache, or paths; NAME@HOST:PORT is at another host.  [default: the embedded "
        "pair, tiny,small]",
        also=("--model", "--model-path"),
        parse=parse_names,
        metavar="A,B",
    )
    dtype: str = option(
        "auto",
        "Precision of weights and KV cache; auto is float32 below 50 M parameters, else bfloat16.",
        choices=DTYPES,
    )
    quantization: str = option(
        "none",
        "Weights of the projections: as --dtype says, or 8 bits with a scale for each output.",
        choices=QUANTIZATIONS,
    )
    load_format: str = option(
        "auto",
        "Where weights come from: what is there, or one kind of file; dummy draws them at random.",
        choices=LOAD_FORMATS,
    )
    max_model_len: int = option(
        0,
        "Longest row (prompt and output) in tokens.  [default: the models' own]",
        also=("--context-length",),
        parse=parse_length,
        metavar="TOKENS|8k|auto",
    )
    tokenizer: str = option(
        "",
        "Checkpoint whose tokenizer all models use: a path, or a hub id in the local cache.  "
        "[default: that of the entry model]",
        also=("--tokenizer-path",),
        metavar="NAME",
    )


@dataclass(frozen=True)
class RouterConfig:
    """Who writes the next token."""

    router: str = option(
        "auto",
        "Router: r-stitch, r2r, citer, co-llm, confidence, entropy, top-prob, margin, step-leader, "
        "me, random, none, emulated, or module:Class.  [default: r-stitch for two models]",
    )
    router_config: tuple[tuple[str, str], ...] = option(
        (),
        "Router parameters, k=v,...; may be repeated.",
        parse=parse_assignments,
        multiple=True,
        metavar="K=V,...",
    )


@dataclass(frozen=True)
class PlacementConfig:
    """Where the models run."""

    device: str = option(
        "auto",
        "Device of all models; onnx is a CPU with ONNX Runtime, for small models; emulated takes "
        "the time of a --profile and makes tokens up.",
        choices=DEVICES,
    )
    gpus: tuple[tuple[int, ...], ...] = option(
        (),
        "GPUs of each model, models separated by /.  [default: all on GPU 0, or spread out where "
        "they do not fit]",
        parse=parse_groups,
        metavar="0/0,1",
    )
    tp: tuple[int, ...] = option(
        (),
        "Tensor parallel processes, one number a model.  [default: one for each GPU of the model]",
        also=("--tensor-parallel-size", "--tp-size", "-tp"),
        parse=parse_counts,
        metavar="1,2",
    )
    mps: str = option(
        MPS[0],
        "CUDA MPS for models that share a GPU: auto uses it where it can be had.",
        choices=MPS,
    )
    enforce_eager: bool = option(
        False,
        "On a GPU, launch each step operation by operation, and replay no CUDA graph.",
        also=("--disable-cuda-graph",),
    )
    profile: str = option(
        "",
        "Latency profile of emulated devices: one that ships with the package, or a JSON file.  "
        "[default: the one that has exactly these --models]",
        metavar="NAME|FILE",
    )
    threads: tuple[int, ...] = option(
        (),
        "CPU threads, one number a model.  [default: the cores shared out, at least 1]",
        parse=parse_counts,
        metavar="1,1",
    )


@dataclass(frozen=True)
class SchedulingConfig:
    """When a model starts a step."""

    batch_threshold: tuple[int, ...] = option(
        (),
        "Requests that a model waits for before a step, one number a model (1,1: never wait), or "
        "auto: what yields the most tokens/s by what was measured.  [default: auto]",
        parse=parse_thresholds,
        metavar="auto|1,3",
    )
    schedule: str = option(
        SCHEDULES[0],
        "delayed, or what it is compared with: model-sync runs one model at a time, step-sync "
        "starts no step before all models have finished the last one.",
        choices=SCHEDULES,
    )
    max_wait_ms: float = option(
        0.0,
        "Longest wait of a request for others before a step.  [default: four steps of the slowest "
        "model, at least 20]",
    )
    early_prefill: str = option(
        EARLY_PREFILL[0],
        "When a model computes the prompts of requests that another one writes, so that a first "
        "handoff does not wait for that: idle, when it has nothing else to do.",
        choices=EARLY_PREFILL,
    )


@dataclass(frozen=True)
class RecordConfig:
    """What is kept of what the models computed."""

    record: str = option(
        "",
        "Directory to which each model's hidden states and top logits are appended, one row for "
        "each token that it samples; routers are trained on them.  [default: off]",
        metavar="DIR",
    )
    record_top_k: int = option(20, "Most probable tokens in each row of a recording.")


@dataclass(frozen=True)
class FaultConfig:
    """What happens when a process dies, and at the end."""

    on_peer_loss: str = option(
        ON_PEER_LOSS[0],
        "When a worker dies for the third time in a minute: fail ends the server, degrade goes on "
        "with the models left, wait keeps starting it.",
        choices=ON_PEER_LOSS,
    )
    watchdog_s: float = option(
        30.0, "Seconds after which a worker or gateway without sign of life is replaced; 0: never."
    )

    drain_timeout: float = option(
        30.0, "Seconds that open streams get after SIGTERM.", also=("--shutdown-timeout",)
    )


@dataclass(frozen=True)
class LaunchConfig:
    """Everything that ``trserve launch`` can be told."""

    model: ModelConfig = ModelConfig()
    router: RouterConfig = RouterConfig()
    placement: PlacementConfig = PlacementConfig()
    hosts: HostsConfig = field(default_factory=HostsConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    scheduling: SchedulingConfig = SchedulingConfig()
    recording: RecordConfig = RecordConfig()
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    faults: FaultConfig = FaultConfig()


GROUPS: Final[dict[str, type[Any]]] = {
    "model": ModelConfig,
    "router": RouterConfig,
    "placement": PlacementConfig,
    "hosts": HostsConfig,
    "engine": EngineConfig,
    "scheduling": SchedulingConfig,
    "recording": RecordConfig,
    "endpoint": EndpointConfig,
    "faults": FaultConfig,
}


def flag_name(setting: Field[Any]) -> str:
    """``max_num_seqs`` as ``--max-num-seqs``."""
    return "--" + setting.name.replace("_", "-")


def config_from_flags(values: Mapping[str, Any]) -> LaunchConfig:
    """The tree, from values by field name. Raises ConfigError naming the flag that is wrong."""
    groups = {
        name: group(**{f.name: values[f.name] for f in fields(group) if f.name in values})
        for name, group in GROUPS.items()
    }
    config = LaunchConfig(**groups)
    check_hosts(config.hosts, len(config.model.models))
    models = with_placeholder(config.model.models, config.hosts.edge_listen)
    config = replace(config, model=replace(config.model, models=models))
    _check(config)
    return config


def _check(config: LaunchConfig) -> None:
    models = config.model.models
    check_engine(config.engine)
    if config.recording.record_top_k < 1:
        raise ConfigError(f"--record-top-k {config.recording.record_top_k}: must be 1 or more")
    if config.model.max_model_len < 0:
        raise ConfigError(f"--max-model-len {config.model.max_model_len}: must be positive")
    check_endpoint(config.endpoint)
    watchdog_s = config.faults.watchdog_s
    if watchdog_s and not SHORTEST_WATCHDOG_S <= watchdog_s < math.inf:
        raise ConfigError(
            f"--watchdog-s {watchdog_s:g}: must be 0 (off), or {SHORTEST_WATCHDOG_S:g} or more: an "
            "idle worker gives a sign of life once a second"
        )
    if not 0 <= config.faults.drain_timeout < math.inf:
        raise ConfigError(f"--drain-timeout {config.faults.drain_timeout:g}: must be 0 or more")
    if not 0 <= config.scheduling.max_wait_ms < math.inf:
        raise ConfigError(f"--max-wait-ms {config.scheduling.max_wait_ms:g}: must be 0 or more")
    thresholds = config.scheduling.batch_threshold
    if thresholds and config.scheduling.schedule != SCHEDULES[0]:
        raise ConfigError(
            f"--batch-threshold: means nothing with --schedule {config.scheduling.schedule}"
        )
    if config.placement.device == "emulated":
        return  # its profile may say how many models there are; see trserve/emulated/placement.py
    if thresholds and len(thresholds) != len(models):
        raise ConfigError(
            f"--batch-threshold names {len(thresholds)} numbers for {len(models)} models: give "
            "one a model, or auto"
        )
    placement = config.placement
    for flag, each in (
        ("--threads", placement.threads),
        ("--gpus", placement.gpus),
        ("--tp", placement.tp),
    ):
        if each and len(each) != len(models):
            raise ConfigError(
                f"{flag} names {len(each)} for {len(models)} models: give one a model"
            )
