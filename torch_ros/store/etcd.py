"""etcd, through the generated stubs of pyetcd. Translates requests, decides nothing.

The only module that imports pyetcd and grpc.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import grpc  # type: ignore[import-untyped]
from pyetcd import etcdrpc as rpc  # type: ignore[import-untyped]

from torch_ros.errors import ClosedError, StoreUnavailable, UsageError
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
    Read,
    Reply,
    Txn,
    Unchanged,
    View,
    Watch,
    one,
)

CHANNEL_OPTIONS = (
    # A proxy that the environment names for the web does not know the hosts of a cluster.
    ("grpc.enable_http_proxy", 0),
    # An etcd that restarts is found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 2000),  # despite its name: what one attempt may take
    # A host that vanished is noticed in 8 s. etcd disconnects clients that ping more often than
    # every 5 s, or without an open call.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),  # without it, a minute instead
    ("grpc.http2.max_pings_without_data", 0),
    # Replies are bounded by etcd's quota; grpc's own 4 MiB would cut large ranges off.
    ("grpc.max_receive_message_length", -1),
)
# etcd ends the stream of a member that has no leader, where it would otherwise stay silent.
WATCH_METADATA = (("hasleader", "true"),)
# etcd ends a stream at the deadline too, with another code and sometimes a little earlier.
WATCH_SLACK_S = 0.05

REASONS = (
    ("Connection refused", "connection refused"),
    ("errors resolving", "the host name is not known"),
    ("DNS resolution failed", "the host name is not known"),
    ("Connection reset", "connection reset"),
    ("ping timeout", "no answer"),
    ("SETTINGS frame", "something answered, but it is not etcd v3"),
    ("Received http2 header", "something answered, but it is not etcd v3"),
)


NOW = 0  # as the start of a watch


class EtcdKV:
    """A `KV` in etcd, over one connection. Not usable in a child of ``fork()``.

    Args:
        hosts: "host:port" of members of one cluster. The first that answers is used; when its
            connection breaks, the next. The names of several hosts are resolved once, here; a
            single name whenever its connection breaks.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.endpoint = "etcd://" + ",".join(hosts)
        self._pid = os.getpid()
        self._is_closed = False
        self._channel = grpc.insecure_channel(_target(hosts), options=CHANNEL_OPTIONS)
        self._kv = rpc.KVStub(self._channel)
        self._leases = rpc.LeaseStub(self._channel)
        self._watches = rpc.WatchStub(self._channel)

    def read(self, request: Read, *, timeout_s: float) -> View:
        gets = tuple(Get(range_) for range_ in request.ranges)
        reply = self._call(self._kv.Txn, _txn(Txn(ops=gets)), timeout_s)
        entries: dict[str, Entry] = {}
        for response in reply.responses:
            entries.update(_entries(response.response_range))
        return View(reply.header.revision, entries)

    def commit(self, txn: Txn, *, timeout_s: float) -> Reply:
        try:
            reply = self._call(self._kv.Txn, _txn(txn), timeout_s)
        except _LeaseEndedError:
            now = self.read(Read((one("\0"),)), timeout_s=timeout_s)
            return Reply(applied=False, rev=now.rev)
        if not reply.succeeded:
            return Reply(applied=False, rev=reply.header.revision)
        return Reply(
            applied=True,
            rev=reply.header.revision,
            results=tuple(_results(txn.ops, reply.responses)),
        )

    def wait(self, watch: Watch, *, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        # etcd goes through its past for a new watch only every 100 ms, and tells it nothing before.
        # So each range is watched from now on too; and what is in between is asked for.
        starts = (NOW, watch.after_rev + 1)
        requests = [_watch(range_, start) for start in starts for range_ in watch.ranges]
        call = self._call(self._watch_stream, requests, timeout_s)
        created = 0
        try:
            for reply in call:
                rev = reply.header.revision
                # A store that was wiped counts from 1 again: its events would come much too late.
                if not reply.created or reply.canceled or rev < watch.after_rev:
                    return True
                created += 1
                is_late = created == len(requests) and rev > watch.after_rev
                if is_late and self._has_newer(watch, timeout_s=deadline - time.monotonic()):
                    return True
        except grpc.RpcError:
            self._check_open()
            return time.monotonic() < deadline - WATCH_SLACK_S
        finally:
            call.cancel()
        return True

    def grant(self, ttl_s: int, *, timeout_s: float) -> tuple[int, int]:
        reply = self._call(self._leases.LeaseGrant, rpc.LeaseGrantRequest(TTL=ttl_s), timeout_s)
        return reply.ID, reply.TTL

    def keep_alive(self, lease_id: int, *, timeout_s: float) -> int:
        request = rpc.LeaseKeepAliveRequest(ID=lease_id)
        reply = self._call(self._first_keep_alive, request, timeout_s)
        granted_s: int = reply.TTL
        return granted_s

    def revoke(self, lease_id: int, *, timeout_s: float) -> None:
        with contextlib.suppress(_LeaseEndedError):
            self._call(self._leases.LeaseRevoke, rpc.LeaseRevokeRequest(ID=lease_id), timeout_s)

    def close(self) -> None:
        self._is_closed = True
        # The threads of grpc do not exist in a child of fork(): closing would wait for them.
        if os.getpid() == self._pid:
            self._channel.close()

    def _has_newer(self, watch: Watch, *, timeout_s: float) -> bool:
        """Whether something was written after the watch's revision. Deletions do not show."""
        guards = tuple(NoneNewer(range_, watch.after_rev) for range_ in watch.ranges)
        try:
            return not self.commit(Txn(guards), timeout_s=timeout_s).applied
        except StoreUnavailable:
            return True

    def _watch_stream(self, requests: Iterable[Any], timeout: float) -> Any:
        return self._watches.Watch(iter(requests), timeout=timeout, metadata=WATCH_METADATA)

    def _first_keep_alive(self, request: Any, timeout: float) -> Any:
        call = self._leases.LeaseKeepAlive(iter((request,)), timeout=timeout)
        try:
            for reply in call:
                return reply
        finally:
            call.cancel()
        raise StoreUnavailable(self.endpoint, timeout, "the stream ended without an answer")

    def _call(self, method: Callable[..., Any], request: Any, timeout_s: float) -> Any:
        self._check_open()
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            self._check_open()
            self._raise(error, timeout_s)
        except ValueError:
            self._check_open()  # grpc's error for a channel that another thread just closed
            raise

    def _raise(self, error: Any, timeout_s: float) -> NoReturn:
        match error.code():
            case grpc.StatusCode.NOT_FOUND:
                raise _LeaseEndedError from error
            case grpc.StatusCode.INVALID_ARGUMENT:
                raise UsageError(f"{self.endpoint} refused a request: {error.details()}") from error
            case _:
                raise StoreUnavailable(self.endpoint, timeout_s, _reason(error)) from error

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"{self.endpoint} was closed")
        if os.getpid() != self._pid:
            raise ClosedError(f"{self.endpoint} was opened before fork(); open it again here")


