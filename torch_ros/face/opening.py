"""`open`: check what the caller asks for, take the seat, and make the handle."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, get_args

from torch_ros import arguments, environment
from torch_ros.costs import Costs
from torch_ros.deadline import Deadline
from torch_ros.errors import UsageError
from torch_ros.face.choose import Network, TransportName, choose_transport
from torch_ros.face.handle import ShardHandle
from torch_ros.face.identity import Identity, identify
from torch_ros.face.models import hint
from torch_ros.face.progress import OnProgress, displays
from torch_ros.features.fallback.flow import Fallback, asks_for, bucket_below  # feature fallback
from torch_ros.features.fallback.rules import knows  # feature fallback
from torch_ros.features.following.chosen import Chosen, UpdatePolicy  # feature following
from torch_ros.features.handover.flow import Handover  # feature handover
from torch_ros.features.huge_pages.pages import huge_pages_for  # feature huge_pages
from torch_ros.features.installs.records import NAME as INSTALL  # feature installs
from torch_ros.features.installs.records import Install  # feature installs
from torch_ros.features.lending.buffers import lend  # feature lending
from torch_ros.features.pace.judging import Pacing  # feature pace
from torch_ros.features.pace.rules import SlowOnes  # feature pace
from torch_ros.features.retention.copying import LastCopies  # feature retention
from torch_ros.features.retention.flow import Retention  # feature retention
from torch_ros.features.seeding.forerunner import Forerunner  # feature seeding
from torch_ros.features.seeding.near_first import NearFirst  # feature seeding
from torch_ros.features.seeding.rules import check_policy, forerunner_of  # feature seeding
from torch_ros.features.tracing.spans import Spans  # feature tracing
from torch_ros.fleet.life import Sign, seen_here
from torch_ros.p2p.pages import Pages
from torch_ros.p2p.transport import Transport
from torch_ros.printable import log_of
from torch_ros.protocol.applicant import Applicant
from torch_ros.protocol.group import Group
from torch_ros.protocol.keys import DEFAULT_DATACENTER, OUTSIDE, Keys
from torch_ros.shard.core import Settings, Shard, shard_of
from torch_ros.shard.seams import Feature
from torch_ros.store.endpoint import connect as connect_store
from torch_ros.transfer.mailbox import Mailbox
from torch_ros.transfer.reading import Reading
from torch_ros.weights.manifest import Depth

log: logging.Logger = log_of(__name__)

DEFAULT_ENDPOINT = "local"
Seeding = Literal["foreground", "host"]  # feature seeding


def _several(name: str, value: object) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UsageError(f"{name}={value!r}: expected a list, such as ('latest',)")


def _function(name: str, value: object) -> None:
    if not callable(value):
        raise UsageError(f"{name}={value!r}: expected a function of two numbers")


def _run(name: str, value: object) -> None:
    arguments.optional(arguments.text)(name, value)
    if value == OUTSIDE:
        raise UsageError(f"{name}={value!r}: versions that come from a bucket have that name")


# feature following {
def _policy(name: str, value: object) -> None:
    if not callable(getattr(value, "choose", None)):
        raise UsageError(f"{name}={value!r}: expected an object with a method `choose`")


# } following

OPTIONS: Mapping[str, arguments.Check] = {  # of `open`
    "model": arguments.text,
    "endpoint": arguments.optional(arguments.text),
    "replica": arguments.optional(arguments.text),
    "rank": arguments.optional(arguments.whole(0, 999_998)),  # keys have six digits for it
    "world_size": arguments.optional(arguments.whole(1, 999_999)),
    "run": _run,
    "bucket": arguments.maybe_text,  # feature fallback
    "datacenter": arguments.text,
    "fabric": arguments.optional(arguments.text),  # feature fabrics
    "wan_devices": arguments.texts,  # feature fabrics
    "listen": arguments.optional(arguments.text),  # feature tcp
    "spot": arguments.yes_or_no,
    "installs": arguments.yes_or_no,  # feature installs
    "timeout_s": arguments.seconds,
    "ttl_s": arguments.whole(2, 24 * 3600),  # 2: etcd's least, at its default election timeout
    "drain_s": arguments.seconds,
    "linger_s": arguments.seconds,
    "digests": arguments.one_of(get_args(Depth)),
    "check_contract": arguments.yes_or_no,  # feature contract
    "relay": arguments.yes_or_no,
    "staging_bytes": arguments.whole(0, 1 << 40),
    "costs": arguments.optional(arguments.instance(Costs)),
    "retain": _several,  # feature retention
    "borrow_bytes": arguments.whole(0, 1 << 50),  # feature lending
    "huge_pages": arguments.yes_or_no,  # feature huge_pages
    "on_progress": arguments.optional(_function),
    "policy": arguments.optional(_policy),  # feature following
    "seeding": arguments.one_of(get_args(Seeding)),  # feature seeding
    "seeding_bytes": arguments.optional(arguments.whole(0, 1 << 50)),  # feature seeding
}


def open(  # noqa: A001  # the paper's name for it, used as torch_ros.open
    model: str,
    *,
    endpoint: str | None = None,
    replica: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    run: str | None = None,
    bucket: str | None = None,  # feature fallback
    retain: Sequence[str | int] = (),  # feature retention
    datacenter: str = DEFAULT_DATACENTER,
    fabric: str | None = None,  # feature fabrics
    wan_devices: Sequence[str] = (),  # feature fabrics
    listen: str | None = None,  # feature tcp
    spot: bool = False,
    installs: bool = False,  # feature installs
    timeout_s: float = 300.0,
    ttl_s: int = 10,
    drain_s: float = 60.0,
    linger_s: float = 30.0,
    digests: Depth = "off",
    check_contract: bool = False,  # feature contract
    relay: bool = True,
    transport: TransportName | None = None,
    staging_bytes: int = 4 << 20,
    costs: Costs | None = None,
    huge_pages: bool = True,  # feature huge_pages
    borrow_bytes: int = 0,  # feature lending
    on_progress: OnProgress | None = None,
    policy: UpdatePolicy | None = None,  # feature following
    seeding: Seeding = "foreground",  # feature seeding
    seeding_bytes: int | None = None,  # feature seeding
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
        rank: This process's place in the replica. None: the process group's, else torchrun's,
            else 0.
        world_size: How many processes the replica has. None: as with `rank`, else 1.
        run: Where `publish` goes. Versions grow within a run. None: the newest living run, or, if
            there is none but for archivers, that of the bucket, or a new one; "new": a new one
            (after a rollback to an older step); else the run of that name.
        bucket: The URL of a bucket that `torch-ros archive` writes this model's versions to. When
            nobody has held any version for 2 to 3 `ttl_s`, a `replicate` or `update` of "latest"
            reads the newest one that the bucket has in full and that fits, and this replica serves
            it to the others. Not once this handle has held a version of another origin. One
            rank decides; all ranks are given the same. Takes the extra `bucket`. None: the
            environment's TORCH_ROS_BUCKET, else, and with "", nothing is read from a bucket.
        retain: Versions that shall not be lost while this replica is there: "latest", "latest-1",
            ..., or a number. The replica that unpublishes the last copy outside spot
            replicas copies it to host memory first, where it stays until another replica has it
            or it is no longer retained. With "@here" behind it, as in "latest@here": of the
            versions that this datacenter has, and until another replica of it has that one.
        datacenter: A version is read from another one only where nobody in this one has it, or is
            reading it: so it crosses a slow link once. The others read from those here. No
            `unpublish` waits for that link: it copies to host memory what somebody else still
            reads across it, and nobody else has.
        fabric: Processes with one name may reach each other by NIXL; all others over TCP alone.
            None: the datacenter.
        wan_devices: The network devices at which readers reach this process over TCP, such as
            ("eth1",): `listen` without a port. Readers of its own datacenter need one too, where
            neither RDMA nor a GPU leads here.
        listen: Where readers reach this process over TCP: addresses or network devices,
            then a port, or a range of which the first free one is taken: "eth0",
            "10.0.0.7,eth1:7000", "[fd00::7]:7000-7099", ":7000-7099". Loopback is always among
            them. Each handle of a host takes a port of its own; so does `seeding="host"`. None: the
            environment's TORCH_ROS_LISTEN, else all addresses and a port of the kernel's choice.
        spot: This replica may vanish at any time: its copies do not count for `retain`.
        installs: This replica feeds an engine, and says by `installing` which version that uses:
            `wait_installed` waits for it, from now on. The same on all ranks. Whatever reads
            with this handle, as replicate, update, read, stream, borrow and dcp.load do, is a
            UsageError outside of `installing`.
        timeout_s: Seconds for this call, and the default for the handle's calls.
        ttl_s: Seconds after which a dead process's records vanish from etcd; 2 to 86,400.
        drain_s: How long `unpublish` waits for readers; those that take longer go on from another
            source, or fail.
        linger_s: How long `close` stays with a version that is retained, and that nobody else
            has, for another replica to take it, or for an archiver to write it to its bucket.
        digests: Of the content of what is published, and of what was read: "full" finds every
            flipped bit and every element in a wrong place, at a few GB/s per thread; "sampled"
            looks at 1/64 of it; "off" trusts. Versions published with digests are verified by
            replicas that are opened with either, to the depth of the publisher.
        check_contract: For debugging. Also digest what is published when it is unpublished, and
            raise ContractBroken if it was written to in between. The environment's
            TORCH_ROS_CHECK_CONTRACT=1 turns it on without a change of code.
        relay: While this replica reads a version, others may read from it the part that is there.
        transport: How weights are read, from replicas that have a way in common. "auto": "memory"
            for a store in memory; else host memory of sources on this host is copied, by up to four
            threads: mapped if it is a buffer of a copy or a lent one, else by the kernel; all else
            comes over "tcp", or, where both ends have RDMA or a GPU that leads from one to the
            other, by "nixl". "tcp": sockets of torch_ros's own, encrypted beyond a host, by which
            nothing is reached but what is registered; on a host memory is copied as with "auto".
            "nixl": NIXL alone, which listens on no port to other hosts. "ucx": NIXL over UCX with
            its own TCP, by which whoever reaches its ports reads and writes all memory of the
            process; "ucx-tcp": its TCP alone. "memory": within this process. None: the
            environment's TORCH_ROS_TRANSPORT, else "auto".
        staging_bytes: Size of the buffer through which short strided runs are read, if there are
            any. On hosts, one that fits the processor's cache beats a larger one.
        costs: The time that reading and copying take here, by which short strided runs are read one
            by one, or by whole rows into staging. None: as measured, for the transport, near or
            far.
        huge_pages: Bring registered host memory onto huge pages, in the background, where peers on
            this host copy it: they then read up to twice as fast. Takes half a core for 5 s per
            GiB, once; `ShardHandle.huge_pages` says how far it is. Pinned memory is left alone.
            The environment's TORCH_ROS_HUGE_PAGES=0 turns it off without a change of code.
        borrow_bytes: How much of the copies that this process publishes, in bytes of their tensors,
            may be lent at a time to processes on this host that `borrow` them; whole copies only.
            If loans last, `publish_copy` takes so much memory at most beside its two buffers, if
            copies are of one size. It never waits for a borrower: a version that would exceed the
            bound is not lent. For borrowers that go from version to version, twice the shard. 0:
            nothing is lent.
        on_progress: Called with the bytes that have arrived and the bytes in all, after each batch
            of a read, by the thread that reads. Its exceptions are logged. None: a read of more
            than a second draws a bar if stderr is a terminal, on the first rank of each host;
            not if the environment has TORCH_ROS_PROGRESS=0.
        policy: Chooses the version that `update` and `follow` go to, if they are asked for a
            relative one: the object's method `choose(available, held)` does (`UpdatePolicy`). The
            same on all ranks. Where it has nothing to choose from, `update` returns False and asks
            no bucket, also while nothing is held: begin with a `replicate`. None: the newest.
        seeding: How a newer version comes into a datacenter that does not have it. "foreground":
            an `update` reads it, however slow the link is, with nothing held meanwhile. "host":
            `update` has it fetched into host memory, in the background and by one replica of the
            datacenter, and returns False until it is there; this replica goes on with what it has.
            Then replicas go to it, and the copy is let go of when one of them has it. Takes a
            copy of the shard, in host memory and for that long.
        seeding_bytes: How much host memory such a copy may take in this process. With less than
            the shard has, an `update` that would fetch is a UsageError. None: what the host has.

    Raises:
        UsageError: Bad arguments, or ranks that disagree about them; or this process was forked
            from one that had a handle open.
        StoreUnavailable: Nothing that speaks etcd v3 answers at the endpoint, or nobody listened
            there for all of `timeout_s`.
        AccessDenied: etcd refuses the certificate, the user or its role.
        DeadlineExceeded: Not all ranks came.
        BackendError: The store of the process group failed.
    """
    arguments.check(locals(), OPTIONS)
    keeper = LastCopies.of(retain)  # feature retention
    way, reason = _chosen(transport)
    # feature contract {
    check_contract = check_contract or environment.value(environment.CHECK_CONTRACT) == "1"
    digests = "full" if check_contract and digests == "off" else digests
    # } contract
    chosen = Settings(timeout_s, linger_s, digests, relay, displays(on_progress))
    deadline = Deadline(f"open({model!r})", timeout_s)
    place = identify(model, replica, rank, world_size, timeout_s=timeout_s)
    # feature following {
    check_policy(policy, seeding)  # feature seeding
    # } following
    endpoint = endpoint or environment.value(environment.ENDPOINT) or DEFAULT_ENDPOINT
    network = Network()
    network = _elsewhere(fabric or datacenter, wan_devices)  # feature fabrics
    network = _listening(network, listen)  # feature tcp
    means = _Means(model, endpoint, timeout_s, way, network, reason, staging_bytes, costs)
    applicant = partial(Applicant, keys=Keys(model), rank=place.rank, world_size=place.world_size)
    applicant = partial(applicant, run=run, datacenter=datacenter, ttl_s=ttl_s, drain_s=drain_s)
    own = partial(applicant, shared_nonce=place.nonce or "", spot=spot)
    own = partial(own, keeper=keeper)  # feature retention
    says: dict[str, Any] = {}  # in the shard's record
    # feature fallback {
    below = bucket_below(environment.value(environment.BUCKET) if bucket is None else bucket, model)
    own, says = partial(own, **asks_for(below, deadline)), says | knows(below)
    # } fallback
    own = partial(own, prefers=forerunner_of(place.replica))  # feature seeding
    says |= {"carries": {INSTALL: Install().carried}} if installs else {}  # feature installs
    _serve_figures()  # before there is a seat that an error or Ctrl-C would leave behind
    pages: Callable[[Transport], Pages] = _as_they_are
    pages = partial(huge_pages_for, is_wanted=huge_pages)  # feature huge_pages
    shard = means.shard(place, own, chosen, deadline, says, pages)

    # feature fallback {
    if below is not None:
        shard.attach(Fallback(shard, below))
    # } fallback
    # feature seeding {
    ahead = _Ahead(means, place, applicant, chosen, shard)
    forerunner = Forerunner(shard, ahead, seeding_bytes) if seeding == "host" else None
    shard.policy = NearFirst(shard, forerunner)
    # } seeding
    shard.policy = shard.policy if policy is None else Chosen(policy)  # feature following
    handle = ShardHandle(
        shard,
        check_contract,  # feature contract
    )
    lend(handle.copies, shard.transport.agent, borrow_bytes)  # feature lending
    return handle


