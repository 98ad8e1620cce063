"""ShardHandle: one process's shard of a replica. Ties the store, the weights and p2p together."""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.hooks import RemovableHandle

from torch_ros.errors import (
    BackendError,
    ClosedError,
    ContractBroken,
    CorruptWeights,
    PeerError,
    SelfFenced,
    SourceLost,
    TorchRosError,
    TransferFailed,
    UsageError,
)
from torch_ros.exchange import EVERYTHING, Digests, Intake, Offer
from torch_ros.hostcopy import HostCopy
from torch_ros.identity import identify
from torch_ros.p2p.memory import MemoryTransport
from torch_ros.p2p.transport import HOST, Region, Transport
from torch_ros.reading import Feed, Progress, Reading, connect
from torch_ros.store import rules
from torch_ros.store.endpoint import connect as connect_store
from torch_ros.store.group import Group, GroupCall, Place
from torch_ros.store.keys import Keys, copy_of, replica_of
from torch_ros.store.loops import Done, Step, Wait
from torch_ros.store.records import Call, Kind, Outcome, Shard, Version, VersionRef
from torch_ros.store.rules import Whole
from torch_ros.store.run import Deadline
from torch_ros.store.seat import Seat, own_group
from torch_ros.store.sources import Source
from torch_ros.store.txn import View
from torch_ros.store.versions import Spec, check_version, listing, newer, resolve, spec_ranges
from torch_ros.weights.digest import Depth, chunk_digests, first_difference, totals
from torch_ros.weights.local import LocalTensor, build, local_chunks, span_of
from torch_ros.weights.manifest import OBJECT, Layout, Manifest, logical, logical_digest

T = TypeVar("T")
log = logging.getLogger(__name__)

ENDPOINT_VARIABLE = "TORCH_ROS_ENDPOINT"
DEFAULT_ENDPOINT = "local"
HEAL_TRIES = 2  # a second one, when what was read is not what was published

# Strong references: a handle that is dropped without close() goes on serving what it published,
# so its tensors must stay.
_open_handles: set[ShardHandle] = set()


def open(  # noqa: A001  # the paper's name for it, used as torch_ros.open
    model: str,
    *,
    endpoint: str | None = None,
    replica: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    run: str | None = None,
    retain: Sequence[str | int] = (),
    datacenter: str = "default",
    spot: bool = False,
    timeout_s: float = 300.0,
    ttl_s: int = 10,
    drain_s: float = 60.0,
    digests: Depth = "off",
    check_contract: bool = False,
    staging_bytes: int = 4 << 20,
) -> ShardHandle:
    """Take this process's place in a replica of `model`.

    Collective: every rank of the replica opens it; returns on each once all have. With a process
    group, ranks open their handles in the same order.

    Args:
        model: The name under which versions are published.
        endpoint: Where etcd is: "etcd://host:port[,host:port]"; "local", an etcd on this host
            that is found or started; "memory://name", a store inside this process. None: the
            environment's TORCH_ROS_ENDPOINT, else "local".
        replica: The name of this replica, the same on all its ranks, unlike any other living
            one's: opening a name again replaces its holder. None: the process group's rank 0
            chooses one; else torchrun's run id and role; else, for one process, a unique name.
        rank, world_size: This process's place in the replica. None: the process group's, else
            torchrun's, else 0 of 1.
        run: Where `publish` goes. Versions grow within a run. None: the newest living run; "new":
            a new one (after a rollback to an older step); else the run of that name.
        retain: Versions that shall not be lost while this replica is there: "latest", "latest-1",
            ..., or a number. Whoever unpublishes the last copy of one that is not on a spot
            replica copies it to host memory first, where it stays until another replica has it
            or it is no longer retained.
        datacenter: Sources in the same one are preferred.
        spot: This replica may vanish at any time: its copies do not count for `retain`.
        timeout_s: Seconds for this call, and the default for the handle's calls.
        ttl_s: Seconds after which a dead process's records vanish from etcd.
        drain_s: How long `unpublish` waits for readers; those that take longer go on from another
            source, or fail.
        digests: Of the content of what is published, and of what was read: "full" finds every
            flipped bit and every element in a wrong place, at a few GB/s per thread; "sampled"
            looks at 1/64 of it; "off" trusts. What was published with digests is verified by
            replicas that are opened with either, to the depth of the publisher.
        check_contract: For debugging. Also digest what is published when it is unpublished, and
            raise ContractBroken if it was written to in between.
        staging_bytes: Bound on the buffer through which short strided runs are read. On hosts, one
            that fits the processor's cache beats a larger one.

    Raises:
        UsageError: Bad arguments, or ranks that disagree about them.
        StoreUnavailable: Nothing that speaks etcd v3 answers at the endpoint.
        DeadlineExceeded: Not all ranks came.
    """
    if not model:
        raise UsageError("model '': expected a name")
    if digests not in get_args(Depth):
        raise UsageError(f"digests={digests!r}: expected one of {', '.join(get_args(Depth))}")
    retained = tuple(str(Spec.parse(version)) for version in retain)
    if ttl_s < 2:  # etcd's own minimum at its default election timeout
        raise UsageError(f"ttl_s={ttl_s}: expected at least 2 seconds")
    deadline = Deadline(f"open({model!r})", timeout_s)
    place = identify(replica, rank, world_size, timeout_s=timeout_s)
    endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT
    kv = connect_store(endpoint, timeout_s=timeout_s)
    transport: Transport | None = None
    try:
        transport = _transport(endpoint)
        offer = Offer(transport)
        seat = Place(
            keys=Keys(model),
            replica=place.replica,
            rank=place.rank,
            world_size=place.world_size,
            nonce=place.nonce,
            run_name=run,
            datacenter=datacenter,
            spot=spot,
            retain=retained,
            ttl_s=ttl_s,
            drain_s=drain_s,
            shard=_shard(offer),
        )
        group = Group.join(kv, seat, deadline)
    except BaseException:
        if transport is not None:
            transport.close()
        kv.close()
        raise
    depth: Depth = "full" if check_contract and digests == "off" else digests
    handle = ShardHandle(
        model,
        group,
        transport,
        offer,
        timeout_s=timeout_s,
        staging_bytes=staging_bytes,
        depth=depth,
        check_contract=check_contract,
    )
    log.info("opened %s at %s, run %r", handle, kv.endpoint, group.seat.run)
    return handle


