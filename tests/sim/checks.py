"""What must hold after every step, seen from outside: the store's records and everyone's memory."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
from replicas import TTL_S, Process, Start

from torch_ros.errors import CallMismatch, ClosedError, SeatLost, StoreUnavailable
from torch_ros.features.fallback.rules import TTLS
from torch_ros.features.installs.records import Install
from torch_ros.features.lending.memory import _file
from torch_ros.features.seeding.rules import is_forerunner
from torch_ros.protocol import keys as k
from torch_ros.protocol.legible import readable
from torch_ros.protocol.records import (
    Decisions,
    GroupRecord,
    Holding,
    RunRecord,
    SeenRecord,
    ShardRecord,
    VersionRecord,
    VersionRef,
    mark,
)
from torch_ros.protocol.versions import Spec
from torch_ros.store.loops import Act, Wait, WaitAtMost
from torch_ros.store.txn import Commit, Read, Watch, under, whole
from torch_ros.transfer.card import ALL_BLOCKS, Word

SLACK_S = 25.0  # what a call may take beyond its deadline: see docs/PROTOCOL.md
SLOW = {"idle", "stream", "install"}  # tasks of several calls
MOMENT_S = 0.5  # what is there for less, and gone again, a watch may not show
SETTLED_S = 3.0  # until whoever watches has noticed that a lease has ended
OF_A_RANK_ALONE = (SeatLost, StoreUnavailable, ClosedError)


class Broken(AssertionError):
    pass


def demand(holds: object, why: str) -> None:
    if not holds:
        raise Broken(why)


@contextmanager
def never(kinds: type[Exception] | tuple[type[Exception], ...], why: str) -> Iterator[None]:
    """Within it, no such error comes."""
    try:
        yield
    except kinds as error:
        raise Broken(f"{why}: {error!r}") from error


def _replica(inst: str) -> str:
    """Whose group's record it is that a holding of that name hangs on."""
    name = k.replica_of(inst)
    return name if is_forerunner(inst) else name.partition("+")[0]


def told_at_once(check: Callable) -> Callable:
    """What production code may catch on its way still ends the run."""

    @functools.wraps(check)
    def checked(self, *args):
        try:
            return check(self, *args)
        except Exception as error:
            self.world.crash = self.world.crash or error
            raise

    return checked


def are_of(world, tensors, content: int) -> bool:
    """Whether these whole tensors, by name, or their chunks, are of a content."""
    for number, (fqn, shape) in enumerate(world.shapes):
        expected = world.cells(np.arange(math.prod(shape)).reshape(shape) + 100 * number, content)
        boxes = getattr(tensors[fqn], "chunks", {(0,) * len(shape): tensors[fqn]})
        for offsets, box in boxes.items():
            part = tuple(slice(o, o + s) for o, s in zip(offsets, box.shape, strict=True))
            if not np.array_equal(box.numpy(), expected[part]):
                return False
    return True