# feature fabrics {
def _elsewhere(fabric: str, devices: Sequence[str]) -> Network:
    network = Network(fabric)
    network = replace(network, listen=",".join(devices))  # feature tcp
    return network  # noqa: RET504  # without tcp, what is above


# } fabrics
# feature tcp {
def _listening(network: Network, listen: str | None) -> Network:
    if listen and network.listen:
        found = f"listen={listen!r}, wan_devices={network.listen.split(',')}"
        raise UsageError(f"{found}: expected one of the two")
    return replace(network, listen=listen or network.listen)


# } tcp
def _as_they_are(_: Transport) -> Pages:
    return Pages()


def _serve_figures() -> None:
    """If the environment says where."""
    if not environment.value(environment.METRICS_PORT):
        return
    try:
        from torch_ros.metrics.process import serve_as_told  # noqa: PLC0415  # an extra
    except ImportError:
        log.warning(
            "no figures are served: %s takes prometheus-client; install torch-ros with the extra "
            "metrics",
            environment.METRICS_PORT,
        )
    else:
        serve_as_told()


@dataclass(frozen=True, slots=True)
class _Means:
    """The things that all seats of one `open` are made with."""

    model: str
    endpoint: str
    timeout_s: float
    way: str
    network: Network
    reason: str
    staging_bytes: int
    costs: Costs | None

    def shard(
        self,
        place: Identity,
        applicant: Callable[..., Applicant],
        settings: Settings,
        deadline: Deadline,
        says: Mapping[str, Any] = MappingProxyType({}),
        pages_of: Callable[[Transport], Pages] = _as_they_are,
    ) -> Shard:
        """Take a seat, with all that belongs to it."""
        name = place.replica
        with ExitStack() as undo:
            # First: in a child that was forked beside a handle NIXL refuses, and grpc would be at a
            # loss.
            is_here = self.endpoint.startswith("memory:")
            ways = choose_transport(
                self.way,
                self.network,
                replica=name,
                rank=place.rank,
                in_process=is_here,
                reason=self.reason,
            )
            undo.callback(ways.close)
            kv = undo.enter_context(closing(connect_store(self.endpoint, timeout_s=self.timeout_s)))
            pages = pages_of(ways)
            reading = Reading(ways, self.staging_bytes, self.costs, pages)
            mailbox, sign = Mailbox(ways, reading.forget), Sign()
            undo.callback(sign.close)
            applicant = partial(applicant, leaves=SlowOnes())  # feature pace
            own = applicant(replica=name, shard=shard_of(mailbox, **says), seen=seen_here(sign))
            group = Group.join(kv, own, deadline)
            undo.callback(group.close)
            shard = Shard(self.model, group, ways, mailbox, reading, settings, pages)
            shard.hint = partial(hint, group)
            shard.tracing = Spans(shard)  # feature tracing
            shard.attach(_Signed(sign))
            shard.attach(Pacing())  # feature pace
            shard.attach(Retention(shard))  # feature retention
            shard.attach(Handover(shard))  # feature handover
            undo.pop_all()
        log.info("opened %r at %s, run %r", shard, kv.endpoint, group.seat.run)
        return shard


