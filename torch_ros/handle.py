"""ShardHandle: one process's shard of a replica. Ties the store, the weights and p2p together."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Literal, NamedTuple, Self, TypeVar, get_args

import torch
from torch.utils.hooks import RemovableHandle

from torch_ros import arguments
from torch_ros.beginnings import Beginning, Beginnings
from torch_ros.closing import Closing
from torch_ros.copies import Copies, shard_of
from torch_ros.errors import (
    BackendError,
    CallAborted,
    ClosedError,
    ContractBroken,
    PeerError,
    SelfFenced,
    TorchRosError,
    UsageError,
)
from torch_ros.exchange import EVERYTHING, Intake, Offer
from torch_ros.filling import Filler, Filling, ReadReport
from torch_ros.identity import identify
from torch_ros.p2p import cma
from torch_ros.p2p.memory import MemoryTransport
from torch_ros.p2p.transport import Transport
from torch_ros.reading import Reading
from torch_ros.registered import LocalState, Named, Registered, finish_kernels, memory_of
from torch_ros.staged import Copying, StagingBuffers
from torch_ros.store import rules
from torch_ros.store.aside import Aside
from torch_ros.store.ending import Leaving
from torch_ros.store.endpoint import connect as connect_store
from torch_ros.store.group import (
    CLEAN_UP_S,
    DOES_NOT_WAIT,
    Group,
    GroupCall,
    Missed,
    Place,
)
from torch_ros.store.keys import Keys, copy_of, replica_of
from torch_ros.store.loops import Done, Step, Wait
from torch_ros.store.patience import Patience
from torch_ros.store.records import Call, Kind, Shard, Version, VersionRef, mark
from torch_ros.store.rules import Whole
from torch_ros.store.run import Deadline
from torch_ros.store.seat import Seat, own_group
from torch_ros.store.txn import Unseen, View, whole
from torch_ros.store.versions import (
    Spec,
    check_version,
    listing,
    newer,
    newer_ranges,
    resolve,
    shows_all,
    spec_ranges,
)
from torch_ros.weights.digest import Depth
from torch_ros.weights.local import build, local_chunks, span_of
from torch_ros.weights.manifest import OBJECT, Layout, logical
from torch_ros.weights.plan import HOST_COSTS, NIXL_COSTS, TCP_COSTS, Costs

T = TypeVar("T")
log = logging.getLogger(__name__)

ENDPOINT_VARIABLE = "TORCH_ROS_ENDPOINT"
TRANSPORT_VARIABLE = "TORCH_ROS_TRANSPORT"
CHECK_CONTRACT_VARIABLE = "TORCH_ROS_CHECK_CONTRACT"
DEFAULT_ENDPOINT = "local"
State = Literal["seated", "away", "gone", "closed"]
TransportName = Literal["auto", "ucx", "ucx-tcp", "memory"]

OPTIONS: Mapping[str, arguments.Check] = {  # of `open`
    "model": arguments.text,
    "endpoint": arguments.optional(arguments.text),
    "replica": arguments.optional(arguments.text),
    "rank": arguments.optional(arguments.whole(0, 999_998)),  # keys have six digits for it
    "world_size": arguments.optional(arguments.whole(1, 999_999)),
    "run": arguments.optional(arguments.text),
    "datacenter": arguments.text,
    "spot": arguments.yes_or_no,
    "timeout_s": arguments.seconds,
    "ttl_s": arguments.whole(2, 24 * 3600),  # 2: etcd's least, at its default election timeout
    "drain_s": arguments.seconds,
    "linger_s": arguments.seconds,
    "check_contract": arguments.yes_or_no,
    "relay": arguments.yes_or_no,
    "staging_bytes": arguments.whole(0, 1 << 40),
    "costs": arguments.optional(arguments.instance(Costs)),
}
COSTS = {  # of what this process copies itself, and of what it does not
    "auto": (HOST_COSTS, NIXL_COSTS),
    "memory": (HOST_COSTS, HOST_COSTS),
    "ucx": (NIXL_COSTS, NIXL_COSTS),
    "ucx-tcp": (TCP_COSTS, TCP_COSTS),
}
COPY_THREADS_MAX = 4  # a few fill the memory's channels

# Strong references: a handle that is dropped without close() goes on serving what it published,
# so its tensors must stay.
_open_handles: set[ShardHandle] = set()
_aside = Aside("torch_ros closes")


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
    linger_s: float = 30.0,
    digests: Depth = "off",
    check_contract: bool = False,
    relay: bool = True,
    transport: TransportName | None = None,
    staging_bytes: int = 4 << 20,
    costs: Costs | None = None,
) -> ShardHandle:
    """Take this process's place in a replica of `model`.

    Collective: every rank of the replica opens it; returns on each once all have. With a process
    group, ranks open their handles in the same order.

    Args:
        model: The name under which versions are published.
        endpoint: Where etcd is: "etcd://host:port[,host:port]", "etcds://..." over TLS; "local",
            an etcd on this host that is found or started; "memory://name", a store inside this
            process. None: the environment's TORCH_ROS_ENDPOINT, else "local".
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
        ttl_s: Seconds after which a dead process's records vanish from etcd; 2 to 86,400.
        drain_s: How long `unpublish` waits for readers; those that take longer go on from another
            source, or fail.
        linger_s: How long `close` stays with a version that is retained, and that nobody else
            has, for another replica to take it.
        digests: Of the content of what is published, and of what was read: "full" finds every
            flipped bit and every element in a wrong place, at a few GB/s per thread; "sampled"
            looks at 1/64 of it; "off" trusts. What was published with digests is verified by
            replicas that are opened with either, to the depth of the publisher.
        check_contract: For debugging. Also digest what is published when it is unpublished, and
            raise ContractBroken if it was written to in between. The environment's
            TORCH_ROS_CHECK_CONTRACT=1 turns it on without a change of code.
        relay: While this replica reads a version, others may read from it the part that is there.
        transport: "ucx": NIXL over UCX, which takes the best way that both ends have (shared
            memory, RDMA, TCP); "ucx-tcp": TCP alone, the same on all replicas; "memory": within
            this process; "auto": "memory" for a store in memory, else "ucx", but host memory of
            sources on this host is copied directly, by up to four threads, if they too have "auto":
            mapped if it is shared (`Tensor.share_memory_`), else as UCX's cma does. None: the
            environment's TORCH_ROS_TRANSPORT, else "auto".
        staging_bytes: Size of the buffer through which short strided runs are read, if there are
            any. On hosts, one that fits the processor's cache beats a larger one.
        costs: What reading and copying take here, by which short strided runs are read one by one,
            or by whole rows into staging. None: as measured, for the transport, near or far.

    Raises:
        UsageError: Bad arguments, or ranks that disagree about them; or this process was forked
            from one that had a handle open.
        StoreUnavailable: Nothing that speaks etcd v3 answers at the endpoint, or nobody listened
            there for all of `timeout_s`.
        AccessDenied: etcd refuses the certificate, the user or its role.
        DeadlineExceeded: Not all ranks came.
    """
    arguments.check(locals(), OPTIONS)
    if digests not in get_args(Depth):
        raise UsageError(f"digests={digests!r}: expected one of {', '.join(get_args(Depth))}")
    if isinstance(retain, str) or not isinstance(retain, Sequence):
        raise UsageError(f"retain={retain!r}: expected a list, such as ('latest',)")
    retained = tuple(str(Spec.parse(version)) for version in retain)
    wanted = os.environ.get(TRANSPORT_VARIABLE)
    way = transport or wanted or "auto"
    reason = "asked for" if transport else f"{TRANSPORT_VARIABLE} is set" if wanted else "default"
    if way not in get_args(TransportName):
        names = ", ".join(get_args(TransportName))
        raise UsageError(f"transport={way!r}: expected one of {names}")
    check_contract = check_contract or os.environ.get(CHECK_CONTRACT_VARIABLE) == "1"
    deadline = Deadline(f"open({model!r})", timeout_s)
    place = identify(replica, rank, world_size, timeout_s=timeout_s)
    endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT
    kv = connect_store(endpoint, timeout_s=timeout_s)
    ways: Transport | None = None
    group: Group | None = None
    depth: Depth = "full" if check_contract and digests == "off" else digests
    try:
        ways = _transport(endpoint, way, reason)
        offer = Offer(ways)
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
            shard=shard_of(offer),
        )
        group = Group.join(kv, seat, deadline)
        handle = ShardHandle(
            model,
            group,
            ways,
            offer,
            timeout_s=timeout_s,
            linger_s=linger_s,
            staging_bytes=staging_bytes,
            costs=(costs, costs) if costs else COSTS[way],
            depth=depth,
            check_contract=check_contract,
            relay=relay,
        )
    except BaseException:
        if group is not None:
            group.close()
        if ways is not None:
            ways.close()
        kv.close()
        raise
    log.info("opened %s at %s, run %r", handle, kv.endpoint, group.seat.run)
    return handle


def _transport(endpoint: str, name: str, reason: str) -> Transport:
    if name == "memory" or (name == "auto" and endpoint.startswith("memory:")):
        log.info("transport: within this process")
        return MemoryTransport()
    # Importing nixl loads UCX and takes a second; a store in memory can do without.
    from torch_ros.p2p.nixl import NixlTransport  # noqa: PLC0415
    from torch_ros.p2p.shared import SharedTransport  # noqa: PLC0415

    how = {"ucx": "", "ucx-tcp": ", TCP", "auto": "; memory of this host is copied"}[name]
    log.info("transport: NIXL over UCX%s (%s)", how, reason)
    nixl = NixlTransport(tcp_only=name == "ucx-tcp")
    # Peers of either kind can talk.
    return SharedTransport(nixl, is_used=name == "auto", threads=_copy_threads())


def _copy_threads() -> int:
    """How many cores may copy for this process, when all of torchrun's on this host read."""
    if not cma.is_allowed(os.environ.get("UCX_TLS", "")):
        return 0
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    cores = len(os.sched_getaffinity(0)) // max(1, int(ranks) if ranks.isdecimal() else 1)
    return max(1, min(cores, COPY_THREADS_MAX))


