"""The systems that the throughput benchmarks compare, each as something that can be measured.

- ``llm-only``, ``slm-only``: a server of one model, whole answers.
- ``std-serving``: a server a model and an external dispatcher (``std_dispatch``);
  ``official-co-llm`` and ``official-citer`` are its variations (``std_official``), and
  ``official-r2r`` is two workers of its own.
- ``step-sync``, ``model-sync``, ``eager``, ``delayed-fixed``, ``delayed-auto``: one trserve server
  with ``--schedule`` or ``--batch-threshold`` accordingly. Where the server refuses that, the
  system is not available and the row says why.

All have the same device, profile, threads and prefix cache. Knows no tables and no predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from bench import two_hosts
from bench.closed_loop import Until, Window, measure
from bench.endpoint import (
    Address,
    Asked,
    MetricsProbe,
    NotAvailableError,
    StreamUser,
    launched,
)
from bench.std_dispatch import DispatchUser, Tally
from bench.std_official import OFFICIAL, R2R, official
from bench.std_policy import Chance, EntropyStitch, Mixture, Policy
from bench.workloads import Workload

Vector = tuple[int, ...]

LLM_ONLY: Final = "llm-only"
SLM_ONLY: Final = "slm-only"
STANDARD: Final = "std-serving"
SINGLE: Final = {SLM_ONLY: 0, LLM_ONLY: -1}
LOCKSTEP: Final = ("step-sync", "model-sync")
SCHEDULED: Final = (*LOCKSTEP, "eager", "delayed-fixed", "delayed-auto")
SYSTEMS: Final = (LLM_ONLY, SLM_ONLY, STANDARD, *SCHEDULED)
_ONE_WAY: Final = ("r2r", "citer", "co-llm", "confidence")


@dataclass(frozen=True)
class Algorithm:
    """A routing algorithm with its values: ``tau`` alone decides on real entropies (r-stitch, CPU).

    Else ``values`` are probabilities: p; for r-stitch p and q; for me one weight a model.
    """

    name: str
    values: tuple[float, ...] = ()
    tau: float | None = None

    @property
    def shown(self) -> str:
        if self.tau is not None:
            return f"{self.name} tau={self.tau:g}"
        return f"{self.name} {','.join(f'{value:g}' for value in self.values)}"

    def router_arguments(self, device: str) -> list[str]:
        """The flags that make trserve route so."""
        if self.tau is not None:
            return ["--router", self.name, "--router-config", f"tau={self.tau:g}"]
        if self.name == "me":
            weights = "weights=" + "/".join(f"{value:g}" for value in self.values)
            if device == "emulated":
                return ["--router", "emulated", "--router-config", f"algorithm=me,{weights}"]
            return ["--router", "me", "--router-config", weights]
        chances = ",".join(
            f"{key}={value:g}" for key, value in zip("pq", self.values, strict=False)
        )
        if device == "emulated":
            config = f"algorithm={self.name},{chances}"
            return ["--router", "emulated", "--router-config", config]
        # By chance on real models: the same processes, with q = 1 the one-way ones.
        return ["--router", "random", "--router-config", chances]

    def policy(self, seed: int, vocabulary: int) -> Policy:
        """The dispatcher's side of the same rule."""
        if self.tau is not None:
            return EntropyStitch(self.tau, vocabulary)
        if self.name == "me":
            return Mixture(self.values, seed=seed)
        p, q = (*self.values, 1.0)[:2]
        return Chance(p, 1.0 if self.name in _ONE_WAY else q, seed=seed)


@dataclass(frozen=True)
class Setup:
    """What all systems of a comparison share. ``vocabulary`` is the tokenizer's size."""

    models: tuple[str, ...]
    device: str
    algorithm: Algorithm
    profile: str | None = None
    vocabulary: int = 0
    more: tuple[str, ...] = ()

    def arguments(self, models: Sequence[str]) -> list[str]:
        """The flags of a server of ``models``, all but its router's and its gate's."""
        profile = ["--profile", self.profile] if self.profile else []
        threads = ["--threads", ",".join("1" * len(models))] if self.device == "cpu" else []
        names = ["--models", ",".join(models), "--device", self.device]
        return [*names, *profile, *threads, *self.more]


