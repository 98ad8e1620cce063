"""The requests to one member of an etcd: our values in, our values out, pyetcd's stubs between.

The only module that imports pyetcd.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, TypeVar

from pyetcd import etcdrpc as rpc  # type: ignore[import-untyped]

from torch_ros.store.txn import (
    Count,
    Created,
    Delete,
    Empty,
    Entry,
    Get,
    Guard,
    NoneNewer,
    Op,
    Put,
    Range,
    Ranges,
    Read,
    Reply,
    Sample,
    T,
    Txn,
    Unchanged,
    View,
    whole,
)

A = TypeVar("A")
Metadata = tuple[tuple[str, str], ...]

# A member that has no leader says so, where it would otherwise stay silent; it does nothing then.
HAS_LEADER: Metadata = (("hasleader", "true"),)
ALARMS = {1: "NOSPACE", 2: "CORRUPT"}  # by etcd's numbers; the stubs know the first one only


@dataclass(frozen=True, slots=True)
class Status:
    """One member of an etcd, as it says itself."""

    version: str
    size_bytes: int  # of its database, with what was deleted and not defragmented
    has_leader: bool


class Member:
    """The requests over one channel of grpc. `call` has grpc's `timeout` and `metadata`.

    Raises what grpc raises.
    """

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self._auth, self._kv = rpc.AuthStub(channel), rpc.KVStub(channel)
        self._leases, self._watches = rpc.LeaseStub(channel), rpc.WatchStub(channel)
        self._upkeep = rpc.MaintenanceStub(channel)

    def authenticate(self, user: tuple[str, str], **call: Any) -> str:
        request = rpc.AuthenticateRequest(name=user[0], password=user[1])
        token: str = self._auth.Authenticate(request, **call).token
        return token

    def read(self, request: Read, **call: Any) -> View:
        return _view(request.ranges, self._kv.Txn(_read(request), **call))

    def commit(self, txn: Txn, **call: Any) -> Reply:
        reply = self._kv.Txn(_commit(txn), **call)
        rev = reply.header.revision
        if reply.succeeded:
            return Reply(applied=True, rev=rev, results=tuple(_results(txn.ops, reply.responses)))
        view = _view(txn.otherwise, reply) if txn.otherwise else None  # it asked for none
        return Reply(applied=False, rev=rev, view=view)

    def grant(self, ttl_s: int, **call: Any) -> tuple[int, int]:
        reply = self._leases.LeaseGrant(rpc.LeaseGrantRequest(TTL=ttl_s), **call)
        return reply.ID, reply.TTL

    def revoke(self, lease_id: int, **call: Any) -> None:
        self._leases.LeaseRevoke(rpc.LeaseRevokeRequest(ID=lease_id), **call)

    def keep_alive(self, lease_id: int, **call: Any) -> int | None:
        """The seconds granted by the first answer; None if there is none."""
        requests = iter((rpc.LeaseKeepAliveRequest(ID=lease_id),))
        replies = self._leases.LeaseKeepAlive(requests, **call)
        try:
            return next((reply.TTL for reply in replies), None)
        finally:
            replies.cancel()

    def status(self, _: None, *, metadata: Metadata, **call: Any) -> Status:
        """The member's state by its own word: it asks no other member, nor a leader."""
        alone = tuple(each for each in metadata if each not in HAS_LEADER)
        reply = self._upkeep.Status(rpc.StatusRequest(), metadata=alone, **call)
        return Status(reply.version, reply.dbSize, has_leader=bool(reply.leader))

    def alarms(self, _: None, **call: Any) -> tuple[str, ...]:
        """The alarms of all members, such as "NOSPACE"."""
        reply = self._upkeep.Alarm(rpc.AlarmRequest(action=rpc.AlarmRequest.GET), **call)
        numbers = {each.alarm for each in reply.alarms}
        return tuple(sorted(ALARMS.get(number, f"number {number}") for number in numbers))

    def watch(
        self, starts: Sequence[tuple[Range, int]], *, timeout: float, metadata: Metadata
    ) -> Any:
        """The stream of replies about ranges, each from a revision on."""
        create = rpc.WatchCreateRequest
        created = (create(**_bounds(range_), start_revision=rev) for range_, rev in starts)
        requests = [rpc.WatchRequest(create_request=each) for each in created]
        return self._watches.Watch(iter(requests), timeout=timeout, metadata=metadata)


Method = Callable[Concatenate[Member, A, ...], T]


def keys(request: object) -> list[str]:
    """The keys of a request, but not of one about a lease: for the message of a denied role."""
    match request:
        case Read():
            sent = _read(request)
        case Txn():
            sent = _commit(request)
        case _:
            return []
    ops = [getattr(op, op.WhichOneof("request")) for op in sent.success]  # without `otherwise`
    return [_text(one.key) for one in (*sent.compare, *ops)]  # of a range the first


