"""Figures of this process's handles: what they know when a scrape comes. No request is made."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from torch_ros.deadline import wall_ms
from torch_ros.shard.core import Shard, open_shards
from torch_ros.shard.tally import BOUNDS_S, Histogram, Tally, Whose, tallies

PREFIX = "torch_ros_"
WHOSE = Whose._fields

_Times = dict[tuple[str, ...], Histogram]  # by the labels' values


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
    (
        "streams",
        "Streams that have not read all yet.",
        lambda shard: len(shard.observed.open["streams"]),
    ),
    (
        "loans",
        "Versions that are borrowed, until they are given back.",
        lambda shard: len(shard.observed.open["loans"]),
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[Tally], float]], ...] = (
    ("reroutes", "Sources that were lost within a read.", lambda tally: tally.reroutes),
    ("corrupt", "Reads whose bytes were not what was published.", lambda tally: tally.corrupt),
    (
        "readers_left_behind",
        "Readers that had not done when an unpublish waited no longer.",
        lambda tally: tally.left_behind,
    ),
    # feature deltas {
    ("delta_bytes", "Bytes of the deltas that were made.", lambda tally: tally.sums["delta_bytes"]),
    ("delta_seconds", "Time that they took to make.", lambda tally: tally.sums["delta_s"]),
    # } deltas
)
_LABELLED: tuple[tuple[str, str, str], ...] = (  # of `Tally.ended`, by the label's name
    (
        "reads_via",
        "Reads that ended well: in full, by deltas, or by deltas that were prefetched.",
        "via",
    ),
    ("read_via_bytes", "Bytes that came for them.", "via"),
    # feature deltas {
    ("deltas", "Deltas between copies, by how the making of each ended.", "outcome"),
    # } deltas
    # feature prefetch {
    ("prefetches", "Prefetches: staged, nothing, or the error's class.", "outcome"),
    # } prefetch
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
        yield from _held(shards)
        for name, text, of in _GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=WHOSE)
            for whose, shard in shards.items():
                gauge.add_metric(whose, float(of(shard)))
            yield gauge
        yield _staged(shards)
        counted = tallies.all()
        for name, text, count in _COUNTERS:
            yield _counter(name, text, {whose: count(tally) for whose, tally in counted.items()})
        yield from _labelled(counted)
        lost = Counter({whose: tally.seats_lost for whose, tally in counted.items()})
        lost.update({whose: shard.group.ledger.seats_lost for whose, shard in shards.items()})
        yield _counter("seat_lost", "Seats in etcd that were lost.", lost)
        yield from _reads(counted)
        text = "Duration of publications that ended well."
        times: _Times = {whose: tally.publish_s for whose, tally in counted.items()}
        yield _histogram("publish_seconds", text, times)
        text = "Duration of calls that gave a version up, also as a part of others."
        times = {whose: tally.drain_s for whose, tally in counted.items()}
        yield _histogram("unpublish_wait_seconds", text, times)


def _held(shards: Mapping[Whose, Shard]) -> Iterator[Metric]:
    text = "Number of the version that is held and served; -1: none."
    number = GaugeMetricFamily(PREFIX + "held_version", text, labels=(*WHOSE, "run"))
    text = "Time since the publication of the held version began, by two hosts' clocks."
    age = GaugeMetricFamily(PREFIX + "held_version_age_seconds", text, labels=WHOSE)
    for whose, shard in shards.items():
        kept = shard.group.ledger.holds
        run = kept.ref.run if kept else shard.group.seat.run
        number.add_metric((*whose, run), kept.ref.version if kept else -1)
        if kept and kept.at_ms:
            age.add_metric(whose, max(0.0, (wall_ms() - kept.at_ms) / 1000))
    yield number
    yield age


def _staged(shards: Mapping[Whose, Shard]) -> Metric:
    text = "Memory beside the tensors: host copies, buffers of publish_copy, staging, forerunner."
    gauge = GaugeMetricFamily(PREFIX + "staged_bytes", text, labels=(*WHOSE, "kind"))
    for whose, shard in shards.items():
        for kind, size_bytes in list(shard.observed.staged.items()):
            gauge.add_metric((*whose, kind), size_bytes())
    return gauge


def _reads(counted: Mapping[Whose, Tally]) -> Iterator[Metric]:
    text = "Reads: ok, with the way of most bytes, or the error's class."
    reads = CounterMetricFamily(PREFIX + "reads", text, labels=(*WHOSE, "outcome", "way"))
    text = "Bytes that came, by the way that they took."
    size = CounterMetricFamily(PREFIX + "read_bytes", text, labels=(*WHOSE, "way"))
    for whose, tally in counted.items():
        for way, count in tally.ended["reads"].items():
            reads.add_metric((*whose, "ok", way), count)
        for outcome, count in tally.ended["failures"].items():
            reads.add_metric((*whose, outcome, ""), count)
        for way, count in tally.ended["read_bytes"].items():
            size.add_metric((*whose, way), count)
    yield reads
    yield size
    stages: _Times = {
        (*whose, stage): times
        for whose, tally in counted.items()
        for stage, times in tally.read_s.items()
    }
    text = "Duration of reads that ended well: of each stage, and of all of it."
    yield _histogram("read_seconds", text, stages, "stage")


def _labelled(counted: Mapping[Whose, Tally]) -> Iterator[Metric]:
    for name, text, label in _LABELLED:
        metric = CounterMetricFamily(PREFIX + name, text, labels=(*WHOSE, label))
        for whose, tally in counted.items():
            for value, count in tally.ended[name].items():
                metric.add_metric((*whose, value), count)
        yield metric


def _histogram(name: str, text: str, values: _Times, *labels: str) -> Metric:
    histogram = HistogramMetricFamily(PREFIX + name, text, labels=(*WHOSE, *labels))
    bounds = [*map(str, map(float, BOUNDS_S)), "+Inf"]
    for whose, times in values.items():
        buckets = list(zip(bounds, map(float, accumulate(times.counts)), strict=True))
        histogram.add_metric(whose, buckets, times.sum_s)
    return histogram


def _counter(name: str, text: str, values: Mapping[Whose, float]) -> Metric:
    counter = CounterMetricFamily(PREFIX + name, text, labels=WHOSE)
    for whose, value in values.items():
        counter.add_metric(whose, value)
    return counter
