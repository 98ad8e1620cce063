"""The replicas and versions of a model, as values: who holds what, who reads from whom.

Pure, but for `Fleet.at`. Tools, metrics and policies draw a `Fleet`; none of them parses a key. It
takes no seat and no lease, and writes nothing: a role that may only read is enough. A view that
lies is worse than none: it says of no holding that it is offered which a reader would not be given.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal

from torch_ros import environment
from torch_ros.features.installs.records import Install  # feature installs
from torch_ros.features.installs.rules import installs_of  # feature installs
from torch_ros.protocol import keys as k
from torch_ros.protocol import legible
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.legible import keyed, readable
from torch_ros.protocol.records import (
    GroupRecord,
    Holding,
    VersionRecord,
    VersionRef,
)
from torch_ros.protocol.schema import require_own
from torch_ros.protocol.sources import suspects
from torch_ros.protocol.versions import number_of, offered, run_numbers
from torch_ros.store.txn import Entry, Range, Ranges, Read, View, one

Kind = Literal["original", "replica", "copy", "lingering"]


def fleet_ranges(keys: Keys) -> Ranges:
    """The records that a `Fleet` is made of: some hundred bytes for each replica."""
    return (
        one(keys.schema()),
        keys.runs(),
        keys.versions(),
        keys.groups(),
        keys.holdings(),
        keys.readers(),
        keys.carried(),  # feature installs
        keys.suspects(),
    )


@dataclass(frozen=True, slots=True)
class Published:
    """A version that has a record.

    Attributes:
        is_offered: Somebody has all of it, for readers.
        tensor_count, size_bytes: Of its tensors, without pickled objects; None: its first
            publication has not ended.
        at_ms: When its first publication began, in ms since 1970, by the publisher's clock; None:
            nobody knows.
    """

    ref: VersionRef
    is_offered: bool
    tensor_count: int | None
    size_bytes: int | None
    at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """One holding of a version.

    Attributes:
        replica: The name that it was opened with.
        inst: The incarnation, or the copy of one: what readers attach to.
        kind: "original": the publisher's own tensors. "copy": in host memory, made to outlive them.
            "lingering": left behind by a replica that has closed.
        is_offered: A reader would be given it, as a whole.
        is_relay: While it fills, younger replicas read the part that is there.
        sources: Names of the replicas that it reads from, while it fills.
        readers: Names of the replicas that read from it, or stream.
        streamers: Names of those among them that stream.
        since_ms: Since when it fills; of one that is full, or was, since when all of it is there.
            In ms since 1970, by the clock of a process of its replica; None: nobody knows.
    """

    ref: VersionRef
    replica: str
    inst: str
    datacenter: str
    kind: Kind
    state: Literal["filling", "full", "draining"]
    is_offered: bool
    is_relay: bool
    spot: bool
    world_size: int
    sources: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    streamers: tuple[str, ...] = ()
    since_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica, as its group's record shows it.

    Attributes:
        inst: Its incarnation.
        state: "joining": not all ranks have come yet. "gone": it has closed or died, and something
            that it held is still there.
        run: In which it publishes.
        install: The version that its engine uses; None: nobody asks.
        is_suspected: A transfer from it failed less than 10 s ago.
    """

    name: str
    inst: str
    state: Literal["joining", "complete", "refused", "left", "gone"]
    datacenter: str
    spot: bool
    run: str
    world_size: int
    retain: tuple[str, ...] = ()
    install: Install | None = None  # feature installs
    is_suspected: bool = False


@dataclass(frozen=True, slots=True)
class Fleet:
    """All of a model's records at one revision of etcd.

    Attributes:
        runs: From the newest; the numbers by which they are ordered.
        versions: From the newest.
        held: All holdings, newest versions first, then by replica.
        replicas: By name, also those of which only a holding is left.
    """

    model: str
    revision: int
    runs: Mapping[str, int]
    versions: Sequence[Published]
    held: Sequence[Held]
    replicas: Mapping[str, Replica]

    @classmethod
    def of(cls, view: View, keys: Keys) -> "Fleet":
        """From a view of `fleet_ranges`.

        Raises:
            BackendError: Another release has written the model's records.
        """
        require_own(view, keys)
        records, numbers = _Records(view), run_numbers(view, keys)
        is_offered = {each.ref: each.holdings for run in offered(view, keys) for each in run}
        versions = _versions(view, keys, numbers, is_offered.keys())
        held = _held(records, keys, numbers, is_offered)
        return cls(
            model=keys.model,
            revision=view.rev,
            runs=dict(sorted(numbers.items(), key=lambda run: (run[1], run[0]), reverse=True)),
            versions=sorted(versions, key=lambda each: each.ref.order, reverse=True),
            held=tuple(held),
            replicas={each.name: each for each in _replicas(view, records, keys, held)},
        )

    @classmethod
    def at(cls, model: str, *, endpoint: str | None = None, timeout_s: float = 10.0) -> "Fleet":
        """Ask etcd now, by no handle: nothing is written, and no etcd is started.

        Args:
            endpoint: As for `torch_ros.open`; "local" has to run.
            timeout_s: For etcd to answer.

        Raises:
            StoreUnavailable: It does not answer, or none runs.
            AccessDenied: It refuses the certificate, the user or its role.
            UsageError: This is no endpoint.
            BackendError: Another release has written the model's records.
        """
        from torch_ros.store.endpoint import connect, located  # noqa: PLC0415  # it takes grpc

        where = located(endpoint or environment.value(environment.ENDPOINT) or "local")
        keys = Keys(model)
        with closing(connect(where, timeout_s=timeout_s)) as kv:
            return cls.of(kv.read(Read(fleet_ranges(keys)), timeout_s=timeout_s), keys)

    @property
    def latest(self) -> VersionRef | None:
        """The newest version that can be read, of the newest run that has one."""
        return next((each.ref for each in self.versions if each.is_offered), None)

    def holders(self, ref: VersionRef) -> tuple[Held, ...]:
        """The holdings of a version that readers are given."""
        return tuple(each for each in self.held if each.ref == ref and each.is_offered)

    @property
    def has_only_copy(self) -> bool:
        """Whether fewer than two replicas, spot ones aside, have the newest version."""
        if self.latest is None:
            return False
        holders = self.holders(self.latest)
        return len({each.replica for each in holders if not each.spot}) < 2

    def behind(self) -> dict[str, int | None]:
        """The replicas that hold an older version, and by how many numbers.

        None: it is of an older run, whose numbers say nothing. A replica that holds nothing, or a
        copy in host memory only, is not behind.
        """
        if (latest := self.latest) is None:
            return {}
        own = [each for each in self.held if each.kind in {"original", "replica"}]
        newest = {each.replica: each.ref for each in reversed(own) if each.state != "filling"}
        return {
            name: latest.version - ref.version if ref.run == latest.run else None
            for name, ref in newest.items()
            if ref.order < latest.order and self.replicas[name].state == "complete"
        }


