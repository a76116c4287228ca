"""The models of a configuration: there, of one vocabulary, small enough, with a router that fits.

Every judgement is the one of ``trserve launch`` (``trserve/plan.py`` and what it calls); here each
is asked for on its own, so that one fault does not hide the next. Loads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from trserve.config import LaunchConfig
from trserve.doctor.findings import Finding, Level
from trserve.doctor.gpus import check_gpus
from trserve.doctor.limits import Needs
from trserve.emulated.placement import place
from trserve.endpoint_plan import cautions, plan_endpoint
from trserve.errors import StartupError
from trserve.gateway.tokenizer import Tokenizer
from trserve.gpus.plan import GPU_DEVICE
from trserve.ipc.slab import available_memory
from trserve.kv_blocks import DTYPE_BYTES
from trserve.model_plans import Member, checkpoint_of, with_profile
from trserve.models.aliases import ResolvedModel
from trserve.places import Place, split_places
from trserve.plan import ServerPlan, check_memory, choose_dtype, choose_router, make_plan
from trserve.router_lib.configuration import Values
from trserve.router_lib.registry import BUILTIN
from trserve.vocabularies import token_maps

_GIB: Final = 2**30
_WORKER: Final = 256 * 2**20
_OTHERS: Final = 160 * 2**20
"""Bytes of a worker beside its model, and of launcher, gateway and solver together, as
``trserve_process_resident_memory_bytes`` in /metrics says of the embedded pair."""

_FLAG: Final = re.compile(r"--[a-z][a-z-]*")
_TORCHS_OWN: Final = f"--device {GPU_DEVICE}: torch"
"""What a check of torch has said already."""

_CHECKPOINT: Final = "checkpoint"


class Diagnosed:
    """What is known of a configuration's models, and what is wrong with them.

    Attributes:
        config: with what an emulated device's profile decides.
        models: those that are there.
        findings: in the order in which a start would meet them.
        gpu_count: how many GPUs there are, where they are asked for.

    Args:
        cuda: the CUDA version that torch was built with, None for none.
    """

    def __init__(self, config: LaunchConfig, cuda: str | None) -> None:
        self.config = config
        self.emulated = config.placement.device == "emulated"
        self.gpu_count = 0
        self._cuda = cuda
        self._on_gpus = config.placement.device == GPU_DEVICE
        self.models: list[ResolvedModel] = []
        self._members: list[Member] = []
        self.findings: list[Finding] = []
        self.plan: ServerPlan | None = None

    @property
    def weights(self) -> int:
        """Bytes of this machine's memory that the models that are there take for good."""
        elsewhere = self.emulated or self._on_gpus
        return 0 if elsewhere else sum(_weights(self.config, self.models))

    @property
    def needs(self) -> Needs | None:
        """What the server would take; None where it could not start anyway."""
        if self.plan is None:
            return None
        elsewhere = self.emulated or self._on_gpus
        weights = [0 if elsewhere else each for each in _weights(self.config, self.models)]
        kv = [0 if elsewhere else each for each in _kv(self.plan, self.models)]
        programs = _OTHERS + _WORKER * len(self.models)
        largest = max(map(sum, zip(weights, kv, strict=True)))
        return Needs(sum(weights) + self.plan.layout.size + programs, sum(kv), largest)

    def run(self) -> None:
        """Look at everything."""
        self._find_models()
        if self.models:
            complete = len(self._members) == len(self.config.model.models)
            self._check_tokenizers()
            if not (self._on_gpus or self.emulated):
                self._check_memory()
            if complete:
                self._check_router()
        if self._on_gpus:
            complete = len(self._members) == len(self.config.model.models)
            found, self.gpu_count = check_gpus(
                self._cuda, self.config, self._members if complete else None
            )
            self.findings.extend(found)
        self._check_endpoint()
        self._make_plan()

    def _find_models(self) -> None:
        try:
            places = split_places(self.config.model.models)
        except StartupError as error:
            self._fault("models", error, "--models")
            return
        if self.emulated:
            try:
                self.config, _, self.models = place(self.config, [each.name for each in places])
            except StartupError as error:
                self._fault("models", error, "--models, --profile")
                return
            self._members = with_profile(places, self.models)
            names = ", ".join(self.config.model.models)
            self._well("models", f"{names}, emulated: no weights are needed")
            return
        for where in places:
            self._find_model(where)

    def _find_model(self, where: Place) -> None:
        if where.remote:
            self._members.append(Member(where, None))
            self._well("models", f"{where.name} is at another host: {where.remote}")
            return
        try:
            self.models.append(checkpoint_of(self.config, where.name))
        except StartupError as error:
            self._fault("models", error, f"--models {where.name}")
        else:
            self._members.append(Member(where, self.models[-1]))
            self._well("models", f"{where.name} is at {self.models[-1].path}")

    def _check_tokenizers(self) -> None:
        first = self.models[0]
        try:
            tokenizer = Tokenizer.load(first.tokenizer_path)
            maps = token_maps(tokenizer, self.models)
        except StartupError as error:
            fix = "name models of one family: their vocabularies must be the same"
            self._fault("tokenizers", error, "--models", fix)
            return
        rows = sum(len(each.moved) for each in maps)
        shown = f"{tokenizer.size} ids" + (", the same in all models" * (len(self.models) > 1))
        if rows:
            shown += f" but for {rows}, whose rows are moved as they are loaded"
        self._well("tokenizers", shown)
        if not (tokenizer.has_chat_template or self.config.endpoint.chat_template):
            what = f"{first.name} has none: /v1/chat/completions will refuse"
            self._add("chat template", Level.WARNING, what, "--chat-template", "give a file")

    def _check_memory(self) -> None:
        dtypes = [choose_dtype(model, self.config.model.dtype) for model in self.models]
        int8 = self.config.model.quantization == "int8"
        try:
            check_memory(self.models, dtypes, int8=int8)
        except StartupError as error:
            self._fault("memory", error, "--models")
            return
        free = available_memory() / _GIB
        self._well("memory", f"the weights need {self.weights / _GIB:.2f} GiB of {free:.1f} free")

    def _check_router(self) -> None:
        try:
            name, values = choose_router(self.config, self._members)
        except StartupError as error:
            fix = "see `trserve launch --help` and docs/routers.md"
            self._fault("router", error, "--router, --router-config", fix)
            return
        if name in BUILTIN and _CHECKPOINT in values:
            self._check_checkpoint(name, values)
        else:
            self._well("router", name)

    def _check_checkpoint(self, name: str, values: Values) -> None:
        path = values[_CHECKPOINT]
        parameter = f"--router-config {_CHECKPOINT}={path}"
        fix = "give the file or folder that `trserve train-router` or `convert-router` wrote"
        try:
            _load_router(name, values, self.models)
        except StartupError as error:
            self._add("router", Level.FAULT, f"{name}: {error}", parameter, fix)
        except Exception as error:
            # A checkpoint may break its reader in any way; which one is what a person asks.
            self._add("router", Level.FAULT, f"{name}: {path}: {error!r}", parameter, fix)
        else:
            self._well("router", f"{name}, its checkpoint {path} fits")

    def _check_endpoint(self) -> None:
        try:
            plan = plan_endpoint(self.config.endpoint)
        except StartupError as error:
            self._fault("endpoint", error, "--api-key, --admin-key, --chat-template")
            return
        for caution in cautions(self.config.endpoint, plan):
            what, _, fix = caution.rpartition("; ")
            self._add("endpoint", Level.WARNING, what, "--api-key", fix)

    def _make_plan(self) -> None:
        """Whatever a start would refuse and no check above has met."""
        try:
            self.plan = make_plan(self.config)
        except StartupError as error:
            said = any(finding.level is Level.FAULT for finding in self.findings)
            if not said and not str(error).startswith(_TORCHS_OWN):
                named = _FLAG.search(str(error))
                fix = "see `trserve launch --help`"
                self._fault("settings", error, named[0] if named else "flags", fix)

    def _fault(self, check: str, error: StartupError, parameter: str, fix: str = "") -> None:
        self.findings.append(Finding.of_error(check, error, parameter, fix))

    def _well(self, check: str, what: str) -> None:
        self._add(check, Level.OK, what)

    def _add(self, check: str, level: Level, what: str, parameter: str = "", fix: str = "") -> None:
        self.findings.append(Finding(check, level, what, parameter, fix))


def _weights(config: LaunchConfig, models: Sequence[ResolvedModel]) -> list[int]:
    int8 = config.model.quantization == "int8"
    return [
        model.spec.weight_bytes(DTYPE_BYTES[choose_dtype(model, config.model.dtype)], int8=int8)
        for model in models
    ]


def _kv(plan: ServerPlan, models: Sequence[ResolvedModel]) -> list[int]:
    return [
        model.spec.kv_bytes_per_token(DTYPE_BYTES[planned.dtype])
        * planned.num_blocks
        * plan.block_size
        for model, planned in zip(models, (m for m in plan.models if not m.remote), strict=True)
    ]


def _load_router(name: str, values: Mapping[str, object], models: Sequence[ResolvedModel]) -> None:
    """Make the first worker's router, as that worker does, but for the loaded model."""
    from trserve.router_lib.base import RouterContext
    from trserve.router_lib.registry import load_router_class

    context = RouterContext(
        model=0,
        models=tuple(model.name for model in models),
        tokenizer_size=Tokenizer.load(models[0].tokenizer_path).size,
        config=dict(values),
        path=str(models[0].path),
    )
    load_router_class(name)(context)
