"""From a configuration to a plan: which checkpoints, how long a row, how much KV, which router.

Everything that can be wrong with a configuration is found here, before a socket is bound, memory
taken or a process started. The plan is what every child receives. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

import msgspec

from trserve import demo
from trserve.config import LaunchConfig
from trserve.emulated.placement import place
from trserve.emulated.profile import Profile
from trserve.endpoint_plan import EndpointPlan, plan_endpoint
from trserve.errors import ConfigError, ModelUnavailableError
from trserve.gateway.tokenizer import Tokenizer
from trserve.ipc.layout import Layout
from trserve.ipc.slab import available_memory
from trserve.kv_blocks import DTYPE_BYTES, kv_blocks
from trserve.models.aliases import LoadFormat, ResolvedModel, resolve_model
from trserve.models.fit import check_weights_fit
from trserve.models.generation_defaults import read_sampling_defaults
from trserve.models.token_map import TokenMap
from trserve.params import SamplingDefaults
from trserve.record_format import RecordHeader, new_run, weights_digest
from trserve.recording import RecordPlan, plan_record
from trserve.restarts import ON_PEER_LOSS
from trserve.router_lib.configuration import Values, read_untyped, read_values
from trserve.router_lib.registry import MODEL, TOKENIZER, RouterEntry, describe
from trserve.sched.table import ThresholdTable
from trserve.vocabularies import end_ids, token_maps

_BFLOAT16_FROM: Final = 50_000_000
_DEFAULT_ROUTER: Final = "r-stitch"


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One model and its worker.

    ``num_blocks`` KV blocks; ``dtype`` a torch dtype's name; with ``int8`` 8-bit weights;
    ``token_map`` how its rows are put in the order of the server's ids; ``active_parameters`` how
    many weights a token meets, 0 where nobody counted.
    """

    name: str
    path: str
    load_format: LoadFormat = "auto"
    dtype: str
    int8: bool = False
    token_map: TokenMap = TokenMap()
    max_model_len: int
    num_blocks: int
    threads: int
    active_parameters: int = 0


class ServerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher tells every child.

    ``router_config`` holds numbers and texts by name; for a built-in router it is complete with
    defaults.
    ``record`` is None where nothing is recorded, ``batch_threshold`` where thresholds follow the
    load; ``max_wait_ms`` 0 stands for the gate's default.
    """

    models: list[ModelPlan]
    device: str
    router: str
    router_config: Values
    tokenizer_path: str
    own_tokenizer: bool = True
    tokenizer_size: int
    eos_token_ids: list[int]
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    served_names: list[str]
    slots: int
    row_tokens: int
    block_size: int
    prefix_caching: bool = True
    early_prefill: str = "idle"
    batch_threshold: list[int] | None = None
    max_wait_ms: float = 0.0
    schedule: str = "delayed"
    max_rows: int
    max_tokens: int
    record: RecordPlan | None = None
    profile: Profile | None = None
    on_peer_loss: str = ON_PEER_LOSS[0]
    watchdog_s: float = 0.0
    endpoint: EndpointPlan = EndpointPlan()

    @property
    def thresholds(self) -> ThresholdTable:
        """The batch thresholds at the start: the fixed ones, else eager execution."""
        if self.batch_threshold is None:
            return ThresholdTable.eager(len(self.models))
        return ThresholdTable.fixed(self.batch_threshold)

    @property
    def max_wait_s(self) -> float | None:
        """How long a gate stays closed at most; None: it follows the steps."""
        return self.max_wait_ms / 1e3 or None

    @property
    def layout(self) -> Layout:
        """The slab's layout."""
        return Layout(slots=self.slots, row_tokens=self.row_tokens, workers=len(self.models))


def make_plan(config: LaunchConfig) -> ServerPlan:
    """Resolve ``config`` against this machine.

    Raises:
        ConfigError: a flag is wrong; the message names it.
        ModelUnavailableError: a model or device is not here.
    """
    device = choose_device(config)
    load_format = cast(LoadFormat, config.model.load_format)
    profile: Profile | None = None
    if device == "emulated":
        config, profile, models = place(config)
    else:
        models = [resolve_model(name, load_format) for name in config.model.models]
    router, router_config = choose_router(config, models)
    tokenizer = Tokenizer.load(models[0].tokenizer_path)
    maps = token_maps(tokenizer, models)
    lengths = [model_length(model, config.model.max_model_len) for model in models]
    dtypes = [choose_dtype(model, config.model.dtype) for model in models]
    int8 = config.model.quantization == "int8"
    check_memory(models, dtypes, int8=int8)
    blocks = kv_blocks(config, models, dtypes, lengths)
    threads = config.placement.threads or _shared_threads(len(models))
    return ServerPlan(
        models=[
            ModelPlan(
                name=name,
                path=str(models[index].path),
                load_format=load_format,
                dtype=dtypes[index],
                int8=int8,
                token_map=maps[index],
                max_model_len=lengths[index],
                num_blocks=blocks[index],
                threads=threads[index],
                active_parameters=0 if profile else models[index].spec.active_parameters,
            )
            for index, name in enumerate(_unique_names(models))
        ],
        device=device,
        router=router,
        router_config=router_config,
        tokenizer_path=str(models[0].tokenizer_path),
        own_tokenizer=models[0].own_tokenizer,
        tokenizer_size=tokenizer.size,
        eos_token_ids=end_ids(tokenizer, models, maps),
        sampling_defaults=read_sampling_defaults(models[0].path),
        served_names=list(config.endpoint.served_model_name),
        slots=config.engine.max_requests,
        row_tokens=max(lengths),
        block_size=config.engine.block_size,
        prefix_caching=config.engine.enable_prefix_caching,
        early_prefill=config.scheduling.early_prefill,
        batch_threshold=_batch_threshold(config),
        max_wait_ms=config.scheduling.max_wait_ms,
        schedule=config.scheduling.schedule,
        max_rows=config.engine.max_num_seqs,
        max_tokens=config.engine.max_num_batched_tokens,
        record=_record(config, models, dtypes, tokenizer.size),
        profile=profile,
        on_peer_loss=config.faults.on_peer_loss,
        watchdog_s=config.faults.watchdog_s,
        endpoint=plan_endpoint(config.endpoint),
    )