class _LeaseEndedError(Exception):
    """The lease that a request names has ended; nothing was applied."""


def _target(hosts: Sequence[str]) -> str:
    """One grpc target for all of `hosts`: grpc uses one at a time, and fails over by itself."""
    addresses = [] if len(hosts) == 1 else [found for host in hosts for found in _addresses(host)]
    if not addresses:
        return f"dns:///{hosts[0]}"  # an unknown name is reported by the first call
    return "ipv6:" + ",".join(addresses)


def _addresses(host: str) -> list[str]:
    """Those of "name:port", all as IPv6 (mapped where they are not): a target has one family."""
    name, _, port = host.rpartition(":")
    flags = socket.AI_V4MAPPED | socket.AI_ALL
    try:
        found = socket.getaddrinfo(
            name.strip("[]"), port, socket.AF_INET6, socket.SOCK_STREAM, flags=flags
        )
    except OSError:
        return []
    return [f"[{ip!s}]:{port}" for *_, (ip, *_rest) in found]


def _txn(txn: Txn) -> Any:
    return rpc.TxnRequest(
        compare=[_compare(guard) for guard in txn.guards], success=[_op(op) for op in txn.ops]
    )


def _compare(guard: Guard) -> Any:
    compare = rpc.Compare
    match guard:
        case Unchanged(key, mod_rev):
            return compare(
                key=key.encode(), target=compare.MOD, result=compare.EQUAL, mod_revision=mod_rev
            )
        case Created(key, create_rev):
            return compare(
                key=key.encode(),
                target=compare.CREATE,
                result=compare.EQUAL,
                create_revision=create_rev,
            )
        # A comparison over a range holds for every key in it; without any, it compares zero.
        case Empty(range_):
            return compare(
                **_bounds(range_), target=compare.VERSION, result=compare.EQUAL, version=0
            )
        case NoneNewer(range_, rev):
            return compare(
                **_bounds(range_), target=compare.MOD, result=compare.LESS, mod_revision=rev + 1
            )


def _op(op: Op) -> Any:
    match op:
        case Put(key, value, lease_id):
            put = rpc.PutRequest(key=key.encode(), value=value, lease=lease_id)
            return rpc.RequestOp(request_put=put)
        case Delete(range_):
            delete = rpc.DeleteRangeRequest(**_bounds(range_))
            return rpc.RequestOp(request_delete_range=delete)
        case Get(range_, keys_only):
            get = rpc.RangeRequest(**_bounds(range_), keys_only=keys_only)
            return rpc.RequestOp(request_range=get)
        case Count(range_):
            count = rpc.RangeRequest(**_bounds(range_), count_only=True)
            return rpc.RequestOp(request_range=count)


def _watch(range_: Range, start_rev: int) -> Any:
    create = rpc.WatchCreateRequest(**_bounds(range_), start_revision=start_rev)
    return rpc.WatchRequest(create_request=create)


def _bounds(range_: Range) -> dict[str, bytes]:
    return {"key": range_.start.encode(), "range_end": range_.end.encode()}


def _results(ops: Sequence[Op], responses: Sequence[Any]) -> Iterator[Mapping[str, Entry] | int]:
    for op, response in zip(ops, responses, strict=True):
        match op:
            case Get():
                yield _entries(response.response_range)
            case Count():
                yield response.response_range.count
            case Put() | Delete():
                pass


def _entries(reply: Any) -> dict[str, Entry]:
    return {
        kv.key.decode(): Entry(kv.value, kv.create_revision, kv.mod_revision, kv.lease)
        for kv in reply.kvs
    }


def _reason(error: Any) -> str:
    """What a person should know of a grpc error."""
    details = error.details() or ""
    for sign, reason in REASONS:
        if sign in details:
            return reason
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return "no answer"
        case grpc.StatusCode.UNIMPLEMENTED:
            return "something answered, but it is not etcd v3"
        case code:
            return f"{code.name}: {details}"
