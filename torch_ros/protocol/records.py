"""The values in etcd: JSON, so that `etcdctl get` can be read at night; decoded strictly.

Never pickle: whoever can write to etcd must not be able to run code here.
"""

from __future__ import annotations

import math
import re
import shlex
import zlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, NamedTuple, Self

import msgspec

from torch_ros import errors
from torch_ros.digests import digest_of
from torch_ros.errors import BackendError, TorchRosError
from torch_ros.store.txn import T, View

REASON_MAX = 500  # characters; the record is kept for many calls
NUMBER_MAX = 2**63 - 1  # above 64 bits none could be written again

Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
Moment = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
"""Milliseconds since 1970, by the clock of the host that wrote it; 0: nobody knows. For people: no
rule compares two of them, and none digests one."""
Traceparent = Annotated[
    str, msgspec.Meta(pattern="^([0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?$")
]
"""A span, as W3C writes it; "": none. For tools that trace: no rule looks at it."""
Size = Annotated[int, msgspec.Meta(ge=1, lt=10**6)]  # of a group; keys have six digits
Field = str | Annotated[int, msgspec.Meta(ge=-NUMBER_MAX, le=NUMBER_MAX)] | float


def deletion(key: str) -> str:
    """The line for a shell that deletes it."""
    if key.isascii() and key.isprintable():
        return f"etcdctl del {shlex.quote(key)}"
    raw = key.encode(errors="surrogateescape")
    return "etcdctl del $'" + "".join(f"\\x{byte:02x}" for byte in raw) + "'"


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A value in etcd. A field that is not known here is an error: another release wrote it."""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, value: bytes, key: str) -> Self:
        """Raises: BackendError: Something else wrote this, or another release of torch_ros."""
        try:
            return msgspec.json.decode(value, type=cls)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            kind = cls.__name__.removesuffix("Record")
            raise BackendError(
                f"etcd holds a {kind} record that this release cannot read ({error}) at {key}: "
                f"{value[:200]!r}; use one release of torch_ros for all processes of a model, and "
                f"delete what none of them wrote: {deletion(key)}"
            ) from error

    @classmethod
    def at(cls, view: View, key: str) -> Self | None:
        """Raises: BackendError: As `decode`."""
        return cls.decode(entry.value, key) if (entry := view.get(key)) else None


def extension(of: Mapping[str, msgspec.Raw], name: str, kind: type[T]) -> T | None:
    """The value that a feature has added to a record under this name; None: nothing.
    Raises: BackendError: As `Record.decode`.
    """
    if name not in of:
        return None
    try:
        return msgspec.json.decode(of[name], type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise BackendError(
            f"etcd holds a Call record whose part {name!r} this release cannot read ({error}): "
            f"{bytes(of[name])[:200]!r}; use one release of torch_ros for all processes of a model"
        ) from error


def extended(of: Mapping[str, msgspec.Raw], name: str, value: object) -> dict[str, msgspec.Raw]:
    """`of`, with `value` under `name`; a value of None: without what is there by that name."""
    others = {other: there for other, there in of.items() if other != name}
    return others if value is None else others | {name: msgspec.Raw(msgspec.json.encode(value))}


class Failure(Record, frozen=True):
    """An error of ours, told to the other ranks."""

    kind: str  # the class's name in torch_ros.errors
    fields: list[Field]
    rank: Number

    @classmethod
    def of(cls, error: BaseException, *, replica: str, call: int, rank: int) -> Failure:
        """The error as peers are told it. CallAborted stands for those that are not ours, that JSON
        cannot write, or that say nothing to a peer: a lost seat is this rank's alone.
        """
        shared = isinstance(error, TorchRosError) and not isinstance(error, errors.SeatLost)
        fields = [_writable(field) for field in error.args if _is_writable(field)]
        if shared and len(fields) == len(error.args):
            return cls(type(error).__name__, fields, rank)
        reason = _writable(f"{type(error).__name__}: {error}"[:REASON_MAX])
        return cls("CallAborted", [replica, call, rank, reason], rank)

    def error(self) -> TorchRosError:
        """The error to raise on this rank; a PeerError, if this release knows none like it."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, TorchRosError)):
            return errors.PeerError(f"{self.kind}{tuple(self.fields)} on rank {self.rank}")
        try:
            error = kind(*self.fields)
        except TypeError:  # too few fields, or too many
            return errors.PeerError(f"{self.kind}{tuple(self.fields)} on rank {self.rank}")
        error.add_note(f"(found by rank {self.rank} of this replica; the call failed on all ranks)")
        return error