def _shard(offer: Offer) -> Shard:
    return Shard(socket.gethostname(), os.getpid(), offer.card)


def _transport(endpoint: str) -> Transport:
    if endpoint.startswith("memory:"):
        return MemoryTransport()
    # Importing nixl loads UCX and takes a second; a store in memory can do without.
    from torch_ros.p2p.nixl import NixlTransport  # noqa: PLC0415

    return NixlTransport()


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What one replicate, update or dcp.load read on this rank."""

    version: int
    source: str  # the replica read from; the last one, if others were lost
    reroutes: int  # how often a source was lost and another taken
    bytes_total: int  # of this rank's tensors
    bytes_read: int  # over the wire: more where whole rows were read for a part of them
    elapsed_s: float  # of the whole call
    stages_s: Mapping[str, float]  # decide, manifests, plan, read, commit


@dataclass(frozen=True, slots=True)
class _Registered:
    """Tensors that are shown to readers. Keeps their memory allocated."""

    layout: Layout
    memory: Sequence[torch.Tensor]  # of each of its chunks
    objects: Mapping[str, torch.Tensor]
    parts: Sequence[_Part]  # objects come before tensors

    @property
    def digest(self) -> str:
        """Of the content, whatever the sharding."""
        return logical_digest(logical([self.layout]))


@dataclass(frozen=True, slots=True)
class _Part:
    """What is read together: the pickled objects, or the tensors, of a registered layout."""

    layout: Layout
    memory: Sequence[torch.Tensor]
    chunks: npt.NDArray[np.int64]  # their numbers in the whole layout


@dataclass(frozen=True, slots=True)
class LocalState:
    """A state dict's tensors and pickled objects, as this rank has them."""

    tensors: Sequence[LocalTensor]
    objects: Mapping[str, torch.Tensor]
    paths: Mapping[str, tuple[str | int, ...]]


@dataclass(slots=True)
class _Stopwatch:
    started_s: float = field(default_factory=time.perf_counter)
    stages_s: dict[str, float] = field(default_factory=dict)
    _last_s: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> None:
        now_s = time.perf_counter()
        self.stages_s[stage] = self.stages_s.get(stage, 0.0) + now_s - self._last_s
        self._last_s = now_s

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s


class _Filling:
    """A version that is being read, over all the sources and seats that this takes.

    Args:
        register: From a source's layouts to what is to be filled.
        landed: Called when the objects have landed, before a tensor changes, and at the end.
    """

    def __init__(
        self,
        register: Callable[[Sequence[Layout]], _Registered],
        landed: Callable[[], object] = lambda: None,
    ) -> None:
        self.register, self.landed = register, landed
        self.ref: VersionRef | None = None
        self.registered: _Registered | None = None
        self.progress: Progress | None = None
        self.source = ""
        self.sources: list[str] = []  # instances
        self.expected = Digests()

    def start(self, ref: VersionRef) -> None:
        """Another version than before: nothing of it is here."""
        self.ref, self.registered, self.progress = ref, None, None
        self.expected = Digests()