class _Signed(Feature):
    """The sign of a seat, which stays until its handle has closed."""

    def __init__(self, sign: Sign) -> None:
        self._sign = sign

    def has_closed(self) -> None:
        self._sign.close()


# feature seeding {
@dataclass(frozen=True, slots=True)
class _Ahead:
    """Takes the seat of a replica's forerunner, with a nonce."""

    means: _Means
    place: Identity
    applicant: Callable[..., Applicant]
    settings: Settings
    shard: Shard

    def __call__(self, nonce: str, deadline: Deadline, on_progress: OnProgress) -> Shard:
        place = replace(self.place, replica=forerunner_of(self.place.replica))
        settings = replace(self.settings, relay=True, displays=displays(on_progress))
        seat = self.shard.group.seat
        # Spot: nobody counts on a copy that is let go of when it has been used.
        there = partial(self.applicant, shared_nonce=nonce, spot=True)
        there = partial(there, run=seat.run, datacenter=seat.datacenter)
        there = partial(there, keeper=LastCopies())  # feature retention
        return self.means.shard(place, there, settings, deadline)


# } seeding


def _chosen(transport: str | None) -> tuple[str, str]:
    """The name of the transport to use, and the reason for it."""
    wanted = environment.value(environment.TRANSPORT)
    way = transport or wanted or "auto"
    arguments.one_of(get_args(TransportName))("transport", way)
    if transport:
        return way, "asked for"
    return way, f"{environment.TRANSPORT} is set" if wanted else "default"