def largest(request: object) -> tuple[str, int]:
    """The key for which a request writes most, and how many bytes it has for that."""
    ops = request.ops if isinstance(request, Txn) else ()
    sizes = {op.key: len(_raw(op.key)) + len(op.value) for op in ops if isinstance(op, Put)}
    return max(sizes.items(), key=lambda item: item[1], default=("", 0))


def writes(request: object) -> bool:
    return isinstance(request, Txn) and any(isinstance(op, Put | Delete) for op in request.ops)


def changed(event: Any) -> tuple[str, int, Entry | None]:
    """The key that an event of a watch is about, its revision, and its entry; None: deleted."""
    entry = None if event.type == event.DELETE else _entry(event.kv)
    return _text(event.kv.key), event.kv.mod_revision, entry


# Requests


def _read(request: Read) -> Any:
    return rpc.TxnRequest(success=[_get(range_) for range_ in request.ranges])


def _commit(txn: Txn) -> Any:
    compare = [_compare(guard) for guard in txn.guards]
    failure = [_get(range_) for range_ in txn.otherwise]
    # Without an operation, a member checks guards against what it has, which may be the past.
    # A range in either branch makes it ask the others first.
    if compare and not (txn.ops or failure):
        key, end = compare[0].key, compare[0].range_end
        look = rpc.RangeRequest(key=key, range_end=end, count_only=True)
        failure = [rpc.RequestOp(request_range=look)]
    return rpc.TxnRequest(compare=compare, success=[_op(op) for op in txn.ops], failure=failure)


def _compare(guard: Guard) -> Any:
    compare = rpc.Compare
    equal = partial(compare, result=compare.EQUAL)
    match guard:
        case Unchanged(key, rev):
            return equal(key=_raw(key), target=compare.MOD, mod_revision=rev)
        case Created(key, rev):
            return equal(key=_raw(key), target=compare.CREATE, create_revision=rev)
        # A comparison over a range holds for every key in it; without any, it compares zero.
        case Empty(range_):
            return equal(**_bounds(range_), target=compare.VERSION, version=0)
        case NoneNewer(range_, rev):
            older = partial(compare, result=compare.LESS)
            return older(**_bounds(range_), target=compare.MOD, mod_revision=rev + 1)


def _op(op: Op) -> Any:
    match op:
        case Put(key, value, lease_id):
            put = rpc.PutRequest(key=_raw(key), value=value, lease=lease_id)
            return rpc.RequestOp(request_put=put)
        case Delete(range_):
            return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(**_bounds(range_)))
        case Get(range_, keys_only):
            return _get(range_, keys_only=keys_only)
        case Count(range_):
            return rpc.RequestOp(request_range=rpc.RangeRequest(**_bounds(range_), count_only=True))


def _get(range_: Range | Sample, *, keys_only: bool = False) -> Any:
    if isinstance(range_, Range):
        get = rpc.RangeRequest(**_bounds(range_), keys_only=keys_only)
    else:
        order = rpc.RangeRequest.ASCEND if range_.is_oldest else rpc.RangeRequest.DESCEND
        get = rpc.RangeRequest(
            **_bounds(range_.range),
            keys_only=keys_only,
            limit=range_.most,
            sort_order=order,
            sort_target=rpc.RangeRequest.CREATE,
            max_create_revision=max(0, range_.before - 1),  # 0: all
        )
    return rpc.RequestOp(request_range=get)


def _bounds(range_: Range) -> dict[str, bytes]:
    return {"key": _raw(range_.start), "range_end": _raw(range_.end)}


def _raw(key: str) -> bytes:
    return key.encode(errors="surrogateescape")


# Replies


def _text(key: bytes) -> str:
    """The text of a key. Others' keys may be no UTF-8: `_raw` makes the same bytes of it again."""
    return key.decode(errors="surrogateescape")


def _results(ops: Sequence[Op], responses: Sequence[Any]) -> Iterator[Mapping[str, Entry] | int]:
    for op, response in zip(ops, responses, strict=True):
        match op:
            case Get():
                yield _entries(response.response_range)
            case Count():
                yield response.response_range.count
            case Put() | Delete():
                pass


def _view(ranges: Ranges, reply: Any) -> View:
    entries: dict[str, Entry] = {}
    shown: list[Range] = []
    for range_, response in zip(whole(ranges), reply.responses, strict=True):
        found = response.response_range
        entries.update(_entries(found))
        if len(found.kvs) == found.count:  # etcd counts those that it leaves out, too
            shown.append(range_)
    return View(reply.header.revision, entries, tuple(shown), ranges)


def _entries(reply: Any) -> dict[str, Entry]:
    return {_text(kv.key): _entry(kv) for kv in reply.kvs}


def _entry(kv: Any) -> Entry:
    return Entry(kv.value, kv.create_revision, kv.mod_revision, kv.lease)
