"""Decisions from samples of what there is are those that all of it would have led to."""

import dataclasses
import itertools
import random

import msgspec
import pytest

from torch_ros.deadline import Deadline
from torch_ros.errors import TorchRosError, UsageError
from torch_ros.features.retention import rules as retention
from torch_ros.memory.store import MemoryKV
from torch_ros.protocol import membership, records, sources, versions
from torch_ros.protocol.applicant import Applicant
from torch_ros.protocol.keeping import GivenUp
from torch_ros.protocol.keys import Keys, lingering_of, parse_reader
from torch_ros.protocol.seat import Seat
from torch_ros.protocol.versions import Spec
from torch_ros.store import txn
from torch_ros.store.loops import Act, Done, Wait, settle
from torch_ros.store.run import run
from torch_ros.store.txn import (
    Commit,
    Put,
    Read,
    Sample,
    Txn,
    Unseen,
    Watch,
    one,
    sample,
    under,
    whole,
)

KEYS = Keys("m")
RUNS = ("one", "two", "three")
REF = records.VersionRef("one", 1, "u", 1)


class Store:
    """The KV in memory; and how much was read of it."""

    def __init__(self):
        self.kv = MemoryKV()
        self.reads = []

    def put(self, key, record):
        assert self.kv.commit(Txn(ops=(Put(key, record.encode()),)), timeout_s=1).applied

    def settle(self, ranges, rule):
        """What the loop returns; or why it waits, or what it would commit."""
        steps, reply, self.reads = settle("test", ranges, rule), None, []
        while True:
            try:
                request = steps.send(reply)
            except StopIteration as stop:
                return stop.value
            except TorchRosError as error:
                return type(error), str(error)
            match request:
                case Read():
                    reply = self.kv.read(request, timeout_s=1)
                    self.reads.append(len(reply.entries))
                case Watch():
                    return request.reason
                case Commit():
                    return msgspec.structs.replace(request.txn, otherwise=())


@pytest.fixture
def few(monkeypatch):
    """Call it; from so many records on they are many."""

    def limit(sample_max, holders_max, neighbours):
        monkeypatch.setattr(txn, "SAMPLE_MAX", sample_max)
        monkeypatch.setattr(versions, "HOLDERS_MAX", holders_max)
        monkeypatch.setattr(sources, "NEIGHBOURS", neighbours)

    return limit


# The loop


def numbered(count):
    store = Store()
    for number in range(count):
        store.put(f"/n/{number}", records.Suspect(""))
    return store


def test_a_rule_that_sees_too_little_is_shown_everything(few):
    few(2, 1, 1)
    store = numbered(5)
    count = store.settle(
        (sample(under("/n/")),), lambda view: Done(len(list(view.within(under("/n/")))))
    )
    assert (count, store.reads) == (5, [2, 5])


def test_a_rule_may_ask_for_other_parts_instead(few):
    few(2, 1, 1)
    store, oldest = numbered(5), Sample(under("/n/"), 1, is_oldest=True)

    def first(view):
        if not view.entries.keys() & {"/n/0"}:
            raise Unseen(oldest)
        return Done(list(view.entries))

    assert store.settle((sample(under("/n/")),), first) == ["/n/0"]
    assert store.reads == [2, 1]


def test_a_rule_that_goes_on_asking_is_shown_everything(few):
    few(2, 1, 1)
    store, range_ = numbered(5), under("/n/")

    def never(view):
        if not view.shows(range_):
            raise Unseen(Sample(range_, 1))
        return Done("enough")

    assert store.settle((sample(range_),), never) == "enough"
    assert store.reads == [2, 1, 1, 5]


def test_a_rule_that_looks_at_what_it_did_not_ask_for_is_a_mistake():
    with pytest.raises(Unseen):
        Store().settle((under("/n/"),), lambda view: Done(list(view.within(under("/m/")))))


