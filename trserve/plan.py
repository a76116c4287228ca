"""From a configuration to a plan: which checkpoints, how long a row, how much KV, which router.

Everything that can be wrong with a configuration is found here, before a socket is bound, memory
taken or a process started. The plan is what every child receives. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from trserve.config import LaunchConfig
from trserve.config_hosts import LINKS
from trserve.edge.curve import read_server_keys
from trserve.edge.nccl_opening import check_nccl
from trserve.edge.onnx.placement import as_rows, without_exports
from trserve.edge.remote_models import ask_hosts
from trserve.emulated.placement import place
from trserve.emulated.profile import Profile
from trserve.endpoint_plan import EndpointPlan, plan_endpoint
from trserve.errors import ConfigError
from trserve.gateway.tokenizer import Tokenizer
from trserve.gpus.links import chosen_links
from trserve.gpus.members import plan_members, refuse_without_gpus
from trserve.gpus.plan import GPU_DEVICE, GpuPlan
from trserve.gpus.planning import Planned
from trserve.gpus.torch_build import check_torch_for_gpus
from trserve.ipc.layout import Layout
from trserve.model_plans import (
    Member,
    ModelPlan,
    check_memory,
    choose_dtype,
    find_members,
    local_models,
    plan_models,
    unique_names,
    with_profile,
)
from trserve.models.generation_defaults import read_sampling_defaults
from trserve.params import SamplingDefaults
from trserve.places import check_first, split_places
from trserve.record_format import RecordHeader, new_run, weights_digest
from trserve.recording import RecordPlan, plan_record
from trserve.restarts import ON_PEER_LOSS
from trserve.router_lib.configuration import Values
from trserve.router_plan import choose_router
from trserve.sched.table import ThresholdTable
from trserve.vocabularies import end_ids, token_maps

__all__ = ["ModelPlan", "ServerPlan", "check_memory", "choose_dtype", "choose_router", "make_plan"]


class ServerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher tells every child.

    ``router_config`` holds numbers and texts by name; for a built-in router it is complete with
    defaults.
    ``record`` is None where nothing is recorded, ``batch_threshold`` where thresholds follow the
    load; ``max_wait_ms`` 0 stands for the gate's default. The slab has ``slots`` for the gateway,
    then ``edge_slots`` for the edge port at ``edge_listen``. ``links`` names what carries tokens
    from each model (outer) to each, as ``ipc.device.choice`` calls it; empty where nobody chose.
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
    gpu: GpuPlan = GpuPlan()
    link: str = LINKS[0]
    links: list[list[str]] = []
    edge_listen: str = ""
    edge_keys: str = ""
    edge_slots: int = 0
    remote_timeout_s: float = 0.0
    link_heartbeat_s: float = 1.0
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
        slots = self.slots + self.edge_slots
        return Layout(slots=slots, row_tokens=self.row_tokens, workers=len(self.models))

    @property
    def gateway_slots(self) -> range | None:
        """The slots that the gateway allocates; None for all."""
        return range(self.slots) if self.edge_slots else None

    @property
    def port_slots(self) -> range:
        """Those that the edge port allocates."""
        return range(self.slots, self.slots + self.edge_slots)

    @property
    def edge_port(self) -> int:
        """The worker that is the edge port; there is one where there are ``edge_slots``."""
        return next(i for i, model in enumerate(self.models) if model.place.is_placeholder)

    def process_of(self, index: int) -> int:
        """The worker whose process stands for model ``index``.

        Each its own, but for placeholders: the first one's process stands for all of them.
        """
        if not self.models[index].place.is_placeholder:
            return index
        return next(i for i, model in enumerate(self.models) if model.place.is_placeholder)


def make_plan(config: LaunchConfig) -> ServerPlan:
    """Resolve ``config`` against this machine.

    Raises:
        ConfigError: a flag is wrong; the message names it.
        ModelUnavailableError: a model or device is not here.
    """
    device = choose_device(config)
    places = split_places(config.model.models)
    check_first(places)
    if config.hosts.edge_listen:
        read_server_keys(config.hosts.edge_keys)  # the port reads them again: a plan has no keys
    facts = ask_hosts(config, places)
    profile: Profile | None = None
    if device == "emulated":
        config, profile, models = place(config, [each.name for each in places])
        members = with_profile(places, models)
    else:
        members = find_members(config, places)
    router, router_config = choose_router(config, members)
    models = local_models(members)
    config = as_rows(config, models) if device == "onnx" else without_exports(config, models)
    tokenizer = Tokenizer.load(models[0].tokenizer_path)
    maps = token_maps(tokenizer, models)
    planned = plan_members(config, members) if device == GPU_DEVICE else None
    check_nccl(config.hosts.link, places, planned.gpu_plan if planned is not None else None)
    plans = plan_models(config, members, facts, maps, planned)
    if profile is not None:
        plans = [msgspec.structs.replace(each, active_parameters=0) for each in plans]
    ends = {token for each in facts if each is not None for token in each.eos_token_ids}
    return ServerPlan(
        models=plans,
        device=device,
        router=router,
        router_config=router_config,
        tokenizer_path=str(models[0].tokenizer_path),
        own_tokenizer=models[0].own_tokenizer,
        tokenizer_size=tokenizer.size,
        eos_token_ids=sorted(ends.union(end_ids(tokenizer, models, maps))),
        sampling_defaults=read_sampling_defaults(models[0].path),
        served_names=list(config.endpoint.served_model_name),
        slots=config.engine.max_requests,
        row_tokens=max(each.max_model_len for each in plans if not each.remote),
        block_size=config.engine.block_size,
        prefix_caching=config.engine.enable_prefix_caching,
        early_prefill=config.scheduling.early_prefill,
        batch_threshold=_batch_threshold(config, members),
        max_wait_ms=config.scheduling.max_wait_ms,
        schedule=config.scheduling.schedule,
        max_rows=config.engine.max_num_seqs,
        max_tokens=config.engine.max_num_batched_tokens,
        record=_record(config, members, plans, tokenizer.size),
        profile=profile,
        gpu=planned.gpu_plan if planned is not None else GpuPlan(),
        link=config.hosts.link,
        links=_links(config, members, plans, planned),
        edge_listen=config.hosts.edge_listen,
        edge_keys=config.hosts.edge_keys,
        edge_slots=config.hosts.edge_sessions if config.hosts.edge_listen else 0,
        remote_timeout_s=config.hosts.remote_timeout_s,
        link_heartbeat_s=config.hosts.link_heartbeat_s,
        on_peer_loss=config.faults.on_peer_loss,
        watchdog_s=config.faults.watchdog_s,
        endpoint=plan_endpoint(config.endpoint),
    )


def _links(
    config: LaunchConfig,
    members: Sequence[Member],
    plans: Sequence[ModelPlan],
    planned: Planned | None,
) -> list[list[str]]:
    """What carries tokens from each model (outer) to each."""
    longest = max(each.max_model_len for each in plans if not each.remote)
    slots = config.engine.max_requests + (
        config.hosts.edge_sessions if config.hosts.edge_listen else 0
    )
    here = [member.is_here for member in members]
    names = [each.name for each in plans]
    return chosen_links(config.hosts.link, names, here, planned, 4 * slots * longest)


def _batch_threshold(config: LaunchConfig, members: Sequence[Member]) -> list[int] | None:
    """What ``--batch-threshold`` says, None for auto; one model alone has nobody to wait for.

    Nor does one whose peers are at other hosts: the way there is longer than any step.
    """
    wanted, models = list(config.scheduling.batch_threshold), len(members)
    if not wanted:
        elsewhere = any(not member.is_here for member in members)
        fixed = models == 1 or elsewhere or config.scheduling.schedule != "delayed"
        return [1] * models if fixed else None
    most = min(config.engine.max_num_seqs, config.engine.max_requests)
    if max(wanted) > most:
        raise ConfigError(
            f"--batch-threshold {','.join(map(str, wanted))}: a step takes {most} requests at most "
            "(--max-num-seqs, --max-requests)"
        )
    return wanted


def choose_device(config: LaunchConfig) -> str:
    """The device that ``--device`` means. ModelUnavailableError where it is not here."""
    device, profile = config.placement.device, config.placement.profile
    if device != GPU_DEVICE:
        refuse_without_gpus(config)
    if device == "emulated":
        return device
    if profile:
        raise ConfigError(f"--profile {profile}: is for --device emulated, not {device}")
    if device == GPU_DEVICE:
        check_torch_for_gpus()
        return device
    return "cpu" if device == "auto" else device


def _record(
    config: LaunchConfig,
    members: Sequence[Member],
    plans: Sequence[ModelPlan],
    tokenizer_size: int,
) -> RecordPlan | None:
    wanted = config.recording
    if not wanted.record:
        return None
    if wanted.record_top_k > tokenizer_size:
        raise ConfigError(
            f"--record-top-k {wanted.record_top_k}: the tokenizer has {tokenizer_size} ids"
        )
    models = local_models(members)
    if len(models) < len(members):
        raise ConfigError("--record: what models at other hosts compute cannot be recorded here")
    run, names = new_run(), unique_names(members)
    quantized = "+int8" if config.model.quantization == "int8" else ""
    drawn = config.model.load_format == "dummy"
    headers = [
        RecordHeader(
            run=run,
            index=index,
            models=names,
            dtype=plans[index].dtype + quantized,
            weights="dummy" if drawn else weights_digest(model.path),
            hidden_size=model.spec.hidden_size,
            tokenizer_size=tokenizer_size,
            top_k=wanted.record_top_k,
        )
        for index, model in enumerate(models)
    ]
    return plan_record(Path(wanted.record).expanduser(), headers)