def _is_writable(field: object) -> bool:
    match field:
        case int():
            return abs(field) <= NUMBER_MAX
        case float():
            return math.isfinite(field)  # JSON has no others
    return isinstance(field, str)


def _writable(field: Field) -> Field:
    if isinstance(field, str):
        return field.encode(errors="backslashreplace").decode()
    return int(field) if isinstance(field, bool) else field  # strict decoding knows no `true`


class GroupRecord(Record, frozen=True):
    """`groups/<replica>`: which incarnation of the replica is the living one."""

    nonce: str
    world_size: Size
    run: str  # where it publishes
    is_shared: bool = False  # its ranks were given the nonce, so nobody else is one of them
    is_complete: bool = False  # all ranks have joined
    spot: bool = False
    datacenter: str = "default"
    retain: list[str] = []  # versions that shall not be lost
    refusal: Failure | None = None  # why this group can never be complete
    left: Number | None = None  # the rank that closed its handle, and so ended this incarnation


class RetainRecord(Record, frozen=True):
    """`retains/<datacenter>/<replica>`: versions that a group retains in its own datacenter."""

    here: list[str] = []


class SchemaRecord(Record, frozen=True):
    """`schema`: the format of all that stands under the model's name."""

    number: Number
    release: str  # that put it; for people


class RunRecord(Record, frozen=True):
    """`runs/<run>`; ordered by number, so that the order survives a store that is wiped."""

    by: str
    number: Number
    ended_at: Number | None = None  # the highest version of runs before, which went; for people


class VersionRecord(Record, frozen=True):
    """`versions/<run>/<v>`."""

    uid: str  # of the content: the same number published again is another version
    layout: str = ""  # digest of the sharding-free content; empty until it was published once
    at_ms: Moment = 0  # when its first publication began
    traceparent: Traceparent = ""  # the span of that
    by: str = ""  # the replica that published it first; "": nobody knows. For people

    @property
    def sizes(self) -> tuple[int, int] | None:
        """How many tensors it has, and their bytes, as the layout says; None: nobody knows."""
        found = re.fullmatch("[^/]*/([0-9]{1,18})/([0-9]{1,18})", self.layout)
        return (int(found[1]), int(found[2])) if found else None

    def brought_by(self, call: Call, ref: VersionRef) -> Call:
        """The call as it is decided to bring this version, `ref`."""
        return msgspec.structs.replace(
            call, ref=ref, published_ms=self.at_ms, traceparent=self.traceparent
        )


def mark(uid: str, call: int) -> int:
    """The mark that the processes of a group show while they serve `uid` because of a call.

    32 bits, never 0. Not the call's number alone: a call that is made again, since its seats were
    lost, may find another version, and who still reads the first one must notice.
    """
    return zlib.crc32(f"{uid}/{call}".encode()) or 1


class Holding(Record, frozen=True):
    """`holdings/<run>/<v>/<inst>`: a replica holds, or is filling, a version."""

    uid: str
    call: Number  # the group call that made it
    state: Literal["filling", "full", "draining"]
    world_size: Size
    datacenter: str = "default"
    is_original: bool = False  # the publisher's own tensors
    is_relay: bool = False  # while it fills, others may read the part that is there
    spot: bool = False
    at_ms: Moment = 0  # since when it fills; once it is full, since when all of it is there

    @property
    def mark(self) -> int:
        return mark(self.uid, self.call)


class Ready(Record, frozen=True):
    """`ready/<inst>/<n>/<rank>`: this rank has done its part of call n."""

    value: str  # of an agree, what the ranks must agree on; else the digest of its sharding
    is_unproven: bool = False  # made of bytes it had before: the ranks must compare all they have


def in_words(version: object) -> str:
    """The version as a caller gave it."""
    try:
        words = f"{version}"
    except ValueError:
        return "of thousands of digits"
    return words[:REASON_MAX].encode(errors="backslashreplace").decode()


