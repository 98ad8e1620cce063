"""A bucket below all runs: docs/protocol/fallback.md. Pure."""

from dataclasses import dataclass
from zlib import crc32

from msgspec.structs import replace

from torch_ros.protocol import legible
from torch_ros.protocol.calls import filling
from torch_ros.protocol.keys import OUTSIDE, parse_version
from torch_ros.protocol.ledger import Ledger
from torch_ros.protocol.legible import keyed, nobody
from torch_ros.protocol.records import (
    Call,
    RunRecord,
    VersionRecord,
    VersionRef,
    extended,
    extension,
)
from torch_ros.protocol.seat import Seat, holding_put, recorded
from torch_ros.protocol.versions import Spec
from torch_ros.store.loops import Act
from torch_ros.store.txn import Delete, Put, Range, View

NAME = "bucket"  # of the option, in `Call.must`
TTLS = 2.0  # at least: whoever holds something, and has lost its seat, is back by then
GAP_S = 3.0  # beyond a TTL


def knows(bucket: object) -> dict[str, list[str]]:
    """The field of a shard record by which a rank says so that was given one, and not None."""
    return {} if bucket is None else {"knows": [NAME]}


@dataclass(frozen=True, slots=True)
class Stored:
    """A version that a bucket has in full."""

    manifest: str  # its key, which no other attempt to write it has
    version: int
    uid: str
    layout: str  # digest
    at_ms: int


def manifest_of(call: Call) -> str | None:
    """The key of the manifest of the version that is read from a bucket; None: none is."""
    return extension(call.must, NAME, str)


def may_fall_back(spec: Spec, ledger: Ledger, *, decides: bool) -> bool:
    """Whether a replica may be given a version of a bucket.

    One that has held another's waits for that one's next: its `latest` never goes back. The rank
    that decides says so, since its peers may have begun later.
    """
    is_latest = (spec.absolute, spec.back, spec.floor, spec.only) == (None, 0, None, None)
    return is_latest and not ledger.carries and not (ledger.has_held and decides)


def fall_back(view: View, seat: Seat, call: Call, stored: Stored) -> Act[Call]:
    """Announce that this replica fills itself with a version of the bucket, while nobody has any.

    The bucket's run has one version. Its record is written always: that is what a replica which
    comes back with another one is guarded on.
    """
    keys, ref = seat.keys, VersionRef(OUTSIDE, stored.version, stored.uid, 0)
    record = VersionRecord(stored.uid, stored.layout, at_ms=stored.at_ms)
    must = extended(call.must, NAME, stored.manifest)
    decided = replace(record.brought_by(call, ref), must=must)
    key, there = keys.version(OUTSIDE, stored.version), keys.versions(OUTSIDE)
    return recorded(
        view,
        seat,
        decided,
        (nobody(view, keys.holdings()),),
        (
            Put(keys.run(OUTSIDE), RunRecord(seat.inst, 0).encode()),
            Put(key, record.encode()),
            Delete(Range(there.start, key)),
            Delete(keys.versions_above(OUTSIDE, stored.version)),
            holding_put(view, seat, ref, filling(seat, call, ref)),
        ),
    )


def is_held(view: View, seat: Seat) -> bool:
    """Whether anybody holds, or fills, anything."""
    holdings = seat.keys.holdings()
    is_seen = any(True for _ in legible.holdings(view.seen(holdings)))
    return is_seen or any(True for _ in legible.holdings(view.within(holdings)))


def is_filled(view: View, seat: Seat) -> bool:
    """Whether somebody reads what comes from a bucket."""
    holdings = legible.holdings(view.within(seat.keys.holdings()))
    return any(where.run == OUTSIDE and each.state == "filling" for _, where, each, _ in holdings)


def highest(view: View, seat: Seat) -> int | None:
    """The highest number that the run in which this replica publishes has had; None: none."""
    there = keyed(view.within(seat.keys.versions(seat.run)), parse_version)
    return max((number for _, (_, number), _ in there), default=None)


class Unheld:
    """How long nobody has held anything, as one seat sees it, while the store answers.

    Args:
        call: The number of the call that waits for it. Of many replicas that begin at once, each
            waits for another share of the last TTL, so that one is first.
    """

    def __init__(self, seat: Seat, call: int, ttl_s: int) -> None:
        share = crc32(f"{seat.inst}/{call}".encode()) / 2**32
        self._lasts_s, self._ttl_s = (TTLS + share) * ttl_s, ttl_s
        self.is_over = False  # for the next answer, if nobody holds anything then
        self._since_s = self._seen_s = -1.0
        self._held_s: float | None = None  # since when somebody holds something
        self._rev = self._written = self._trained = 0

    def begin(self) -> None:
        """Begin anew."""
        self._rev, self.is_over = 0, False

    def has_lasted(self, view: View, seat: Seat, now_s: float) -> bool:
        """Whether it has by this view, which is an answer of now."""
        if is_held(view, seat):
            self.begin()
            self._held_s = now_s if self._held_s is None else self._held_s
            return False
        # All that makes a version available writes its record, also where it has gone again.
        records = keyed(view.within(seat.keys.versions()), parse_version)
        revs = [(run, entry.mod_rev) for _, (run, _), entry in records]
        written = max((rev for _, rev in revs), default=0)
        trained = max((rev for run, rev in revs if run != OUTSIDE), default=0)
        is_wiped, is_late = view.rev < self._rev, now_s - self._seen_s > self._ttl_s + GAP_S
        # What this replica could not read has left a record in the bucket's run.
        self.is_over = self.is_over and not is_wiped and trained <= self._trained
        if not self._rev or is_late or is_wiped or written > self._written:
            self._since_s = now_s
        self._rev, self._seen_s, self._held_s = view.rev, now_s, None
        self._written, self._trained = written, trained
        return self.is_over or now_s - self._since_s >= self._lasts_s

    @property
    def has_begun(self) -> bool:
        """Whether nobody held anything at the last answer."""
        return self._rev > 0

    def must_ask(self, now_s: float) -> bool:
        """Whether the store has to be asked again, for the time to go on."""
        return not self._rev or now_s - self._seen_s >= self._ttl_s

    def outlasts_the_dead(self, now_s: float) -> bool:
        """Whether somebody holds something, and for longer than what a dead process has left."""
        return self._held_s is not None and now_s - self._held_s >= self._ttl_s + GAP_S

    def may_end(self, now_s: float) -> bool:
        """Whether an answer might be the last."""
        if self._held_s is not None:
            return self.outlasts_the_dead(now_s)
        return self.must_ask(now_s) or now_s - self._since_s >= self._lasts_s