def _versions(
    view: View, keys: Keys, numbers: Mapping[str, int], there: Collection[VersionRef]
) -> Iterator[Published]:
    found = readable(view.within(keys.versions()), k.parse_version, VersionRecord)
    for _, (run, number), record, _ in found:
        ref = VersionRef(run, number, record.uid, number_of(run, numbers))
        tensor_count, size_bytes = record.sizes or (None, None)
        yield Published(ref, ref in there, tensor_count, size_bytes, record.at_ms or None)


class _Records:
    """The records of a view in the order of their keys, so that each range is found at once."""

    def __init__(self, view: View) -> None:
        self._entries, self._keys = view.entries, sorted(view.entries)

    def within(self, range_: Range) -> Iterator[tuple[str, Entry]]:
        start, end = (bisect_left(self._keys, key) for key in (range_.start, range_.end))
        return ((key, self._entries[key]) for key in self._keys[start:end])


def _held(
    records: _Records,
    keys: Keys,
    numbers: Mapping[str, int],
    is_offered: Mapping[VersionRef, Collection[str]],
) -> list[Held]:
    found: list[Held] = []
    sources: dict[tuple[VersionRef, str], set[str]] = {}
    held = legible.holdings(records.within(keys.holdings()))
    for _, where, holding, _ in held:
        ref = VersionRef(where.run, where.version, holding.uid, number_of(where.run, numbers))
        reads = records.within(keys.readers_of(ref.run, ref.version, where.inst))
        readers = {reader for _, (_, reader, _), _ in keyed(reads, k.parse_reader)}
        replica = k.replica_of(k.owner_of(where.inst))
        for reader in readers:
            sources.setdefault((ref, reader), set()).add(replica)
        found.append(
            Held(
                ref=ref,
                replica=replica,
                inst=where.inst,
                datacenter=where.datacenter,
                kind=_kind(where.inst, holding),
                state=holding.state,
                is_offered=where.inst in is_offered.get(ref, ()),
                is_relay=holding.is_relay,
                spot=holding.spot,
                world_size=holding.world_size,
                since_ms=holding.at_ms or None,
                readers=_names(readers),
                streamers=_names(filter(k.streams, readers)),
            )
        )
    found = [
        replace(each, sources=tuple(sorted(sources.get((each.ref, each.inst), ()))))
        for each in found
    ]
    found.sort(key=lambda each: (each.replica, each.inst))
    return sorted(found, key=lambda each: each.ref.order, reverse=True)


def _names(readers: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({k.replica_of(k.owner_of(reader)) for reader in readers}))


def _kind(inst: str, holding: Holding) -> Kind:
    if k.lingers(inst):
        return "lingering"
    if k.owner_of(inst) != inst:
        return "copy"
    return "original" if holding.is_original else "replica"


def _replicas(view: View, records: _Records, keys: Keys, held: Sequence[Held]) -> list[Replica]:
    installs = installs_of(view, keys)  # feature installs
    suspected = suspects(view, keys)
    replicas = {
        each.replica: Replica(
            name=each.replica,
            inst=k.owner_of(each.inst),
            state="gone",
            datacenter=each.datacenter,
            spot=each.spot,
            run=each.ref.run,
            world_size=each.world_size,
        )
        for each in held
    }
    found = readable(records.within(keys.groups()), k.parse_group, GroupRecord)
    for _, name, group, _ in found:
        inst = k.instance(name, group.nonce)
        replicas[name] = Replica(
            name=name,
            inst=inst,
            state=_standing(group),
            datacenter=group.datacenter,
            spot=group.spot,
            run=group.run,
            world_size=group.world_size,
            retain=tuple(group.retain),
            install=installs.get(name),  # feature installs
            is_suspected=inst in suspected,
        )
    return sorted(replicas.values(), key=lambda replica: replica.name)


def _standing(group: GroupRecord) -> Literal["joining", "complete", "refused", "left"]:
    if group.left is not None:
        return "left"
    if group.refusal is not None:
        return "refused"
    return "complete" if group.is_complete else "joining"
