"""One process's shard of a replica: what it shows, and the calls it makes with its group."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from torch_ros import arguments
from torch_ros.deadline import Deadline, is_cancelled, unless_cancelled
from torch_ros.errors import ClosedError, Fenced, SeatLost, TorchRosError, UsageError
from torch_ros.p2p.pages import Pages
from torch_ros.p2p.transport import Transport
from torch_ros.printable import log_of
from torch_ros.protocol.call import ALONE, GroupCall, Parting, Passing
from torch_ros.protocol.group import Group, GroupTask
from torch_ros.protocol.meeting import Missed
from torch_ros.protocol.outage import Patience
from torch_ros.protocol.policy import NEWEST, Policy
from torch_ros.protocol.records import Asked, Call, Kind, ShardRecord, VersionRef, mark
from torch_ros.shard.beginnings import Beginning, Beginnings
from torch_ros.shard.collective import end_for_peers
from torch_ros.shard.manifests import Manifests
from torch_ros.shard.observed import Observed
from torch_ros.shard.report import Reports, Stopwatch
from torch_ros.shard.seams import Base, Feature, Tracing
from torch_ros.shard.tensors import Tensors
from torch_ros.shard.word import OwnWord
from torch_ros.store.aside import Aside
from torch_ros.store.txn import View, Watch
from torch_ros.transfer.card import ALL_BLOCKS, Word
from torch_ros.transfer.mailbox import Digests, Mailbox
from torch_ros.transfer.meter import Displays
from torch_ros.transfer.reading import Reading
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.manifest import Depth

T = TypeVar("T")
State = Literal["seated", "away", "gone", "closed"]
log: logging.Logger = log_of(__name__)

# Strong references: a handle that is dropped without close() goes on serving what it published,
# so its tensors must stay.
_open_shards: set[Shard] = set()
_aside = Aside("torch_ros closes")


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of `open` that concern a shard's calls."""

    timeout_s: float
    linger_s: float
    depth: Depth
    relay: bool
    displays: Displays  # of reads


def shard_of(mailbox: Mailbox, **says: Any) -> ShardRecord:
    """The record by which peers find this process; `says`: fields of it that features fill."""
    return ShardRecord(socket.gethostname(), os.getpid(), mailbox.card, **says)


