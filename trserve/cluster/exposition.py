"""What Prometheus reads of the groups behind one endpoint. Each group has metrics of its own.

Knows no requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from trserve.cluster.groups import Group


class _Groups:
    def __init__(self, groups: Sequence[Group], choices: Mapping[str, int]) -> None:
        self._groups = groups
        self._choices = choices

    def collect(self) -> Iterator[Metric]:
        """The families, made from what is known now."""
        up = GaugeMetricFamily("trserve_group_ready", "Whether all of it serves.", labels=["group"])
        load = GaugeMetricFamily(
            "trserve_group_requests_in_flight", "Requests that it has to do.", labels=["group"]
        )
        served = CounterMetricFamily(
            "trserve_group_requests", "Requests that it has answered.", labels=["group"]
        )
        losses = CounterMetricFamily(
            "trserve_group_losses", "How often it went away.", labels=["group"]
        )
        for group in self._groups:
            label = [str(group.index)]
            up.add_metric(label, group.ready)
            load.add_metric(label, group.in_flight)
            served.add_metric(label, group.served)
            losses.add_metric(label, group.losses)
        chosen = CounterMetricFamily(
            "trserve_group_choices", "Why a request went where it went.", labels=["reason"]
        )
        for reason, count in self._choices.items():
            chosen.add_metric([reason], count)
        yield from (up, load, served, losses, chosen)


def exposition(groups: Sequence[Group], choices: Mapping[str, int]) -> tuple[bytes, bytes]:
    """The text format and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Groups(groups, choices))
    return generate_latest(registry), CONTENT_TYPE_LATEST.encode()
