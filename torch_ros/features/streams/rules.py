"""How one rank streams a version (docs/protocol/streams.md): what it asks of the store. Pure."""

from collections import Counter
from collections.abc import Mapping
from zlib import crc32

import msgspec

from torch_ros.protocol import keys as k
from torch_ros.protocol import sources
from torch_ros.protocol.legible import keyed
from torch_ros.protocol.records import Call, Outcome, VersionRecord, VersionRef
from torch_ros.protocol.seat import Seat, recorded
from torch_ros.protocol.sources import Candidate, Source, distance, seen_holdings
from torch_ros.protocol.versions import Spec, resolve
from torch_ros.store.loops import Step, Wait
from torch_ros.store.txn import Put, Ranges, View, one, sample


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


def full_ones(view: View, seat: Seat, ref: VersionRef, only: str = "") -> dict[str, Candidate]:
    """Those that a stream could read from: those of one replica `only`, if it has a name."""
    found = view.seen(seat.keys.readers_for(ref.run, ref.version))
    pairs = {(source, reader) for _, (source, reader, _), _ in keyed(found, k.parse_reader)}
    readers = Counter(source for source, _ in pairs)
    return {
        inst: Candidate(holding, born, readers[inst], 0, distance(holding.datacenter, seat))
        for inst, (holding, born) in seen_holdings(view, seat, ref).items()
        if holding.state == "full" and holding.uid == ref.uid and not k.is_of(inst, seat.inst)
        if only in {"", k.replica_of(k.owner_of(inst))}
    }


def best(candidates: Mapping[str, Candidate], suspected: set[str], seat: Seat) -> str:
    """One that few read from; each rank of a burst prefers another."""

    def worth(inst: str) -> tuple[int, ...]:
        turn = crc32(f"{inst} {seat.inst} {seat.rank}".encode())
        return (inst in suspected, candidates[inst].readers, turn)

    return min(candidates, key=worth)


def layout(view: View, seat: Seat, ref: VersionRef) -> str:
    """The one that a source has to show; "": the version's record is gone."""
    record = VersionRecord.at(view, seat.keys.version(ref.run, ref.version))
    return record.layout if record is not None and record.uid == ref.uid else ""


def attach(view: View, seat: Seat, ref: VersionRef, place: str, reader: Put) -> Step[Source]:
    """As `sources.attach`, by a reader record on a lease of its own."""
    mine = view.get(reader.key)
    is_put = mine is not None and mine.lease_id == reader.lease_id  # before; the reply was lost
    offer = sources.offered(view, seat, ref, place, waits=is_put)
    return sources.attach(view, seat, offer, None if is_put else reader)
