"""Figures of an archiver: what it has done, and how far its bucket is behind the fleet."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from torch_ros.bucket.archive import Archiver, Totals
from torch_ros.errors import BackendError

PREFIX = "torch_ros_archive_"
_COUNTERS: tuple[tuple[str, str, Callable[[Totals], float]], ...] = (
    ("versions", "Versions that were written.", lambda totals: totals.versions),
    ("bytes", "Bytes of versions that were written.", lambda totals: totals.size_bytes),
    ("seconds", "Time that it took to write these versions.", lambda totals: totals.seconds),
    ("collected", "Objects that were collected.", lambda totals: totals.collected),
)


class ArchiveCollector(Collector):
    """For a registry of prometheus_client. A scrape asks etcd once, and the bucket nothing."""

    def __init__(self, archiver: Archiver) -> None:
        self._archiver = archiver

    def describe(self) -> Sequence[Metric]:
        """Nothing, so that to register it asks nobody."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Draw what it has done; and how far it is behind, if etcd answers."""
        model, totals = (self._archiver.model,), self._archiver.totals
        for name, text, of in _COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=("model",))
            counter.add_metric(model, of(totals))
            yield counter
        text = "Attempts that failed, and are made again, by the error's class."
        retries = CounterMetricFamily(PREFIX + "retries", text, labels=("model", "error"))
        for error, count in dict(totals.retries).items():
            retries.add_metric((*model, error), count)
        yield retries
        try:
            behind = self._archiver.behind()
        except BackendError:
            return
        text = "Numbers by which the bucket is behind the newest version of the fleet."
        versions = GaugeMetricFamily(PREFIX + "behind_versions", text, labels=("model",))
        text = "By how much later that version was published than the newest of the bucket."
        seconds = GaugeMetricFamily(PREFIX + "behind_seconds", text, labels=("model",))
        if behind is not None:
            versions.add_metric(model, behind[0])
            seconds.add_metric(model, behind[1])
        yield versions
        yield seconds
