"""How one rank streams a version (docs/protocol/streams.md): what it asks of the store. Pure."""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from zlib import crc32

import msgspec

from torch_ros.errors import BackendError, SourceLost, VersionNotFound
from torch_ros.protocol import keys as k
from torch_ros.protocol.elsewhere import TRIES_MAX, is_to_be_left
from torch_ros.protocol.legible import keyed
from torch_ros.protocol.records import Call, Holding, Outcome, Reader, VersionRecord, VersionRef
from torch_ros.protocol.seat import Seat, recorded
from torch_ros.protocol.sources import (
    Source,
    distance,
    gotten,
    learned,
    seen_holdings,
    suspects,
)
from torch_ros.protocol.versions import Spec, resolve
from torch_ros.store.loops import Act, Done, Step, Wait
from torch_ros.store.txn import Get, Put, Ranges, Txn, Unseen, View, one, sample


def version_to_stream(view: View, seat: Seat, call: Call, spec: Spec) -> Step[Call]:
    """Decide which version, and end the call at once: nobody is waited for in it."""
    offer = resolve(view, seat.keys, spec)
    if isinstance(offer, Wait):
        return offer
    return recorded(view, seat, msgspec.structs.replace(call, ref=offer.ref, outcome=Outcome()))


def choice_ranges(seat: Seat, ref: VersionRef) -> Ranges:
    keys = seat.keys
    return (
        one(keys.version(ref.run, ref.version)),
        sample(keys.holdings_of(ref.run, ref.version)),
        sample(keys.readers_for(ref.run, ref.version)),
        keys.suspects(),
    )


def choose(
    view: View,
    seat: Seat,
    ref: VersionRef,
    tried: Mapping[str, int],
    lost: SourceLost | None,
    only: str = "",
) -> Step[tuple[str, str]]:
    """Where a full source is, and the layout that it has to show; "": the version's record is gone.

    Args:
        only: The replica that is to be read from; "": whichever is best.

    Raises:
        SourceLost: No other source is left than the one that was lost.
        VersionNotFound: Nobody else holds this content whole.
    """
    left = {
        inst: holding
        for inst, holding in _full(view, seat, ref).items()
        if tried.get(inst, 0) < TRIES_MAX and only in {"", k.replica_of(k.owner_of(inst))}
    }
    if not left:
        if not _is_whole(view, seat, ref):
            raise Unseen
        who = f"replica {only!r} does not hold" if only else "no replica but this one holds"
        reason = f"{who} it whole, with the content that it had"
        raise lost or VersionNotFound(seat.keys.model, str(ref.version), reason)
    found = view.seen(seat.keys.readers_for(ref.run, ref.version))
    pairs = {(source, reader) for _, (source, reader, _), _ in keyed(found, k.parse_reader)}
    readers = Counter(source for source, _ in pairs)
    suspected = suspects(view, seat.keys)

    def worth(inst: str) -> tuple[int, ...]:
        turn = crc32(f"{inst} {seat.inst} {seat.rank}".encode())
        far = distance(left[inst].datacenter, seat)
        is_held_up = far and left[inst].is_original  # a trainer, for as long as the link takes
        return (tried.get(inst, 0), far, is_held_up, inst in suspected, readers[inst], turn)

    best = min(left, key=worth)
    if distance(left[best].datacenter, seat) and not _is_whole(view, seat, ref):
        raise Unseen
    key = seat.keys.version(ref.run, ref.version)
    record = VersionRecord.at(view, key)
    layout = record.layout if record is not None and record.uid == ref.uid else ""
    return Done((k.place(left[best].datacenter, best), layout))


def _is_whole(view: View, seat: Seat, ref: VersionRef) -> bool:
    return view.shows(seat.keys.holdings_of(ref.run, ref.version))


def _full(view: View, seat: Seat, ref: VersionRef) -> dict[str, Holding]:
    return {
        inst: holding
        for inst, (holding, _) in seen_holdings(view, seat, ref).items()
        if holding.state == "full" and holding.uid == ref.uid and not k.is_of(inst, seat.inst)
    }


def attach_ranges(seat: Seat, ref: VersionRef, place: str, reader: str) -> Ranges:
    keys = seat.keys
    held = keys.holding_at(ref.run, ref.version, place)
    return (one(held), one(reader), keys.shards(k.inst_at(place)))


def attach(
    view: View, seat: Seat, ref: VersionRef, place: str, reader: str, lease_id: int
) -> Step[Source]:
    """Announce, by the record `reader`, that this rank reads from there while the lease lives.

    Raises:
        SourceLost: It does not offer this content any more, or one of its processes is gone.
    """
    held, source = seat.keys.holding_at(ref.run, ref.version, place), k.inst_at(place)
    entry = view.get(held)
    left = SourceLost(k.replica_of(source), "it left before it was read", 0, 0)
    if entry is None:
        raise left
    try:
        holding = Holding.decode(entry.value, held)
    except BackendError as error:
        raise SourceLost(k.replica_of(source), str(error), 0, 0) from error
    learn = partial(learned, source, holding, entry.create_rev)
    there = view.get(reader)
    is_found = there is not None and there.lease_id == lease_id  # put before; the reply was lost
    is_waiting = holding.state == "draining" and is_found
    if holding.uid != ref.uid or not (holding.state == "full" or is_waiting):
        raise left
    if is_found:
        return Done(learn(dict(view.within(seat.keys.shards(source)))))
    guards = (view.unchanged(held), view.unchanged(reader))
    ops = (Put(reader, Reader(0).encode(), lease_id), Get(seat.keys.shards(source)))
    return Act(Txn(guards, ops), lambda reply: learn(gotten(reply)[0]))


def has_other(
    view: View,
    seat: Seat,
    ref: VersionRef,
    source: Source,
    tried: Mapping[str, int],
    silent_s: float,
) -> Step[bool]:
    """Whether `source`, which has not answered for so long, is to be left for somebody else."""
    there = {i: distance(held.datacenter, seat) for i, held in _full(view, seat, ref).items()}
    is_left = is_to_be_left(view, seat, source, tried, silent_s, there)
    if not (is_left or _is_whole(view, seat, ref)):
        raise Unseen  # the youngest, which were seen, may be those that still fill
    return Done(is_left)