class Asked(Record, frozen=True):
    """A call as its user, or a rank of its group, makes it. Equal ones are one call. People get its
    `str`, by which nothing is decided.
    """

    verb: str
    version: Number | str | None = None  # as the user gave it; a text if it is no number
    is_check: bool = False  # the check that comes first, whether all ranks may make it
    floor: Number | None = None  # replicate: no version below it
    if_there: bool = False  # replicate: that there is no such version is an answer
    or_in: str = ""  # with `if_there`: a feature's supplier, where it counts as being there, too
    waits: bool = False  # update: until there is something newer
    attempt: Number = 0  # installed: the install that it ends

    @classmethod
    def of(cls, verb: str, version: object, *, waits: bool = False) -> Self:
        """A call with a version that nobody has checked yet: one that is no number is a text."""
        is_number = isinstance(version, int) and not isinstance(version, bool)
        if is_number and 0 <= version <= NUMBER_MAX:  # type: ignore[operator]
            return cls(verb, int(version), waits=waits)  # type: ignore[call-overload]
        return cls(verb, in_words(version), waits=waits)

    @property
    def check(self) -> Asked:
        return msgspec.structs.replace(self, is_check=True)

    @property
    def after_check(self) -> Asked:
        return msgspec.structs.replace(self, is_check=False) if self.is_check else self

    def __str__(self) -> str:
        words = f"check before {self.verb}" if self.is_check else self.verb
        if self.version is not None:
            words += f" {self.version}"
        if self.floor is not None:
            words += f" not below {self.floor}"
        if self.if_there:
            words += ", if it is there" + (f" or in {self.or_in}" if self.or_in else "")
        if self.waits:
            words += ", waiting"
        return f"{words} ({self.attempt})" if self.attempt else words


class Begun(Record, frozen=True):
    """`begun/<inst>/<rank>`: this rank has begun a call of DCP."""

    number: Number  # of the group's next call when it began
    asked: Asked


class Reader(Record, frozen=True):
    """`readers/<run>/<v>/<source>/<reader>/...`; believed by its key alone."""

    call: Number
    is_far: bool = False  # a replica in another datacenter: it can go on from another source
    is_leaf: bool = False  # it rests: nobody reads from it


class Suspect(Record, frozen=True):
    """`suspects/<source>/<reader>`: a transfer from that source failed a moment ago."""

    reason: str


class VersionRef(Record, frozen=True):
    """A version of a run; `uid` tells its content from that of a later one with its number."""

    run: str
    version: Number
    uid: str
    run_number: Number

    @property
    def order(self) -> tuple[int, str, int]:
        """Newer versions compare greater, across runs.

        By their names too: while the members of a run have lost their seats to a wiped store, a
        newcomer may start one with the same number.
        """
        return (self.run_number, self.run, self.version)

    def follows(self, other: VersionRef | None) -> bool:
        """Whether it is a later version of the same run."""
        return other is not None and self.run == other.run and self.version > other.version


class ArchiveRecord(Record, frozen=True):
    """`archives/<replica>`: the version that an archiver has dealt with last; None: none yet."""

    ref: VersionRef | None = None  # its bucket has it, or need not have it


Kind = Literal["agree", "publish", "replicate", "update", "unpublish"]


class Said(NamedTuple):
    """The answers of all ranks in a call."""

    by_rank: Mapping[int, str]
    is_unproven: bool = False  # the part of a rank is, as its Ready record says


def answers_of(said: Mapping[int, str]) -> str:
    """The digest of what the ranks of a group said in a call, by rank."""
    rows = [said[rank] for rank in sorted(said)]
    return digest_of(msgspec.msgpack.encode(rows)).hex()


class Outcome(Record, frozen=True):
    failure: Failure | None = None
    is_source: bool = False  # the group now holds the version, and serves it
    said: str = ""  # of an agree, what all ranks said; of a version, the layout they have all of
    answers: str = ""  # of a version: digest of what the ranks said, which `said` is true of
    at_ms: Moment = 0  # when the call ended; 0: as it was decided


class Call(Record, frozen=True):
    """A group's n-th call, and its end."""

    number: Number
    kind: Kind
    asked: Asked  # the call as the ranks made it
    by: Number = 0  # the rank that decided
    ref: VersionRef | None = None  # update: None says "nothing newer"
    sources: list[str] = []  # replicate: whom the group claimed
    copy: str = ""  # unpublish: the instance that takes a copy to host memory first
    is_optional: bool = False  # that copy: if a rank cannot make its part, readers are waited for
    is_forgone: bool = False  # a copy that was needed: a rank could not make its part
    outcome: Outcome | None = None
    at_ms: Moment = 0  # when the rank that decided it began it
    published_ms: Moment = 0  # of a version that it brings: as in the version's record
    traceparent: Traceparent = ""  # likewise
    part_of: Asked | None = None  # the user's call, if it is not what is asked
    continues: bool = False  # not the first part of that
    # Values of features, by name. One in `must` that a rank does not know ends the call for all;
    # one in `more` is passed over.
    must: dict[str, msgspec.Raw] = {}
    more: dict[str, msgspec.Raw] = {}

    @property
    def caller(self) -> Asked:
        """The user's call that it is a part of."""
        return self.part_of or self.asked.after_check

    @property
    def failure(self) -> Failure | None:
        return self.outcome.failure if self.outcome is not None else None

    @property
    def has_ended_well(self) -> bool:
        return self.outcome is not None and self.outcome.failure is None

    @property
    def was_made_by_all(self) -> bool:
        """Whether it has ended with all ranks ready, each of which knew all earlier ends."""
        return self.outcome is not None and self.outcome.is_source

    def with_sources(self, *sources: str) -> Call:
        return msgspec.structs.replace(self, sources=list(sources))


