"""Figures of this process's handles: what they know when a scrape comes. No request is made."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from torch_ros.shard.core import Shard, open_shards
from torch_ros.shard.tally import Tally, Whose, tallies

PREFIX = "torch_ros_"
WHOSE = Whose._fields


def _behind(shard: Shard) -> int:
    held, newest = shard.held, shard.observed.newest
    return newest.version - held.version if held and newest and newest.follows(held) else 0


_GAUGES: tuple[tuple[str, str, Callable[[Shard], float]], ...] = (
    (
        "behind_versions",
        "Numbers by which the held version is behind the newest of its run that was heard of.",
        _behind,
    ),
    ("seated", "1: the process has its seat in etcd.", lambda shard: shard.state == "seated"),
    (
        "etcd_up",
        "1: etcd answered the last request for the seat.",
        lambda shard: shard.group.store_answers,
    ),
    (
        "etcd_roundtrip_seconds",
        "How long the lease's last renewal took.",
        lambda shard: shard.group.session.round_trip_s,
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[Tally], float]], ...] = (
    ("reroutes", "Sources that were lost within a read.", lambda tally: tally.reroutes),
    ("corrupt", "Reads whose bytes were not what was published.", lambda tally: tally.corrupt),
)


class HandleCollector(Collector):
    """For a registry of prometheus_client: figures of all handles that this process has open.

        prometheus_client.REGISTRY.register(torch_ros.metrics.HandleCollector())

    Register one. Values are read when they are scraped, from memory: a call of a handle costs as
    much as without. Counters go on when a handle is closed, and when one of the same name is
    opened. Handles of one process that share model, replica and rank, as do those whose names
    nobody chose, are added up, and of what cannot be added one is shown.
    """

    def describe(self) -> Sequence[Metric]:
        """Nothing, so that to register it reads nothing."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Draw what the handles know."""
        shards = {shard.observed.tally.whose: shard for shard in open_shards()}
        yield _held(shards)
        for name, text, of in _GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=WHOSE)
            for whose, shard in shards.items():
                gauge.add_metric(whose, float(of(shard)))
            yield gauge
        yield _staged(shards)
        counted = tallies.all()
        for name, text, count in _COUNTERS:
            yield _counter(name, text, {whose: count(tally) for whose, tally in counted.items()})
        lost = Counter({whose: tally.seats_lost for whose, tally in counted.items()})
        lost.update({whose: shard.group.ledger.seats_lost for whose, shard in shards.items()})
        yield _counter("seat_lost", "Seats in etcd that were lost.", lost)
        yield _reads(counted)


def _held(shards: Mapping[Whose, Shard]) -> Metric:
    text = "Number of the version that is held and served; -1: none."
    gauge = GaugeMetricFamily(PREFIX + "held_version", text, labels=(*WHOSE, "run"))
    for whose, shard in shards.items():
        held = shard.held
        run = held.run if held else shard.group.seat.run
        gauge.add_metric((*whose, run), held.version if held else -1)
    return gauge


def _staged(shards: Mapping[Whose, Shard]) -> Metric:
    text = "Memory beside the tensors: host copies, buffers of publish_copy, staging, forerunner."
    gauge = GaugeMetricFamily(PREFIX + "staged_bytes", text, labels=(*WHOSE, "kind"))
    for whose, shard in shards.items():
        for kind, size_bytes in list(shard.observed.staged.items()):
            gauge.add_metric((*whose, kind), size_bytes())
    return gauge


def _reads(counted: Mapping[Whose, Tally]) -> Metric:
    text = "Reads by their outcome: ok, or the error's class."
    counter = CounterMetricFamily(PREFIX + "reads", text, labels=(*WHOSE, "outcome"))
    for whose, tally in counted.items():
        for outcome, count in tally.failures.items():
            counter.add_metric((*whose, outcome), count)
    return counter


def _counter(name: str, text: str, values: Mapping[Whose, float]) -> Metric:
    counter = CounterMetricFamily(PREFIX + name, text, labels=WHOSE)
    for whose, value in values.items():
        counter.add_metric(whose, value)
    return counter