class ShardHandle:
    """One replica's shard in this process: it publishes or replicates, one version at a time.

    Life cycle, on all ranks of the replica and in the same order:

    1. `torch_ros.open`
    2. `register` the tensors
    3. trainer: `publish`; mutate only after `unpublish` has returned; again from 3
       rollout: `replicate`, then `update` as often as wanted
    4. `unpublish`, `unregister`, `close`; or just `close`

    publish, unpublish, replicate and update are calls of the whole group: every rank makes the
    same ones in the same order, no collective is involved, and all get the same answer or the
    same error. An error on one rank ends the call on all of them. list and wait are this
    process's own. Safe to call from several threads, one call at a time.

    A rank that closes its handle ends the replica for its peers: what they still call then is a
    SelfFenced error, but for list, wait, unpublish and close.

    After `fork` the child's copy does nothing and raises `ClosedError`; open a new one there.
    """

    def __init__(
        self,
        model: str,
        group: Group,
        transport: Transport,
        offer: Offer,
        *,
        timeout_s: float,
        staging_bytes: int,
        depth: Depth,
        check_contract: bool,
    ) -> None:
        self.model = model
        self._depth, self._checks_contract = depth, check_contract
        self._digests = Digests()
        self._group, self._transport, self._offer = group, transport, offer
        self._timeout_s, self._staging_bytes = timeout_s, staging_bytes
        self._intake = Intake(transport)
        self._reading = Reading(transport, self._intake, staging_bytes)
        self._registered: _Registered | None = None
        self._copies: dict[str, HostCopy] = {}
        self._last_read: ReadReport | None = None
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._is_closed = False
        self._staged: set[tuple[int, int]] = set()  # memory of dcp's staged copy, if published
        _open_handles.add(self)
        _close_open_handles_at_exit()

    @property
    def _held(self) -> VersionRef | None:
        kept = self._group.holds
        return kept.ref if kept else None

    def __repr__(self) -> str:
        held = f", version={self._held.version}" if self._held else ""
        return (
            f"ShardHandle(model={self.model!r}, replica={self.replica!r}, "
            f"rank={self.rank} of {self.world_size}{held})"
        )

    @property
    def replica(self) -> str:
        """The name that `list` shows for this replica."""
        return self._group.seat.replica

    @property
    def rank(self) -> int:
        """This process's place in the replica."""
        return self._group.seat.rank

    @property
    def world_size(self) -> int:
        """The number of processes that hold the replica together."""
        return self._group.seat.world_size

    @property
    def run(self) -> str:
        """The run in which this handle publishes."""
        return self._group.seat.run

    @property
    def version(self) -> int | None:
        """The version that this replica holds and serves; None: none."""
        return self._held.version if self._held else None

    @property
    def last_read(self) -> ReadReport | None:
        """What the last replicate, update or dcp.load of this handle did."""
        return self._last_read

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    # Tensors

    def register(self, named_tensors: Mapping[str, torch.Tensor]) -> None:
        """Name the tensors that are published from, or replicated into. Local to this rank.

        Args:
            named_tensors: fqn to tensor, any dtype and shape, also 0-d, empty, non-contiguous or
                sharing memory. A DTensor stands for its local chunk; any other tensor is the
                whole, and where ranks differ the lowest one's counts. Not copied, not modified;
                referenced until `unregister` or `close`, so they must not be resized or moved.

        Raises:
            UsageError: Something is registered, or a tensor is not plain strided memory.
        """
        with self._busy():
            if self._registered is not None:
                raise UsageError("this handle has registered tensors; unregister() them first")
            self._register(local_chunks(named_tensors), {}, {})

    def unregister(self) -> None:
        """Forget the tensors. Local to this rank. May be called again.

        Raises:
            UsageError: A version is held; `unpublish` first.
        """
        with self._busy():
            self._require_nothing_held("unregister")
            self._unregister()

    def _register(
        self,
        tensors: Sequence[LocalTensor],
        objects: Mapping[str, torch.Tensor],
        paths: Mapping[str, tuple[str | int, ...]],
    ) -> _Registered:
        layout, memory = build(tensors, objects, paths=paths)
        devices = [t.get_device() if t.is_cuda else HOST for t in memory]
        spans = [span_of(t) for t in memory]
        regions = {
            Region(address, size, device)
            for (address, size), device in zip(spans, devices, strict=True)
            if size
        }
        addresses = [address for address, _ in spans]
        ordered = sorted(regions, key=lambda r: (r.device, r.address, r.size_bytes))
        try:
            self._offer.show(layout, addresses, devices, ordered)
        except BaseException:
            self._unregister()
            raise
        dtypes = [layout.tensors[chunk.tensor].dtype for chunk in layout.chunks]
        is_object = np.array([dtype == OBJECT for dtype in dtypes], np.bool_)
        parts = [_Part(*build([], objects), np.flatnonzero(is_object))] if objects else []
        parts.append(_Part(*build(tensors, {}), np.flatnonzero(~is_object)))
        self._registered = _Registered(layout, memory, objects, parts)
        return self._registered

    def _unregister(self) -> None:
        self._offer.withdraw()
        self._registered = None

    # Publishing

    def publish(self, version: int, *, timeout_s: float | None = None) -> None:
        """Offer the registered tensors as `version`. No bytes move.

        Collective. Returns on each rank once the whole replica is offered. The tensors are read
        in place: do not write to them or free them until `unpublish` has returned.

        Args:
            version: Not below the newest of the run; gaps are fine.

        Raises:
            UsageError: Nothing is registered, or a version is held. Nothing was published.
            VersionConflict: A newer version exists. Nothing was published.
            ManifestMismatch: Ranks, or another replica that publishes this version, have other
                tensors. Nothing was published.
            DeadlineExceeded, CallAborted: Not all ranks came. Nothing was published.
            SelfFenced, StoreUnavailable

        Cost: 6 to 8 round trips to etcd per rank, none of them contended; no copy.
        """
        deadline = self._deadline(f"publish {version}", timeout_s)
        with self._busy():
            self._catch_up(deadline)

            def body(call: GroupCall) -> None:
                registered = self._require_registered("publish")
                self._require_nothing_held("publish")
                self._publish(call, version, registered, deadline)

            self._make("publish", f"publish {version}", deadline, body)

    def _make(
        self, kind: Kind, asked: str, deadline: Deadline, body: Callable[[GroupCall], T]
    ) -> T:
        """The group's next call. Whoever reads from here learns if nothing is held after it."""
        try:
            return self._group.make(kind, asked, deadline, body)
        finally:
            if self._held is None:
                self._offer.void()

    def _catch_up(self, deadline: Deadline) -> None:
        """Learn how the last call ended, before the next one or before the tensors are given back.

        Its end may have been a bad one, and readers still believe what this process shows.
        """
        self._group.catch_up(deadline)
        if self._held is None:
            self._offer.void()

    def _publish(
        self, call: GroupCall, version: int, registered: _Registered, deadline: Deadline
    ) -> None:
        effects = partial(
            rules.publish, version=check_version(version), fresh_uid=secrets.token_hex(8)
        )
        keys, run = call.seat.keys, call.seat.run
        call.decide((keys.versions(run), keys.holdings(run)), effects)
        _finish_kernels(registered.memory)
        self._digests = Digests(self._depth, self._digest(registered, self._depth))
        self._offer.show_digests(self._digests)
        self._offer.serve(call.number, EVERYTHING)
        if not call.has_ended:
            self._finish(call, registered, deadline)
        log.info("published version %d of %r", version, self.model)

    def _digest(self, registered: _Registered, depth: Depth) -> tuple[int, ...]:
        if depth == "off":
            return ()
        return chunk_digests(registered.layout, registered.memory, depth=depth)

    def guard(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """From now on, `unpublish` before each step of `optimizer`, which writes to its parameters.

        Collective, as the step is: the optimizers of all ranks step together. What `unpublish`
        raises, `step` raises, and no parameter has changed.

        Returns:
            A hook; its `remove()` ends this.
        """
        return optimizer.register_step_pre_hook(lambda *_: self.unpublish())

    def unpublish(self, *, timeout_s: float | None = None) -> None:
        """Stop offering what is held; returns once nobody reads it any more.

        Collective, but it waits for readers only, not for the peers' calls: the first rank's call
        counts for all. From then on the tensors may be written. Holding nothing, it does nothing.
        Readers that are not done after the handle's `drain_s` are left behind: what they still
        read does not count for them.

        If this is the last copy of a retained version, it is copied to host memory first, by all
        ranks, and so waits for all.

        Raises:
            DeadlineExceeded: Somebody still reads; the version is not offered any more, and
                calling again goes on waiting. The tensors must not be written yet.
            StoreUnavailable: Likewise.
            ContractBroken: With `check_contract`: they were written to. It is unpublished.
        """
        with self._busy(is_member=False):
            self._unpublish(self._deadline("unpublish", timeout_s))

    def _unpublish(self, deadline: Deadline) -> None:
        try:
            self._catch_up(deadline)
            if (held := self._held) is None:
                return
            try:
                self._make(
                    "unpublish",
                    f"unpublish {held.version}",
                    deadline,
                    lambda call: call.unpublish(held, partial(self._copy, call)),
                )
            finally:
                self._keep_copies()
        except SelfFenced as lost:
            # The store has forgotten this replica; readers ask the memory, which now says no.
            log.warning("%s; its tensors are taken back without the store", lost)
            self._group.forget()
            self._offer.void()
        if self._checks_contract and held is not None:
            self._check_contract(held)

    def _check_contract(self, held: VersionRef) -> None:
        registered, known = self._registered, self._digests
        if registered is None or not known.chunks:
            return
        _finish_kernels(registered.memory)
        now = self._digest(registered, known.depth)
        for chunk, before, after in zip(registered.layout.chunks, known.chunks, now, strict=True):
            if before != after:
                fqn = registered.layout.tensors[chunk.tensor].fqn
                raise ContractBroken(
                    held.version,
                    f"tensor {fqn!r} is not what it was",
                    "write only after unpublish() has returned; handle.guard(optimizer) sees to it",
                )

    def _copy(self, call: GroupCall, name: str) -> Shard:
        """This rank's part of a copy in host memory, of the last that counts of a version."""
        if name not in self._copies:
            registered, kept = self._registered, self._group.holds
            assert registered is not None
            assert kept is not None
            self._copies[name] = HostCopy(
                self._transport, registered.layout, registered.memory, kept, call.number
            )
        return _shard(self._copies[name].offer)

    def _keep_copies(self) -> None:
        for name, copy in self._copies.items():
            if not copy.is_kept:
                copy.is_kept = True
                threading.Thread(
                    target=self._keep_copy,
                    args=(name, self._group.seat),
                    name=f"torch_ros keeps {name}",
                    daemon=True,
                ).start()

    def _keep_copy(self, name: str, seat: Seat) -> None:
        """Offer a copy for as long as it is needed, also after a seat was lost and taken again."""
        copy, group = self._copies[name], self._group
        version = copy.kept.ref.version
        forever = Deadline(f"keeping version {version}", math.inf)
        shard, inst = _shard(copy.offer), name
        while True:
            try:
                if group.host(copy.kept, seat, inst, copy.call, shard, forever):
                    group.release(copy.kept.ref, seat, inst)
                break
            except SelfFenced as lost:
                group.fence(lost)
            except BackendError as error:
                log.warning("keeping version %d: %s", version, error)
            except ClosedError:
                break
            try:
                group.await_seat(forever, peers_s=math.inf)
            except (SelfFenced, ClosedError):
                break
            seat = group.seat
            inst = copy_of(seat.inst, copy.call)
        del self._copies[name]
        copy.close()
        log.info("the copy of version %d in host memory is released", version)

    # Reading

    def replicate(self, version: int | str = "latest", *, timeout_s: float | None = None) -> int:
        """Read a whole version into the registered tensors, and become a source of it.

        Collective. Blocks until the version exists; a version below the newest that nobody holds
        any more is an error. All ranks get the same version. The group's tensors together must
        be exactly the version's, in any sharding.

        Args:
            version: A number, "latest", or "latest-k" for the k-th newest that is available.

        Returns:
            The version's number.

        Raises:
            UsageError: Nothing is registered, or a version is held.
            ManifestMismatch: Other names, shapes or dtypes than the version's. We do not cast.
            VersionNotFound: The version is gone.
            SourceLost: The source vanished. The tensors' content is undefined; nothing is held.
            DeadlineExceeded, CallAborted, SelfFenced, StoreUnavailable

        Cost: 8 to 10 round trips to etcd per rank; every byte moves once.
        """
        with self._busy():
            return self._replicate(version, None, self._deadline(f"replicate {version}", timeout_s))

    def update(self, version: int | str = "latest", *, timeout_s: float | None = None) -> bool:
        """Go to `version` if it is newer than what is held; holding nothing, replicate it.

        Collective; all ranks get the same answer. With something newer: unpublish what is held
        (drained), then replicate. A relative version never goes back to an older one; an absolute
        one goes wherever it says.

        Returns:
            Whether this replica now holds another version than before. False costs one read of
            etcd; with several ranks, and one write that tells the others.

        Raises:
            Like `replicate`. Once the old version was given up, the handle holds nothing, and a
            later `update` replicates.
        """
        deadline = self._deadline(f"update {version}", timeout_s)
        with self._busy():
            self._catch_up(deadline)
            ref = self._newer(version, self._held, deadline) if self._held else None
            if self._held is not None and ref is None:
                return False
            self._unpublish(deadline)
            self._replicate(version, ref, deadline)
            return True

    def _newer(self, version: int | str, held: VersionRef, deadline: Deadline) -> VersionRef | None:
        spec, ranges = Spec.parse(version), spec_ranges(self._group.seat.keys)

        def ask(view: View) -> Step[VersionRef | None]:
            own_group(view, self._group.seat)
            offer = newer(view, self._group.seat.keys, spec, held)
            return Done(offer.ref if offer else None)

        def decide(call: GroupCall) -> VersionRef | None:
            call.decide(ranges, partial(rules.update, spec=spec, held=held))
            return call.found

        if self.world_size > 1:
            return self._make("update", deadline.what, deadline, decide)
        # Nobody could decide otherwise: one read, nothing written.
        while True:
            self._group.await_seat(deadline)
            try:
                return self._group.ask((*self._group.seat.own, *ranges), ask, deadline)
            except SelfFenced as lost:
                self._group.fence(lost)

    def _replicate(self, version: int | str, floor: VersionRef | None, deadline: Deadline) -> int:
        asked = f"replicate {version}" + (f" not below {floor.version}" if floor else "")

        def attempt(filling: _Filling) -> int:
            def body(call: GroupCall) -> int:
                self._require_registered("replicate")
                self._require_nothing_held("replicate")
                spec = Spec.parse(version)
                return self._fill(call, spec, floor, filling, Whole(), deadline)

            return self._make("replicate", asked, deadline, body)

        register = lambda _: self._require_registered("replicate")  # noqa: E731  # short
        return self._healing(attempt, lambda: _Filling(register))

    def _fill(
        self,
        call: GroupCall,
        spec: Spec,
        floor: VersionRef | None,
        filling: _Filling,
        whole: Whole,
        deadline: Deadline,
    ) -> int:
        """This rank's part in reading a version, whole or what is still missing of it."""
        watch = _Stopwatch()
        # A part of a version cannot serve those who want all of it.
        call.decide_to_read(spec, floor, is_relay=whole.is_required)
        if call.has_ended:  # while this rank had no seat; its part was done
            self._offer.serve(call.number, EVERYTHING)
            return call.ref.version
        watch.lap("decide")
        if filling.ref != call.ref:
            filling.start(call.ref)
        call.read(partial(self._fetch, call, filling, watch, deadline))
        registered, progress = filling.registered, filling.progress
        assert registered is not None
        assert progress is not None
        _mark_written(registered.memory)
        watch.lap("read")
        expected = filling.expected
        depth: Depth = expected.depth if self._depth != "off" else "off"
        self._digests = Digests(expected.depth, self._digest(registered, depth), expected.totals)
        if depth != "off":
            self._offer.show_digests(self._digests)
            watch.lap("digest")
        outcome = self._finish(
            call, registered, deadline, whole, partial(self._verify, call, filling, deadline)
        )
        watch.lap("commit")
        if not outcome.is_source:
            self._offer.void()
        self._report(call, filling, progress, registered, watch)
        return call.ref.version

    def _fetch(
        self,
        call: GroupCall,
        filling: _Filling,
        watch: _Stopwatch,
        deadline: Deadline,
        source: Source,
    ) -> None:
        feed = connect(
            self._intake,
            [shard.card for shard in source.shards],
            deadline,
            replica=replica_of(source.inst),
            call=source.call,
            is_full=source.is_full,
            is_there=partial(call.is_there, source),
            certify=partial(self._group.await_certainty, deadline),
        )
        watch.lap("manifests")
        filling.source = feed.replica
        filling.sources.append(source.inst)
        layouts = [manifest.layout for _, manifest in feed.manifests]
        if filling.registered is None:
            filling.registered = filling.register(layouts)
            filling.progress = Progress(self._offer, len(filling.registered.memory))
            _finish_kernels(filling.registered.memory)  # those that still use the old content
            filling.expected = self._expected(feed, source.inst)
            self._offer.show_digests(filling.expected)
        registered, progress = filling.registered, filling.progress
        assert progress is not None
        plans = [self._reading.plan(layouts, part.layout, self.rank) for part in registered.parts]
        watch.lap("plan")
        progress.serve(call.number)
        for plan, part in zip(plans, registered.parts, strict=True):
            self._reading.read(plan, feed, part.memory, part.chunks, progress, deadline)
            filling.landed()

    def _expected(self, feed: Feed, inst: str) -> Digests:
        """What the version's digests are, as far as this source knows."""
        manifests = [manifest for _, manifest in feed.manifests]
        depth = manifests[0].depth if manifests else "off"
        if depth == "off" or self._depth == "off":
            if self._depth != "off":
                log.warning("%s has no digests; what is read from it is not verified", inst)
            # Passed on all the same, for those who verify.
            known = next((m for m in manifests if m.totals), None)
            return Digests(known.depth, (), known.totals) if known else Digests()
        if manifests[0].totals:
            return Digests(depth, (), manifests[0].totals)
        layouts, chunks = [m.layout for m in manifests], [m.digests for m in manifests]
        return Digests(depth, (), totals(layouts, chunks, depth=depth))

    def _verify(self, call: GroupCall, filling: _Filling, deadline: Deadline) -> None:
        """By the last rank of a replica that is ready: is what all of them read what it should be?

        Raises: CorruptWeights
        """
        expected = filling.expected
        if self._depth == "off" or expected.depth == "off":
            return
        manifests = self._own_manifests(deadline)
        chunks = [manifest.digests for manifest in manifests]
        if any(len(m.digests) != len(m.layout.chunks) for m in manifests):
            log.warning("not all ranks have digests; version %d is not verified", call.ref.version)
            return
        found = totals([m.layout for m in manifests], chunks, depth=expected.depth)
        if (fqn := first_difference(found, expected.totals)) is not None:
            raise CorruptWeights(self.model, call.ref.version, fqn, filling.source)

    def _healing(self, attempt: Callable[[_Filling], T], make: Callable[[], _Filling]) -> T:
        """What was read and is not what was published is read again, rather from another source.

        All ranks get the same CorruptWeights, so all of them try again.
        """
        for tries_left in reversed(range(HEAL_TRIES)):
            filling = make()
            try:
                return attempt(filling)
            except CorruptWeights as error:
                if not tries_left:
                    raise
                log.warning("%s; reading it again", error)
                self._group.suspect(filling.sources, str(error))
        raise AssertionError("the last try returns or raises")

    def _report(
        self,
        call: GroupCall,
        filling: _Filling,
        progress: Progress,
        registered: _Registered,
        watch: _Stopwatch,
    ) -> None:
        bytes_total = sum(t.numel() * t.element_size() for t in registered.memory)
        report = ReadReport(
            call.ref.version,
            filling.source,
            call.reroutes,
            bytes_total,
            progress.bytes_read,
            watch.elapsed_s,
            watch.stages_s,
        )
        self._last_read = report
        log.info(
            "version %d of %r from %r: %.1f MB in %.1f ms, %.2f GB/s while reading, "
            "%d re-routed (%s)",
            report.version,
            self.model,
            report.source,
            bytes_total / 1e6,
            1e3 * report.elapsed_s,
            bytes_total / max(watch.stages_s["read"], 1e-9) / 1e9,
            report.reroutes,
            ", ".join(f"{stage} {1e3 * s:.1f} ms" for stage, s in watch.stages_s.items()),
        )

    def _finish(
        self,
        call: GroupCall,
        registered: _Registered,
        deadline: Deadline,
        whole: Whole = Whole(),  # noqa: B008  # a frozen value
        verify: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Ready; returns when, together with the peers, done."""

        def summarise(said: Mapping[int, str]) -> str:
            verify()
            if len(set(said.values())) == 1:
                return said[self.rank]
            # Ranks with different tensors (pipeline stages): together they hold the union.
            return logical_digest(logical(self._layouts(self._group.seat.inst, deadline)))

        return call.finish(registered.digest, summarise, whole)

    def _manifests(
        self, shards: Sequence[Shard], source: str, deadline: Deadline
    ) -> list[tuple[str, Manifest]]:
        shown = []
        for rank, shard in enumerate(shards):
            try:
                shown.append(self._intake.manifest(shard.card, deadline))
            except TransferFailed as error:
                self._intake.forget(error.agent)
                raise SourceLost(source, f"rank {rank}: {error.reason}", 0, 0) from error
        return shown

    def _layouts(self, inst: str, deadline: Deadline) -> list[Layout]:
        """What the ranks of a replica show now, which may be this one."""
        if inst != self._group.seat.inst:
            shards = self._shards(inst, deadline)
            shown = self._manifests(shards, replica_of(inst), deadline)
            return [manifest.layout for _, manifest in shown]
        return [manifest.layout for manifest in self._own_manifests(deadline)]

    def _own_manifests(self, deadline: Deadline) -> list[Manifest]:
        """What the ranks of this replica show now."""
        shards = self._shards(self._group.seat.inst, deadline)
        peers = [shard for rank, shard in enumerate(shards) if rank != self.rank]
        manifests = [m for _, m in self._manifests(peers, self.replica, deadline)]
        own = self._offer.manifest
        assert own is not None
        manifests.insert(self.rank, own)
        return manifests

    def _shards(self, inst: str, deadline: Deadline) -> list[Shard]:
        within = self._group.seat.keys.shards(inst)

        def rule(view: View) -> Step[list[Shard]]:
            return Done([Shard.decode(view.entries[key].value) for key in sorted(view.entries)])

        return self._group.ask((within,), rule, deadline)

    # What torch_ros.dcp stands on

    def _inspect(
        self, version: int | str, timeout_s: float | None
    ) -> tuple[VersionRef, Sequence[Layout]]:
        """What `version` means now, and its layouts, rank by rank. Reads no tensor.

        Takes no claim: what is read is checked against the digest in etcd instead.
        """
        with self._busy():
            deadline = self._deadline(f"find version {version}", timeout_s)
            return self._find(Spec.parse(version), deadline)

    def _find(self, spec: Spec, deadline: Deadline) -> tuple[VersionRef, Sequence[Layout]]:
        keys, refused = self._group.seat.keys, set[str]()

        def rule(view: View) -> Step[tuple[VersionRef, str, str]]:
            offer = resolve(view, keys, spec)
            if isinstance(offer, Wait):
                return offer
            entry = view.entries[keys.version(offer.ref.run, offer.ref.version)]
            own = self._group.seat.inst  # last: it is about to read from another
            sources = sorted(offer.holdings, key=lambda i: (i == own, i in refused, i))
            return Done((offer.ref, Version.decode(entry.value).layout, sources[0]))

        while True:
            ref, layout, source = self._group.ask(spec_ranges(keys), rule, deadline)
            try:
                layouts = self._layouts(source, deadline)
                if logical_digest(logical(layouts)) == layout:
                    return ref, layouts
                reason = "it shows other tensors by now"
            except PeerError as error:
                reason = str(error)
            refused.add(source)
            deadline.check(f"version {ref.version} at {replica_of(source)!r}: {reason}")
            time.sleep(0.05)

    def _save(
        self,
        version: int,
        collect: Callable[[], LocalState],
        *,
        is_staged: bool,
        timeout_s: float | None,
    ) -> None:
        """dcp.save: give up what is held, register and publish. Checked before anything changes.

        Args:
            collect: What to publish. Called within a call of the group, so that what it raises
                reaches the peers.
            is_staged: The tensors are a copy that dcp's stager made for this save.
        """
        asked = f"save {version}"
        deadline = self._deadline(asked, timeout_s)
        state: LocalState | None = None
        registered: _Registered | None = None

        def check() -> str:
            nonlocal state
            check_version(version)
            state = collect()
            build(state.tensors, state.objects, paths=state.paths)
            if is_staged and self._staged & _memory_of(state) and self._held is not None:
                raise ContractBroken(
                    self._held.version,
                    "dcp.async_save staged the next one over it; this stager reuses its buffers",
                    "call handle.unpublish() before each async_save, or use a stager that does not "
                    "keep its buffers",
                )
            return ""

        def body(call: GroupCall) -> None:
            nonlocal state, registered
            state = state or collect()
            if registered is None:
                registered = self._register(state.tensors, state.objects, state.paths)
            self._publish(call, version, registered, deadline)

        with self._busy():
            self._catch_up(deadline)
            if self._held is not None:
                effects = partial(rules.check_publishable, version=version)
                try:
                    self._agree(f"check before {asked}", deadline, check, effects)
                except ContractBroken:
                    self._unpublish(deadline)
                    raise
                self._unpublish(deadline)
            try:
                self._make("publish", asked, deadline, body)
                assert state is not None
                self._staged = _memory_of(state) if is_staged else set()
            finally:
                self._unregister_unless_held()

    def _load(
        self,
        version: int | str,
        found: tuple[VersionRef, Sequence[Layout]],
        fill: Callable[[Sequence[Layout]], LocalState],
        vet: Callable[[], object],
        *,
        is_served: bool,
        timeout_s: float | None,
    ) -> ReadReport:
        """dcp.load: give up what is held, register and read.

        Args:
            found: What `_inspect` found: the check is made against that.
            fill: From a source's layouts to what is to be read.
            vet: Called when the objects have landed; raises to refuse them.
            is_served: Whether to become a source, if the version was read whole.
        """
        asked = f"load {version}"
        deadline = self._deadline(asked, timeout_s)
        ref, layouts = found
        checked: LocalState | None = None

        def check() -> str:
            nonlocal checked
            checked = fill(layouts)
            layout, _ = build(checked.tensors, checked.objects, paths=checked.paths)
            self._reading.plan(layouts, layout, self.rank)
            if is_served and self._held == ref and self._is_registered(checked, layout):
                return "held"
            self._require_another_holder(Spec.parse(version), deadline)
            return "to be read"

        def register(now: Sequence[Layout]) -> _Registered:
            is_as_checked = all(a is b for a, b in zip(now, layouts, strict=False))
            state = checked if checked and is_as_checked else fill(now)
            return self._register(state.tensors, state.objects, state.paths)

        with self._busy():
            self._catch_up(deadline)
            if self.world_size > 1:
                said = self._agree(f"check before {asked}", deadline, check, rules.agree)
            else:
                said = check()
            if said == "held":
                assert checked is not None
                return self._already_held(checked, vet)
            self._unpublish(deadline)
            whole = Whole(is_required=False, is_served=is_served)
            spec = Spec.parse(version)

            def attempt(filling: _Filling) -> int:
                body = lambda call: self._fill(call, spec, None, filling, whole, deadline)  # noqa: E731  # short
                return self._make("replicate", asked, deadline, body)

            try:
                self._healing(attempt, lambda: _Filling(register, vet))
            finally:
                self._unregister_unless_held()
            assert self._last_read is not None
            return self._last_read

    def _is_registered(self, state: LocalState, layout: Layout) -> bool:
        """Whether these tensors are the registered ones. Objects have a new buffer each time."""
        known = self._registered
        if known is None or known.layout.digest != layout.digest:
            return False
        tensors = known.parts[-1].memory
        _, wanted = build(state.tensors, {})
        return [span_of(t) for t in tensors] == [span_of(t) for t in wanted]

    def _already_held(self, state: LocalState, vet: Callable[[], object]) -> ReadReport:
        """The version is where it is wanted; nobody may write there while it is held."""
        assert self._held is not None
        assert self._registered is not None
        for fqn, buffer in state.objects.items():
            buffer.copy_(self._registered.objects[fqn])
        vet()
        log.info("version %d of %r is already here", self._held.version, self.model)
        self._last_read = ReadReport(self._held.version, self.replica, 0, 0, 0, 0.0, {})
        return self._last_read

    def _require_another_holder(self, spec: Spec, deadline: Deadline) -> None:
        """To read a version into other tensors, this replica first gives up the copy it holds."""
        keys, own = self._group.seat.keys, self._group.seat.inst

        def rule(view: View) -> Step[None]:
            offer = resolve(view, keys, spec)
            if not isinstance(offer, Wait) and offer.holdings.keys() == {own}:
                raise UsageError(
                    f"this replica is the only one that holds version {offer.ref.version}, in "
                    "other tensors than these; load into those, or with another handle"
                )
            return Done(None)

        if self._held is not None:
            self._group.ask(spec_ranges(keys), rule, deadline)

    def _unregister_unless_held(self) -> None:
        if self._held is None:
            self._unregister()

    def _agree(
        self,
        asked: str,
        deadline: Deadline,
        check: Callable[[], str],
        effects: Callable[[View, Seat, Call], Step[Call]],
    ) -> str:
        """Go on only if the check passes on every rank. What all say; "" if they differ."""
        keys, run = self._group.seat.keys, self._group.seat.run

        def body(call: GroupCall) -> str:
            value = check()
            call.decide((keys.versions(run), keys.holdings(run)), effects)
            if not call.has_ended:
                call.finish(value, lambda said: _unanimous(said.values()))
            return call.said

        return self._make("agree", asked, deadline, body)

    # Looking around

    def list(self, *, timeout_s: float | None = None) -> dict[int, set[str]]:
        """The available versions, and the names of the replicas that hold each of them whole.

        This process's own question. Of the newest run that has a version.
        """
        deadline = self._deadline("list", timeout_s)
        keys = self._group.seat.keys
        self._require_usable()
        return self._group.ask(spec_ranges(keys), lambda view: Done(listing(view, keys)), deadline)

    def wait(
        self,
        predicate: Callable[[dict[int, set[str]]], bool],
        *,
        timeout_s: float | None = None,
    ) -> dict[int, set[str]]:
        """Block until `predicate` of what `list` returns is true; returns that.

        This process's own question; asked again at every change.

        Raises:
            DeadlineExceeded: With what `list` said last.
        """
        deadline = self._deadline("wait", timeout_s)
        keys = self._group.seat.keys

        def rule(view: View) -> Step[dict[int, set[str]]]:
            there = listing(view, keys)
            if predicate(there):
                return Done(there)
            names = {version: sorted(replicas) for version, replicas in there.items()}
            return Wait(f"available: {names or 'nothing'}", (keys.versions(), keys.holdings()))

        self._require_usable()
        return self._group.ask(spec_ranges(keys), rule, deadline)

    # The end

    def close(self) -> None:
        """Leave: everything this process published vanishes from etcd at once. Idempotent.

        Readers are not waited for; `unpublish` first to let them finish. After the return the
        tensors may be freed. In a forked child it does nothing.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        try:
            self._group.close()
        finally:
            with self._lock:  # a call in another thread ends first
                self._registered = None
                self._reading.close()
                self._intake.close()
                self._offer.close()
                self._transport.close()
            _open_handles.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Shared by the calls

    @contextmanager
    def _busy(self, *, is_member: bool = True) -> Iterator[None]:
        """One call at a time, by a process that may make one.

        Args:
            is_member: Whether the call needs this process to be in its group still.
        """
        self._require_usable()
        with self._lock:
            if is_member:
                self._group.check_final()
            yield

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{self!r} belongs to process {self._pid} and this is its fork; "
                "call torch_ros.open here"
            )
        if self._is_closed:
            raise ClosedError(f"{self!r} is closed; call torch_ros.open again")

    def _deadline(self, what: str, timeout_s: float | None) -> Deadline:
        return Deadline(what, self._timeout_s if timeout_s is None else timeout_s)

    def _require_registered(self, call: str) -> _Registered:
        if self._registered is None:
            raise UsageError(f"{call}: this handle has no tensors; register() them first")
        return self._registered

    def _require_nothing_held(self, call: str) -> None:
        if self._held is not None:
            raise UsageError(
                f"{call}: this handle holds version {self._held.version}; unpublish() it first"
            )


def _unanimous(said: Iterable[str]) -> str:
    values = set(said)
    return values.pop() if len(values) == 1 else ""


def _memory_of(state: LocalState) -> set[tuple[int, int]]:
    return {span_of(chunk.tensor) for tensor in state.tensors for chunk in tensor.chunks}


def _finish_kernels(memory: Sequence[torch.Tensor]) -> None:
    """Wait for what was queued on these tensors: nobody else orders it before our reads."""
    for device in {tensor.device for tensor in memory if tensor.is_cuda}:
        torch.cuda.synchronize(device)  # of all streams: they may have been queued on any


def _mark_written(memory: Sequence[torch.Tensor]) -> None:
    """Let autograd notice that these were overwritten behind its back."""
    for tensor in memory:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


@functools.cache
def _close_open_handles_at_exit() -> None:
    # Not when this module is imported: nixl comes later, and the last to register is run first.
    atexit.register(_close_open_handles)


def _close_open_handles() -> None:
    for handle in list(_open_handles):
        try:
            handle.close()
        except TorchRosError as error:
            log.warning("closing %r at exit: %s", handle, error)