def _batch_threshold(config: LaunchConfig) -> list[int] | None:
    """What ``--batch-threshold`` says, None for auto; one model alone has nobody to wait for."""
    wanted = list(config.scheduling.batch_threshold)
    if not wanted:
        fixed = len(config.model.models) == 1 or config.scheduling.schedule != "delayed"
        return [1] * len(config.model.models) if fixed else None
    most = min(config.engine.max_num_seqs, config.engine.max_requests)
    if max(wanted) > most:
        raise ConfigError(
            f"--batch-threshold {','.join(map(str, wanted))}: a step takes {most} requests at most "
            "(--max-num-seqs, --max-requests)"
        )
    return wanted


def choose_device(config: LaunchConfig) -> str:
    device, profile = config.placement.device, config.placement.profile
    if device == "emulated":
        return device
    if profile:
        raise ConfigError(f"--profile {profile}: is for --device emulated, not {device}")
    if device in ("auto", "cpu"):
        return "cpu"
    raise ModelUnavailableError(
        f"--device {device}: this version runs models on the CPU only\n"
        "use --device cpu, or --device emulated, which only takes a device's time"
    )


def _unique_names(models: Sequence[ResolvedModel]) -> list[str]:
    names: list[str] = []
    for model in models:
        name, count = model.name, 1
        while name in names:
            count += 1
            name = f"{model.name}-{count}"
        names.append(name)
    return names


def model_length(model: ResolvedModel, wanted: int) -> int:
    most = model.spec.max_position_embeddings
    if wanted > most:
        raise ConfigError(f"--max-model-len {wanted}: model {model.name} has {most} positions")
    return wanted or most


def choose_dtype(model: ResolvedModel, wanted: str) -> str:
    if wanted != "auto":
        return wanted
    return "bfloat16" if model.spec.num_parameters >= _BFLOAT16_FROM else "float32"


def check_memory(models: Sequence[ResolvedModel], dtypes: Sequence[str], *, int8: bool) -> None:
    sizes = [
        (model.name, model.spec, DTYPE_BYTES[dtype], int8)
        for model, dtype in zip(models, dtypes, strict=True)
    ]
    check_weights_fit(sizes, available_memory())


def _shared_threads(models: int) -> tuple[int, ...]:
    return (max(1, len(os.sched_getaffinity(0)) // models),) * models


def choose_router(config: LaunchConfig, models: Sequence[ResolvedModel]) -> tuple[str, Values]:
    name, pairs = config.router.router, config.router.router_config
    if name == "auto":
        name = _DEFAULT_ROUTER if len(models) == 2 else "none"
    entry = describe(name)
    if entry is None:
        return name, read_untyped(pairs)
    _check_model_count(name, entry, len(models))
    first = models[0]
    found = {MODEL: str(first.path), TOKENIZER: str(first.tokenizer_path)}
    pairs = (*_stored_pairs(name, models), *pairs)  # the last one of a name counts
    return name, read_values(pairs, name, entry.parameters, found=found, models=len(models))


def _check_model_count(name: str, entry: RouterEntry, count: int) -> None:
    most = entry.max_models
    if count < entry.min_models or (most is not None and count > most):
        wanted = (
            str(entry.min_models) if entry.min_models == most else f"at least {entry.min_models}"
        )
        raise ConfigError(f"--router {name} needs {wanted} models; --models names {count}")


def _stored_pairs(name: str, models: Sequence[ResolvedModel]) -> Sequence[tuple[str, str]]:
    """What ships with the embedded pair."""
    stored = [demo.model_path("tiny"), demo.model_path("small")]
    if [model.path for model in models] != stored:
        return ()
    if name == _DEFAULT_ROUTER:
        return (("tau", repr(demo.default_tau())),)
    checkpoint = demo.router_checkpoint(name)
    return (("checkpoint", str(checkpoint)),) if checkpoint else ()


def _record(
    config: LaunchConfig,
    models: Sequence[ResolvedModel],
    dtypes: Sequence[str],
    tokenizer_size: int,
) -> RecordPlan | None:
    wanted = config.recording
    if not wanted.record:
        return None
    if wanted.record_top_k > tokenizer_size:
        raise ConfigError(
            f"--record-top-k {wanted.record_top_k}: the tokenizer has {tokenizer_size} ids"
        )
    run, names = new_run(), _unique_names(models)
    quantized = "+int8" if config.model.quantization == "int8" else ""
    drawn = config.model.load_format == "dummy"
    headers = [
        RecordHeader(
            run=run,
            index=index,
            models=names,
            dtype=dtypes[index] + quantized,
            weights="dummy" if drawn else weights_digest(model.path),
            hidden_size=model.spec.hidden_size,
            tokenizer_size=tokenizer_size,
            top_k=wanted.record_top_k,
        )
        for index, model in enumerate(models)
    ]
    return plan_record(Path(wanted.record).expanduser(), headers)