class Counting(MemoryKV):
    """Counts what it is asked."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def read(self, request, *, timeout_s):
        self.asked.append("read")
        return super().read(request, timeout_s=timeout_s)

    def commit(self, txn, *, timeout_s):
        self.asked.append("commit")
        return super().commit(txn, timeout_s=timeout_s)


def add_one(view):
    """To the number in /n/0."""
    entry = view.get("/n/0")
    number = int(entry.value) + 1 if entry else 1
    put = Put("/n/0", b"%d" % number)
    return Act(Txn((view.unchanged("/n/0"),), (put,)), lambda _: number)


def added(kv, first=None, ahead=(), keep=None):
    steps = settle("test", (one("/n/0"),), add_one, first, ahead, keep)
    return run(steps, kv, Deadline("test", 5))


def test_what_is_read_ahead_saves_the_next_loop_its_read():
    kv, kept = Counting(), []
    assert added(kv, None, (under("/n/"),), kept.append) == 1
    assert added(kv, kept[0]) == 2
    assert kv.asked == ["read", "commit", "commit"]


def test_what_was_seen_of_something_else_does_not():
    kv = Counting()
    assert added(kv, kv.read(Read((one("/n/1"),)), timeout_s=1)) == 1
    assert kv.asked == ["read", "read", "commit"]


def test_an_error_is_not_believed_of_a_view_from_before():
    """No guard protects an error: what it is about may have come since."""

    def number(view):
        if view.get("/n/0") is None:
            raise UsageError("there is no number")
        return Done(int(view.entries["/n/0"].value))

    kv, range_ = Counting(), one("/n/0")
    before = kv.read(Read((range_,)), timeout_s=1)
    with pytest.raises(UsageError):
        run(settle("test", (range_,), number, before), kv, Deadline("test", 5))
    added(kv)
    assert run(settle("test", (range_,), number, before), kv, Deadline("test", 5)) == 1


def test_who_loses_a_race_has_seen_what_there_is_now():
    kv, kept = Counting(), []
    added(kv, None, (under("/n/"),), kept.append)
    added(kv)
    del kv.asked[:]
    assert added(kv, kept[0]) == 3  # a view from before the last one
    assert kv.asked == ["commit", "commit"]


# Versions, retention, runs


DATACENTERS = ["east", "east", "west"]


def any_store(rng):
    """Some runs, versions, holdings and groups."""
    store, names, todo = Store(), [f"r{number}" for number in range(rng.randrange(1, 9))], []
    for number, name in enumerate(rng.sample(RUNS, rng.randrange(len(RUNS) + 1))):
        if rng.random() < 0.9:
            todo.append((KEYS.run(name), records.RunRecord("h:1", rng.choice([number, number, 1]))))
        for version in rng.sample(range(6), rng.randrange(4)):
            layout = rng.choice(["L", "L", "L", ""])
            if rng.random() < 0.9:
                todo.append((KEYS.version(name, version), records.VersionRecord("u", layout)))
            for replica in rng.sample(names, rng.randrange(len(names))):
                uid, state = rng.choice("uuuo"), rng.choice(["full", "full", "filling", "draining"])
                if not layout and uid == "u":
                    state = "filling"
                here = rng.choice(DATACENTERS)
                held = records.Holding(uid, 1, state, 1, here, spot=rng.random() < 0.2)
                todo.append((KEYS.holding(name, version, here, f"{replica}@x"), held))
    for name in rng.sample(names, rng.randrange(len(names))):
        retain, left = rng.choice([[], [], ["latest"], ["latest-1"], ["3"]]), rng.choice([None, 0])
        group = records.GroupRecord("x", 1, rng.choice(RUNS), retain=retain, left=left)
        todo.append((KEYS.group(name), group))
        if rng.random() < 0.3:
            here = records.RetainRecord([rng.choice(["latest", "latest-1", "3"])])
            todo.append((KEYS.retain(rng.choice(DATACENTERS), name), here))
    if rng.random() < 0.3:
        todo.append((KEYS.suspect("r0@x", "r1@x"), records.Suspect("")))
    rng.shuffle(todo)
    for key, record in todo:
        store.put(key, record)
    return store


def any_questions(rng):
    """What to read, and a rule."""
    spec = rng.choice([Spec(), Spec(back=1), Spec(absolute=rng.randrange(7))])
    held = records.VersionRef(rng.choice(RUNS), rng.randrange(6), rng.choice("uo"), 1)
    floor, name = rng.choice([None, None, held]), f"r{rng.randrange(9)}"
    who = Applicant(
        KEYS, name, 0, 1, records.ShardRecord("h", 1, b""), nonce="y",
        run=rng.choice([None, None, "new", "one", "four"]), fresh_run="fresh",
        datacenter="default", spot=False,
    )  # fmt: skip

    def resolved(view):
        offer = versions.resolve(view, KEYS, dataclasses.replace(spec, floor=floor))
        return offer if isinstance(offer, Wait) else Done(offer.ref)

    def newer(view):
        offer = versions.newer(view, KEYS, spec, held)
        return Done(offer.ref if offer else None)

    def is_kept(view):
        dropped = GivenUp(f"{name}@x", "east")
        return Done(retention.keeping(view, KEYS, held, dropped).is_needed)

    yield versions.spec_ranges(KEYS), resolved
    yield versions.newer_ranges(KEYS, held), newer
    yield retention.keeping_ranges(KEYS, held, "east"), is_kept
    yield membership.open_ranges(who), lambda view: membership.create_group(view, who)


@pytest.mark.parametrize("times", [100, pytest.param(400, marks=pytest.mark.long)])
@pytest.mark.parametrize("most", [(1, 1, 1), (2, 1, 2), (3, 2, 2)], ids=str)
def test_samples_lead_to_what_the_whole_would_lead_to(few, most, times):
    few(*most)
    rng, went_on = random.Random(0), 0
    for _ in range(times):
        store = any_store(rng)
        for ranges, rule in any_questions(rng):
            expected = store.settle(whole(ranges), rule)
            assert store.settle(ranges, rule) == expected
            went_on += len(store.reads) > 1
    assert went_on > times / 4


@pytest.mark.parametrize("spec", ["latest", "latest-1"])
@pytest.mark.parametrize("doubt", ["lingers", "is suspected"])
def test_an_older_version_stays_whether_one_that_may_go_does_or_not(doubt, spec):
    store, old = Store(), records.VersionRef("one", 8, "u", 1)
    store.put(KEYS.run("one"), records.RunRecord("h:1", 1))
    store.put(KEYS.group("r0"), records.GroupRecord("x", 1, "one", retain=[spec], is_complete=True))
    newer = lingering_of("r1@x", 3) if doubt == "lingers" else "r2@x"
    for inst, version in (("r0@x", 8), (newer, 9)):
        store.put(KEYS.version("one", version), records.VersionRecord("u", "L"))
        store.put(KEYS.holding("one", version, "default", inst), records.Holding("u", 1, "full", 1))
    if doubt == "is suspected":
        store.put(KEYS.suspect(newer, "r3@x"), records.Suspect("slow"))

    def is_kept(view):
        dropped = GivenUp("r0@x", "default")
        return Done(retention.keeping(view, KEYS, old, dropped).is_needed)

    assert store.settle(retention.keeping_ranges(KEYS, old, "default"), is_kept)
    store.put(KEYS.holding("one", 9, "default", "r1@x"), records.Holding("u", 1, "full", 1))
    kept = store.settle(retention.keeping_ranges(KEYS, old, "default"), is_kept)
    assert kept == (spec == "latest-1")


# Sources


def newcomer(name, datacenter):
    return Seat(KEYS, name, "x", 0, 1, REF.run, REF.run_number, 0, datacenter, False, 60.0)


def burst(fulls, newcomers, datacenters=("default",)):
    """All have decided to read the version, and nobody has a source yet.

    The newcomers are dealt out to the datacenters; full ones are in "default".
    """
    store = Store()
    store.put(KEYS.run(REF.run), records.RunRecord("h:1", 1))
    store.put(KEYS.version(REF.run, REF.version), records.VersionRecord(REF.uid, "L"))
    for number in range(fulls):
        held = records.Holding(REF.uid, 1, "full", 1)
        store.put(KEYS.holding(REF.run, REF.version, "default", f"t{number}@x"), held)
    places = itertools.cycle(datacenters)
    seats = [newcomer(f"r{number}", next(places)) for number in range(newcomers)]
    call = records.Call(1, "replicate", records.Asked("replicate", "latest"), 0, REF)
    for seat in seats:
        store.put(seat.group, records.GroupRecord("x", 1, REF.run, is_complete=True))
        store.put(seat.decisions, records.Decisions([call]))
        held = records.Holding(REF.uid, 1, "filling", 1, seat.datacenter, is_relay=True)
        store.put(seat.holding(REF), held)
    return store, seats, call


def claimed(store, seat, call):
    rule = lambda view: sources.claim(view, seat, call)
    txn = store.settle(sources.source_ranges(seat, REF), rule)
    return txn, next(
        parse_reader(op.key)[0] for op in txn.ops if isinstance(op, Put) and "/readers/" in op.key
    )


@pytest.mark.parametrize("fulls", [1, 2, 5, 8])
def test_newcomers_that_look_at_once_choose_different_sources(fulls):
    store, seats, call = burst(fulls, 100)
    chosen = [claimed(store, seat, call)[1] for seat in seats]
    assert len(set(chosen)) == len(chosen)
    assert set(chosen[:fulls]) == {f"t{number}@x" for number in range(fulls)}


@pytest.mark.parametrize("fulls", [1, 3])
def test_newcomers_that_look_one_after_another_do_too(fulls):
    store, seats, call = burst(fulls, 100)
    random.Random(0).shuffle(seats)
    chosen = []
    for seat in seats:
        txn, source = claimed(store, seat, call)
        chosen.append(source)
        assert store.kv.commit(txn, timeout_s=1).applied
    assert len(set(chosen)) == len(chosen)


@pytest.mark.parametrize("newcomers", [10, 100])
@pytest.mark.parametrize("datacenters", [("far",), ("far", "default"), ("far", "farther")])
def test_of_a_datacenter_the_oldest_alone_reads_from_afar(datacenters, newcomers):
    store, seats, call = burst(2, newcomers, datacenters)
    chosen = {seat.inst: claimed(store, seat, call)[1] for seat in seats}
    place = {seat.inst: seat.datacenter for seat in seats} | dict.fromkeys(
        ("t0@x", "t1@x"), "default"
    )
    far = [reader for reader, source in chosen.items() if place[source] != place[reader]]
    assert far == [seat.inst for seat in seats[: len({*datacenters} - {"default"})]]
    near = [source for reader, source in chosen.items() if reader not in far]
    assert len(set(near)) == len(near), "and those behind it do not race for one source"


def test_a_holding_that_is_not_where_it_says_is_no_source():
    store, [seat], call = burst(1, 1)
    stray = KEYS.holding(REF.run, REF.version, "elsewhere", "a@x")
    store.put(stray, records.Holding(REF.uid, 1, "full", 1))
    assert claimed(store, seat, call)[1] == "t0@x"
    offers = []
    store.settle(
        whole(versions.spec_ranges(KEYS)),
        lambda view: Done(offers.append(versions.offered(view, KEYS))),
    )
    assert offers[0][0][0].holdings.keys() == {"t0@x"}


def test_what_a_newcomer_reads_does_not_grow_with_how_many_there_are():
    most = []
    for newcomers in (100, 400):
        store, seats, call = burst(1, newcomers)
        read = []
        for seat in (seats[0], seats[newcomers // 2], seats[-1]):
            claimed(store, seat, call)
            read.append(sum(store.reads))
            for rule in (
                lambda view: Done(versions.resolve(view, KEYS, Spec()).ref),
                lambda view: Done(versions.newer(view, KEYS, Spec(), REF)),
            ):
                store.settle(versions.spec_ranges(KEYS), rule)
                read.append(sum(store.reads))
        most.append(max(read))
    assert most[0] == most[1] < 100


def test_few_among_many_elsewhere_see_each_other():
    store, seats, call = burst(1, 400, ("default",) * 39 + ("far",))
    far = [seat for seat in seats if seat.datacenter == "far"]
    for seat in far[1:]:
        source = claimed(store, seat, call)[1]
        assert source in {other.inst for other in far}
        assert sum(store.reads) < 100


def test_the_only_source_left_is_found_wherever_it_is():
    """What is offered late, such as a copy in host memory, is younger than who looks for it."""
    store, seats, call = burst(0, 50)
    for seat in itertools.islice(seats, 1, None):
        no_relay = records.Holding(REF.uid, 1, "filling", 1)
        store.put(seat.holding(REF), no_relay)
    store.put(
        KEYS.holding(REF.run, REF.version, "default", "t+2@x"),
        records.Holding(REF.uid, 2, "full", 1),
    )
    for number in range(40):
        held = records.Holding(REF.uid, 1, "filling", 1)
        store.put(KEYS.holding(REF.run, REF.version, "default", f"late{number}@x"), held)
    assert claimed(store, seats[0], call)[1] == "t+2@x"