class Running(Protocol):
    """A system whose servers are up."""

    async def measure(self, concurrency: int, workload: Workload, until: Until) -> Window: ...


@dataclass(frozen=True)
class Endpoint:
    """One server; ``only`` names the model that writes where it is not the router's choice."""

    address: Address
    only: str | None = None

    async def measure(self, concurrency: int, workload: Workload, until: Until) -> Window:
        asked = Asked(workload, trserve={"only": self.only} if self.only else {})
        probe = await MetricsProbe.open(self.address)
        try:
            return await measure(
                lambda number: StreamUser(self.address, asked, number, concurrency),
                probe,
                concurrency,
                until,
            )
        finally:
            probe.close()


@dataclass(frozen=True)
class Standard:
    """A server a model, and the dispatcher in this process."""

    servers: tuple[Address, ...]
    make_policy: Callable[[int], Policy]

    async def measure(self, concurrency: int, workload: Workload, until: Until) -> Window:
        tally = Tally(len(self.servers))
        return await measure(
            lambda number: DispatchUser(
                self.servers, self.make_policy, workload, (number, concurrency), tally
            ),
            tally,
            concurrency,
            until,
        )


@contextmanager
def running(system: str, setup: Setup, vector: Vector | None = None) -> Iterator[Running]:
    """Start the servers of ``system``; ``vector`` is that of delayed-fixed.

    Raises NotAvailableError where the server refuses the settings.
    """
    with ExitStack() as stack:
        if system in SINGLE:
            arguments = setup.arguments([setup.models[SINGLE[system]]])
            yield Endpoint(stack.enter_context(launched([*arguments, "--router", "none"])))
        elif system in OFFICIAL:
            yield official(system, single_servers(stack, setup, OFFICIAL[system]), setup)
        elif system == R2R:
            yield official_r2r(setup)
        elif system == STANDARD:
            servers = single_servers(stack, setup, [()] * len(setup.models))
            yield Standard(servers, lambda seed: setup.algorithm.policy(seed, setup.vocabulary))
        elif system == two_hosts.SYSTEM:
            yield Endpoint(stack.enter_context(two_hosts.two_hosts(setup)))
        else:
            router = setup.algorithm.router_arguments(setup.device)
            gate = gate_arguments(system, vector, len(setup.models))
            arguments = [*setup.arguments(setup.models), *router, *gate]
            yield Endpoint(stack.enter_context(launched(arguments)))


def official_r2r(setup: Setup) -> Running:
    """R2R's own way; raises NotAvailableError for what it cannot do."""
    from bench.official_r2r_system import OfficialR2R

    if setup.algorithm.name not in _ONE_WAY or len(setup.models) != 2:
        raise NotAvailableError("R2R's own way is there for one-way routing of two models only")
    return OfficialR2R(setup.models, setup.profile, setup.algorithm.values[0])


def single_servers(
    stack: ExitStack, setup: Setup, more: Sequence[Sequence[str]]
) -> tuple[Address, ...]:
    """A server for each model; ``more`` has the further flags of each."""
    return tuple(
        stack.enter_context(launched([*setup.arguments([model]), "--router", "none", *flags]))
        for model, flags in zip(setup.models, more, strict=True)
    )


def gate_arguments(system: str, vector: Vector | None, models: int) -> list[str]:
    """The flags that make a server schedule as ``system`` does."""
    if system in LOCKSTEP:
        return ["--schedule", system]
    if system == "delayed-auto":
        return ["--batch-threshold", "auto"]
    if system == "eager":
        vector = (1,) * models
    if vector is None:
        raise ValueError(f"{system} needs a vector")
    return ["--batch-threshold", ",".join(map(str, vector))]
