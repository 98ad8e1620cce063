"""Installs of one handle: the blocks in which it brings versions into an engine.

docs/protocol/installs.md has the rules; invariant I10.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

from torch_ros.deadline import Deadline
from torch_ros.errors import (
    CallAborted,
    ClosedError,
    Fenced,
    InstallRejected,
    SeatLost,
    TorchRosError,
    UsageError,
    VersionNotFound,
)
from torch_ros.features.installs import rules
from torch_ros.features.installs.intake import Intake
from torch_ros.features.installs.known import Known
from torch_ros.features.installs.ready_file import ReadyFile
from torch_ros.features.installs.records import NAME, Install, Rejection
from torch_ros.printable import log_of
from torch_ros.protocol import keys
from torch_ros.protocol.call import CLEAN_UP_S, GroupCall
from torch_ros.protocol.group import GroupTask
from torch_ros.protocol.records import REASON_MAX, Asked, VersionRef
from torch_ros.protocol.versions import Spec, spec_ranges
from torch_ros.shard.collective import collectively, end_for_peers
from torch_ros.shard.core import Shard
from torch_ros.store.latch import Latch
from torch_ros.store.loops import Done, Step, settle
from torch_ros.store.txn import Range, Ranges, View, one

log: logging.Logger = log_of(__name__)

LOOK_MAX_S = 1.5  # for which one look counts: a store that does not answer tells nobody's absence
THERE = -1.0


class Installs:
    """The record of one handle's replica, and all that it has heard of those of others."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        is_told = NAME in shard.group.applicant.shard.carries
        self.intake = Intake(shard) if is_told else None
        self.known = Known(shard.group.ledger, is_told=is_told)
        if is_told:
            seat = shard.group.seat
            file = ReadyFile(shard.model, seat.replica, seat.rank, keys.family(seat.nonce))
            shard.attach(file)
            self.known.tells = file.tell
        self.open: Installing | None = None  # not left yet; or never, if Ctrl-C came there
        self.told: Latch = Latch()  # the last rejection is
        self.told.set()
        self._sight: View | None = None  # the own record, as it was written last
        self._heard: dict[str, Install] = {}
        self.mine: VersionRef | None = None  # the last one that this very process has left well
        self._missing_s: dict[str, float] = {}  # of each that was heard of; THERE: it is not
        self._looked_s = 0.0
        self._lock = threading.Lock()  # several threads may wait

    # The own record

    def write(
        self, rule: Callable[..., Step[Install]], deadline: Deadline, ranges: Ranges = ()
    ) -> Install:
        """Change it, from whatever seat this rank has."""
        group = self.shard.group

        def write() -> Install:
            seat = group.seat
            own = one(rules.own_key(seat))
            change, see = partial(rule, seat=seat), partial(self._see, own)
            steps = settle(deadline.what, (own, *ranges), change, self._sight, (own,), see)
            found = group.run(steps, deadline)
            self.known.learn(found, seat)
            return found

        return group.from_seat(write, deadline)

    def _see(self, own: Range, view: View) -> None:
        """Keep the record alone: what else was read may be old when it is asked for again."""
        self._sight = View(view.rev, dict(view.seen(own)), (own,))

    def tell(self, rule: Callable[..., Step[Install]]) -> Install | None:
        """Change it, as soon as etcd answers; None: not within some seconds, but later.

        A thread does so, which no Ctrl-C ends.
        """
        group, told, found = self.shard.group, Latch(), list[Install]()
        deadline = Deadline("telling of a failed install", math.inf)

        def tell() -> None:
            try:
                while not found:
                    try:
                        found.append(self.write(rule, deadline))
                    except Fenced:
                        return
                    except SeatLost:  # its peers take their time
                        group.pause()
            except TorchRosError as error:
                log.warning("nobody is told that an install has failed: %s", error)
            finally:
                told.set()

        group.start(f"torch_ros tells {group.seat.replica}", tell)
        self.told = told  # not before: Ctrl-C may come in between, and then nobody would set it
        told.wait(CLEAN_UP_S)
        return found[0] if found else None

    # Those of all

    def all(self, timeout_s: float | None) -> dict[str, Install]:
        shard = self.shard
        shard.require_usable()
        keys = shard.group.seat.keys
        deadline = shard.deadline("installs", timeout_s)
        there = shard.group.ask(
            (keys.carried(),), lambda view: Done(rules.installs_of(view, keys)), deadline
        )
        self.note(there)
        return there

    def missing_s(self, name: str) -> float:
        """For how long a replica has been missing, in which the store has answered."""
        return self._missing_s.get(name, THERE)

    def heard_of(self) -> tuple[str, ...]:
        return tuple(self._missing_s)

    def last(self, name: str) -> Install | None:
        return self._heard.get(name)

    def note(self, there: Mapping[str, Install]) -> None:
        with self._lock:
            now_s = time.monotonic()
            passed_s = min(now_s - self._looked_s, LOOK_MAX_S)
            self._looked_s = now_s
            for name in self._missing_s.keys() - there.keys():
                missing_s = self._missing_s[name]
                self._missing_s[name] = 0.0 if missing_s == THERE else missing_s + passed_s
            self._heard |= there
            self._missing_s |= dict.fromkeys(there, THERE)

    def forget(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._missing_s.pop(name, None)
                self._heard.pop(name, None)


class Installing:
    """One install, on one rank: `with` this."""

    def __init__(self, installs: Installs, version: int | str, timeout_s: float | None) -> None:
        self._installs, self._shard = installs, installs.shard
        self._version, self._timeout_s = version, timeout_s
        self._asked = Asked.of("install", version)
        self._attempt = 0
        self._ref: VersionRef | None = None
        self._calls_before = 0  # made by the group when this was entered

    def __enter__(self) -> VersionRef:
        self._shard.require_usable()
        if (left := self._installs.open) is not None:  # Ctrl-C kept it from being left
            reason = "left without its end: another install was begun"
            left.fail(CallAborted(self._replica, 0, self._rank, reason), raises=False)
        self._installs.open = self
        self._calls_before = self._shard.group.ledger.calls_made
        try:
            return collectively(self._shard, self._asked, self._enter, self._timeout_s)
        except BaseException as error:
            self.fail(error, raises=False)
            raise

    @property
    def _intake(self) -> Intake:
        assert self._installs.intake is not None
        return self._installs.intake

    @property
    def _replica(self) -> str:
        return self._shard.group.seat.replica

    @property
    def _rank(self) -> int:
        return self._shard.group.seat.rank

    def _enter(self, deadline: Deadline) -> VersionRef:
        if self._installs.intake is None:
            raise UsageError("installing: open the handle with installs=True, on all ranks")
        shard, known, spec = self._shard, self._installs.known, Spec.parse(self._version)
        self._installs.told.wait(max(0.0, deadline.left_s()))
        if shard.is_alone:
            self._attempt = known.install.attempt + 1
            seen = self._intake.seen
            # The active version's number may be another content's by now.
            if seen and (seen.version != spec.absolute or seen == known.install.active):
                seen = None
            rule = partial(rules.enter_alone, attempt=self._attempt, spec=spec, known=seen)
            ranges = () if seen else spec_ranges(shard.group.seat.keys)
            install = self._installs.write(rule, deadline, ranges)
        else:
            task = GroupTask("update", self._asked, deadline, partial(self._decide, spec))
            shard.make(task)
            install = known.install
        self._attempt, ref = install.attempt, install.trying or install.active
        if ref is None:  # it was active, and has been rejected since, perhaps by this very rank
            assert install.rejected is not None
            self._ref = install.rejected.ref
            raise rules.rejected(install, shard.group.seat, self._ref)
        self._ref = ref
        self._intake.opens()
        shard.group.ledger.block = self._end
        return ref

    def _decide(self, spec: Spec, call: GroupCall) -> None:
        ranges = (one(rules.own_key(call.seat)), *spec_ranges(call.seat.keys))
        call.decide(ranges, partial(rules.enter, spec=spec))

    @property
    def _end(self) -> Asked:
        """The call that ends it."""
        if self._ref is None:
            return self._asked
        return Asked("installed", self._ref.version, attempt=self._attempt)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        shard, number = self._shard, self._shard.group.ledger.calls_made
        try:
            shard.require_usable()
            if self._installs.open is not self:
                raise UsageError(
                    f"{self._end}: another install was begun in the block of this one, and has "
                    "ended it; leave a block before the next"
                )
        except (ClosedError, UsageError):
            if error is None:
                raise
            return
        if error is not None:
            self.fail(error)
            return
        try:
            collectively(shard, self._end, self._leave, self._timeout_s)
            self._close()  # here: Ctrl-C may come in between
        except BaseException as failed:
            self.fail(failed, refuses=shard.group.ledger.calls_made == number)
            raise

    def _leave(self, deadline: Deadline) -> None:
        shard = self._shard
        if shard.is_alone:
            ref = self._content()
            rule = partial(rules.leave_alone, attempt=self._attempt, ref=ref)
            self._installs.write(rule, deadline)
        else:
            task = GroupTask("agree", self._end, deadline, self._agree)
            ref = shard.make(task)
        self._installs.mine = ref

    def _agree(self, call: GroupCall) -> VersionRef:
        ref, seat = self._content(), call.seat
        call.decide((), partial(rules.leave, ref=ref))
        if call.ref != ref:
            raise UsageError(f"{self._end}: the ranks have read {call.ref} and {ref}")
        rule = partial(rules.end, seat=seat, call=call.decided, attempt=self._attempt)
        ranges = (*seat.own, one(rules.own_key(seat)))
        call.finish("", lambda _: call.conclude(ranges, rule))
        return ref

    def _content(self) -> VersionRef:
        """The content that the engine has now, for all that this handle knows.

        Raises:
            UsageError: Another one than was to be installed, several, or a part.
            VersionNotFound: An update in its block has found nothing to go to.
        """
        mine = self._installs.mine
        assert self._ref is not None
        if torn := sorted({call.what for call in self._intake.torn}):
            raise UsageError(
                f"{self._end}: {torn} of its block had begun, and did not bring all; install anew"
            )
        found = self._intake.refs or ({mine} if mine is not None else set())
        if len(found) != 1 or {ref.version for ref in found} != {self._ref.version}:
            if self._intake.refs == {mine}:
                reason = "it went before it was read"
                raise VersionNotFound(self._shard.model, f"{self._ref.version}", reason)
            numbers = sorted(ref.version for ref in found) or "nothing"
            raise UsageError(
                f"{self._end}: its block has read {numbers}; expected one content, of the version "
                "that was entered, or nothing if this process had it installed last"
            )
        [ref] = found
        rules.refuse_older(ref, self._installs.known.install.floor)
        return ref

    def fail(self, error: BaseException, *, refuses: bool = True, raises: bool = True) -> None:
        """Tell everybody that this rank has left badly.

        Args:
            refuses: Its peers are, or will be, in a call of the block, or that which ends it.

        Raises: InstallRejected: This rank's error is another's.
        """
        shard = self._shard
        if self._ref is None and not shard.is_alone:
            self._learn()
        found: Rejection | None = None
        if self._attempt:
            mine = self._rejection(error)
            if mine is not None:
                self._installs.known.left_badly(self._attempt, mine)
            told = self._installs.tell(partial(rules.reject, attempt=self._attempt, rejection=mine))
            found = told.rejected if told and told.attempt == self._attempt else None
            is_first = found is None or (found == mine and found.rank == self._rank)
            if refuses and is_first and not shard.is_alone:
                with suppress(ClosedError):
                    shard.busy(partial(end_for_peers, shard, self._end, error), is_member=False)
        self._close()
        if raises and found and found.rank != self._rank and isinstance(error, TorchRosError):
            version = found.ref.version
            raise InstallRejected(self._replica, version, found.rank, found.reason) from error

    def _learn(self) -> None:
        """Find out whether the group has entered without this rank."""
        shard, ledger = self._shard, self._shard.group.ledger
        with suppress(TorchRosError):
            deadline = Deadline(f"the end of {self._asked}", CLEAN_UP_S)
            shard.busy(partial(shard.catch_up, deadline), is_member=False)
        refs = [
            call.ref
            for call in list(ledger.ended)
            if call.asked.verb == "install" and call.number > self._calls_before
            if call.outcome is not None and call.outcome.failure is None
        ]
        if refs:
            self._attempt, self._ref = self._installs.known.install.attempt, refs[-1]
            ledger.block = self._end  # which the peers are in

    def _rejection(self, error: BaseException) -> Rejection | None:
        if self._ref is None:
            return None
        rank, reason = self._rank, f"{type(error).__name__}: {error}"
        if isinstance(error, CallAborted):
            rank, reason = error.rank, error.reason
        text = reason.encode(errors="backslashreplace").decode()[:REASON_MAX]
        return Rejection(self._ref, rank, text)

    def _close(self) -> None:
        if (intake := self._installs.intake) is not None:
            intake.shuts()
        self._shard.group.ledger.block = None
        self._installs.open = None