class Shard:
    """A seat, the tensors that are shown from it, and the replica's calls, one at a time.

    Two faces stand on it: `ShardHandle` for users, and `Checkpoints` for saves and loads.
    """

    model: str
    group: Group
    settings: Settings
    pages: Pages
    mailbox: Mailbox
    reading: Reading
    transport: Transport

    def __init__(
        self,
        model: str,
        group: Group,
        transport: Transport,
        mailbox: Mailbox,
        reading: Reading,
        settings: Settings,
        pages: Pages,
    ) -> None:
        self.model, self.group, self.settings, self.pages = model, group, settings, pages
        self.mailbox, self.reading, self.transport = mailbox, reading, transport
        self.features: list[Feature] = []  # that are attached
        self.word: OwnWord = OwnWord(group, mailbox, self.features)
        self.tensors: Tensors = Tensors(mailbox, pages, self.features)
        self.manifests: Manifests = Manifests(group, mailbox, reading.peers)
        self.beginnings: Beginnings = Beginnings(group, self.end_beginning)
        self.digests: Digests = Digests()  # of the version that is held
        self.reports: Reports = Reports()
        self.observed: Observed = Observed(model, group, self.reports, reading)
        self.policy: Policy = NEWEST  # of its updates
        self.tracing: Tracing = Tracing()
        self.hint: Callable[[Watch], str] = lambda _: ""  # what helps people with a wait
        self.is_closed: bool = False
        self.lock: threading.RLock = threading.RLock()  # of the call that is under way
        self._ending = threading.Lock()
        self._caller, self._pid = 0, os.getpid()  # the thread that is in a call; 0: none is
        self.beside: list[int] = []  # threads in calls that others may go on beside
        _open_shards.add(self)
        _close_open_shards_at_exit()

    @property
    def held(self) -> VersionRef | None:
        """The version that this replica may be a source of."""
        kept = self.group.ledger.holds
        return kept.ref if kept else None

    def base(self) -> Base | None:
        """The content that a change could be applied to: what this shard has read, and shows whole.

        Asked right before that is unpublished. None: the tensors are its own, which may have been
        written to since they were published, or something was read into them.
        """
        kept, registered = self.group.ledger.held, self.tensors.registered
        if kept is None or registered is None or kept.is_original:
            return None
        everything = Word(mark(kept.ref.uid, kept.call), ALL_BLOCKS)
        return Base(kept.ref, registered) if self.mailbox.word == everything else None

    @property
    def is_alone(self) -> bool:
        return self.group.seat.world_size == 1

    @property
    def state(self) -> State:
        return "closed" if self.is_closed else self.group.state

    def __repr__(self) -> str:
        seat, held = self.group.seat, f", version={self.held.version}" if self.held else ""
        state = "" if self.state == "seated" else f", {self.state}"
        return (
            f"ShardHandle(model={self.model!r}, replica={seat.replica!r}, "
            f"rank={seat.rank} of {seat.world_size}{held}{state})"
        )

    def attach(self, feature: Feature) -> None:
        """Tell a feature of what happens here from now on."""
        self.features.append(feature)

    def read_begins(self, call: Deadline) -> None:
        for feature in self.features:
            feature.read_begins(call)

    def read_ends(self, ref: VersionRef | None, call: Deadline) -> None:
        for feature in self.features:
            feature.read_ends(ref, call)

    # One call at a time

    def busy(self, call: Callable[[], T], *, is_member: bool = True) -> T:
        """Make `call`, one at a time, if this process may make one.

        No context manager: Ctrl-C between the steps of one in Python would leave the lock taken.

        Args:
            is_member: Whether the call needs this process to be in its group still.
        """
        self.require_usable()
        self.refuse_nested("used")
        with self.lock:
            try:
                self._caller = threading.get_ident()
                if is_member:
                    self.group.check_final()
                return call()
            finally:
                self._caller = 0

    def refuse_nested(self, what: str) -> None:
        """Refuse a call from a signal handler: the call it interrupted resumes afterwards."""
        if threading.get_ident() in (self._caller, *self.beside):
            raise UsageError(
                f"{self} cannot be {what} within a call that it is in the middle of; let the "
                "signal handler raise (SystemExit, say), and go on when the call has ended"
            )

    def require_usable(self) -> None:
        """Raises: ClosedError: This process is a fork, or closed the handle."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{self!r} belongs to process {self._pid} and this is its fork; open one in a "
                "process that is started with spawn, or was forked before this was opened"
            )
        if self.is_closed:
            raise ClosedError(f"{self!r} was closed before; call torch_ros.open again")

    @property
    def asked(self) -> Asked:
        """The user's call that is under way; the group's calls are its parts."""
        asked = self.group.ledger.caller
        assert asked is not None
        return asked

    def deadline(self, what: object, timeout_s: float | None) -> Deadline:
        """The end of a call that is asked for as `what`; None: after the handle's `timeout_s`."""
        timeout_s = self.settings.timeout_s if timeout_s is None else timeout_s
        arguments.seconds("timeout_s", timeout_s)
        # Set by face/aio.py: was the awaiting task cancelled? Then `check_open` raises, and a wait
        # that does not ask it ends by `is_cut`, as if its time were over.
        group, is_cut = self.group, is_cancelled.get()
        check_open = unless_cancelled(group.ledger.check_open)
        return Deadline(f"{what}", timeout_s, check_open=check_open, hint=self.hint, is_cut=is_cut)

    def require_nothing_held(self, call: str) -> None:
        if self.held is not None:
            raise UsageError(
                f"{call}: this handle holds version {self.held.version}; unpublish() it first"
            )

    def ready(self, call: str) -> LocalState:
        """The registered tensors, for a call that may only begin while nothing is held.

        Raises: UsageError: There are none, or a version is held.
        """
        if self.tensors.is_empty:
            self.tensors.require(call)  # raises
        self.require_nothing_held(call)
        return self.tensors.current(call)

    def hide_unless_held(self) -> None:
        """Show nothing where a save or load ends and the replica holds nothing."""
        if self.held is None:
            self.tensors.hide()

    # Calls of the group

    def make(self, task: GroupTask[T]) -> T:
        """Make the group's next call. Clears the word if the replica holds nothing afterwards.

        Raises: Missed: The peers have unpublished instead, and now this rank has, too.
        """
        if task.store_wait_s is not None:
            arguments.seconds("store_wait_s", task.store_wait_s)
        try:
            return self._make(task)
        except Missed as missed:
            call = missed.call
            if call.outcome is None:  # the peers are in it, and wait for this rank's part
                assert call.ref is not None
                self._make(self._unpublication(call.ref, call.asked, task.deadline))
            raise
        finally:
            self.word.void_unless_held()

    def _make(self, task: GroupTask[T]) -> T:
        """Make it, and let features know when an unpublish has ended, well or not."""
        if task.kind in ("publish", "replicate"):
            self.tensors.brought = None  # what a `read` put there is of this call from now on
        try:
            return self.group.make(task)
        finally:
            if task.kind == "unpublish":
                self._has_given_up()

    def catch_up(self, deadline: Deadline, patience: Patience | None = None) -> None:
        """Learn how the last call ended, before the next one or before the tensors change.

        It may have ended badly, and readers still believe the word.
        """
        self.group.catch_up(deadline, patience)
        self.word.void_unless_held()

    def begin(
        self, kind: Kind, asked: Asked, deadline: Deadline, store_wait_s: float | None = None
    ) -> None:
        """Catch up before the first of the group's calls, of this kind, that a user's call makes.

        Where that fails, its number counts as used: the peers go on, and this rank stays in step.
        With `store_wait_s`, as of `publish`, a call without a seat goes on.
        """
        try:
            self.catch_up(deadline, Patience(store_wait_s=store_wait_s))
        except SeatLost as lost:
            if store_wait_s is None or isinstance(lost, Fenced):
                self.group.pass_over(kind, asked, deadline)
                raise

    # Giving up what is held

    def unpublish(
        self,
        deadline: Deadline,
        *,
        may_forget: bool = True,
        counted: VersionRef | None = None,
        passing: Passing = ALONE,
    ) -> None:
        """Give up the version that is held, once nobody reads it.

        Without etcd, the word is cleared and the tensors are the owner's again: readers ask the
        memory and not the store.

        Args:
            may_forget: Whether to go on without etcd. Not if something is read into the tensors
                next: peers that have their seats would not know of that call.
            counted: What this rank's peers may take for held though it does not, as after a
                publication that was not waited for: then it makes their unpublish with them.
        """
        held, counted = self.held, counted or self.group.ledger.not_waited_for
        for feature in self.features:
            feature.unpublishes()
        for feature in self.features if may_forget else ():  # else a read comes next
            feature.gives_up()
        try:
            self.catch_up(deadline, Patience(is_unpublish=may_forget))
            if (held := self.held or counted) is None:
                return
            with self.tracing.around("unpublish", version=held.version):
                asked = Asked("unpublish", held.version)
                self.make(self._unpublication(held, asked, deadline, passing))
        except SeatLost as lost:  # for good, or etcd is away
            if not isinstance(lost, Fenced) and not may_forget:
                raise
            for feature in self.features:
                feature.takes_back()
            if not self.group.ledger.forget(counted):  # it has its seat again: tell the store
                self.unpublish(deadline, may_forget=may_forget, counted=counted)
                return
            self.word.void()
            self._has_given_up()
            log.info("%s; its tensors are taken back without the store", lost)
        if held is not None:
            for feature in self.features:
                feature.has_unpublished(held, deadline)

    def _unpublication(
        self, held: VersionRef, asked: Asked, deadline: Deadline, passing: Passing = ALONE
    ) -> GroupTask[None]:
        """The task that stops offering `held`, and ends once nobody reads it."""
        watch = Stopwatch()

        def sees(view: View) -> None:
            for feature in self.features:
                feature.sees(view)

        def perform(call: GroupCall) -> None:
            def acts(decided: Call) -> None:
                for feature in self.features:
                    feature.acts_first(call, decided)

            call.unpublish(held, passing, Parting(sees, acts))
            self.reports.add(watch.drain_report(held, call))

        return GroupTask("unpublish", asked, deadline, perform)

    def _has_given_up(self) -> None:
        for feature in self.features:
            feature.has_given_up()

    # Calls of DCP, from where they begin

    def end_beginnings(self, mine: Beginning | None) -> None:
        """End beginnings that never came to their save or load, before this thread makes a call.

        Their peers wait in them, and would take this thread's call for the one that they made.
        """
        for one in self.beginnings.left(mine):
            self._end_now(one, self.beginnings.error(one.lost))

    def end_beginning(self, one: Beginning, error: TorchRosError) -> None:
        """End one of them, by the thread of `Beginnings`, which makes no calls of its own."""
        self.busy(partial(self._end_now, one, error), is_member=False)

    def _end_now(self, one: Beginning, error: TorchRosError) -> None:
        """End one beginning for all ranks; when it comes after all, it raises `error`."""
        if one.state == "begun":  # still, now that no other call is under way
            log.warning("%s", error)
            one.state, one.failure = "over", error
            end_for_peers(self, one.asked, error)

    # The end

    def close(self, linger_s: float, *, drains: bool = False) -> None:
        """Leave; see `ShardHandle.close`, and, if readers are let finish, `ShardHandle.leave`."""
        if os.getpid() != self._pid:
            return
        self.refuse_nested("closed")
        self.is_closed = True
        if linger_s <= 0:
            self._hurry()  # a close that is under way in another thread
        try:
            # Ctrl-C ends the wait for it, and not the closing; a second close waits on.
            _aside.run(partial(self._end, linger_s, drains=drains))
        except BaseException:
            self._hurry()
            raise

    def _hurry(self) -> None:
        for feature in self.features:
            feature.nobody_waits()

    def _end(self, linger_s: float, *, drains: bool) -> None:
        """Leave the group, clear the word, and only then free what readers read."""
        with self._ending:
            if self not in _open_shards:
                return
            for feature in self.features:
                feature.closes()
            try:
                self.group.close(partial(self._leaves, linger_s, drains=drains))
            finally:
                with self.lock:  # a call in another thread ends first
                    self.word.void()  # readers in the middle notice; then the memory may go
                    self.reading.close()
                    self.reading.peers.close()
                    self.mailbox.close()
                    self.tensors.withdraw()
                    for feature in self.features:
                        feature.has_closed()
                    self.transport.close()
                _open_shards.discard(self)
                self.observed.end()

    def _leaves(self, linger_s: float, *, drains: bool) -> bool:
        """Let features leave first, while this has its seat. Whether one has done all of it."""
        has_left = False
        for feature in self.features:
            has_left |= feature.leaves(linger_s, drains=drains)
        return has_left


def open_shards() -> list[Shard]:
    """The shards of this process that are not closed."""
    return list(_open_shards)


@functools.cache
def _close_open_shards_at_exit() -> None:
    # Not when this module is imported: nixl comes later, and the last to register is run first.
    atexit.register(_close_open_shards)


def _close_open_shards() -> None:
    for shard in list(_open_shards):
        try:
            shard.close(0.0)
        except TorchRosError as error:
            log.warning("closing %r at exit: %s", shard, error)
