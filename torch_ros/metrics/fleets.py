"""Figures of whole fleets: each scrape asks for `Fleet`s, and draws no key of its own.

No label names a version, a content, a replica or a process, so there are as many series as there
are models.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args, get_type_hints

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from torch_ros.deadline import wall_ms
from torch_ros.errors import AccessDenied, BackendError, StoreUnavailable
from torch_ros.features.installs.records import Install  # feature installs
from torch_ros.fleet.fleet import Fleet, Held, Replica
from torch_ros.protocol.records import VersionRef

_Samples = dict[tuple[str, ...], float]  # by the labels' values

PREFIX = "torch_ros_fleet_"
INSTALLS = ("active", "trying", "rejected", "none")  # feature installs

Ask = Callable[[], Mapping[str, Fleet | BackendError]]
"""The fleets by their models, or why one cannot be read."""


@dataclass(frozen=True, slots=True)
class _Figure:
    """A figure of a fleet: one, or one for each value of a label."""

    name: str
    text: str
    of: Callable[[Fleet], float | Mapping[str, int] | None]  # None: nobody knows
    label: str = ""
    values: Sequence[str] = ()


def _states(kind: type) -> tuple[str, ...]:
    return get_args(get_type_hints(kind)["state"])


def _latest_bytes(fleet: Fleet) -> float:
    sizes = (each.size_bytes for each in fleet.versions if each.ref == fleet.latest)
    return next(sizes, None) or 0


def _latest_age_s(fleet: Fleet) -> float | None:
    began_ms = (each.at_ms for each in fleet.versions if each.ref == fleet.latest)
    at_ms = next(began_ms, None)
    return None if at_ms is None else max(0.0, (wall_ms() - at_ms) / 1000)


def _holders(fleet: Fleet) -> float:
    return len(fleet.holders(fleet.latest)) if fleet.latest else 0


def _in_flight(fleet: Fleet) -> float:
    return sum(len(each.readers) for each in fleet.held)


def _streams(fleet: Fleet) -> float:
    return sum(len(each.streamers) for each in fleet.held)


# feature installs {
def _installs(fleet: Fleet) -> Mapping[str, int]:
    installs = (each.install for each in fleet.replicas.values())
    return Counter(_standing(install) for install in installs if install is not None)


def _standing(install: Install) -> str:
    """It may have rejected a version, and be active at an older one, or try the next."""
    if install.trying:
        return "trying"
    if install.rejected:
        return "rejected"
    return "active" if install.active else "none"


# } installs


FIGURES = (
    _Figure(
        "replicas",
        "Replicas, by the state of their group.",
        lambda fleet: Counter(each.state for each in fleet.replicas.values()),
        "state",
        _states(Replica),
    ),
    _Figure(
        "holdings",
        "Holdings of any version, by state; filling ones are being read.",
        lambda fleet: Counter(each.state for each in fleet.held),
        "state",
        _states(Held),
    ),
    # feature installs {
    _Figure(
        "installs",
        "Replicas that feed an engine, by what that does with its last version.",
        _installs,
        "state",
        INSTALLS,
    ),
    # } installs
    _Figure(
        "versions",
        "Versions that can be read.",
        lambda fleet: sum(each.is_offered for each in fleet.versions),
    ),
    _Figure(
        "latest_version",
        "Number of the newest version that can be read; -1: there is none.",
        lambda fleet: fleet.latest.version if fleet.latest else -1,
    ),
    _Figure(
        "latest_age_seconds",
        "Time since the publication of the newest version began, by two hosts' clocks.",
        _latest_age_s,
    ),
    _Figure("latest_bytes", "Size of the newest version's tensors.", _latest_bytes),
    _Figure("latest_holders", "Holdings from which the newest version can be read.", _holders),
    _Figure(
        "only_copy",
        "1: fewer than two replicas outside spot ones have the newest version.",
        lambda fleet: fleet.has_only_copy,
    ),
    _Figure(
        "max_behind",
        "Numbers by which the oldest version of the newest run that a replica holds is behind.",
        lambda fleet: max((count or 0 for count in fleet.behind().values()), default=0),
    ),
    _Figure(
        "older_run_replicas",
        "Replicas that hold a version of an older run than the newest version's.",
        lambda fleet: sum(count is None for count in fleet.behind().values()),
    ),
    _Figure(
        "readers_in_flight",
        "Pairs of a replica and a source that it reads from now, or streams.",
        _in_flight,
    ),
    _Figure("streams_in_flight", "Those of these pairs of which the replica streams.", _streams),
    _Figure(
        "suspected_replicas",
        "Replicas from which a transfer failed less than 10 s ago.",
        lambda fleet: sum(each.is_suspected for each in fleet.replicas.values()),
    ),
)


class FleetCollector(Collector):
    """For a registry of prometheus_client: the figures of all fleets that `ask` returns.

    Nothing is kept from one scrape to the next, except since when a holding is seen to drain. If
    etcd does not answer, no fleet has figures, and `torch_ros_fleet_etcd_up` is 0.
    """

    def __init__(self, ask: Ask, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._clock = ask, clock
        self._drains: dict[tuple[str, VersionRef, str], float] = {}
        self._lock = threading.Lock()  # two servers may scrape at a time

    def describe(self) -> Sequence[Metric]:
        """Nothing, so that to register it asks nobody."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Ask, and draw what there is."""
        began_s = self._clock()
        found: Mapping[str, Fleet | BackendError] = {}
        is_up = True
        try:
            found = self._ask()
        except (StoreUnavailable, AccessDenied):
            is_up = False
        fleets = [each for each in found.values() if isinstance(each, Fleet)]
        yield _gauge("etcd_up", "1: etcd answered this scrape.", {(): is_up})
        if not is_up:
            return
        took_s = self._clock() - began_s
        yield _gauge("read_seconds", "How long etcd took to answer this scrape.", {(): took_s})
        readable: _Samples = {(model,): isinstance(each, Fleet) for model, each in found.items()}
        text = "0: another release has written the model's records."
        yield _gauge("readable", text, readable, "model")
        for figure in FIGURES:
            yield _drawn(figure, fleets)
        text = "How long the longest drain lasts, since this exporter has seen it."
        yield _gauge("draining_seconds", text, self._draining_s(fleets), "model")

    def _draining_s(self, fleets: Sequence[Fleet]) -> _Samples:
        now_s = self._clock()
        longest_s: _Samples = {(fleet.model,): 0.0 for fleet in fleets}
        with self._lock:
            seen: dict[tuple[str, VersionRef, str], float] = {}
            for fleet in fleets:
                for each in fleet.held:
                    if each.state == "draining":
                        key = (fleet.model, each.ref, each.inst)
                        seen[key] = self._drains.get(key, now_s)
                        lasts_s = now_s - seen[key]
                        longest_s[fleet.model,] = max(longest_s[fleet.model,], lasts_s)
            self._drains = seen
        return longest_s


def _drawn(figure: _Figure, fleets: Sequence[Fleet]) -> Metric:
    samples: _Samples = {}
    for fleet in fleets:
        found = figure.of(fleet)
        if isinstance(found, Mapping):
            samples |= {(fleet.model, value): found.get(value, 0) for value in figure.values}
        elif found is not None:
            samples[fleet.model,] = found
    labels = ("model", figure.label) if figure.label else ("model",)
    return _gauge(figure.name, figure.text, samples, *labels)


def _gauge(name: str, text: str, samples: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
    gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for values, value in samples.items():
        gauge.add_metric(values, float(value))
    return gauge
