"""The values in etcd: JSON, so that `etcdctl get` can be read at night; decoded strictly.

Never pickle: whoever can write to etcd must not be able to run code here.
"""

from __future__ import annotations

import zlib
from typing import Literal, Self

import msgspec

from torch_ros import errors
from torch_ros.errors import BackendError, TorchRosError

REASON_MAX = 500  # characters; the record is kept for many calls


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Raises: BackendError: Something else wrote this, or another release of torch_ros."""
        try:
            return msgspec.json.decode(value, type=cls)
        except msgspec.DecodeError as error:
            raise BackendError(
                f"etcd holds a {cls.__name__} record that this release cannot read ({error}): "
                f"{value[:200]!r}; use one release of torch_ros for all processes of a model"
            ) from error


class Failure(Record, frozen=True):
    """An error of ours, told to the other ranks."""

    kind: str  # the class's name in torch_ros.errors
    fields: list[str | int | float]
    rank: int

    @classmethod
    def of(cls, error: BaseException, *, replica: str, call: int, rank: int) -> Failure:
        """Errors that are not ours, and those that say nothing to a peer, become CallAborted."""
        shared = isinstance(error, TorchRosError) and not isinstance(error, errors.SelfFenced)
        fields = [field for field in error.args if isinstance(field, str | int | float)]
        if shared and len(fields) == len(error.args):
            return cls(type(error).__name__, fields, rank)
        reason = f"{type(error).__name__}: {error}"[:REASON_MAX]
        return cls("CallAborted", [replica, call, rank, reason], rank)

    def error(self) -> TorchRosError:
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, TorchRosError)):
            return errors.PeerError(f"{self.kind}{tuple(self.fields)} on rank {self.rank}")
        error = kind(*self.fields)
        error.add_note(f"(found by rank {self.rank} of this replica; the call failed on all ranks)")
        return error


class Group(Record, frozen=True):
    """`groups/<replica>`: which incarnation of the replica is the living one."""

    nonce: str
    world_size: int
    run: str  # where it publishes
    is_shared: bool = False  # its ranks were given the nonce, so nobody else is one of them
    is_complete: bool = False  # all ranks have joined
    spot: bool = False
    datacenter: str = "default"
    retain: list[str] = []  # versions that shall not be lost
    refusal: Failure | None = None  # why this group can never be complete
    left: int | None = None  # the rank that closed its handle, and so ended this incarnation


class Run(Record, frozen=True):
    """`runs/<run>`; ordered by number, so that the order survives a store that is wiped."""

    by: str
    number: int


class Version(Record, frozen=True):
    """`versions/<run>/<v>`."""

    uid: str  # of the content: the same number published again is another version
    layout: str = ""  # digest of the sharding-free content; empty until it was published once


def mark(uid: str, call: int) -> int:
    """What the processes of a group show while they serve the content `uid` because of a call.

    32 bits, never 0. Not the call's number alone: a call that is made again, since its seats were
    lost, may find another version, and who still reads the first one must notice.
    """
    return zlib.crc32(f"{uid}/{call}".encode()) or 1


class Holding(Record, frozen=True):
    """`holdings/<run>/<v>/<inst>`: a replica holds, or is filling, a version."""

    uid: str
    call: int  # the group call that made it
    state: Literal["filling", "full", "draining"]
    world_size: int
    datacenter: str = "default"
    is_original: bool = False  # the publisher's own tensors
    is_relay: bool = False  # while it fills, others may read the part that is there
    spot: bool = False

    @property
    def mark(self) -> int:
        return mark(self.uid, self.call)


class Ready(Record, frozen=True):
    """`ready/<inst>/<n>/<rank>`: this rank has done its part of call n."""

    value: str  # what the ranks must agree on


class Reader(Record, frozen=True):
    """`readers/<run>/<v>/<source>/<reader>/...`."""

    call: int


class Suspect(Record, frozen=True):
    """`suspects/<source>/<reader>`: a transfer from that source failed a moment ago."""

    reason: str


class VersionRef(Record, frozen=True):
    run: str
    version: int
    uid: str
    run_number: int

    @property
    def order(self) -> tuple[int, str, int]:
        """Newer versions compare greater, across runs.

        By their names too: while the members of a run have lost their seats to a wiped store, a
        newcomer may start one with the same number.
        """
        return (self.run_number, self.run, self.version)


Kind = Literal["agree", "publish", "replicate", "update", "unpublish"]


class Outcome(Record, frozen=True):
    failure: Failure | None = None
    is_source: bool = False  # the group now holds the version, and serves it
    said: str = ""  # what the ranks said, summarised: of a version, the digest of its layout


class Call(Record, frozen=True):
    """What a group's n-th call is, and what became of it."""

    number: int
    kind: Kind
    asked: str  # the call as the ranks made it
    by: int  # the rank that decided
    ref: VersionRef | None = None  # update: None says "nothing newer"
    sources: list[str] = []  # replicate: whom the group claimed
    copy: str = ""  # unpublish: the instance that takes a copy to host memory first
    outcome: Outcome | None = None

    def with_sources(self, *sources: str) -> Call:
        return msgspec.structs.replace(self, sources=list(sources))


class Decisions(Record, frozen=True):
    """`decisions/<inst>`: the group's last calls."""

    calls: list[Call] = []


class Kept(Record, frozen=True):
    """What a replica holds, as one of its ranks knows it."""

    ref: VersionRef
    call: int
    layout: str
    is_original: bool


class Shard(Record, frozen=True):
    """`shards/<inst>/<rank>`: how to reach one process, and what it brings along. Written once."""

    host: str
    pid: int
    card: bytes  # opaque here: what p2p needs to connect
    is_back: bool = False  # it had a seat in a complete group of this start, and lost it
    kept: Kept | None = None
    ended: list[Call] = []  # the calls whose end it knows
    pending: int = 0  # the number of the call it is in the middle of
