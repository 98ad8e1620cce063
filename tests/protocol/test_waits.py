"""Many wait for a version while as many read one: what that costs each of those who wait."""

import itertools
import os
import random
from functools import partial

import pytest

from torch_ros.memory.store import MemoryKV, Space
from torch_ros.protocol import calls, records, sources
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.seat import Seat
from torch_ros.protocol.versions import Spec, listing, resolve, spec_ranges
from torch_ros.store import loops
from torch_ros.store.loops import Done, Wait, settle
from torch_ros.store.txn import Commit, Follow, Put, Read, Txn, Watch, one, sample, whole

KEYS = Keys("m")
READS_MAX = 10
MANY = (
    [30, 100, 300] if int(os.environ.get("TORCH_ROS_FUZZ", "1")) > 1 else [30]
)  # each costs the same
REF = records.VersionRef("run", 8, "uid", 1)


class Loop:
    """A loop of the store, one request at a time; how often it read."""

    def __init__(self, kv, steps):
        self.kv, self.steps = kv, steps
        self.reads, self.is_over, self.answer, self.seen_rev = 0, False, None, 0
        self._go_on(None)

    def _go_on(self, reply):
        try:
            self.request = self.steps.send(reply)
        except StopIteration as stop:
            self.is_over, self.answer = True, stop.value

    def step(self):
        """Whether it moved."""
        if self.is_over:
            return False
        match self.request:
            case Read():
                self.reads += 1
                self._go_on(self.kv.read(self.request, timeout_s=1))
            case Commit(txn):
                self._go_on(self.kv.commit(txn, timeout_s=1))
            case Watch(ranges):
                if not self._is_woken(ranges):
                    return False
                self._go_on(0.0)
            case Follow(ranges):
                if not self._is_woken(ranges):
                    return False
                self._go_on(self.kv.follow(self.request, timeout_s=0))
        return True

    def _is_woken(self, ranges):
        """Whether anything has changed; of what it was asked before, nothing had."""
        rev = max(self.request.after_rev, self.seen_rev)
        self.seen_rev = self.kv.read(Read(()), timeout_s=1).rev
        return self.kv.wait(Watch(ranges, rev, ""), timeout_s=0)


def play(moving, waiting, seed):
    """Let one of those who move do a step, and all who wait look at what it changed; to the end."""
    rng, moving = random.Random(seed), list(moving)
    while True:
        for loop in waiting:
            while loop.step():
                pass
        moving = [loop for loop in moving if not loop.is_over]
        if not moving:
            return
        assert any(loop.step() for loop in rng.sample(moving, len(moving)))


def seat(name, lease_id):
    return Seat(KEYS, name, "1", 0, 1, "run", 1, lease_id, "default", False, 60.0)


def put(kv, key, record, lease_id=0):
    assert kv.commit(Txn(ops=(Put(key, record.encode(), lease_id),)), timeout_s=1).applied


def replica(kv, name):
    lease_id, _ = kv.grant(3600, timeout_s=1)
    put(kv, KEYS.group(name), records.GroupRecord("1", 1, "run", is_complete=True), lease_id)
    return seat(name, lease_id)


def reads(place):
    """All that a replica of one process asks etcd while it replicates, but for its shards."""
    own = place.own
    effects = partial(calls.announce_filling, spec=Spec(), is_relay=True)
    ranges = (*own, *spec_ranges(KEYS), sample(KEYS.readers()), KEYS.suspects())
    made = records.Call(1, "replicate", records.Asked("r"), by=place.rank)
    decide = partial(calls.find_or_decide, seat=place, call=made, effects=effects)
    call = yield from settle("decide", ranges, decide)
    if not call.sources:
        claim = partial(sources.claim, seat=place, call=call)
        call = (yield from settle("claim", sources.source_ranges(place, call.ref), claim)).call
    complete = partial(calls.complete, seat=place, call=call, end=records.Outcome(said="L"))
    return (yield from settle("complete", calls.end_ranges(place, call), complete))


def leaves(place):
    """Its process ends, at some time: nobody drains it."""
    for _ in range(3):
        yield Read((one(place.group),))
    yield Commit(Txn(ops=tuple(calls.Delete(one(k)) for k in (place.group, place.holding(REF)))))


def waits(spec):
    def rule(view):
        found = resolve(view, KEYS, spec)
        return found if isinstance(found, Wait) else Done(found)

    return settle("wait", spec_ranges(KEYS), rule)


def looks(count):
    def rule(view):
        there = listing(view, KEYS)
        return Done(there) if len(there.get(8, ())) >= count else Wait("", whole(spec_ranges(KEYS)))

    return loops.follow(whole(spec_ranges(KEYS)), rule)


def model():
    kv = MemoryKV(Space())
    trainer = replica(kv, "t")
    put(kv, KEYS.run("run"), records.RunRecord("h:1", 1))
    put(kv, KEYS.version("run", 8), records.VersionRecord("uid", "L"))
    put(
        kv,
        trainer.holding(REF),
        records.Holding("uid", 1, "full", 1, is_original=True),
        trainer.lease_id,
    )
    return kv, trainer


@pytest.mark.parametrize("count", MANY)
def test_who_waits_for_an_older_version_is_not_woken_by_all_who_read(count):
    kv, trainer = model()
    waiting = [Loop(kv, waits(Spec.parse("latest-1"))) for _ in range(count)]
    reading = [Loop(kv, reads(replica(kv, f"r{n}"))) for n in range(count)]
    play([*reading, Loop(kv, leaves(trainer))], waiting, count)
    assert all(loop.is_over for loop in reading)
    assert not any(loop.is_over for loop in waiting)
    assert max(loop.reads for loop in waiting) <= READS_MAX
    # They are told when there is one.
    holding = Put(
        KEYS.holding("run", 9, "default", "x@1"), records.Holding("new", 1, "full", 1).encode()
    )
    record = Put(KEYS.version("run", 9), records.VersionRecord("new", "L").encode())
    assert kv.commit(Txn(ops=(holding, record)), timeout_s=1).applied
    play([], waiting, count)
    assert {loop.answer.ref.version for loop in waiting} == {8}


@pytest.mark.parametrize("count", MANY)
def test_who_waits_for_something_in_the_list_reads_it_once(count):
    kv, _ = model()
    waiting = [Loop(kv, looks(count + 1)) for _ in range(min(count, 10))]  # each alike
    reading = [Loop(kv, reads(replica(kv, f"r{n}"))) for n in range(count)]
    play(reading, waiting, count)
    assert all(loop.is_over for loop in itertools.chain(waiting, reading))
    assert max(loop.reads for loop in waiting) <= READS_MAX
    assert {len(loop.answer[8]) for loop in waiting} == {count + 1}