class Checks:
    def __init__(self, world) -> None:
        self.world = world
        self.starts: dict[str, Start] = {}  # by incarnation
        self.truth: dict[str, int] = {}  # uid -> the content that was published
        self.marks: dict[int, int] = {}  # what processes show -> the content
        self.answers: dict[tuple, object] = {}
        self.decided: dict[tuple, object] = {}
        self.forgone: set[tuple[str, int]] = set()  # versions that went without a copy, by inst
        self.groups: dict[str, GroupRecord] = {}
        self.holdings: dict[str, Holding] = {}
        self.offered: set[str] = set()  # the uids that anybody could read
        self.held_s = -math.inf  # when anybody held anything last, but what came from a bucket
        self.numbers: dict[str, int] = {}  # of runs
        self.moments: dict[str, tuple[str, set[tuple[int, str]]]] = {}  # of a record's uid
        self.installs: dict[str, list[tuple]] = {}  # by replica: all that it said, and when
        self.root = under("/torch-ros/m/")

    # Told by the world

    def seated(self, process: Process) -> None:
        """Look over the shoulder of its calls, and of what it reads from."""
        group = process.shard.group
        # A second start of the name may have got the seat before the first one sat down.
        self.starts[group.seat.inst] = process.start
        make = group.make

        def spied_make(task):
            calls, kind = [], task.kind

            def spied_perform(call):
                calls[:] = [call]
                if kind == "replicate" and task.asked.verb != "serve":
                    known, replication = [], task.perform.__self__
                    fetch = partial(type(replication)._fetch, replication)
                    replication._fetch = lambda claimed, meter, sources: spied_fetch(
                        call, partial(fetch, claimed, meter), sources, known, claimed.tried
                    )
                return task.perform(call)

            try:
                result = make(dataclasses.replace(task, perform=spied_perform))
            except Exception as error:
                if calls:
                    self._answered(process, calls[0], kind, error)
                raise
            if calls and calls[0].has_ended:  # else it was not waited for
                self._answered(process, calls[0], kind, None)
            return result

        def spied_fetch(call, fetch, sources, known, tried):
            own = self.world.store.entries.get(call.seat.holding(call.ref))
            born = own.create_rev if own else 0
            if len(sources) > 1:
                self.world.saw("attached to several")
            for source in sources:
                if source not in known:
                    self._attached(process, call, source)
                    self._crosses(process, call, source, tried)
                    is_older = source.is_full or source.born < born
                    is_quiet = not self._shown(process)[0].mark
                    # A holding that went with its lease since the claim was older than that.
                    demand(
                        is_older or is_quiet or own is None,
                        f"{process} tells what comes from a younger one",
                    )
                known[:] = sources
                self._acyclic(process, source.inst, source.born, (call.seat.inst, born))
            process.reads_from = [(born, source.inst, source.born) for source in sources]
            try:
                fetch(sources)
            finally:
                process.reads_from = []

        group.make = spied_make

    @told_at_once
    def _answered(self, process: Process, call, kind: str, error: Exception | None) -> None:
        """I3: all ranks get the same answer, or the same error."""
        if isinstance(error, OF_A_RANK_ALONE):
            return
        if error is not None and not (call.has_ended and kind in {"publish", "replicate"}):
            return
        if isinstance(error, CallMismatch):
            return  # this rank is behind its peers
        answer: object = None
        if error is None:
            answer = call.said if kind == "agree" else call._call and call._call.ref
        # Ranks of several starts may make up one incarnation, if nothing tells them apart.
        where = (call.seat.replica, k.family(call.seat.nonce), call.number, kind)
        if answer == "":
            return  # a peer closed its handle, and took along what was said
        known = self.answers.setdefault(where, (answer, process, error))
        given_up = {ref.uid for ref in (known[0], answer) if kind == "unpublish" and ref}
        if given_up and not given_up & self.offered:
            return  # ranks out of step: each gives up its own part of what came to nothing
        demand(
            known[0] == answer,
            f"I3: call {where} was {known[0] or known[2]!r} to {known[1]}, "
            f"{answer or error!r} to {process}",
        )

    @told_at_once
    def _attached(self, process: Process, call, source) -> None:
        world = self.world
        world.saw("attached" if source.is_full else "attached to a relay")
        if k.lingers(source.inst):
            world.saw("attached to what lingers")
        elif "+" in source.inst:
            world.saw("attached to a copy")
        if call.turns.get("lost source"):
            world.saw("re-routed")
        processes = [world.process_of(shard) for shard in source.shards]
        start = processes[0].start
        demand(len(processes) == start.size, f"I7: {process} is sent to {len(processes)} processes")
        for peer in processes:
            # A second: the reply that named it may be on its way for that long.
            late_s = max(peer.died_s or world.now_s, world.leases_renewed_s) + TTL_S + 1.0
            is_late = peer.died_s is not None and world.now_s > late_s
            # A process that was stopped until a moment ago has had the answer since before.
            demand(
                not is_late or world.now_s < process.suspended_until_s + 1,
                f"I7: {process} is sent to {peer}, dead since {peer.died_s}",
            )
        is_ahead = is_forerunner(source.inst)
        demand(is_ahead or start is not process.start, f"{process} reads from itself")
        if is_ahead:
            world.saw("fetched ahead, and taken")

    @told_at_once
    def _crosses(self, process: Process, call, source, tried) -> None:
        """I13: who reads from afar has tried every near source that it could have chosen."""
        seat, ref, there = call.seat, call.ref, self.world.store.entries
        own = there.get(seat.holding(ref))
        if own is None or source.datacenter == seat.datacenter:
            return
        if Holding.decode(own.value, seat.holding(ref)).call != call.number:
            return  # a peer has ended the call, and begun the next one
        self.world.saw("attached to a far source")
        within = seat.keys.holdings_of(ref.run, ref.version)
        for key, where, holding, entry in readable(
            ((key, entry) for key, entry in there.items() if key in within),
            k.parse_holding,
            Holding,
        ):
            if holding.datacenter != seat.datacenter or holding.uid != ref.uid:
                continue
            # It has been so since this replica decided, and so when it chose.
            is_full = holding.state == "full" and entry.mod_rev < own.create_rev
            is_older = entry.create_rev < own.create_rev and holding.state == "filling"
            is_near = is_full or (is_older and holding.is_relay)
            demand(
                not is_near or k.is_of(where.inst, seat.inst) or tried[where.inst],
                f"I13: {process} reads from {source.inst}, and {key} is near",
            )

    @told_at_once
    def _acyclic(self, process: Process, inst: str, born: int, goal: tuple, depth=0) -> None:
        """Nobody reads, by whatever detour, from itself. A holding made anew is another one."""
        if depth and self._is_leaf(inst):
            return  # nothing comes of it, and who reads from it is about to find that
        demand((inst, born) != goal and depth < 50, f"{process} reads from {inst}, in a cycle")
        if "+" in inst or is_forerunner(inst) or not self._is_born(inst, born):
            return
        for peer in self.starts[inst].processes:
            for reader_born, *source in peer.reads_from:
                if reader_born == born:
                    self._acyclic(process, *source, goal, depth + 1)

    def _is_leaf(self, inst: str) -> bool:
        """It fills, is no relay, and tells nobody what it has."""
        there = (h for key, h in self.holdings.items() if k.parse_holding(key).inst == inst)
        fills = any(held.state == "filling" and not held.is_relay for held in there)
        return fills and not any(self._shown(p)[0].mark for p in self.starts[inst].processes)

    def _is_born(self, inst: str, born: int) -> bool:
        return any(
            k.parse_holding(key).inst == inst and self.world.store.entries[key].create_rev == born
            for key in self.holdings
        )

    @told_at_once
    def returned(self, process: Process, version: int) -> None:
        """I1, as users mean it: a call said that this version is here."""
        ref = self._held_by(process)
        known = {self.truth[uid] for uid, v in self.world.versions.items() if v == version}
        if ref is not None:
            known &= {self.truth[ref.uid]}
        has_it = any(np.array_equal(process.cells, process.expected(each)) for each in known)
        demand(has_it, f"I1: {process} has version {version} as {process.cells}, not {known}")

    @told_at_once
    def handed_out(self, process: Process, stream, good: list) -> None:
        """I12: what a stream has handed out is of the version's content while it is good."""
        ref = stream._filling.wanted.ref
        content = self.truth[ref.uid]
        numbers = {fqn: n for n, (fqn, _) in enumerate(self.world.shapes)}
        for fqn, tensor in good:
            cells = tensor.flatten().numpy()
            wanted = self.world.cells(np.arange(len(cells)) + 100 * numbers[fqn], content)
            if not np.array_equal(cells, wanted):
                raise Broken(f"I12: {process} was handed {fqn} of {ref} as {cells}, not {wanted}")

    @told_at_once
    def stream_ended(self, process: Process, stream) -> None:
        """I12: nobody is held up by a stream that has ended."""
        if self.world.now_s < process.unsure_until_s or not stream._filling.over.is_set():
            return  # its lease ends by itself
        self.no_record_of(process, stream, "has ended")

    def no_record_of(self, process: Process, stream, why: str) -> None:
        seat = process.shard.group.seat
        mine = f"/{stream._filling._sources._name}/{seat.rank:06d}"
        left = [key for key in self.world.store.entries if key.endswith(mine)]
        demand(not left, f"I12: a stream of {process} {why}, and {left} are there")

    def _held_by(self, process: Process) -> VersionRef | None:
        kept = process.shard.group.ledger.held
        return kept.ref if kept else None

    @told_at_once
    def withdrew(self, process: Process) -> None:
        """I5: nothing is left of a rank's part in a call that failed."""
        world = self.world
        if process.handle is None or world.now_s < process.unsure_until_s:
            return
        if process.shard.group.ledger.left_over:
            return  # the store was away; it is noted, for the next call
        if process.shard.group.state != "seated":
            return  # its records go with the lease, which another thread gives back
        seat = process.shard.group.seat
        mine = f"/{seat.inst}/{seat.rank:06d}"
        left = [
            key
            for key in world.store.read(Read((world.keys.readers(),))).entries
            if key.endswith(mine)
        ]
        demand(not left, f"I5: a failed call of {process} left {left}")

    @told_at_once
    def took(self, process: Process, task, took_s: float) -> None:
        wrong = process.shard.observed.tally.corrupt
        # Where somebody wrote to a base, or a rank cannot tell whether somebody did, all is read.
        is_foreseen = self.world.stray_share or isinstance(process.start.digests, tuple)
        demand(
            is_foreseen or not wrong, f"I1: {process} has compared digests, and {wrong} were wrong"
        )
        calls = 1 if task.kind == "unpublish" else 2  # of the handle, one after the other
        late = took_s > calls * task.timeout_s + SLACK_S and task.kind not in SLOW
        if late and not self.world.was_hindered(process, took_s):
            demand(False, f"I6: {process} took {took_s:.1f} s for {task}")

    @told_at_once
    def closed(self, process: Process, most_s: float, took_s: float) -> None:
        late = took_s > most_s + SLACK_S
        if late and not self.world.was_hindered(process, took_s):
            demand(False, f"I6: {process} took {took_s:.1f} s to close")

    # Memory

    def _shown(self, process: Process) -> tuple[Word, int]:
        """What it says is there, and how many of its cells that are."""
        if process.handle is None:
            return Word(), 0
        word = process.shard.mailbox.word
        if word.mark == 0 or word.position == 0:
            return word, 0
        ends = process.ends
        position = len(ends) if word.position == ALL_BLOCKS else word.position
        return word, ends[position - 1] if ends else 0

    def _expected(self, process: Process, number: int):
        content = self.marks.get(number)
        return None if content is None else process.expected(content)

    @told_at_once
    def landed(self, process: Process, target: int, size: int) -> None:
        first = (target - process.base) // 8
        if 0 <= first < len(process.cells):
            self._compare(process, first, first + max(1, size // 8), "a read landed")

    @told_at_once
    def sent(self, process: Process, agent: str, address: int, size: int) -> None:
        """I2: what was unregistered is not read any more, however slow a reader is."""
        is_there = self.world.wires[agent].has(address, size)
        demand(is_there, f"I2: {process} sends {size} bytes that are not registered any more")

    @told_at_once
    def met(self, process: Process, wanted: str, found: str) -> None:
        """I7: who connects meets the process of the card, and no other at its address."""
        demand(wanted == found, f"I7: {process} has met {found}, and its card is of {wanted}")

    @told_at_once
    def wrote(self, process: Process) -> None:
        self._compare(process, 0, len(process.cells), "its owner wrote")

    @told_at_once
    def shown(self, process: Process) -> None:
        self._compare(process, 0, len(process.cells), "it said so")
        word, _ = self._shown(process)
        if process.handle is not None and word.mark:
            inst = process.shard.group.seat.inst
            for key, holding in self.holdings.items():
                if holding.mark == word.mark and k.parse_holding(key).inst == inst:
                    self._compare_with(process, holding, key)

    def _compare(self, process: Process, first: int, last: int, why: str) -> None:
        """Cells that are said to be there."""
        word, end = self._shown(process)
        last = min(last, end)
        if first >= last or process.start.publishes_copies:  # its copies are elsewhere
            return
        expected = self._expected(process, word.mark)
        if expected is None:
            return
        if not np.array_equal(process.cells[first:last], expected[first:last]):
            raise Broken(
                f"I1, I2: {process} shows {word}, {why}, and cells {first} to {last} are "
                f"{process.cells[first:last]}, not {expected[first:last]}"
            )

    def _compare_with(self, process: Process, holding: Holding, key: str) -> None:
        """What its replica is said to hold, by its record."""
        word, end = self._shown(process)
        is_elsewhere = process.start.publishes_copies
        if process.is_gone or word.mark != holding.mark or is_elsewhere:
            return
        content = self.truth.get(holding.uid)
        if content is None:
            return
        expected = process.expected(content)
        if not np.array_equal(process.cells[:end], expected[:end]):
            raise Broken(
                f"I1: {key} is {holding.state} with call {holding.call}, {process} shows {word}, "
                f"and its cells are {process.cells[:end]}, not {expected[:end]}"
            )

    @told_at_once
    def copied(self, copy, process: Process) -> None:
        """A copy in host memory is what was published."""
        content = self.truth.get(copy.kept.ref.uid)
        demand(
            content is not None, f"I4: {process} copies {copy.kept.ref}, which was never offered"
        )
        cells = [cell for chunk in copy._chunks for cell in chunk.flatten().tolist()]
        good = cells == process.expected(content).tolist()
        demand(good, f"I4: {process} copies {copy.kept.ref} as {cells}")
        self.world.saw("copied to host memory")

    @told_at_once
    def filled(self, lent) -> None:
        """I11: who is about to be written to is nobody's."""
        for process, loans in self.world.loans.items():
            had = [loan for loan in loans if loan._end.alive and not process.is_gone]
            had = [loan for loan in had if not hasattr(loan, "is_unlocked")]
            for loan in had:
                is_same = _file(loan._fd) == lent._file
                demand(not is_same, f"I11: {process} has a buffer that is filled again")

    @told_at_once
    def borrowed(self, process: Process, tensors) -> None:
        """I1, I11: what is borrowed is what was published, all the time."""
        world, version = self.world, tensors.version
        known = {self.truth[uid] for uid, v in world.versions.items() if v == version}
        is_it = any(are_of(world, tensors, content) for content in known)
        demand(is_it, f"I11: {process} borrowed as {version} something else than {known}")
        world.saw("borrowed")
        holders = {k.parse_holding(key).version for key in self.holdings}
        if version not in holders:
            world.saw("borrowed while it was given up")

    # The store

    @told_at_once
    def changed(self, keys: set[str], what: object) -> None:
        entries = self.world.store.entries
        before, groups = dict(self.holdings), dict(self.groups)
        if any(k.parse_holding(key).run != k.OUTSIDE for key in before):
            self.held_s = self.world.now_s
        kinds: dict[str, list[str]] = {}
        for key in keys:
            kinds.setdefault(key.split("/")[3], []).append(key)
        for kind, look in (
            ("runs", self._changed_run),
            ("versions", self._changed_version),
            ("groups", self._changed_group),
            ("shards", self._changed_shard),
            ("decisions", self._changed_decisions),
            ("holdings", self._changed_holding),
            ("readers", self._changed_reader),
            ("carried", self._changed_install),
        ):
            for key in kinds.get(kind, ()):
                look(key, entries.get(key))
        if "holdings" in kinds or "groups" in kinds:
            self._records()
        if "holdings" in kinds and isinstance(what, Commit):
            self._retained(before, groups)

    def _changed_run(self, key: str, entry) -> None:
        if entry is not None:
            self.numbers[k.parse_run(key)] = RunRecord.decode(entry.value, key).number

    def _changed_version(self, key: str, entry) -> None:
        """A version keeps its moment and its span, whoever completes, copies or brings it back."""
        if entry is None:  # brought back after that, it may have another rank's
            self.moments.pop(key, None)
            return
        record = VersionRecord.decode(entry.value, key)
        if k.parse_version(key)[0] == k.OUTSIDE:  # no span, and a bucket's moment
            return
        uid, known = self.moments.setdefault(key, (record.uid, set()))
        if uid != record.uid:  # published anew
            known = set()
            self.moments[key] = (record.uid, known)
        told = record.at_ms, record.traceparent
        if not (known and record.layout):
            known.add(told)
        # After a wipe it may be decided anew, by another rank.
        is_kept = told in known or self.world.wipes
        demand(all(told) and is_kept, f"{key} has moment and span {told}, not one of {known}")

    def _changed_reader(self, key: str, entry) -> None:
        if entry is not None and key.endswith("/group"):
            self._anchored(key, k.parse_reader(key)[1], entry)

    def _changed_group(self, key: str, entry) -> None:
        old = self.groups.pop(key, None)
        if entry is None:
            return
        group = self.groups[key] = GroupRecord.decode(entry.value, key)
        seen = self.world.keys.seen_of(k.parse_group(key))
        is_left = group.left is not None and any(each in seen for each in self.world.store.entries)
        demand(not is_left, f"{key} is left in good order, and somebody looks for who was there")
        inst = k.instance(k.replica_of(key.rpartition("/")[2]), group.nonce)
        if inst not in self.starts:
            start = self.world.start_of(k.replica_of(inst), group.nonce)
            self.starts[inst] = start
            if "." in group.nonce:
                self.world.saw("seats taken again")
        if old is None or old.nonce != group.nonce:
            self.world.saw("group created")

    def _changed_shard(self, key: str, entry) -> None:
        inst, rank = k.parse_shard(key), k.parse_rank(key)
        if entry is None or "+" in inst:  # a copy, or what lingers
            return
        at = self.world.keys.seen_at(k.replica_of(inst), rank)
        seen = self.world.store.entries.get(at)
        pid = ShardRecord.decode(entry.value, key).pid
        is_seen = seen is not None and SeenRecord.decode(seen.value, at).pid == pid
        demand(is_seen and not seen.lease_id, f"{key} is there, and {at} does not say whose")

    def _changed_install(self, key: str, entry) -> None:
        inst, _ = k.parse_carried(key)
        replica, told = k.replica_of(inst), self.installs.setdefault(k.replica_of(inst), [])
        new = Install.decode(entry.value, key) if entry else None
        if new is not None or not self._says(replica):
            told.append((self.world.now_s, new))
        if new is None:
            return
        self._anchored(key, inst, entry)
        demand(self._is_seated(inst), f"I7: {key} is there, and its group is not")
        self.world.saw("install rejected" if new.rejected else "install")
        if new.active is not None:
            self.world.saw("installed")
            self._used(key, self.truth[new.active.uid])

    def _says(self, replica: str) -> bool:
        entries = self.world.store.entries
        return any("/carried/" in key and f"/{replica}@" in key for key in entries)

    def _used(self, key: str, content: int) -> None:
        entries = self.world.store.entries
        shards = self.world.keys.shards(k.parse_carried(key)[0])
        for shard in (ShardRecord.decode(entries[s].value, s) for s in entries if s in shards):
            each = self.world.process_of(shard)
            is_used = each.is_gone or not len(each.cells) or each.engine == content
            is_used |= not each.handle._installs.told.is_set()  # a rejection is on its way
            demand(is_used, f"I10: {key} is active at {content}, and {each} uses {each.engine}")

    @told_at_once
    def uses(self, process: Process) -> None:
        """I10: before an engine changes, nobody is told that it is as it was."""
        for key, entry in self.world.store.entries.items():
            if "/carried/" in key and f"/{process.start.replica}@" in key:
                install = Install.decode(entry.value, key)
                if install.active is not None:
                    self._used(key, self.truth[install.active.uid])

    @told_at_once
    def waited(self, process: Process, version: int, found, began_s: float) -> None:
        """I10: nobody is passed over who was there, and nobody is gone too soon."""
        demand(found.active, f"I10: {process} waits for {version}, and all of nobody is enough")
        run, answered = process.handle.run, {*found.active, *found.rejected, *found.gone}
        known = {*process.heard, *(name for name in self.installs if self._stayed(name, began_s))}
        demand(known <= answered, f"I10: {process} waits for {version} without {known - answered}")
        process.heard = answered - {*found.gone}
        for name in found.active:
            told = self.installs[name]
            last = [each for s, each in told if s < began_s][-1:]
            there = [each for each in last + [e for s, e in told if s >= began_s] if each]
            used = [ref for each in there for ref in (each.active, each.floor)]
            is_it = any(ref and ref.run == run and ref.version >= version for ref in used)
            demand(is_it, f"I10: {process} hears that {name} uses {version}; it used {used}")
        for name in found.gone:
            lasted_s = self._last_gone_s(name)
            demand(lasted_s > 2 * TTL_S - 2, f"I10: {name} is gone after {lasted_s:.1f} s")
            self.world.saw("gone")

    def _last_gone_s(self, name: str) -> float:
        """For how long it had no record, the last time; one for a moment is not seen by all."""
        came_s, left_s, is_there = -math.inf, math.inf, False
        for s, each in self.installs[name]:
            if each is not None and not is_there:
                came_s = s
            elif each is None and is_there and (s - came_s >= MOMENT_S or left_s == math.inf):
                left_s = s
            is_there = each is not None
        return (came_s if is_there else self.world.now_s) - left_s

    def _stayed(self, name: str, since_s: float) -> bool:
        """Whether a replica had a record all the time."""
        told = self.installs[name]
        before = [each for s, each in told if s < since_s][-1:]
        return bool(before) and all([*before, *(each for s, each in told if s >= since_s)])

    def _records(self) -> None:
        holders: set[str] = set()
        uids: dict[str, str] = {}
        for key, holding in self.holdings.items():
            inst = k.parse_holding(key).inst
            demand(inst not in holders, f"I5: two holdings of {inst}: {sorted(self.holdings)}")
            holders.add(inst)
            uid = uids.setdefault(key.rpartition("/")[0], holding.uid)
            demand(uid == holding.uid, f"I1: {key} has uid {holding.uid}, another has {uid}")
            is_there = self._is_seated(inst) or k.lingers(inst)
            demand(is_there, f"I7: {key} is there, and its group is not")

    def _is_seated(self, inst: str) -> bool:
        group = self.groups.get(self.world.keys.group(_replica(inst)))
        replica = _replica(inst)
        return (
            group is not None
            and group.left is None
            and k.is_of(inst, k.instance(replica, group.nonce))
        )

    def _anchored(self, key: str, inst: str, entry) -> None:
        """I3: a group's records live as long as its own record."""
        group = self.world.store.entries.get(self.world.keys.group(_replica(inst)))
        if group is None or not self._is_seated(inst):
            return
        demand(
            entry.lease_id == group.lease_id,
            f"I3: {key} hangs on lease {entry.lease_id}, its group on {group.lease_id}",
        )

    def _changed_holding(self, key: str, entry) -> None:
        old = self.holdings.pop(key, None)
        if entry is None:
            return
        new = self.holdings[key] = Holding.decode(entry.value, key)
        if new.state != "filling" or not new.is_original:
            self.offered.add(new.uid)
        inst = k.parse_holding(key).inst
        self._anchored(key, inst, entry)
        if old is None:
            born = new.state
            self.world.saw(f"holding begins {born}")
            may_be_full = "+" in inst or "." in inst
            demand(born == "filling" or may_be_full, f"I1: {key} begins as {born}")
            if born == "filling" and new.is_original:
                self._newest(key)
        elif old.is_relay and not new.is_relay:
            self.world.saw("stepped aside")
        elif new.state != old.state:
            step = (old.state, new.state)
            self.world.saw(f"{step[0]} to {step[1]}")
            allowed = {("filling", "full"), ("full", "draining")}
            start = self.starts[k.owner_of(inst)]
            may_return = "+" in inst or any(p.closing_s is not None for p in start.processes)
            allowed |= {("draining", "full")} if may_return else set()
            demand(step in allowed, f"I5: {key} goes from {old.state} to {new.state}")
        if new.state == "full":
            self._covers(key, inst, new)
        if is_forerunner(inst):
            self._changed_ahead(key, inst, new)
            return
        if old is None and k.lingers(inst):
            self.world.saw("lingers")
        is_of_tensors = "+" not in inst or k.lingers(inst)
        if is_of_tensors and not (new.is_original and new.state == "filling"):
            for process in self.starts[k.owner_of(inst)].processes:
                self._compare_with(process, new, key)

    def _changed_ahead(self, key: str, inst: str, new: Holding) -> None:
        """I15, I1: one forerunner of a datacenter fills a version; what it offers is that."""
        filling = [
            other
            for other, holding in self.holdings.items()
            if holding.state == new.state == "filling"
            and is_forerunner(k.parse_holding(other).inst)
            if other.rpartition("/")[0] == key.rpartition("/")[0]
        ]
        demand(len(filling) < 2, f"I15: forerunners of one datacenter fill {filling}")
        if new.state != "full":
            return
        self.world.saw("fetched ahead")
        for process in self.starts[inst].processes:
            ahead = process.ahead
            if ahead is None or ahead._room is None or process.is_gone:
                continue
            group = ahead._shard.group
            if group.state != "seated" or group.seat.inst != inst:
                continue
            chunks = (c.tensor for t in ahead._room.state.tensors for c in t.chunks)
            cells = [cell for chunk in chunks for cell in chunk.flatten().tolist()]
            good = cells == process.expected(self.truth[new.uid]).tolist()
            demand(good, f"I1: {key} is full, and {process} has fetched {cells}")

    def _covers(self, key: str, inst: str, holding: Holding) -> None:
        """I9: who holds a version shows every element of it."""
        there = self.world.store.read(Read((self.world.keys.shards(inst),))).entries
        shown = [self._layout_of(ShardRecord.decode(e.value, at)) for at, e in there.items()]
        if len(shown) < holding.world_size or None in shown:
            return  # a rank has lost its seat, or has not returned from `open`
        missing = {fqn: np.ones(shape, np.bool_) for fqn, shape in self.world.shapes}
        for layout in shown:
            for chunk in layout.chunks:
                ends = [o + size for o, size in zip(chunk.offsets, chunk.sizes, strict=True)]
                box = tuple(map(slice, chunk.offsets, ends))
                missing[layout.tensors[chunk.tensor].fqn][box] = False
        lacks = {fqn: np.argwhere(cells).tolist() for fqn, cells in missing.items() if cells.any()}
        demand(not lacks, f"I9: {key} is full, and its ranks lack {lacks}")

    def _layout_of(self, shard: ShardRecord):
        process = self.world.process_of(shard)
        if (handle := process.handle) is None:
            return None
        mailboxes = [handle._shard.mailbox, *(copy.mailbox for copy in process.copies.made)]
        mailboxes += [process.forerunner.mailbox] if process.forerunner else []
        shown = next((each.manifest for each in mailboxes if each.card == shard.card), None)
        return shown and shown.layout

    def _newest(self, key: str) -> None:
        """Numbers only grow within a run."""
        where = k.parse_holding(key)
        above = self.world.keys.versions_above(where.run, where.version)
        newer = [
            other
            for other, entry in self.world.store.read(Read((above,))).entries.items()
            if VersionRecord.decode(entry.value, key).layout
        ]
        demand(not newer, f"I3: {key} is published after {newer}")

    def _changed_decisions(self, key: str, entry) -> None:
        if entry is None:
            return
        inst = key.rpartition("/")[2]
        self._anchored(key, inst, entry)
        start = self.starts[inst]
        for call in Decisions.decode(entry.value, key).calls:
            where = (inst, call.number)
            old = self.decided.get(where)
            if old == call:
                continue
            if old is not None and old.outcome is not None and call.outcome is not None:
                known, said = old.outcome, call.outcome
                # A rank that forgot what it held says that it unpublished it.
                is_same = known == said and (old.ref == call.ref or known.failure is not None)
                demand(is_same, f"I3: {start} ended {old}, then {call}")
            if call.must and (old, call.outcome) == (None, None):
                quiet_s = self.world.now_s - self.held_s
                is_quiet = quiet_s >= TTLS * TTL_S
                demand(is_quiet, f"I16: {start} reads a bucket after {quiet_s:.1f} s")
            if call.kind == "publish" and call.ref is not None and call.ref.uid not in self.truth:
                if call.outcome is not None and call.outcome.failure is None:
                    self.world.saw("offered when back")
                    self._newest(
                        self.world.keys.holding(call.ref.run, call.ref.version, "any", inst)
                    )
                self.truth[call.ref.uid] = self.world.content_of(call)
                self.world.versions[call.ref.uid] = call.ref.version
            if call.ref is not None and call.ref.uid in self.truth:
                self.marks[mark(call.ref.uid, call.number)] = self.truth[call.ref.uid]
            if call.outcome is not None and (old is None or old.outcome is None):
                failure = call.outcome.failure
                self.world.saw(f"{call.kind} ends: {failure.kind if failure else 'ok'}")
                if failure is None and call.copy:
                    self.world.saw("unpublished with a copy")
            if call.is_forgone and call.ref is not None:
                crammed = getattr(self.world, "crammed", ())  # a scene's
                is_short = any(each in crammed for each in start.processes)
                demand(is_short, f"I4: {start} has forgone a copy that it had memory for")
                self.forgone.add((inst, call.ref.version))
            self.decided[where] = call

    def _retained(self, before: dict[str, Holding], groups: dict[str, GroupRecord]) -> None:
        """I4: nobody gives up, of his own accord, the last copy of what others retain."""
        self._lost_to(None, before, groups)
        for datacenter in {group.datacenter for group in groups.values()}:
            self._lost_to(datacenter, before, groups)

    def _lost_to(self, where: str | None, before: dict, groups: dict[str, GroupRecord]) -> None:
        """`where`: a datacenter, and what those retain who are there; None: anywhere."""
        held = self._keepers(before, where)
        lost = dict(held)
        for ref in self._keepers(self.holdings, where):
            lost.pop(ref, None)
        for (run, version, uid), keys in lost.items():
            insts = {key: k.parse_holding(key).inst for key in keys}
            dropped = [key for key, inst in insts.items() if self._would_stay(inst, where)]
            dropped += [key for key, inst in insts.items() if self._could_linger(inst, where)]
            dropped = [key for key in dropped if (insts[key], version) not in self.forgone]
            if not dropped:
                continue  # its replica ended, takes its seats again, or has no memory for a copy
            there = {(r, v) for r, v, _ in held}
            # Whether those go that are about to, or not.
            stays = {
                (r, v)
                for (r, v, _), kept in held.items()
                if (r, v) == (run, version)
                or not all(k.lingers(k.parse_holding(key).inst) for key in kept)
            }
            for key, group in groups.items():
                if not group.is_complete or group.left is not None:
                    continue
                for text in group.retain:
                    spec, _, here = text.partition("@")
                    if (group.datacenter if here else None) != where:
                        continue
                    spec = Spec.parse(int(spec) if spec.isdecimal() else spec)
                    meant = {self._meant(spec, run, there), self._meant(spec, run, stays)}
                    demand(
                        version not in meant,
                        f"I4: {dropped} was the last copy of {version} ({uid}), and "
                        f"{key} retains {text}",
                    )

    def _meant(self, spec: Spec, run: str, there: set[tuple[str, int]]) -> int | None:
        """The version of that run which is retained by this, if these are there."""
        _, newest = max((self.numbers.get(r, 0), r) for r, _ in there)
        if run != newest or spec.absolute is not None:
            return spec.absolute if run == newest else None
        versions = sorted((v for r, v in there if r == run), reverse=True)
        return versions[spec.back] if spec.back < len(versions) else None

    def _would_stay(self, inst: str, where: str | None) -> bool:
        """Whether its replica has its seats, and does not leave while nobody could take it."""
        if not self._is_seated(inst):
            return False
        start = self.starts[k.owner_of(inst)]
        is_leaving = any(p.closing_s is not None for p in start.processes)
        return not is_leaving or self._is_awaited(start, where)

    def _could_linger(self, inst: str, where: str | None) -> bool:
        """Whether nothing has ended yet that lingers, nor need it: somebody could take it."""
        start = self.starts[k.owner_of(inst)]
        if not k.lingers(inst) or any(p.died_s is not None for p in start.processes):
            return False
        shards = self.world.store.read(Read((self.world.keys.shards(inst),))).entries
        until_s = min((p.closing_s or 0.0) + start.linger_s for p in start.processes)
        is_there = len(shards) == start.size and self.world.now_s < until_s
        return is_there and self._is_awaited(start, where)

    def _is_awaited(self, start: Start, where: str | None) -> bool:
        """Whether there is somebody who could take what it has."""
        own = self.world.keys.group(start.replica)
        return any(
            where in (None, g.datacenter) and g.left is None and g.is_complete and not g.spot
            for key, g in self.groups.items()
            if key != own
        )

    def _keepers(self, holdings: dict[str, Holding], where: str | None) -> dict[tuple, list[str]]:
        found: dict[tuple, list[str]] = {}
        for key, holding in holdings.items():
            is_there = where in (None, holding.datacenter)
            if is_there and holding.state == "full" and not holding.spot:
                parsed = k.parse_holding(key)
                found.setdefault((parsed.run, parsed.version, holding.uid), []).append(key)
        return found

    # At special moments

    def stalled(self) -> None:
        """I6: nobody can move before time passes; those who sleep have a reason to."""
        world = self.world
        if any(
            p.is_hindered or p.unsure_until_s > world.now_s
            for p in world.processes
            if not p.is_gone
        ):
            return  # others may wait for what such a one is about to do
        self._expelled()
        views: dict[tuple, object] = {}
        for actor in world.actors:
            process = actor.process
            if not isinstance(actor.waiting, Watch) or not actor.loops:
                continue
            if process.is_hindered or world.down_until_s > world.now_s:
                continue
            if actor.wipes < world.wipes:
                continue  # the new store's revision is past its view's: it looks again in a while
            if actor.waiting.reason == "a lease that has ended" or "miss" in actor.waiting.reason:
                continue  # for half a second, whatever changes; for one
            if "has ranks" in actor.waiting.reason and any(
                peer.is_gone
                for peer in world.processes
                if peer.start.replica == process.start.replica
            ):
                continue  # the last to come completes the group, or nobody does
            if actor.waiting.until is not None and actor.waiting.until():
                continue  # that is no change of the store: it looks by itself
            ranges, rule = actor.loops[-1]
            if ranges not in views:
                views[ranges] = world.store.read(Read(whole(ranges)))
            if re.search("still read by|waits for readers", actor.waiting.reason) and any(
                "/readers/" in key for key in views[ranges].entries
            ):
                continue  # what else has changed, it will see when they are gone
            try:
                answer = rule(views[ranges])
            except Exception as error:
                answer = error
            if isinstance(answer, Act) and not all(map(world.store._lease_lives, answer.txn.ops)):
                continue  # its lease has ended, and it does not know yet
            demand(
                isinstance(answer, Wait | WaitAtMost),
                f"I6: {actor} sleeps ({actor.waiting.reason}), and {answer} is there",
            )

    def _expelled(self) -> None:
        """I7: what a dead process held is not there any more, once its lease has ended."""
        dead = [p for p in self.world.processes if p.died_s is not None and p.handle is not None]
        for process in dead:
            # Whoever would have noticed may have died too.
            last_s = max(peer.died_s or 0.0 for peer in process.start.processes)
            since_s = max(last_s, self.world.leases_renewed_s) + TTL_S + SETTLED_S
            inst = process.shard.group.seat.inst
            insts = {key: k.parse_holding(key).inst for key in self.holdings}
            left = [key for key, other in insts.items() if k.owner_of(other) == inst]
            is_late = self.world.now_s > since_s and left
            demand(not is_late, f"I7: {process} died at {process.died_s}, and {left} are there")

    def calm(self) -> None:
        """A while after the last fault: what is held is offered, and what is offered is there."""
        for start in self.world.starts:
            processes = [p for p in start.processes if p.handle is not None]
            if not start.is_intact or len(processes) < start.size:
                continue
            refs = {self._held_by(process) for process in processes}
            groups = [process.shard.group for process in processes]
            if any(
                group.state != "seated" or group.ledger.unfinished or group.ledger.pending
                for group in groups
            ):
                continue
            if len(refs) != 1 or None in refs or len({g.seat.inst for g in groups}) != 1:
                continue
            (ref,) = refs
            key = groups[0].seat.holding(ref)
            record = self.world.store.entries.get(self.world.keys.version(ref.run, ref.version))
            if record is not None and f'"{ref.uid}"'.encode() not in record.value:
                continue  # published anew, by somebody who did not know
            demand(
                key in self.holdings, f"I4, I6: all of {start} hold {ref}, and it is not offered"
            )
        for key, holding in self.holdings.items():
            inst = k.parse_holding(key).inst
            start = self.starts[k.owner_of(inst)]
            is_copy = "+" in inst or is_forerunner(inst)
            if holding.state != "full" or is_copy or not start.is_intact:
                continue
            for process in start.processes:
                group = process.shard.group
                if group.state != "seated" or group.ledger.pending or group.seat.inst != inst:
                    continue
                word, _ = self._shown(process)
                demand(
                    word == Word(holding.mark, ALL_BLOCKS),
                    f"I6: {key} is full with call {holding.call}, and {process} shows {word}",
                )

    def end(self) -> None:
        left = [
            key
            for key in self.world.store.entries
            if key.split("/")[3] not in {"runs", "schema", "versions", "seen"}
        ]
        demand(not left, f"I6: everybody has gone, and this is left: {left}")


__all__ = ["Broken", "Checks", "demand"]
