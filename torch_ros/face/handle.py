"""ShardHandle: one process's shard of a replica, as its users see it."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Literal, Self, overload

import torch
from torch.utils.hooks import RemovableHandle

from torch_ros import arguments
from torch_ros.copies.buffers import CopyBuffers, Copying
from torch_ros.copies.transforms import Transform
from torch_ros.copies.turns import HostBuffers
from torch_ros.deadline import Deadline
from torch_ros.errors import UsageError
from torch_ros.face.aio import AsyncHandle
from torch_ros.features.contract.flow import Contract  # feature contract
from torch_ros.features.deltas.copies import DeltaOptions  # feature deltas
from torch_ros.features.deltas.flow import Deltas  # feature deltas
from torch_ros.features.following import flow as following  # feature following
from torch_ros.features.handover.archiving import Archives  # feature handover
from torch_ros.features.huge_pages.pages import HugePageReport, HugePages  # feature huge_pages
from torch_ros.features.installs.installing import Installing, Installs  # feature installs
from torch_ros.features.installs.records import Install  # feature installs
from torch_ros.features.installs.waiting import Installed, Waiting  # feature installs
from torch_ros.features.lending.borrowing import Borrowed, borrowing  # feature lending
from torch_ros.features.prefetch.flow import Prefetching  # feature prefetch
from torch_ros.features.reading.reads import Reads  # feature reading
from torch_ros.features.seeding.near_first import policy_for  # feature seeding
from torch_ros.features.streams.stream import Stream, Streams  # feature streams
from torch_ros.fleet.fleet import Fleet, fleet_ranges
from torch_ros.protocol.records import Asked, VersionRef
from torch_ros.protocol.versions import Spec, check_version, listing, spec_ranges
from torch_ros.shard.checkpoint import Checkpoints, SaveRequest
from torch_ros.shard.collective import checked, collectively
from torch_ros.shard.core import Shard, State
from torch_ros.shard.finding import Contents, wait_for
from torch_ros.shard.publishing import Content, publish
from torch_ros.shard.replication import Target, replicate
from torch_ros.shard.report import ReadReport, Report
from torch_ros.shard.updating import UpdateRequest, update
from torch_ros.store.loops import Done
from torch_ros.transfer.named import Named, tensors_of
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.local import local_chunks


class ShardHandle:
    """One replica's shard in this process: it publishes or replicates, one version at a time.

    Life cycle, on all ranks of the replica and in the same order:

    1. `torch_ros.open`
    2. `register` the tensors
    3. trainer: `publish`; mutate only after `unpublish` has returned; again from 3
       rollout: `replicate`, then `update` as often as wanted, or `follow`
    4. `unpublish`, `unregister`, `close`; or just `close`

    publish, unpublish, replicate, update, read, serve, the beginning of a stream and both ends of
    installing are calls of the whole group: every rank makes the same ones in the same order, no
    collective is involved, and all get the same answer or the same error. An error on one rank ends
    the call on all of them. All other calls are this process's own. Safe to call from several
    threads, one call at a time. A signal handler that makes one in the middle of another, in the
    same thread, gets a UsageError.

    `timeout_s` bounds a call; None: as `open` was told. Beside the errors that stand at each call,
    DeadlineExceeded says that time was over, StoreUnavailable that etcd did not answer, ClosedError
    that the handle is closed; and of a call of the group CallAborted that another rank failed,
    SeatLost that the seat is lost, or that a rank has closed its handle: this ends the replica for
    its peers, except for list, wait, unpublish and close.

    After `fork` the child's copy does nothing and raises `ClosedError`. No handle can be opened in
    a child whose parent had one open at the fork: use spawn, or fork first.
    """

    def __init__(
        self,
        shard: Shard,
        check_contract: bool = False,  # noqa: FBT002  # feature contract
    ) -> None:
        self._shard = shard
        self.model: str = shard.model
        self.checkpoints: Checkpoints = Checkpoints(shard)
        """For torch_ros.dcp; no stable interface."""
        self.copies: CopyBuffers = (copies := CopyBuffers(HostBuffers()))
        """For torch_ros.dcp; no stable interface."""
        shard.observed.staged["buffers"] = lambda: copies.size_bytes  # which keeps no handle
        # feature handover {
        self.archives: Archives = Archives(shard)
        """For torch_ros.bucket; no stable interface."""
        # } handover
        self._contract = Contract(shard, checks=check_contract)  # feature contract
        self._reads = Reads(shard)  # feature reading
        self._streams = Streams(shard)  # feature streams
        self._installs = Installs(shard)  # feature installs
        self._prefetching = Prefetching(shard)  # feature prefetch
        self._deltas = Deltas(shard)  # feature deltas

    def __repr__(self) -> str:
        return repr(self._shard)

    def __reduce__(self) -> str | tuple[object, ...]:
        """Refuse to be pickled or copied: neither can make another seat.

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
        return self._shard.group.seat.replica

    @property
    def rank(self) -> int:
        """This process's place in the replica."""
        return self._shard.group.seat.rank

    @property
    def world_size(self) -> int:
        """The number of processes that hold the replica together."""
        return self._shard.group.seat.world_size

    @property
    def run(self) -> str:
        """The run in which this handle publishes."""
        return self._shard.group.seat.run

    @property
    def version(self) -> int | None:
        """The version that this replica holds and serves; None: none."""
        held = self._shard.held
        return held.version if held else None

    @property
    def last_read(self) -> ReadReport | None:
        """The report of the handle's last replicate, update, read or dcp.load."""
        return self._shard.reports.last_read

    @property
    def reports(self) -> tuple[Report, ...]:
        """The last 64 reports of this rank, the oldest first: how long each part of a call took.

        A `ReadReport` for each replicate, update, read or dcp.load, a `PublishReport` for each
        publish, a `DrainReport` for each unpublish, also as a part of another call. One is added
        when a call has ended well. Any thread may ask, at any time.
        """
        return self._shard.reports.last()

    @property
    def aio(self) -> AsyncHandle:
        """Replicate, update, follow and wait as coroutines."""
        return AsyncHandle(self, self._shard)

    # feature huge_pages {
    @property
    def huge_pages(self) -> HugePageReport:
        """How much of the registered memory was made of huge pages; see `open(huge_pages=...)`."""
        assert isinstance(self._shard.pages, HugePages)
        return self._shard.pages.report

    # } huge_pages
    @property
    def state(self) -> State:
        """Where this process stands with etcd.

        "seated": it has its place in the replica. "away": it lost that, and takes it again by
        itself. "gone": it lost that for good; close this handle. "closed": `close` was called.
        """
        return self._shard.state

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._shard.is_closed

    # Tensors

    def register(self, named_tensors: Named) -> None:
        """Name the tensors that are published from, or replicated into. Local to this rank.

            handle.register(model)

        Args:
            named_tensors: One of these:

                - A module of torch: its parameters, frozen ones too, and its persistent buffers,
                  under the names of its `state_dict()`, tied ones under each of theirs. They are
                  looked up anew when `publish`, `replicate` or `update` begins, in FSDP2's sharded
                  form; other tensors by then (`p.data = ...`, `.to()`, `to_empty()`,
                  `load_state_dict(assign=True)`, a new `nn.Parameter`) take their place. What
                  `get_extra_state` gives is left out.
                - A function that returns a mapping, called anew at the same moments: for a part of
                  a module (`lambda: {n: p for n, p in model.named_parameters() if
                  p.requires_grad}`), or for names of your own. It is to return the tensors in use,
                  not copies, into which nothing is read, and costs some 10 us a tensor each time.
                - A mapping of fqns to tensors, any dtype and shape, also 0-d, empty, non-contiguous
                  or sharing memory. It is looked at anew, too, and other memory or another shape of
                  a tensor is found. One that has taken another's place in a module is not, nor
                  what those of `state_dict()`, which are aliases, miss when a parameter gets other
                  memory; only `guard` can find that. So pass the module.

                A DTensor stands for its local chunk, a `Chunked` for its boxes; any other tensor is
                the whole. Where ranks differ the lowest one's counts. Not copied, not modified;
                referenced until `unregister` or `close`, also while a save or load shows others.

        Raises:
            UsageError: Something is registered, a tensor is not plain strided memory, the boxes of
                a `Chunked` do not fit together, or a module's `state_dict()` makes tensors that it
                does not own (FSDP1, dequantising hooks).
        """

        def register() -> None:
            self._shard.tensors.register(LocalState.of(named_tensors))
            for feature in self._shard.features:
                feature.registers()

        self._shard.busy(register)

    def unregister(self) -> None:
        """Forget the tensors. Local to this rank. May be called again.

        Raises:
            UsageError: A version is held; `unpublish` first.
        """

        def unregister() -> None:
            self._shard.require_nothing_held("unregister")
            self._shard.tensors.withdraw()
            for feature in self._shard.features:
                feature.gives_up()

        self._shard.busy(unregister)

    # Publishing

    def publish(
        self,
        version: int,
        *,
        timeout_s: float | None = None,
        store_wait_s: float | None = 0.0,
    ) -> bool:
        """Offer the registered tensors as `version`. No bytes move.

        Collective. Returns on each rank once the whole replica is offered. The tensors are read in
        place: do not write to them or free them until `unpublish` has returned. They are those of
        `register`, whatever was saved, copied or loaded since; without one, those of the last save
        or load in place.

        Args:
            version: Not below the newest of the run; gaps are fine.
            store_wait_s: How long to wait for etcd once it has been away for longer than `ttl_s`,
                and for ranks from which it is; where it refuses, at once. The same on all ranks.
                0: return then, so that a trainer steps on; what is held by all ranks when etcd is
                back is offered, in the order of their calls. None: until `timeout_s` are over,
                which is an error.

        Returns:
            Whether it is offered now. False: not yet, as far as this rank knows. `version` is
            what it holds all the same, and `list` does not show that. Should the run have gone
            on without it by the time etcd is back, a warning says so, and nothing is held.

        Raises:
            UsageError: Nothing is registered, or only a copy of `publish_copy` is; a version is
                held; or a guarded optimizer's parameter has left the memory that is registered.
            VersionConflict: A newer version exists, or another replica has published this one, and
                its digests are others.
            ManifestMismatch: Ranks, or another replica that publishes this version, have other
                tensors; or the ranks together lack a part of one.
            SourceLost: The memory of a peer cannot be read.

        Nothing was published then, nor after a DeadlineExceeded or CallAborted.

        Cost: 3 round trips to etcd, 2 after an `unpublish`; with several ranks up to 6 each; no
        copy. The first time, the rank that comes last looks at what its peers have.
        """
        shard, asked = self._shard, Asked.of("publish", version)

        def flow(deadline: Deadline) -> bool:
            content = Content(partial(shard.ready, "publish"))
            return publish(shard, version, content, deadline, store_wait_s)

        return collectively(shard, asked, flow, timeout_s)

    def publish_copy(
        self,
        version: int,
        named_tensors: Named,
        *,
        transform: Transform | Sequence[Transform] | None = None,
        to: Literal["cpu"] | None = None,
        copy_bytes: int | None = None,
        deltas: int = 0,  # feature deltas
        delta_bytes: int | None = None,  # feature deltas
        timeout_s: float | None = None,
        store_wait_s: float | None = 0.0,
    ) -> bool:
        """Copy these tensors and offer the copy as `version`, in place of what is held.

        Collective. For tensors that are cast or quantised on the way, are not contiguous, are
        allocated anew at every step, or whose device is needed for something else. They may be
        written to, or freed, as soon as this returns. The copy is made before the last version is
        given up, in one of two buffers that are registered once; they stay until `close`, and what
        they hold is registered until `unregister`. A later `publish` or `replicate` is again of the
        tensors of `register`, and a UsageError if there are none.

        Args:
            version: As for `publish`.
            named_tensors: As for `register`.
            transform: Makes the tensors that are published in the place of these: `torch_ros.Cast`,
                `torch_ros.Float8`, `MXFP8`, `NVFP4`, or a `torch_ros.Transform` of your own. Of
                several, the first that makes something of a tensor counts, so that `[Float8(...),
                Cast(...)]` casts those that are not quantised. None: they are copied as they are.
            to: "cpu": copy tensors of a GPU to host memory, transformed there before, in pieces of
                32 MiB that cross while others are made: the GPU has no buffer, and readers no
                business with it. None: the buffers are where the tensors are.
            copy_bytes: Bound on the two buffers together; None: twice the size of the copy.
            deltas: Up to so many changes from one copy to the next (16 at most) are kept for
                replicas that `update` from an older one. When this has returned, a thread compares
                the two buffers; the next `publish_copy` tells it to stop. Needs a handle with
                `digests="full"`, and copies in host memory.
            delta_bytes: Bound on their memory; None: an eighth of the copy.
            store_wait_s: As for `publish`.

        Returns:
            As `publish`.

        Raises:
            As `publish`; and UsageError: The copy does not fit into `copy_bytes`, a transform
                failed, a shard cuts a block that a transform needs whole, or there can be no
                `deltas`; ManifestMismatch: the ranks have different transforms. What was held is
                held still. CallMismatch: some have none, and nothing is held.

        Cost: As unpublish and publish, and one copy on each rank. If nothing is held, several
        ranks with a transform ask etcd as often as if something were.
        """

        def made() -> SaveRequest:
            copying = Copying.asked(transform, to, copy_bytes)
            copying = copying.along(DeltaOptions.asked(deltas, delta_bytes))  # feature deltas
            state = LocalState(local_chunks(tensors_of(named_tensors)), {}, {})
            return SaveRequest(
                version,
                state,
                copier=self.copies.copier(copying),
                store_wait_s=store_wait_s,
            )

        return self.checkpoints.save_made(version, made, timeout_s)

    # feature contract {
    def guard(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """From now on, `unpublish` before each step of `optimizer`, which writes to its parameters.

        Collective, as the step is: the optimizers of all ranks step together. `step` raises
        the errors of `unpublish`; then no parameter has changed.

        Which of its parameters are the registered tensors is noted: the next `publish` or save
        raises a UsageError if one of them has other memory by then, and the registered tensor,
        such as one of `state_dict()`, has not. A warning says so if none of them is.

        Returns:
            A hook; its `remove()` ends this.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"guard({optimizer!r}): expected a torch.optim.Optimizer")
        hook = optimizer.register_step_pre_hook(lambda *_: self.unpublish())
        self._contract.guard(optimizer, hook)
        return hook

    # } contract

    def unpublish(self, *, timeout_s: float | None = None) -> None:
        """Stop offering what is held; returns once nobody reads it any more.

        Collective, but it waits for readers only, not for the peers' calls: the first rank's call
        counts for all. From then on the tensors may be written. Holding nothing, it does nothing.
        Readers that are not done after the handle's `drain_s` are left behind: what they still
        read does not count for them. So are all when etcd is away: it waits for that no longer
        than the lease lasts, at most `ttl_s` and once in an outage. The word in memory, which
        readers ask, needs no etcd.

        If this is the last copy of a retained version, it is copied to host memory first, by all
        ranks, and so waits for all. While etcd is away, it is copied if it may be the last,
        and offered when etcd is back. Likewise if nobody else has the version and somebody in
        another datacenter reads it: that one goes on from the copy, and is not waited for. Only
        where another such copy is read still, or memory is short, it is.

        Raises:
            DeadlineExceeded, StoreUnavailable: Somebody still reads, or the lease is not over; the
                version is not offered any more, and calling again goes on waiting. The tensors must
                not be written yet.
            ContractBroken: They were written to, by torch's count of writes to a plain tensor that
                this handle has published, or, with `check_contract`, by its digest. It is
                unpublished, and withdrawn: nobody takes it from who has it. Where the count is not
                certain (DTensors, views, what was saved or read), a warning says so, once. Writes
                through `.data`, fused optimizers and CUDA graphs are not counted.
        """
        collectively(self._shard, Asked("unpublish"), self._shard.unpublish, timeout_s)

    # Reading

    @overload
    def replicate(
        self,
        version: int | str = "latest",
        *,
        missing_ok: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> int: ...

    @overload
    def replicate(
        self, version: int | str = "latest", *, missing_ok: bool, timeout_s: float | None = None
    ) -> int | None: ...

    def replicate(
        self,
        version: int | str = "latest",
        *,
        missing_ok: bool = False,
        timeout_s: float | None = None,
    ) -> int | None:
        """Read a whole version into the registered tensors, and become a source of it.

        Collective. Blocks until the version exists; a version below the newest that nobody holds
        any more is an error. All ranks get the same version. The group's tensors together must
        be exactly the version's, in any sharding.

        Args:
            version: A number, "latest", or "latest-k" for the k-th newest that is available.
            missing_ok: Whether to return None, at once and on all ranks, where there is no such
                version: not yet, or not any more. No tensor has changed then. The same on all
                ranks. Of "latest" a handle with a bucket says so when somebody has held what cannot
                be read from for a `ttl_s` and 3 s, and where nobody holds anything only when the
                bucket was asked, too.

        Returns:
            The version's number; with `missing_ok` None, if there is none.

        Raises:
            UsageError: Nothing is registered, or only a copy of `publish_copy` is; a version is
                held; the function that was registered makes copies; or a tensor lies in memory that
                this process may only read (PROT_READ), which can be published.
            ManifestMismatch: Other names, shapes or dtypes than the version's, or the ranks
                together lack a part of a tensor. We do not cast.
            VersionNotFound: The version is gone; with `missing_ok`, only after a part of it was
                read: the tensors' content is undefined then.
            SourceLost: The source vanished. The tensors' content is undefined; nothing is held.
            BucketError: Nobody has a version, and none of the bucket's can be read; likewise. Or,
                with `missing_ok`, the bucket does not answer.

        Cost: 5 round trips to etcd, with several ranks up to 8 each; every byte moves once.
        """
        shard, asked = self._shard, Asked.of("replicate", version)

        def flow(deadline: Deadline) -> VersionRef | None:
            spec = replace(Spec.parse(version), may_miss=missing_ok)
            return replicate(shard, spec, Target(shard), deadline)

        ref = collectively(shard, asked, flow, timeout_s)
        return ref.version if ref is not None else None

    def update(
        self,
        version: int | str = "latest",
        *,
        skip: bool | None = None,  # feature seeding
        wait_s: float = 0.0,  # feature following
        timeout_s: float | None = None,
    ) -> bool:
        """Go to `version` if it is newer than what is held; holding nothing, replicate it.

        Collective; all ranks get the same answer. With something newer: wait until all ranks have
        come, unpublish what is held (drained), then replicate. A relative version never goes back
        to an older one; an absolute one goes wherever it says. With a policy (`open`) a relative
        one goes to what that chooses, or nowhere; also where nothing is held.

        An update that skips, to a relative version, goes to the newest that a replica of this
        datacenter has. If none is newer than what is held:

        - Opened with `seeding="host"`, it has the newest one fetched here, unless that is under
          way, and returns False.
        - Otherwise, if a replica here is reading a newer one, it returns False once; the next
          update reads that one too, from what is here of it. If nobody is, it goes.

        Args:
            skip: Whether to. None: if `open` was given a datacenter, or `seeding="host"`. The same
                on all ranks.
            wait_s: For how long to wait until there is a version to go to, also for who holds
                nothing; then it returns False. The first rank whose time is over says so for all.
                One that skips waits for what is here; in that time it orders, but goes to nothing
                that is only being read. 0: not at all, but what is not held is replicated. All
                ranks wait, or none.
            timeout_s: For everything else, each time from when there is a version.

        Returns:
            Whether this replica now holds another version than before. False costs one read of
            etcd; with several ranks, and one write that tells the others. One that skips reads
            twice while something newer is elsewhere. Waiting costs a read every 10 s, and two for
            each version that is published.

        Raises as `replicate` does; and UsageError, if a rank lacks the memory for what is to be
        fetched, or that is not for these tensors: then nothing is given up. Once the old version
        was given up, the handle holds nothing, and a later `update` replicates. One that waits
        raises VersionNotFound then, if there is nothing to go to until its time is over.
        """
        request = UpdateRequest(version, timeout_s)
        request = replace(request, policy=partial(policy_for, skip=skip))  # feature seeding
        go = update
        go = partial(following.update, wait_s=wait_s)  # feature following
        return go(self._shard, request) is not None

    # feature prefetch {
    def prefetch(
        self, version: int | str = "latest", *, timeout_s: float | None = None
    ) -> int | None:
        """Have the changes up to a newer version here, so that `update` then only applies them.

            handle.prefetch("latest")  # while the engine generates
            engine.pause()
            handle.update("latest")

        This process's own question: no record in etcd, and nobody waits for it. What is held stays
        as it is, and is served on. Meanwhile other threads may make any other call of this handle;
        another prefetch waits for this one. An `update` waits for nothing: it takes what is staged
        if that leads from what it gives up to what it goes to, and drops it otherwise; then, or
        where other ranks have staged nothing, it reads as ever. Either way all bytes are digested
        and compared. `unpublish`, `unregister` and all that reads a version drop it too.

        Deltas of a publisher with `publish_copy(deltas=...)` in this datacenter are read, into host
        memory, under the conditions of `update`. If the last one is being made, as right after a
        `publish_copy`, it is waited for until `timeout_s` are over; an `update` would read in full.

        Args:
            version: As for `update`.
            timeout_s: For all of it, also the wait for another prefetch.

        Returns:
            The version for which something is staged now, also if it was before. None: nothing is
            newer, this handle holds nothing that it has read, there are no deltas, they are not
            worth it or do not fit into memory, or something else was read meanwhile.

        Raises:
            UsageError: The handle's `digests` are not "full".
            SourceLost: Three publishers were lost, one after the other.
            VersionNotFound, ManifestMismatch: As `update`.

        In each case nothing has changed, and `update` works.

        Cost: 2 reads of etcd, if something is newer; else 1. Memory: of the changes, at most a
        third of the tensors; until they are applied or dropped.
        """
        return self._prefetching.prefetch(version, timeout_s)

    # } prefetch

    # feature following {
    def follow(
        self,
        version: str = "latest",
        *,
        stop: threading.Event | Callable[[], bool] | None = None,
        skip: bool | None = None,  # feature seeding
        timeout_s: float | None = None,
    ) -> Iterator[int]:
        """Go to each newer version as it comes, and yield its number when it has been read.

            for version in handle.follow(stop=stop):
                evaluate(model, version)

        Collective: all ranks follow, and all get the same versions. Between two of them no call is
        open, so the loop may take its time, call the handle, or be left by `break`, on all ranks
        alike. Where one rank leaves it alone, by `break` or an error in its body, the others get a
        CallAborted when there is a newer version, and hold what they held. (An iterator that a
        variable keeps is left when it is closed.) While it waits, other calls of this handle wait
        with it, in other threads.

        A version that is passed by while the loop is busy is not read. If one vanishes before it
        is here, as when the trainer dies, the handle holds nothing and waits for the next. Waiting
        has no end; it lasts through an outage of etcd, after which this process has its seat again.

        Args:
            version: "latest" or "latest-k".
            stop: Ends the loop on all ranks, after the version that it is at, when it is set, or
                returns true, on one of them. Asked every 2 s while it waits, and once before
                what is held is given up. If etcd does not answer for 5 s then, there is
                nobody to agree with: a group of one ends its loop; others raise StoreUnavailable or
                SeatLost.
            skip: As for `update`.
            timeout_s: For each version, from when it is there: for all ranks to come, and to read.

        Raises:
            UsageError: A number, or a `stop` that cannot be asked.
            SourceLost, VersionNotFound: Six tries, half a `ttl_s` apart, could not read a version.
            SeatLost: The seat is lost for good; or other ranks are missing for two `ttl_s`.
            ManifestMismatch, CorruptWeights: As `replicate`.

        Cost: As `update(wait_s=...)`.
        """

        def check() -> Callable[[], bool]:
            ask = getattr(stop, "is_set", stop) if stop is not None else lambda: False
            if not callable(ask):
                raise UsageError(f"stop={stop!r}: expected a threading.Event or a function")
            if Spec.parse(version).absolute is not None:
                raise UsageError(f"follow({version!r}): expected 'latest' or 'latest-<k>'")
            return ask

        ask = checked(self._shard, Asked.of("follow", version), check)
        request = UpdateRequest(version, timeout_s)
        request = replace(request, policy=partial(policy_for, skip=skip))  # feature seeding
        return following.newer_versions(self._shard, request, ask)

    # } following

    # feature reading {
    def read(
        self,
        version: int | str,
        tensors: Named,
        *,
        partial: bool = False,
        timeout_s: float | None = None,
    ) -> ReadReport:
        """Read a version, whole or in part, into these tensors. Nothing is served, before `serve`.

        Collective. Checked first, on all ranks: the version exists, its names, shapes and dtypes
        are these, and it has every element of them. Only then what is held is given up, as by
        `unpublish`, and the bytes land in the tensors. From the return on they are the caller's to
        write.

        Args:
            version: As for `replicate`. All ranks get the same.
            tensors: As for `register`, in the place of what is registered; any part of the
                version, and any on each rank. They stay registered until `unregister` or the next
                read, which makes another read into the same ones cheap.
            partial: Whether a part is meant. If not, a warning, once in a handle, names tensors
                that are left out beside others of their dict, such as the buffers that
                `named_parameters()` lacks; with several ranks, of their module.

        Returns:
            The report of this rank's part.

        Raises:
            UsageError: No plain tensors, or some in memory that this process may only read; or this
                replica alone holds the version, and would have to give it up. Nothing has changed.
            ManifestMismatch: A name, shape or dtype that the version does not have. Nothing has
                changed; but if a version with other tensors comes while what is held is given up,
                nothing is held.
            VersionNotFound, SourceLost, CorruptWeights: As `replicate`.

        After any other error nothing is held, if what was held is given up.

        Cost: As unpublish and replicate; before, a look at the version, and with several ranks one
        call in which they agree.
        """
        return self._reads.read(version, tensors, timeout_s, is_partial=partial)

    def serve(self, *, timeout_s: float | None = None) -> int:
        """Become a source of the version that the last `read` has brought, where it lies.

        Collective. No byte moves. Call it when nothing writes to the tensors any more, and write to
        them again only after `unpublish` has returned.

        Each rank first digests its tensors, if it knows digests to compare them with: those of
        the version, if its publisher has them, else those of what landed, if this handle was opened
        with `digests`. Only if they are equal on all ranks is anything offered. With neither, the
        caller's word is taken for it.

        Returns:
            The version's number, which is the one that was read, with the content that was read.

        Raises:
            UsageError: A version is held; or nothing was read since the last publish, replicate,
                register or serve; or ranks have read different versions.
            ContentChanged: A tensor is not what was read.
            ManifestMismatch: The ranks have read a part of the version.
            VersionNotFound: The version is gone, or was published anew with other content.

        After an error it may be called again, and nothing is offered; unless `version` is not None,
        since etcd has not said how the call ended.

        Cost: As publish, with several ranks twice; and one pass over the tensors, if they are
        compared.
        """
        return self._reads.serve(timeout_s)

    # } reading

    # feature streams {
    def stream(
        self,
        version: int | str,
        fqns: Iterable[str],
        *,
        buffer_bytes: int,
        timeout_s: float | None = None,
        source: str | None = None,
    ) -> Stream:
        """Iterate over tensors of a version, each whole, without memory for all of them.

            for fqn, tensor in handle.stream("latest", fqns, buffer_bytes=64 << 20):
                load(fqn, tensor)

        Deciding the version is collective, and has ended on return; all ranks get the same. From
        there on each rank is on its own, with any names in any order. It works beside what the
        handle holds, which stays as it is; sources are other replicas that hold the version whole.

        Tensors come in the order of `fqns`, in host memory, contiguous, in two buffers: while one
        is used, a thread reads the next tensors into the other. A tensor is valid until `next` is
        called with `left_in_buffer` at 0: with its last tensor, a buffer ends, and is filled
        again. Those of the last two buffers stay valid for as long as the program has them. What
        else is needed for longer has to be copied. Nothing that is handed out may still turn out
        to be wrong.

        The handle keeps the two buffers and all that it has prepared: its next stream of the same
        tensors in buffers of this size begins without delay. That one gets other buffers if the
        program still has a tensor, or the stream itself; the old ones then go with the last tensor.

        The consumer may take its time. A source waits for it for 5 s; when the consumer goes on
        later, the stream finds that source again or another one. Close the stream, or drop it, to
        end it early; closing the handle ends it.

        Args:
            fqns: Names of tensors, each once. See `contents`.
            buffer_bytes: Of each buffer; a tensor that is larger has a larger buffer for itself.
            timeout_s: For the version to come; then for each buffer, while it is read.
            source: The name of the replica to read from, as `list` shows it; nobody else is, if it
                is lost. None: whoever suits best.

        Raises:
            UsageError: A name that stands there twice, or a bad `buffer_bytes`.
            ManifestMismatch: The version has no tensor of that name.
            VersionNotFound: The version is gone, or only this replica holds it, or `source` does
                not hold it.
            SourceLost: As `replicate`.

        Cost: 5 requests to etcd, with several ranks up to 7; 4 more after each pause of more than
        5 s.
        Memory: 2 * max(buffer_bytes, largest tensor), for each of those that run at the same time;
        as much is kept until the handle closes, or streams other tensors.
        """
        return self._streams.open(version, fqns, buffer_bytes, timeout_s, source)

    # } streams

    # feature lending {
    # Borrowing

    def borrow(
        self, version: int | str = "latest", *, timeout_s: float | None = None
    ) -> AbstractContextManager[Borrowed]:
        """A version's tensors where their publisher on this host has them: `with` this.

        This process's own question: nothing need be registered, nothing is held. No byte is copied,
        so it takes the same milliseconds for any size. Blocks until the version exists.

        Only copies are lent: those of `publish_copy` (and of `ROSWriter(mode="copy")`), by a
        replica whose handles were opened with `borrow_bytes`, all of its ranks being processes of
        this user on this host. What is lent stays as it is until the block is left, whatever the
        publisher does meanwhile: it publishes on, is closed, killed or fenced, or etcd is wiped. It
        waits for no borrower. No lease is needed: the loan of a process that ends ends with it.

        The tensors are for reading: a write to them ends this process with SIGSEGV, since the
        memory is mapped so. Do not register them, nor publish them. Those that are kept when the
        block is left stay mapped, and show what the publisher writes there next.

        Leaving the block waits for this process's CUDA devices. Have other threads that use the
        tensors end first. If something was written there meanwhile, it raises `LoanBroken`, in the
        context of the error that left the block, or as a note on Ctrl-C.

        Args:
            version: As for `replicate`.

        Returns:
            A context manager, to be entered once, of a mapping of fqns to tensors, which has the
            `version` and the `replica` that lends it. A tensor of which one rank of the publisher
            has all is a tensor, the others are `Chunked`, with a box for each piece. Objects that
            DCP pickled are left out.

        Raises:
            NotSupported: The publisher's tensors are live ones or on a GPU, nothing was to be lent
                when they were copied, or it is on another host, in another pid namespace, of
                another user or without `transport="auto"`; says which, and what to do.
            LoanRefused: The publisher lends as much already as its `borrow_bytes` allow.
            VersionNotFound: As `replicate`.

        Cost: 2 round trips to etcd, no write; a look at the open files of the publisher's
        processes.
        """
        return borrowing(self._shard, version, timeout_s)

    # } lending

    # Engines

    # feature installs {
    def installing(
        self, version: int | str, *, timeout_s: float | None = None
    ) -> AbstractContextManager[VersionRef]:
        """Bring a version into an engine: `with` this, do so within, by any calls of this handle.

            with handle.installing("latest") as ref:
                handle.read(ref.version, engine_tensors)
                engine.finish()

        Both ends are collective, and neither is open while the block lasts. Entering waits until
        the version exists; from then on this replica is active at nothing. When all ranks have
        left the block well, it is active at the version, with the content that this handle has read
        in the block. If it has read nothing there, that is the content with which this process has
        left a block well last: it is intact, or back. A call of the block that failed, or a stream
        that was not exhausted, makes the block fail too, whatever was read afterwards.
        The handle has to be opened with `installs=True`, and reads within such blocks only.

        An exception that leaves the block on any rank rejects the version: trainers that wait are
        told its rank and reason, as soon as etcd answers. Then the replica is active at nothing.
        If the old weights are intact, or back, their owner says so:

            with handle.installing(old):
                pass

        Args:
            version: As for `replicate`. Not below the last one of its run that was active.

        Returns:
            A context manager of the version: its `version`, `run` and `uid`.

        Raises:
            UsageError: Such an older version, and nothing has changed; `installs=True` is missing;
                or, when the block is left, another version was read, several were, a part, or
                nothing by a process that has not installed it last, or another `installing` was
                begun in the block: then the replica is active at nothing.
            InstallRejected: When the block is left: another rank has failed.
            VersionNotFound: As `replicate`; when the block is left too, and then the version is
                rejected, as by each error of etcd or of other ranks.

        Cost: 2 requests to etcd with one rank, and one more if this handle neither holds the number
        nor has looked at it; with several, as two checks.
        """
        return Installing(self._installs, version, timeout_s)

    def installs(self, *, timeout_s: float | None = None) -> Mapping[str, Install]:
        """The version that each replica's engine uses, of those opened with `installs=True`.

        A replica that has lost its seat is not there.
        """
        return self._installs.all(timeout_s)

    def wait_installed(
        self,
        version: int,
        *,
        replicas: Iterable[str] | None = None,
        timeout_s: float | None = None,
    ) -> Installed:
        """Block until every replica uses `version` of this handle's run, or a newer one.

        Or has rejected it. This process's own question, asked again at every change. It waits for
        each replica that is there, or has been there when this handle looked before. One that has
        vanished is missing, whatever it said last, and gone only after two TTLs in which etcd has
        answered. If no replica uses the version, the wait does not succeed.

        Args:
            replicas: Those to wait for, also if they were never there. None: all.

        Raises:
            DeadlineExceeded: It names those that have not answered, and what each is at.
            InstallRejected: All that are not gone have rejected it; it has each one's reason.

        Cost: 1 request to etcd, and 1 for each change; 1 a second while a replica is missing.
        """
        shard = self._shard
        shard.require_usable()
        deadline = shard.deadline(f"wait_installed {check_version(version)}", timeout_s)
        return Waiting(self._installs, version, replicas, deadline).run()

    # } installs

    # Looking around

    # feature reading {
    def contents(
        self, version: int | str = "latest", *, timeout_s: float | None = None
    ) -> Contents:
        """The tensors that a version consists of, as a holder of it tells. Reads no tensor.

        This process's own question, since nothing follows from it for the other ranks, and no
        holder waits for it. Two ranks that ask for "latest" may be told of different versions;
        `read` and `replicate` then give all ranks the same one. Waits until the version exists;
        calls of this handle in other threads wait with it.

        Raises:
            VersionNotFound: It is gone.
            DeadlineExceeded: It did not come, or no holder of it answered.

        Cost: 2 requests to etcd, and one read of each of a holder's manifests that is new.
        """
        return self._reads.contents(version, timeout_s)

    # } reading

    def list(self, *, timeout_s: float | None = None) -> dict[int, set[str]]:
        """The available versions, and the names of the replicas that hold each of them whole.

        It lists those of the newest run that has a version.
        """
        deadline = self._shard.deadline("list", timeout_s)
        group, keys = self._shard.group, self._shard.group.seat.keys
        self._shard.require_usable()
        return group.ask(spec_ranges(keys), lambda view: Done(listing(view, keys)), deadline)

    def fleet(self, *, timeout_s: float | None = None) -> Fleet:
        """All replicas and holdings of the model, and who reads from whom.

        It covers all runs, for policies of one's own. Readers are given what `list` says at the
        same moment. Costs one request, and some hundred bytes for each replica.

        Raises:
            BackendError: Another release has taken the model's name since.
        """
        deadline = self._shard.deadline("fleet", timeout_s)
        group, keys = self._shard.group, self._shard.group.seat.keys
        self._shard.require_usable()
        fleet = group.ask(fleet_ranges(keys), lambda view: Done(Fleet.of(view, keys)), deadline)
        self._shard.observed.heard_of(fleet.latest)
        return fleet

    def wait(
        self,
        predicate: Callable[[dict[int, set[str]]], bool],
        *,
        timeout_s: float | None = None,
    ) -> dict[int, set[str]]:
        """Block until `predicate` of what `list` returns is true; returns that.

        Asked again at every change, at most 20 times a second.

        Raises:
            DeadlineExceeded: With what `list` said last.
        """
        return wait_for(self._shard, predicate, timeout_s)

    # The end

    def close(self, *, linger_s: float | None = None) -> None:
        """Leave: what this process published is not offered any more. Idempotent.

        A version that is retained, here or elsewhere, and held nowhere else stays until another
        replica has it: for at most `linger_s`, while one that is not spot lives and could take it,
        and until those have finished that read it then. So does the newest version while a
        `torch-ros archive` that runs has not written it. Handing over takes all ranks, which close
        at about the same time; one that ends without ends it. Other versions go at once, and their
        readers are not waited for; `unpublish` first to let them finish. A `prefetch` of another
        thread ends, and is waited for last, for 5 s at most.

        The tensors must not be written to before the return, and may be freed after it. In a
        forked child it does nothing.

        Args:
            linger_s: None: as `open` was told; 0 while an exception is handled.

        Raises:
            UsageError: By a signal handler, within a call of this handle.
        """
        arguments.optional(arguments.seconds)("linger_s", linger_s)
        if linger_s is None:
            linger_s = self._shard.settings.linger_s if sys.exception() is None else 0.0
        self._shard.close(linger_s)

    # feature handover {
    def leave(self, *, within_s: float = 20.0) -> None:
        """Close before this process is ended, as a machine that is preempted tells it to.

        As `close`; but readers are let finish, and nobody new is sent here meanwhile. Those that
        are not done within `within_s` go on elsewhere with what they have. Best called by a thread
        of its own: a call of this handle that is under way in another thread ends with
        `ClosedError`, and so do all later ones.

        No copy is put aside, since it would go with this machine too. A version that is retained
        and held nowhere else is handed over as by `close`. A warning names each version of which
        nobody has all as this replica goes.

        It ends the replica for its other ranks too, which need not leave by themselves. To hand
        something over takes all of them, at about the same time.

        Args:
            within_s: Some seconds less than there are until the process is ended.

        Raises:
            UsageError: By a signal handler, within a call of this handle.
        """
        arguments.seconds("within_s", within_s)
        self._shard.close(within_s, drains=True)

    # } handover

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(linger_s=self._shard.settings.linger_s if kind is None else 0.0)
