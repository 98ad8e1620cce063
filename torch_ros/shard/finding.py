"""The first look at a version: which one is meant, and what a holder says that it contains."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_ros.deadline import Deadline
from torch_ros.errors import ManifestMismatch, PeerError, SeatLost
from torch_ros.protocol import calls
from torch_ros.protocol.keys import replica_of
from torch_ros.protocol.records import VersionRecord, VersionRef
from torch_ros.protocol.seat import Seat
from torch_ros.protocol.sources import who_knows
from torch_ros.protocol.versions import Spec, listing, resolve, shows_all, spec_ranges
from torch_ros.shard.core import Shard
from torch_ros.store.loops import Done, Step, Wait
from torch_ros.store.txn import Unseen, View, whole
from torch_ros.weights.manifest import Layout, logical


@dataclass(frozen=True, slots=True)
class PinnedVersion:
    """A version as it was when a load began: it is checked against that."""

    ref: VersionRef
    layouts: Sequence[Layout]  # rank by rank
    is_only_here: bool  # nobody but the replica that asked holds it
    seat: Seat  # from which this was seen
    seen: View  # may decide the load that this look is a part of


@dataclass(frozen=True, slots=True)
class Contents:
    """The names of a version, sorted, and what each stands for."""

    version: int
    tensors: Mapping[str, tuple[torch.dtype, torch.Size]]  # by fqn; whole, however sharded
    objects: tuple[str, ...] = ()  # fqns of what DCP has pickled: only dcp.load reads those
    run: str = ""  # in which it has this number: another run may have another version of it
    uid: str = ""  # of the content: a number that is published again gets another one

    @classmethod
    def of(cls, found: PinnedVersion) -> "Contents":
        tensors, objects = logical(found.layouts).contents
        return cls(found.ref.version, dict(tensors), objects, found.ref.run, found.ref.uid)


def find(shard: Shard, spec: Spec, deadline: Deadline) -> PinnedVersion:
    """Wait for the version, and ask a holder what it contains. Reads no tensor.

    Takes no claim, so the holder may go, or show its next content: what it shows has to have the
    digest that etcd has for the version, otherwise others are asked.
    """
    group, failures = shard.group, Counter[str]()  # by holder
    seat, keys = group.seat, group.seat.keys
    ranges = spec_ranges(keys)
    if shard.held is None:  # else an unpublish comes first, which changes what the view shows
        ranges = calls.first_look(seat, group.ledger.calls_made + 1)
    seen = View(0)

    def rule(view: View) -> Step[tuple[VersionRef, str, str]]:
        nonlocal seen
        seen = view
        offer = resolve(view, keys, spec)
        if isinstance(offer, Wait):
            return offer
        key = keys.version(offer.ref.run, offer.ref.version)
        own = group.seat.inst  # last: it is about to read from another
        sources = sorted(who_knows(view, seat, offer), key=lambda i: (i == own, failures[i]))
        if sources[0] in {own, *failures} and not shows_all(view, keys, offer):
            raise Unseen  # the view has a sample of the holders, and none left to ask: see all
        record = VersionRecord.decode(view.entries[key].value, key)
        return Done((offer.ref, record.layout, sources[0]))

    while True:
        session = group.session
        try:
            ref, layout, source = group.ask(ranges, rule, deadline)
            layouts = shard.manifests.layouts(source, deadline)
            if logical(layouts).digest == layout:
                for feature in shard.features:
                    feature.looked_at(ref)
                return PinnedVersion(ref, layouts, source == group.seat.inst, seat, seen)
            reason = "it shows other tensors by now"
        except SeatLost as lost:  # this replica's own peers, where it is the only holder
            group.fence(lost, session)
            group.await_seat(deadline)
            continue
        except (PeerError, ManifestMismatch) as error:  # ranks of one that reads may differ yet
            reason = str(error)
        failures[source] += 1
        deadline.check(f"version {ref.version} at {replica_of(source)!r}: {reason}")
        time.sleep(0.05)


def wait_for(
    shard: Shard,
    predicate: Callable[[dict[int, set[str]]], bool],
    timeout_s: float | None,
    *,
    of_trainers: bool = False,
) -> dict[int, set[str]]:
    """Wait until `predicate` of the available versions is true; see `ShardHandle.wait`.

    `of_trainers`: versions do not count that no replica published.
    """
    deadline = shard.deadline("wait", timeout_s)
    group, keys = shard.group, shard.group.seat.keys
    ranges = whole(spec_ranges(keys))

    def rule(view: View) -> Done[dict[int, set[str]]] | Wait:
        there = listing(view, keys, of_trainers=of_trainers)
        if predicate(there):
            return Done(there)
        names = {version: sorted(replicas) for version, replicas in there.items()}
        return Wait(f"available: {names or 'nothing'}", ranges)

    shard.require_usable()
    return group.follow(ranges, rule, deadline)