class Found(NamedTuple):
    """What a version meant when somebody asked."""

    ref: VersionRef
    layouts: Sequence[Layout]  # rank by rank
    is_only_here: bool  # nobody but the replica that asked holds it


class Fit(NamedTuple):
    """What is to be read into, and what that means."""

    state: LocalState
    said: str  # "held", "whole" or "a part"; "" if the ranks differ


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
    process's own. Safe to call from several threads, one call at a time. A signal handler that
    makes one in the middle of another, in the same thread, gets a UsageError.

    A rank that closes its handle ends the replica for its peers: what they still call then is a
    SelfFenced error, but for list, wait, unpublish and close.

    After `fork` the child's copy does nothing and raises `ClosedError`. No handle can be opened in
    a child whose parent had one open at the fork: use spawn, or fork first.
    """

    def __init__(
        self,
        model: str,
        group: Group,
        transport: Transport,
        offer: Offer,
        *,
        timeout_s: float,
        linger_s: float,
        staging_bytes: int,
        costs: tuple[Costs, Costs],
        depth: Depth,
        check_contract: bool,
        relay: bool,
    ) -> None:
        self.model = model
        self._checks_contract = check_contract
        self._group, self._transport, self._offer = group, transport, offer
        self._timeout_s, self._staging_bytes = timeout_s, staging_bytes
        self._intake = Intake(transport)
        self._reading = Reading(transport, self._intake, staging_bytes, costs)
        offer.before_withdraw = self._reading.forget
        self._registered: Registered | None = None
        self._named: Named | None = None  # what `register` was given; not what dcp registers
        self._filler = Filler(
            model, group, offer, self._intake, self._reading, depth=depth, relays=relay
        )
        self._copies = Copies(group, transport)
        self._beginnings = Beginnings(group, self._end_dcp)
        group.skip = self._skip
        self._staging = StagingBuffers()
        self._lock = threading.RLock()
        self._ending = threading.Lock()
        self._caller = 0  # the thread that is in a call
        self._pid = os.getpid()
        self._linger_s = linger_s
        self._closing: Closing | None = None
        self._is_closed = False
        self._hurries = False  # close, for somebody does not wait for it any more
        self._staged: set[tuple[int, int]] = set()  # memory of dcp's staged copy, if published
        _open_handles.add(self)
        _close_open_handles_at_exit()

    @property
    def _held(self) -> VersionRef | None:
        kept = self._group.holds
        return kept.ref if kept else None

    def __repr__(self) -> str:
        held = f", version={self._held.version}" if self._held else ""
        state = "" if self.state == "seated" else f", {self.state}"
        return (
            f"ShardHandle(model={self.model!r}, replica={self.replica!r}, "
            f"rank={self.rank} of {self.world_size}{held}{state})"
        )

    def __reduce__(self) -> str | tuple[object, ...]:
        """A handle is this process's seat: neither pickle nor copy can make another.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"{self!r} cannot be pickled or copied: it is this process's own seat; call "
            "torch_ros.open in the process that needs a handle"
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
        return self._filler.last_read

    @property
    def state(self) -> State:
        """Where this process stands with etcd.

        "seated": it has its place in the replica. "away": it lost that, and takes it again by
        itself. "gone": it lost that for good; close this handle. "closed": `close` was called.
        """
        return "closed" if self._is_closed else self._group.state

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
                referenced until `unregister` or `close`. One that has other memory (`p.data =
                ...`) or another shape (`p.t_()`) when the next `publish` or `replicate` begins
                is found and registered again.

        Raises:
            UsageError: Something is registered, or a tensor is not plain strided memory.
        """

        def register() -> None:
            if self._registered is not None:
                raise UsageError("this handle has registered tensors; unregister() them first")
            self._register_named(named_tensors)

        self._busy(register)

    def unregister(self) -> None:
        """Forget the tensors. Local to this rank. May be called again.

        Raises:
            UsageError: A version is held; `unpublish` first.
        """

        def unregister() -> None:
            self._require_nothing_held("unregister")
            self._unregister()

        self._busy(unregister)

    def _register(self, state: LocalState) -> Registered:
        registered = Registered.of(state)
        if registered is self._registered:
            return registered
        try:
            self._offer.show(
                registered.layout, registered.addresses, registered.devices, registered.regions
            )
        except BaseException:
            self._unregister()
            raise
        self._registered, self._named = registered, None
        return registered

    def _register_named(self, tensors: Mapping[str, torch.Tensor]) -> Registered:
        registered = self._register(LocalState(local_chunks(tensors), {}, {}))
        self._named = Named(tensors)
        return registered

    def _unregister(self) -> None:
        self._offer.withdraw()
        self._registered = self._named = None

    def _ready(self, call: str) -> Registered:
        """What is registered, where it is now, for a call that begins with nothing held."""
        registered = self._require_registered(call)
        self._require_nothing_held(call)
        named = self._named
        if named is None or not (moved := named.moved):
            return registered
        log.info(
            "%d of %d registered tensors have other memory or shapes now (%s, ...); "
            "registered again",
            len(moved),
            len(named.tensors),
            moved[0],
        )
        return self._register_named(named.tensors)

    # Publishing

    def publish(
        self,
        version: int,
        *,
        timeout_s: float | None = None,
        store_wait_s: float | None = None,
    ) -> bool:
        """Offer the registered tensors as `version`. No bytes move.

        Collective. Returns on each rank once the whole replica is offered. The tensors are read
        in place: do not write to them or free them until `unpublish` has returned.

        Args:
            version: Not below the newest of the run; gaps are fine.
            store_wait_s: How long to wait for etcd once it has been away for longer than `ttl_s`,
                and for ranks from which it is. The same on all ranks. None: until `timeout_s`
                are over, which is an error. 0: return at once; what is held by all ranks when
                etcd is back is offered then, in the order of their calls.

        Returns:
            Whether it is offered now. False: not yet, as far as this rank knows. `version` is
            what it holds all the same, and `list` does not show that. Should the run have gone
            on without it by the time etcd is back, a warning says so, and nothing is held.

        Raises:
            UsageError: Nothing is registered, or a version is held. Nothing was published.
            VersionConflict: A newer version exists. Nothing was published.
            ManifestMismatch: Ranks, or another replica that publishes this version, have other
                tensors. Nothing was published.
            DeadlineExceeded, CallAborted: Not all ranks came. Nothing was published.
            SelfFenced, StoreUnavailable

        Cost: 3 round trips to etcd, with several ranks up to 6 each; no copy.
        """
        asked = f"publish {version}"
        deadline = self._deadline(asked, timeout_s)

        def body(call: GroupCall) -> bool:
            if self._held is None and call.may_hold is None:
                self._offer.void()  # the last call's end may have been a bad one
            self._publish(call, version, self._ready("publish"), deadline)
            return True

        def unseated(call: GroupCall) -> bool:
            return self._publish_without_store(call, version, self._ready("publish"))

        make = partial(self._make, "publish", asked, deadline, body, unseated, store_wait_s)
        return self._busy(lambda: self._whole(asked, make))

    def publish_copy(
        self,
        version: int,
        named_tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        keep_dtype: Sequence[str] = (),
        staging_bytes: int | None = None,
        timeout_s: float | None = None,
        store_wait_s: float | None = None,
    ) -> bool:
        """Copy these tensors and offer the copy as `version`, in place of what is held.

        Collective. For tensors that are cast on the way (fp32 masters to bf16), are not
        contiguous, or are allocated anew at every step. They may be written to as soon as this
        returns. The copy is made before the last version is given up, in one of two buffers that
        are registered once; they stay until `close`, and what they hold is registered until
        `unregister`.

        Args:
            version: As for `publish`.
            named_tensors: As for `register`.
            dtype: What floating-point tensors are cast to; None: they are copied as they are.
            keep_dtype: Names of tensors that are not cast, as patterns ("*.norm.*").
            staging_bytes: Bound on the two buffers together; None: twice the shard.
            store_wait_s: As for `publish`.

        Returns:
            As `publish`.

        Raises:
            As `publish`; and UsageError: The copy does not fit into `staging_bytes`.

        Cost: As unpublish and publish, and one copy on each rank.
        """
        copying = Copying(dtype, keep_dtype, staging_bytes)
        return self._save(
            version,
            lambda: LocalState(local_chunks(named_tensors), {}, {}),
            is_staged=False,
            copying=copying,
            timeout_s=timeout_s,
            store_wait_s=store_wait_s,
        )

    def _make(
        self,
        kind: Kind,
        asked: str,
        deadline: Deadline,
        body: Callable[[GroupCall], T],
        unseated: Callable[[GroupCall], T] | None = None,
        store_wait_s: float | None = None,
    ) -> T:
        """The group's next call. Whoever reads from here learns if nothing is held after it."""
        if store_wait_s is None:
            unseated = None
        else:
            arguments.seconds("store_wait_s", store_wait_s)
        try:
            return self._group.make(
                kind, asked, deadline, body, unseated=unseated, store_wait_s=store_wait_s
            )
        except Missed as missed:
            call = missed.call
            if call.outcome is None:  # the peers are in it
                assert call.ref is not None
                body_ = partial(self._unpublish_held, held=call.ref)
                try:
                    self._group.make("unpublish", call.asked, deadline, body_)
                finally:
                    self._copies.keep()
            raise
        finally:
            if self._held is None:
                self._offer.void()

    def _whole(self, asked: str, flow: Callable[[], T], begun: Beginning | None = None) -> T:
        """A call of the caller, with all of the group's calls that it consists of."""
        self._end_those_left(begun)
        return self._as_part_of(asked, flow)

    def _as_part_of(self, asked: str, flow: Callable[[], T]) -> T:
        """Made from its beginning again when this rank finds that its peers have unpublished."""
        before, self._group.caller = self._group.caller, asked
        try:
            while True:
                try:
                    return flow()
                except Missed as missed:
                    log.warning("%s: %r came first, made by the peers", asked, missed.call.asked)
        finally:
            self._group.caller = before

    def _skip(self, learn: Callable[[], None]) -> None:
        """This rank did not make a call that its peers have made."""
        self._offer.void()
        try:
            learn()
        finally:
            if (kept := self._group.held) is not None:  # nobody may have written to it
                self._offer.serve(mark(kept.ref.uid, kept.call), EVERYTHING)

    def _refuse(self, asked: str, error: BaseException) -> None:
        """End the group's next call, which the peers make as a part of `asked`."""
        deadline = Deadline(f"giving up {asked}", CLEAN_UP_S)

        def refuse() -> None:
            self._make("agree", asked, deadline, lambda call: call.refuse(error))

        try:
            self._as_part_of(asked, refuse)
        except TorchRosError as ended:
            log.info("%s: ended for all ranks: %s", asked, ended)

    def _unpublish_first(
        self,
        asked: str,
        deadline: Deadline,
        *,
        may_forget: bool = True,
        counted: VersionRef | None = None,
    ) -> None:
        """As a part of `asked`: the peers go on to its next part."""
        try:
            self._unpublish(deadline, may_forget=may_forget, counted=counted)
        except BaseException as error:
            if self._held is None:  # or the unpublish has failed for all
                self._refuse(asked, error)
            raise

    # Calls of DCP, from where they begin

    def _begin_dcp(self, asked: str, storage: object) -> Beginning:
        """A call of DCP begins on this rank. It comes to `_save` or `_load`, or is ended.

        Args:
            storage: The writer or reader. When nobody has it any more, the call will not come.
        """
        made = self._beginnings.begin(asked, storage)

        def end_those_left() -> None:
            self._end_those_left(made)
            made.number = self._group.calls_made + 1

        if self._beginnings.left(made):
            self._busy(end_those_left, is_member=False)
        return made

    def _end_those_left(self, mine: Beginning | None) -> None:
        for one in self._beginnings.left(mine):
            why = f"{one.asked!r} failed on this rank before its data were asked for"
            self._end_now(one, self._beginnings.error(why))

    def _end_dcp(self, one: Beginning, error: TorchRosError) -> None:
        self._busy(partial(self._end_now, one, error), is_member=False)

    def _end_now(self, one: Beginning, error: TorchRosError) -> None:
        if one.state == "begun":
            log.warning("%s", error)
            one.state, one.failure = "over", error
            self._refuse(one.asked, error)

    def _here(self, begun: Beginning | None, call: Callable[[], T]) -> T:
        """`call`, which has come to where the group is asked.

        Raises:
            CallAborted: Too late: it was ended, for all ranks.
        """
        if begun is not None and begun.failure is not None:
            raise begun.failure
        if begun is not None:
            begun.state = "here"
        try:
            return call()
        finally:
            if begun is not None:
                begun.state = "over"

    def _catch_up(self, deadline: Deadline, patience: Patience | None = None) -> None:
        """Learn how the last call ended, before the next one or before the tensors are given back.

        Its end may have been a bad one, and readers still believe what this process shows.
        """
        self._group.catch_up(deadline, patience)
        if self._held is None:
            self._offer.void()

    def _begin(
        self, kind: Kind, asked: str, deadline: Deadline, store_wait_s: float | None = None
    ) -> None:
        """`_catch_up`, by a call that is made of several; its number is used in any case."""
        try:
            self._catch_up(deadline, Patience(store_wait_s=store_wait_s))
        except SelfFenced as lost:
            if store_wait_s is None or not lost.may_return:
                self._group.pass_over(kind, asked, deadline)
                raise

    def _publish(
        self, call: GroupCall, version: int, registered: Registered, deadline: Deadline
    ) -> None:
        call.decide_to_publish(check_version(version))
        self._filler.publish(call, registered, deadline)
        log.info("published version %d of %r", version, self.model)

    def _publish_without_store(self, call: GroupCall, version: int, registered: Registered) -> bool:
        self._filler.publish_without_store(call, check_version(version), registered)
        log.info("version %d of %r is held, and offered when etcd is back", version, self.model)
        return False

    def guard(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """From now on, `unpublish` before each step of `optimizer`, which writes to its parameters.

        Collective, as the step is: the optimizers of all ranks step together. What `unpublish`
        raises, `step` raises, and no parameter has changed.

        Returns:
            A hook; its `remove()` ends this.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"guard({optimizer!r}): expected a torch.optim.Optimizer")
        return optimizer.register_step_pre_hook(lambda *_: self.unpublish())

    def unpublish(self, *, timeout_s: float | None = None) -> None:
        """Stop offering what is held; returns once nobody reads it any more.

        Collective, but it waits for readers only, not for the peers' calls: the first rank's call
        counts for all. From then on the tensors may be written. Holding nothing, it does nothing.
        Readers that are not done after the handle's `drain_s` are left behind: what they still
        read does not count for them. So are all when etcd is away: it waits for that no longer
        than the lease lasts, at most `ttl_s` and once in an outage. What the memory says to
        readers needs no etcd.

        If this is the last copy of a retained version, it is copied to host memory first, by all
        ranks, and so waits for all. While etcd is away, it is copied if it may be the last,
        and offered when etcd is back.

        Raises:
            DeadlineExceeded: Somebody still reads; the version is not offered any more, and
                calling again goes on waiting. The tensors must not be written yet.
            StoreUnavailable: Likewise, before the lease is over.
            ContractBroken: With `check_contract`: they were written to. It is unpublished.
        """

        def unpublish() -> None:
            deadline = self._deadline("unpublish", timeout_s)
            self._whole("unpublish", lambda: self._unpublish(deadline))

        self._busy(unpublish, is_member=False)

    def _unpublish(
        self,
        deadline: Deadline,
        *,
        may_forget: bool = True,
        counted: VersionRef | None = None,
    ) -> None:
        """
        Args:
            may_forget: Whether to go on without etcd.
            counted: The version that ranks without a seat take for held, and make this call for.
        """
        held, counted = self._held, counted or self._group.not_waited_for
        try:
            self._catch_up(deadline, Patience(is_unpublish=may_forget))
            if (held := self._held or counted) is None:
                return
            try:
                self._make(
                    "unpublish",
                    f"unpublish {held.version}",
                    deadline,
                    partial(self._unpublish_held, held=held),
                )
            finally:
                self._copies.keep()
        except SelfFenced as lost:
            if lost.may_return and not may_forget:
                raise
            self._copy_without_store()
            if not self._group.forget(counted):
                self._unpublish(deadline, may_forget=may_forget, counted=counted)
                return
            # The store has forgotten this replica; readers ask the memory, which now says no.
            self._offer.void()
            self._copies.keep()
            log.info("%s; its tensors are taken back without the store", lost)
        if self._checks_contract and held is not None:
            self._check_contract(held)

    def _copy_without_store(self) -> None:
        """Copy what is retained, and may be nowhere else; it is offered when etcd is back."""
        number, registered = self._group.must_copy(), self._registered
        if number is None or registered is None:
            return
        try:
            self._copies.make(number, registered, self._filler.digests)
        except (BackendError, RuntimeError, MemoryError) as error:
            log.warning("version %d may be lost, it cannot be copied: %s", self.version, error)

    def _unpublish_held(self, call: GroupCall, held: VersionRef) -> None:
        def copy(_: str) -> Shard:
            assert self._registered is not None
            return self._copies.make(call.number, self._registered, self._filler.digests)

        call.unpublish(held, copy)

    def _check_contract(self, held: VersionRef) -> None:
        registered, known = self._registered, self._filler.digests
        if registered is None or not known.chunks:
            return
        finish_kernels(registered)
        now = registered.digests(known.depth)
        for chunk, before, after in zip(registered.layout.chunks, known.chunks, now, strict=True):
            if before != after:
                fqn = registered.layout.tensors[chunk.tensor].fqn
                raise ContractBroken(
                    held.version,
                    f"tensor {fqn!r} is not what it was",
                    "write only after unpublish() has returned; handle.guard(optimizer) sees to it",
                )

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

        Cost: 5 round trips to etcd, with several ranks up to 8 each; every byte moves once.
        """

        def replicate() -> int:
            deadline = self._deadline(f"replicate {version}", timeout_s)
            return self._whole(deadline.what, lambda: self._replicate(version, None, deadline))

        return self._busy(replicate)

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

        def update() -> bool:
            self._begin("update", deadline.what, deadline)
            ref = self._newer(version, self._held, deadline) if self._held else None
            if self._held is not None and ref is None:
                return False
            self._unpublish_first(deadline.what, deadline, may_forget=False)
            self._replicate(version, ref, deadline)
            return True

        return self._busy(lambda: self._whole(deadline.what, update))

    def _newer(self, version: int | str, held: VersionRef, deadline: Deadline) -> VersionRef | None:
        spec, ranges = Spec.parse(version), newer_ranges(self._group.seat.keys)

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
            session = self._group.session
            try:
                return self._group.ask((*self._group.seat.own, *ranges), ask, deadline)
            except SelfFenced as lost:
                self._group.fence(lost, session)

    def _replicate(self, version: int | str, floor: VersionRef | None, deadline: Deadline) -> int:
        asked = f"replicate {version}" + (f" not below {floor.version}" if floor else "")

        def attempt(filling: Filling) -> int:
            def body(call: GroupCall) -> int:
                self._ready("replicate")
                spec = Spec.parse(version)
                return self._filler.fill(call, spec, floor, filling, Whole(), deadline)

            return self._make("replicate", asked, deadline, body)

        def make() -> Filling:
            bytes_total = self._registered.bytes_total if self._registered else 0
            return Filling(lambda _: self._require_registered("replicate"), bytes_total)

        return self._filler.healing(attempt, make)

    # What torch_ros.dcp stands on

    def _inspect(self, version: int | str, timeout_s: float | None) -> Found:
        """What `version` means now, and its layouts, rank by rank. Reads no tensor.

        Takes no claim: what is read is checked against the digest in etcd instead.
        """

        def find() -> Found:
            deadline = self._deadline(f"find version {version}", timeout_s)
            return self._find(Spec.parse(version), deadline)

        return self._busy(find)

    def _find(self, spec: Spec, deadline: Deadline) -> Found:
        keys, refused = self._group.seat.keys, set[str]()

        def rule(view: View) -> Step[tuple[VersionRef, str, str]]:
            offer = resolve(view, keys, spec)
            if isinstance(offer, Wait):
                return offer
            key = keys.version(offer.ref.run, offer.ref.version)
            own = self._group.seat.inst  # last: it is about to read from another
            sources = sorted(offer.holdings, key=lambda i: (i == own, i in refused, i))
            if sources[0] in {own, *refused} and not shows_all(view, keys, offer):
                raise Unseen
            record = Version.decode(view.entries[key].value, key)
            return Done((offer.ref, record.layout, sources[0]))

        while True:
            ref, layout, source = self._group.ask(spec_ranges(keys), rule, deadline)
            try:
                layouts = self._filler.layouts(source, deadline)
                if logical(layouts).digest == layout:
                    return Found(ref, layouts, source == self._group.seat.inst)
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
        copying: Copying | None = None,
        timeout_s: float | None,
        store_wait_s: float | None = None,
        begun: Beginning | None = None,
    ) -> bool:
        """dcp.save: give up what is held, register and publish. Checked before anything changes.

        Args:
            collect: What to publish. Called within a call of the group, so that what it raises
                reaches the peers.
            is_staged: The tensors are a copy that dcp's stager made for this save.
            copying: Publish a copy of ours instead of them.
            begun: The answer of `_begin`, where that was called.
        """
        asked = f"save {version}"
        deadline = self._deadline(asked, timeout_s)
        state: LocalState | None = None
        registered: Registered | None = None

        def gather() -> LocalState:
            found = collect()
            return found if copying is None else self._staging.fill(found, copying)

        def check() -> str:
            nonlocal state
            check_version(version)
            state = gather()
            _ = state.layout  # it has one
            if is_staged and self._staged & memory_of(state) and self._held is not None:
                raise ContractBroken(
                    self._held.version,
                    "dcp.async_save staged the next one over it; this stager reuses its buffers",
                    "call handle.unpublish() before each async_save, or use a stager that does not "
                    "keep its buffers",
                )
            return ""

        def register() -> Registered:
            nonlocal state, registered
            state = state or gather()
            if registered is None:
                registered = self._register(state)
            return registered

        def body(call: GroupCall) -> bool:
            self._publish(call, version, register(), deadline)
            return True

        def unseated(call: GroupCall) -> bool:
            return self._publish_without_store(call, version, register())

        def save() -> bool:
            nonlocal registered
            registered = None
            self._give_way(asked, version, check, deadline, store_wait_s)
            try:
                is_offered = self._make("publish", asked, deadline, body, unseated, store_wait_s)
                assert state is not None
                self._staged = memory_of(state) if is_staged else set()
                return is_offered
            finally:
                if copying is not None and self._held is not None:
                    self._staging.turn()
                self._unregister_unless_held()

        return self._busy(lambda: self._here(begun, partial(self._whole, asked, save, begun)))

    def _give_way(
        self,
        asked: str,
        version: int,
        check: Callable[[], str],
        deadline: Deadline,
        store_wait_s: float | None,
    ) -> None:
        """Unpublish what is held for what is saved, if that can succeed on every rank."""
        counted = self._group.not_waited_for
        if self._held is None:
            self._begin("publish", asked, deadline, store_wait_s)
        else:
            self._begin("agree", rules.CHECK + asked, deadline, store_wait_s)
        if self._held is None and counted is None:
            return
        effects = partial(rules.check_publishable, version=version)
        try:
            self._agree(rules.CHECK + asked, deadline, check, effects, store_wait_s)
        except ContractBroken:
            self._unpublish(deadline, counted=counted)
            raise
        except CallAborted as error:  # a rank that is cut off has looked for itself
            if store_wait_s is None or error.reason != DOES_NOT_WAIT:
                raise
        self._unpublish_first(asked, deadline, counted=counted)

    def _check_load(
        self,
        version: int | str,
        found: Found,
        fill: Callable[[Sequence[Layout]], LocalState],
        *,
        is_served: bool,
        timeout_s: float | None,
    ) -> Fit:
        """What `_load` checks before it changes anything, on this rank alone.

        For who has the other ranks at hand anyway, as dcp has while it plans.
        """
        deadline = self._deadline(f"{rules.CHECK}load {version}", timeout_s)

        def fit() -> Fit:
            self._catch_up(deadline)
            return self._fit(version, found, fill, deadline, is_served=is_served)

        return self._busy(fit)

    def _fit(
        self,
        version: int | str,
        found: Found,
        fill: Callable[[Sequence[Layout]], LocalState],
        deadline: Deadline,
        *,
        is_served: bool,
    ) -> Fit:
        ref, layouts, is_only_here = found
        state = fill(layouts)
        layout = state.layout
        self._reading.plan(layouts, layout, self.rank)
        if is_served and self._held == ref and self._is_registered(state, layout):
            return Fit(state, "held")
        if is_only_here:
            self._require_another_holder(Spec.parse(version), deadline)
        is_whole = logical([layout]).digest == logical(layouts).digest
        return Fit(state, "whole" if is_served and is_whole else "a part")

    def _load(
        self,
        version: int | str,
        found: Found,
        fill: Callable[[Sequence[Layout]], LocalState],
        vet: Callable[[], object],
        *,
        is_served: bool,
        timeout_s: float | None,
        fit: Fit | None = None,
        begun: Beginning | None = None,
    ) -> ReadReport:
        """dcp.load: give up what is held, register and read.

        Args:
            found: What `_inspect` found: the check is made against that.
            fill: From a source's layouts to what is to be read.
            vet: Called when the objects have landed; raises to refuse them.
            is_served: Whether to become a source, if the version was read whole.
            fit: What `_check_load` found, if it was called on all ranks and passed on all, with
                what all ranks said (`unanimous`). None: the ranks ask each other here.
            begun: The answer of `_begin`, where that was called.
        """
        asked = f"load {version}"
        deadline = self._deadline(asked, timeout_s)
        _, layouts, _ = found
        checked: LocalState | None = None

        def check() -> str:
            nonlocal checked
            checked, said = self._fit(version, found, fill, deadline, is_served=is_served)
            return said

        def register(now: Sequence[Layout]) -> Registered:
            is_as_checked = all(a is b for a, b in zip(now, layouts, strict=False))
            state = checked if checked and is_as_checked else fill(now)
            return self._register(state)

        def load() -> ReadReport:
            nonlocal checked
            self._begin("agree", rules.CHECK + asked, deadline)
            if fit is not None:
                checked, said = fit
            elif self.world_size > 1:
                said = self._agree(rules.CHECK + asked, deadline, check, rules.agree)
            else:
                said = check()
            if said == "held":
                assert checked is not None
                return self._already_held(checked, vet)
            self._unpublish_first(asked, deadline, may_forget=False)
            spec = Spec.parse(version)
            whole = Whole(is_required=False, is_served=is_served, is_relayed=said == "whole")

            def attempt(filling: Filling) -> int:
                body = lambda call: self._filler.fill(call, spec, None, filling, whole, deadline)  # noqa: E731  # short
                return self._make("replicate", asked, deadline, body)

            bytes_total = checked.bytes_total if checked else 0
            try:
                self._filler.healing(attempt, lambda: Filling(register, bytes_total, vet))
            finally:
                self._unregister_unless_held()
            report = self._filler.last_read
            assert report is not None
            return report

        return self._busy(lambda: self._here(begun, partial(self._whole, asked, load, begun)))

    def _is_registered(self, state: LocalState, layout: Layout) -> bool:
        """Whether these tensors are the registered ones. Objects have a new buffer each time."""
        known = self._registered
        if state.known is not None:
            return state.known is known
        if known is None:
            return False
        there, here = known.layout, layout
        if self.world_size == 1:  # nobody else has any of it
            there, here = there.unspread, here.unspread
        if there.digest != here.digest:
            return False
        is_object = [record.dtype == OBJECT for record in known.layout.tensors]
        chunks = zip(known.layout.chunks, known.memory, strict=True)
        tensors = [memory for chunk, memory in chunks if not is_object[chunk.tensor]]
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
        report = ReadReport(self._held.version, self.replica, 0, 0, 0, 0.0, {})
        self._filler.last_read = report
        return report

    def _require_another_holder(self, spec: Spec, deadline: Deadline) -> None:
        """To read a version into other tensors, this replica first gives up the copy it holds."""
        keys, own = self._group.seat.keys, self._group.seat.inst

        def rule(view: View) -> Step[None]:
            offer = resolve(view, keys, spec)
            if isinstance(offer, Wait) or offer.holdings.keys() - {own}:
                return Done(None)
            if not shows_all(view, keys, offer):
                raise Unseen
            raise UsageError(
                f"this replica is the only one that holds version {offer.ref.version}, in "
                "other tensors than these; load into those, or with another handle"
            )

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
        store_wait_s: float | None = None,
    ) -> str:
        """Go on only if the check passes on every rank. What all say; "" if they differ."""
        keys, run = self._group.seat.keys, self._group.seat.run

        def body(call: GroupCall) -> str:
            value = check()
            call.decide((keys.versions(run), keys.holdings(run)), effects)
            if not call.has_ended:
                call.finish(value, lambda said: unanimous(said.values()))
            return call.said

        return self._make("agree", asked, deadline, body, lambda _: check(), store_wait_s)

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

        This process's own question; asked again at every change, at most 20 times a second.

        Raises:
            DeadlineExceeded: With what `list` said last.
        """
        deadline = self._deadline("wait", timeout_s)
        keys = self._group.seat.keys
        ranges = spec_ranges(keys)

        def rule(view: View) -> Done[dict[int, set[str]]] | Wait:
            there = listing(view, keys)
            if predicate(there):
                return Done(there)
            names = {version: sorted(replicas) for version, replicas in there.items()}
            return Wait(f"available: {names or 'nothing'}", whole(ranges))

        self._require_usable()
        return self._group.follow(whole(ranges), rule, deadline)

    # The end

    def close(self, *, linger_s: float | None = None) -> None:
        """Leave: what this process published is not offered any more. Idempotent.

        A version that is retained, here or elsewhere, and held nowhere else stays until another
        replica has it: for at most `linger_s`, while one that is not spot lives and could take it,
        and until those have finished that read it then. Handing over takes all ranks, which close
        at about the same time; one that ends without ends it. Other versions go at once, and their
        readers are not waited for; `unpublish` first to let them finish.

        The tensors must not be written to before the return, and may be freed after it. In a
        forked child it does nothing.

        Args:
            linger_s: None: as `open` was told; 0 while an exception is handled.

        Raises:
            UsageError: By a signal handler, within a call of this handle.
        """
        if os.getpid() != self._pid:
            return
        arguments.optional(arguments.seconds)("linger_s", linger_s)
        if linger_s is None:
            linger_s = self._linger_s if sys.exception() is None else 0.0
        self._refuse_nested("closed")
        self._is_closed = True
        if linger_s <= 0:
            self._hurry()  # one that is under way in another thread
        try:
            # Ctrl-C ends the wait for it, and not the closing; who calls again waits on.
            _aside.run(partial(self._end, linger_s))
        except BaseException:
            self._hurry()
            raise

    def _hurry(self) -> None:
        self._hurries = True
        if self._closing is not None:
            self._closing.stop()

    def _end(self, linger_s: float) -> None:
        with self._ending:
            if self not in _open_handles:
                return
            try:
                self._group.close(partial(self._hand_over, linger_s))
            finally:
                self._copies.close()
                with self._lock:  # a call in another thread ends first
                    self._offer.void()  # readers in the middle notice; then the memory may go
                    self._reading.close()
                    self._intake.close()
                    self._offer.close()
                    self._registered = self._named = None
                    self._transport.close()
                _open_handles.discard(self)

    def _hand_over(self, linger_s: float) -> bool:
        group, seat = self._group, self._group.seat
        if group.held is None and not self._copies:
            return False
        # A call in another thread ends first.
        if not self._lock.acquire(timeout=max(0.0, linger_s)):
            return False
        try:
            # A version that is not certainly held may be half there.
            held = None if group.unfinished else group.held
            made = [
                (copy.kept.ref, copy.call, copy_of(seat.inst, copy.call), copy.offer)
                for copy in self._copies.made
            ]
            if held is not None:
                made.append((held.ref, held.call, seat.inst, self._offer))
            leaving = [
                Leaving(seat.keys, ref, call, inst, shard_of(offer), group.retain)
                for ref, call, inst, offer in made
            ]
        finally:
            self._lock.release()
        self._closing = Closing(group, leaving, 0.0 if self._hurries else linger_s)
        if self._hurries:
            self._closing.stop()
        return self._closing.hand_over()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(linger_s=self._linger_s if kind is None else 0.0)

    # Shared by the calls

    def _busy(self, call: Callable[[], T], *, is_member: bool = True) -> T:
        """`call`, one at a time, by a process that may make one.

        No context manager in Python: Ctrl-C between its steps and those of who uses it would leave
        the lock taken.

        Args:
            is_member: Whether the call needs this process to be in its group still.
        """
        self._require_usable()
        self._refuse_nested("used")
        with self._lock:
            try:
                self._caller = threading.get_ident()
                if is_member:
                    self._group.check_final()
                return call()
            finally:
                self._caller = 0

    def _refuse_nested(self, what: str) -> None:
        """Not by a signal handler: the call that it interrupts goes on afterwards."""
        if self._caller == threading.get_ident():
            raise UsageError(
                f"{self} cannot be {what} within a call that it is in the middle of; let the "
                "signal handler raise (SystemExit, say), and go on when the call has ended"
            )

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{self!r} belongs to process {self._pid} and this is its fork; open one in a "
                "process that is started with spawn, or was forked before this was opened"
            )
        if self._is_closed:
            raise ClosedError(f"{self!r} was closed before; call torch_ros.open again")

    def _deadline(self, what: str, timeout_s: float | None) -> Deadline:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        arguments.seconds("timeout_s", timeout_s)
        group = self._group
        return Deadline(what, timeout_s, check_open=group.check_open, hint=group.hint)

    def _require_registered(self, call: str) -> Registered:
        if self._registered is None:
            raise UsageError(f"{call}: this handle has no tensors; register() them first")
        return self._registered

    def _require_nothing_held(self, call: str) -> None:
        if self._held is not None:
            raise UsageError(
                f"{call}: this handle holds version {self._held.version}; unpublish() it first"
            )


def unanimous(said: Iterable[str]) -> str:
    """What all of them say; "" if they differ."""
    values = set(said)
    return values.pop() if len(values) == 1 else ""


@functools.cache
def _close_open_handles_at_exit() -> None:
    # Not when this module is imported: nixl comes later, and the last to register is run first.
    atexit.register(_close_open_handles)


def _close_open_handles() -> None:
    for handle in list(_open_handles):
        try:
            handle.close(linger_s=0.0)
        except TorchRosError as error:
            log.warning("closing %r at exit: %s", handle, error)