class Decisions(Record, frozen=True):
    """`decisions/<inst>`: the group's last calls."""

    calls: tuple[Call, ...] = ()
    forgotten_below: Number = 0  # below, a call that is not here was made, and is forgotten

    def with_calls(self, calls: Iterable[Call]) -> Decisions:
        return Decisions(tuple(calls), self.forgotten_below)

    def with_call(self, call: Call) -> Decisions:
        """With this one written last, in place of what was known of it."""
        others = (each for each in self.calls if each.number != call.number)
        return self.with_calls((*others, call))

    def cut(self, kept: int) -> Decisions:
        """The `kept` calls written last: by number, one that stayed open for long would go."""
        forgotten = (call.number + 1 for call in self.calls[:-kept])
        return Decisions(self.calls[-kept:], max(self.forgotten_below, *forgotten, 0))


class Kept(Record, frozen=True):
    """The version that a replica holds, as one of its ranks knows it."""

    ref: VersionRef
    call: Number
    layout: str
    is_original: bool
    at_ms: Moment = 0  # as in the version's record
    traceparent: Traceparent = ""  # likewise

    @classmethod
    def of(cls, call: Call, layout: str) -> Kept:
        """The version that a call brings, or has brought."""
        assert call.ref is not None
        is_original = call.kind == "publish"
        published = (call.published_ms, call.traceparent)
        return cls(call.ref, call.number, layout, is_original, *published)

    def is_as(self, other: Kept | None) -> bool:
        """Whether both say the same, but for clocks and spans, which are for people."""
        if other is None:
            return False
        alike = msgspec.structs.replace(other, at_ms=self.at_ms, traceparent=self.traceparent)
        return alike == self

    def record(self, there: VersionRecord | None, replica: str) -> VersionRecord:
        """The record of the version that `replica` keeps; `there`: the store's, of this content."""
        known = there or VersionRecord(self.ref.uid, at_ms=self.at_ms, traceparent=self.traceparent)
        by = known.by or (replica if self.is_original else "")
        return msgspec.structs.replace(known, layout=self.layout, by=by)


class Carried(Record, frozen=True):
    """A feature's say about a replica, as a rank knows it; `carried/<inst>/<feature>` has `value`.

    The one with the highest number counts among those that the ranks of a group bring along, and
    the heaviest of one number.
    """

    value: msgspec.Raw
    number: Number = 0  # of the last change that took all ranks; 0: there was none
    weight: Number = 0

    @property
    def order(self) -> tuple[int, int]:
        return self.number, self.weight


class ShardRecord(Record, frozen=True):
    """`shards/<inst>/<rank>`: how to reach one process, and what it brings along. Written once."""

    host: str
    pid: Number
    card: bytes  # opaque here: what p2p needs to connect
    is_back: bool = False  # it had a seat in a complete group of this start, and lost it
    kept: Kept | None = None
    ended: list[Call] = []  # the calls whose end it knows
    pending: Number = 0  # the number of the call it is in the middle of
    ready: Call | None = None  # a publication that it did not wait for, as it would end
    answer: str = ""  # what it would have said to be ready for that
    knows: list[str] = []  # of the values of features that a call may have in `must`
    carries: dict[str, Carried] = {}  # by the names of features

    def __repr__(self) -> str:
        return f"ShardRecord(host={self.host!r}, pid={self.pid})"  # cards have secrets


class SeenRecord(Record, frozen=True):
    """`seen/<slot>/<replica>/<rank>`: the process that took this seat last. For people.

    On no lease: it outlives the seat, until another process takes that, or the handle is closed.
    """

    host: str
    pid: Number
    at_ms: Moment = 0  # when it took the seat
    # What tells it from others that have its number; empty or 0: the system does not say.
    boot: str = ""  # of its kernel: /proc/sys/kernel/random/boot_id
    namespace: Number = 0  # the inode of that of its pids
    started: Number = 0  # field 22 of its /proc/<pid>/stat
    sign: str = ""  # of a file that it has mapped until its handle is closed
