"""Groups of threads, each a rank, against the KV in memory and a real etcd."""

import math
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
import pytest
from kit import until

from torch_ros.deadline import Deadline
from torch_ros.errors import (
    CallAborted,
    CallMismatch,
    ClosedError,
    CorruptWeights,
    DeadlineExceeded,
    ManifestMismatch,
    SeatLost,
    SourceLost,
    StoreUnavailable,
    UsageError,
    VersionConflict,
    VersionNotFound,
)
from torch_ros.features.pace import rules as pace
from torch_ros.features.retention.copying import LastCopies
from torch_ros.fleet import seen as seen_
from torch_ros.protocol import calls, membership, seating, versions
from torch_ros.protocol import keys as keys_module
from torch_ros.protocol.applicant import Applicant
from torch_ros.protocol.call import GroupCall
from torch_ros.protocol.calls import SourceTerms
from torch_ros.protocol.group import Group, GroupTask
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.reaching import ClaimedSources
from torch_ros.protocol.records import Asked, Call, Outcome, ShardRecord, VersionRef
from torch_ros.protocol.seat import NO_LEAVES
from torch_ros.protocol.versions import Spec, spec_ranges
from torch_ros.store import run
from torch_ros.store.endpoint import connect
from torch_ros.store.loops import Done, Wait
from torch_ros.store.txn import Delete, Put, Read, Txn, one, under


class Store:
    """One model in one store, and the groups that use it."""

    def __init__(self, endpoint):
        self.endpoint = endpoint
        self.keys = Keys("m-" + uuid.uuid4().hex)
        self.kv = connect(endpoint, timeout_s=5)
        self.groups = []

    def join(
        self,
        name,
        rank=0,
        world_size=1,
        *,
        run=None,
        nonce=None,
        ttl_s=5,
        timeout_s=10,
        spot=False,
        drain_s=60,
        knows=(),
        datacenter="default",
        leaves=NO_LEAVES,
    ):
        place = Applicant(
            keys=self.keys,
            replica=name,
            shared_nonce=nonce or "",
            rank=rank,
            world_size=world_size,
            run=run,
            datacenter=datacenter,
            spot=spot,
            leaves=leaves,
            keeper=LastCopies(),
            shard=ShardRecord("host", rank, b"card", knows=[*knows]),
            ttl_s=ttl_s,
            drain_s=drain_s,
        )
        kv = connect(self.endpoint, timeout_s=5)
        group = Group.join(kv, place, Deadline("open", timeout_s))
        self.groups.append(group)
        return group

    def replica(self, name, world_size, **options):
        """All ranks of a replica, joined."""
        return at_once(
            *(partial(self.join, name, rank, world_size, **options) for rank in range(world_size))
        )

    def there(self, part=""):
        prefix = under(f"/torch-ros/{self.keys.model}/{part}")
        return sorted(self.kv.read(Read((prefix,)), timeout_s=5).entries)

    def close(self):
        for group in self.groups:
            group.close()
        self.kv.close()


@pytest.fixture
def store(endpoint):
    made = Store(endpoint)
    yield made
    made.close()


def attempt(call):
    try:
        return call()
    except Exception as error:
        return error


def at_once(*calls):
    """What each call returned or raised, made by a thread each."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(attempt, calls))


def finish(call, layout, *whole, summing_up=lambda: None):
    def sum_up(said):
        summing_up()
        call.complete(Outcome(said="+".join(sorted(set(said.values())))), *whole)

    call.finish(layout, sum_up)


def publish(group, version, layout="L", timeout_s=5, summing_up=lambda: None):
    keys, run, uid = group.seat.keys, group.seat.run, uuid.uuid4().hex

    def body(call):
        effects = partial(calls.announce_version, version=version, fresh_uid=uid)
        call.decide((keys.versions(run), keys.holdings(run)), effects)
        if not call.has_ended:
            finish(call, layout, summing_up=summing_up)
        return call.ref

    asked = Asked("publish", version)
    return group.make(GroupTask("publish", asked, Deadline("publish", timeout_s), body))


def decide_to_read(call, version="latest", *, is_relay=True):
    rule = partial(calls.announce_filling, spec=Spec.parse(version), is_relay=is_relay)
    call.decide_and_claim(rule)


def replicate(
    group,
    version="latest",
    layout="L",
    timeout_s=5,
    whole=SourceTerms(),  # noqa: B008  # a frozen value
    pause=lambda: None,
):
    asked = Asked("replicate", version)

    def body(call):
        decide_to_read(call, version, is_relay=whole.is_required)
        if not call.has_ended:
            ClaimedSources(call).read(call.decided.sources, lambda _: pause())
            finish(call, layout, whole)
        return call.ref if group.ledger.held else None

    return group.make(GroupTask("replicate", asked, Deadline(f"{asked}", timeout_s), body))


def unpublish(group, ref, timeout_s=5):
    asked = Asked("unpublish", ref.version)
    body = lambda call: call.unpublish(ref)
    group.make(GroupTask("unpublish", asked, Deadline(f"{asked}", timeout_s), body))


def extended_replicate(group, *, more=(), must=()):
    """A replicate that has these names of features in its record; nobody claims a source of it."""
    empty = msgspec.Raw(b"0")

    def rule(view, seat, call):
        names = {"more": dict.fromkeys(more, empty), "must": dict.fromkeys(must, empty)}
        return calls.announce_filling(
            view, seat, msgspec.structs.replace(call, **names), Spec(), is_relay=True
        )

    def body(call):
        call.decide_and_claim(rule)
        if call.decided.sources:
            ClaimedSources(call).read(call.decided.sources, lambda _: None)
        finish(call, "L")
        return call.decided

    return group.make(GroupTask("replicate", Asked("replicate", "latest"), Deadline("r", 5), body))


def listing(group):
    keys = group.seat.keys
    rule = lambda view: Done(versions.listing(view, keys))
    return group.ask(spec_ranges(keys), rule, Deadline("list", 5))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_version_goes_from_a_trainer_to_a_rollout_that_then_serves_it(store, size):
    trainer, rollout = store.replica("trainer", size), store.replica("rollout", 3)
    refs = at_once(*(partial(publish, rank, 7) for rank in trainer))
    assert [ref.version for ref in refs] == [7] * size
    assert len({ref.uid for ref in refs}) == 1
    assert at_once(*(partial(replicate, rank) for rank in rollout)) == [refs[0]] * 3
    assert listing(rollout[1]) == {7: {"trainer", "rollout"}}
    assert at_once(*(partial(unpublish, rank, refs[0]) for rank in trainer)) == [None] * size
    assert listing(rollout[1]) == {7: {"rollout"}}
    assert replicate(store.join("late")) == refs[0]
    assert store.there("readers/") == []
    assert store.there("ready/") == []


def test_versions_only_grow_and_all_ranks_hear_it(store):
    trainer = store.replica("trainer", 2)
    at_once(*(partial(publish, rank, 7) for rank in trainer))
    errors = at_once(*(partial(publish, rank, 6) for rank in trainer))
    assert [type(error) for error in errors] == [VersionConflict] * 2
    assert "already at 7" in str(errors[0])
    assert listing(trainer[0]) == {7: {"trainer"}}


def test_a_number_cannot_go_back_when_nobody_holds_anything(store):
    trainer = store.join("trainer")
    unpublish(trainer, publish(trainer, 7))
    assert listing(trainer) == {}
    assert isinstance(attempt(partial(publish, trainer, 6)), VersionConflict)


@pytest.fixture
def read_of(monkeypatch):
    """How often a group has read the store, without the reads of its watches."""

    def read_of(group):
        reads, read = [], group.kv.read
        monkeypatch.setattr(
            group.kv, "read", lambda *args, **named: (reads.append(args), read(*args, **named))[1]
        )
        return reads

    return read_of


def test_a_publication_begins_with_what_the_unpublish_before_it_has_read_along(store, read_of):
    trainer = store.join("trainer")
    reads = read_of(trainer)
    ref = publish(trainer, 7)
    first = len(reads)
    unpublish(trainer, ref)
    reads.clear()
    assert publish(trainer, 8).version == 8
    assert len(reads) == first - 1
    assert listing(trainer) == {8: {"trainer"}}


@pytest.mark.parametrize("size", [1, 2])
def test_a_publication_sees_what_has_changed_since_the_unpublish_before_it(store, size):
    trainer, other = store.replica("trainer", size), store.join("other")
    refs = at_once(*(partial(publish, rank, 7) for rank in trainer))
    at_once(*(partial(unpublish, rank, refs[0]) for rank in trainer))
    publish(other, 9)
    errors = at_once(*(partial(publish, rank, 8) for rank in trainer))
    assert [type(error) for error in errors] == [VersionConflict] * size
    assert {ref.version for ref in at_once(*(partial(publish, r, 10) for r in trainer))} == {10}


@pytest.mark.parametrize("size", [1, 2])
def test_an_error_is_never_decided_from_what_the_unpublish_before_saw(store, size):
    trainer, rollout = store.replica("trainer", size), store.join("rollout")
    refs = at_once(*(partial(publish, rank, 7) for rank in trainer))
    replicate(rollout)
    at_once(*(partial(unpublish, rank, refs[0]) for rank in trainer))
    unpublish(rollout, refs[0])  # until now version 7 could not be published again
    again = at_once(*(partial(publish, rank, 7) for rank in trainer))
    assert {ref.version for ref in again} == {7}
    assert again[0].uid != refs[0].uid


def test_two_replicas_of_one_version_must_agree_on_its_content(store):
    one_, two, three = store.join("one"), store.join("two"), store.join("three")
    ref = publish(one_, 7, "L")
    assert publish(two, 7, "L") == ref
    error = attempt(partial(publish, three, 7, "other"))
    assert isinstance(error, ManifestMismatch)
    assert listing(one_) == {7: {"one", "two"}}


def test_ranks_with_different_tensors_are_summarised_by_the_last(store):
    trainer, rollout = store.replica("trainer", 2), store.join("rollout")
    at_once(*(partial(publish, rank, 7, f"stage{i}") for i, rank in enumerate(trainer)))
    assert replicate(rollout, layout="stage0+stage1").version == 7


class Resting(pace.SlowOnes):
    def begun(self, view, seat, call):
        return pace._paced(call, "rests")


@pytest.mark.parametrize("size", [1, 2])
def test_a_replica_that_relays_after_all_claims_without_beginning_again(store, size):
    ref = publish(store.join("trainer", datacenter="far"), 7)
    rollout, turns, insts = store.replica("rollout", size, leaves=Resting()), [], set()

    def body(call):
        decide_to_read(call)
        turns.append(call.turns)
        insts.update(call.decided.sources)
        assert not pace.is_aside(call.decided)
        ClaimedSources(call).read(call.decided.sources, lambda _: None)
        finish(call, "L")
        return call.ref

    task = GroupTask("replicate", Asked("replicate", "latest"), Deadline("replicate", 5), body)
    assert at_once(*(partial(rank.make, task) for rank in rollout)) == [ref] * size
    assert turns == [{}] * size
    assert len(insts) == 1


def test_a_part_is_read_without_becoming_a_source(store):
    trainer, rollout = store.join("trainer"), store.join("rollout")
    publish(trainer, 7)
    assert replicate(rollout, layout="part", whole=SourceTerms(is_required=False)) is None
    assert replicate(rollout, whole=SourceTerms(is_served=False)) is None
    error = attempt(partial(replicate, rollout, layout="part"))
    assert isinstance(error, ManifestMismatch)
    assert listing(trainer) == {7: {"trainer"}}
    assert store.there("readers/") == []


def test_latest_waits_for_the_first_version(store):
    trainer, rollout = store.join("trainer"), store.join("rollout")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(replicate, rollout)
        time.sleep(0.2)
        assert not waiting.done()
        ref = publish(trainer, 0)
        assert waiting.result(5) == ref


def test_a_deadline_carries_what_was_waited_for_and_ends_the_call_for_all(store):
    rollout = store.replica("rollout", 2)
    errors = at_once(
        partial(replicate, rollout[0], timeout_s=0.5), partial(replicate, rollout[1], timeout_s=20)
    )
    assert [type(error) for error in errors] == [DeadlineExceeded] * 2
    assert "none is available yet" in str(errors[1])
    assert "rank 0" in errors[1].__notes__[0]
    trainer = store.join("trainer")
    ref = publish(trainer, 1)
    assert at_once(*(partial(replicate, rank) for rank in rollout)) == [ref, ref]


def test_an_absolute_version_that_is_gone_is_an_error_and_one_to_come_is_waited_for(store):
    trainer, rollout = store.join("trainer"), store.join("rollout")
    for version in (1, 2):
        held = publish(trainer, version)
        if version == 1:
            unpublish(trainer, held)
    error = attempt(partial(replicate, rollout, 1))
    assert isinstance(error, VersionNotFound)
    assert "available: [2]" in str(error)
    late = attempt(partial(replicate, rollout, 3, timeout_s=0.3))
    assert isinstance(late, DeadlineExceeded)
    assert "version 3 is not published yet" in str(late)


def test_what_a_job_had_that_has_ended_is_told(store):
    for version in (1, 4):
        trainer = store.join("trainer")
        unpublish(trainer, publish(trainer, version))
        trainer.close()
    rollout = store.join("rollout")
    ended = "; a job that has ended had versions up to 4, and nobody holds one any more"
    for asked in (1, "latest"):
        late = attempt(partial(replicate, rollout, asked, timeout_s=0.2))
        assert ended in str(late)
    publish(rollout, 1)  # and its numbers begin anew


def test_a_rank_that_does_not_come_to_a_call_is_named(store):
    trainer = store.replica("trainer", 3)
    late = attempt(partial(publish, trainer[1], 1, timeout_s=0.5))
    assert isinstance(late, DeadlineExceeded)
    assert str(late).endswith("(call 1); missing: ranks 0, 2")


def test_a_source_that_is_lost_before_a_byte_does_not_hide_what_had_come(store):
    trainer, rollout = store.join("trainer"), store.join("rollout")
    publish(trainer, 1)
    come = iter([(700, 1000), (0, 0), (0, 0), (0, 0), (0, 0)])

    def lose():
        raise SourceLost("trainer", "it does not answer", *next(come))

    lost = attempt(partial(replicate, rollout, 1, pause=lose, timeout_s=20))
    assert "700 of 1000 bytes" in str(lost)
    assert lost.args[2:] == (700, 1000), "peers are told by these"
    assert "bytes" not in str(SourceLost("trainer", "it does not show the version"))


def test_latest_minus_k_counts_what_is_available(store):
    trainers = [store.join(f"t{i}") for i in range(3)]
    for trainer, version in zip(trainers, (3, 5, 9), strict=True):
        publish(trainer, version)
    rollout = store.join("rollout")
    assert replicate(rollout, "latest-1").version == 5
    assert replicate(store.join("third"), "latest-2").version == 3


def test_an_unpublish_of_other_content_leaves_the_holding(store):
    """A rank that went on without etcd takes back what nobody offers; its peer offers another."""
    trainer = store.join("trainer")
    ref = publish(trainer, 7)
    unpublish(trainer, msgspec.structs.replace(ref, uid="0" * 16))
    assert listing(trainer) == {7: {"trainer"}}


def test_ranks_that_call_different_things_are_told_so_and_go_on_together(store):
    group = store.replica("r", 2)
    errors = at_once(partial(publish, group[0], 1), partial(replicate, group[1]))
    assert all(isinstance(error, CallMismatch) for error in errors), errors
    assert "same calls in the same order" in str(errors[0])
    refs = at_once(*(partial(publish, rank, 3) for rank in group))
    assert [ref.version for ref in refs] == [3, 3]


def test_one_ranks_error_ends_the_call_for_its_peers(store):
    group = store.replica("r", 2)

    def fails(version, error):
        def body(_):
            raise error

        group[1].make(GroupTask("publish", Asked("publish", version), Deadline("publish", 5), body))

    no_tensors, bug = UsageError("no tensors"), RuntimeError("a bug")
    first = at_once(partial(publish, group[0], 1, timeout_s=30), partial(fails, 1, no_tensors))
    assert [str(error) for error in first] == ["no tensors"] * 2
    second = at_once(partial(publish, group[0], 2, timeout_s=30), partial(fails, 2, bug))
    assert isinstance(second[0], CallAborted)
    assert "RuntimeError: a bug" in str(second[0])
    assert isinstance(second[1], RuntimeError)
    assert listing(group[0]) == {}
    assert not isinstance(at_once(*(partial(publish, rank, 3) for rank in group))[0], Exception)


def two_last(store, late, found=None, closes=""):
    """The ends for two ranks that both sum up: the second, whose reply was lost, raises `late`.

    Args:
        late: None: it does not raise, and would complete the call.
        found: The error with which the first ends the call meanwhile; None: it ends well.
        closes: The first closes its handle after the end, and is "the anchor" or "another"; "": it
            does not.
    """
    first, second = store.replica("r", 2)
    if closes:
        first, second = anchor_first(store, (first, second))[:: 1 if closes == "the anchor" else -1]
    is_ready, is_last, is_summing, has_ended = (threading.Event() for _ in range(4))
    commit, lost = second.kv.commit, []

    def loses_a_reply(txn, *, timeout_s):
        reply = commit(txn, timeout_s=timeout_s)
        if not lost and any(isinstance(op, Put) and "/ready/" in op.key for op in txn.ops):
            lost.append(reply)
            is_ready.set()
            assert is_last.wait(5)
            raise StoreUnavailable("memory", timeout_s, "no answer")
        return reply

    def sums_up():
        is_last.set()
        assert is_summing.wait(5)
        if found is not None:
            raise found

    def comes_last():
        assert is_ready.wait(5)
        try:
            return publish(first, 7, summing_up=sums_up)
        finally:
            if closes:
                first.close()
            has_ended.set()

    def too_late():
        is_summing.set()
        assert has_ended.wait(5)
        if late is not None:
            raise late

    second.kv.commit = loses_a_reply
    ends = at_once(comes_last, partial(publish, second, 7, timeout_s=10, summing_up=too_late))
    return ends, [first.ledger.held, second.ledger.held]


@pytest.mark.parametrize("late", [DeadlineExceeded("sum", 5, "a peer"), SourceLost("r", "")])
def test_a_rank_that_sums_up_beside_the_last_one_has_its_end(store, late):
    ends, held = two_last(store, late)
    assert [ref.version for ref in ends] == [7, 7]
    assert all(held)


@pytest.mark.parametrize("closes", ["the anchor", "another"])
@pytest.mark.parametrize("late", [None, SourceLost("r", "")])
def test_a_rank_that_sums_up_beside_the_last_one_has_its_end_though_that_closes(
    store, late, closes
):
    ends, _ = two_last(store, late, closes=closes)
    assert [ref.version for ref in ends] == [7, 7]


@pytest.mark.parametrize("is_put", [True, False])
def test_a_rank_that_does_not_know_of_its_ready_record_believes_only_what_was_decided(
    store, is_put
):
    """Its peer closes meanwhile; as the anchor, with all that the group has decided."""
    anchor, other = anchor_first(store, store.replica("r", 2))
    late, first = (anchor, other) if is_put else (other, anchor)
    commit, is_ready, is_closed = late.kv.commit, threading.Event(), threading.Event()

    def loses_one(txn, *, timeout_s):
        if is_ready.is_set() or not any("/ready/" in getattr(op, "key", "") for op in txn.ops):
            return commit(txn, timeout_s=timeout_s)
        if is_put:
            commit(txn, timeout_s=timeout_s)
        is_ready.set()
        assert is_closed.wait(5)
        raise StoreUnavailable("memory", timeout_s, "no answer")

    def publish_and_close():
        assert is_ready.wait(5)
        try:
            return publish(first, 7, timeout_s=5 if is_put else 0.5)
        finally:
            first.close()
            is_closed.set()

    late.kv.commit = loses_one
    end, closed = at_once(partial(publish, late, 7, timeout_s=10), publish_and_close)
    if is_put:
        assert (end.version, closed.version) == (7, 7)
    else:
        assert isinstance(end, SeatLost)
        assert isinstance(closed, DeadlineExceeded)


def test_a_rank_that_sums_up_beside_the_last_one_has_its_error(store):
    found = CorruptWeights("m", 7, "w", "trainer")
    ends, held = two_last(store, SourceLost("r", ""), found)
    assert [str(error) for error in ends] == [str(found)] * 2
    assert not any(held)


def test_a_rank_that_gives_up_learns_the_end_of_the_groups_call_not_of_its_own(store):
    """Its call, the third, failed before it could see that the group's third is another."""
    group = store.replica("r", 2)
    refs = at_once(*(partial(publish, rank, 1) for rank in group))
    at_once(*(partial(unpublish, rank, refs[0]) for rank in group))
    unpublished = group[1].ledger.ended.pop()
    group[1].ledger.calls_made = 1

    def body(_):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        group[1].make(GroupTask("publish", Asked("publish", 2), Deadline("publish 2", 5), body))
    assert group[1].ledger.ended[-1].asked == unpublished.asked == Asked("unpublish", 1)
    assert group[1].ledger.ended[-1].kind == "unpublish"


def kill(group):
    """As if its process was killed: nobody renews the lease, nobody comes back."""
    group.ledger.closing.set()
    group.session._closing.set()


def anchor_first(store, group):
    """The rank on whose lease the group's records hang, then the others."""
    seat = group[0].seat
    record = store.kv.read(Read((one(seat.group),)), timeout_s=5).entries[seat.group]
    return sorted(group, key=lambda rank: rank.session.lease_id != record.lease_id)


@pytest.mark.long
@pytest.mark.parametrize("dies", ["the anchor", "another"])
def test_a_dead_rank_takes_its_replica_out(store, dies):
    trainer = store.replica("trainer", 3, ttl_s=2)
    other = store.join("other")
    at_once(*(partial(publish, rank, 7) for rank in trainer))
    ranks = anchor_first(store, trainer)
    dead, alive = (ranks[0], ranks[1]) if dies == "the anchor" else (ranks[1], ranks[0])
    kill(dead)
    until(lambda: not listing(other), limit_s=10)
    assert isinstance(attempt(partial(publish, alive, 8)), SeatLost)


def test_what_an_earlier_decision_would_have_brought_is_not_held(store):
    """Its bytes are overwritten next; who takes it for held would keep and offer a copy of them."""
    trainer, rollout = store.join("trainer"), store.join("rollout")
    first, before = publish(trainer, 7), rollout.seat.inst
    may_hold = []

    def body(call):
        decide_to_read(call)
        may_hold.append(call.may_hold)
        if len(may_hold) == 1:
            call.finish("L", lambda _: None)
            may_hold.append(call.may_hold)
            store.kv.commit(Txn(ops=(Delete(one(call.seat.group)),)), timeout_s=5)
            until(lambda: rollout.state == "seated" and rollout.seat.inst != before)
            unpublish(trainer, first)
            publish(trainer, 8)
            raise SeatLost("rollout", "its group record is gone")
        finish(call, "L")
        return call.ref.version

    task = GroupTask("replicate", Asked("replicate", "latest"), Deadline("replicate", 20), body)
    assert rollout.make(task) == 8
    assert [kept and kept.ref.version for kept in may_hold] == [None, 7, None]


def test_close_makes_everything_vanish_at_once(store):
    trainer, other = store.join("trainer"), store.join("other")
    publish(trainer, 7)
    trainer.close()
    trainer.close()
    assert listing(other) == {}
    assert not [key for key in store.there() if "trainer" in key]
    assert isinstance(attempt(partial(publish, trainer, 8)), ClosedError)


def seen(store):
    view = store.kv.read(Read((store.keys.all(),)), timeout_s=5)
    return {where: each.pid for where, each in seen_.all_of(view, store.keys).items()}


def test_who_took_a_seat_is_seen_until_its_replica_is_closed(store):
    store.replica("r", 2)
    store.join("alone")
    assert seen(store) == {("r", 0): 0, ("r", 1): 1, ("alone", 0): 0}
    alone, ranks = store.groups[-1], store.groups[:-1]
    ranks[1].close()
    assert seen(store) == {("alone", 0): 0}
    ranks[0].close()
    alone.close()
    assert seen(store) == {}


def test_who_lost_its_lease_is_seen_and_nobody_has_its_seat(store):
    group = store.join("r")
    kill(group)
    store.kv.revoke(group.session.lease_id, timeout_s=5)
    view = store.kv.read(Read((store.keys.all(),)), timeout_s=5)
    assert [*seen_.lost(view, store.keys)] == [("r", 0)]
    store.join("r", 0, 1)
    view = store.kv.read(Read((store.keys.all(),)), timeout_s=5)
    assert [*seen_.lost(view, store.keys)] == []


def test_those_who_are_seen_are_no_more_than_there_are_slots(store, monkeypatch):
    monkeypatch.setattr(keys_module, "SEEN_SLOTS", 1)
    for number in range(3):
        store.replica(f"r{number}", 2)
    assert seen(store) == {("r2", 0): 0, ("r2", 1): 1}
    expire(store, "shards/r2@")
    until(lambda: sum("." in key for key in store.there("shards/r2@")) == 2)
    assert seen(store) == {("r2", 0): 0, ("r2", 1): 1}, "who comes back keeps its own"


def test_a_restarted_replica_replaces_its_predecessor(store, caplog):
    first = store.join("r")
    ref = publish(first, 7)
    second = store.join("r")
    assert "was already there, in" in caplog.text
    assert listing(second) == {}
    assert isinstance(attempt(partial(unpublish, first, ref)), SeatLost)
    assert publish(second, 7).uid != ref.uid


def test_ranks_that_disagree_about_the_world_size_are_told(store):
    errors = at_once(
        partial(store.join, "r", 0, 2, timeout_s=20), partial(store.join, "r", 1, 3, timeout_s=20)
    )
    assert [type(error) for error in errors] == [UsageError] * 2
    assert "world_size=3" in str(errors[0])
    assert "world_size=2" in str(errors[0])


def test_a_group_that_is_not_complete_says_who_is_missing(store):
    error = attempt(partial(store.join, "r", 1, 3, timeout_s=0.5))
    assert isinstance(error, DeadlineExceeded)
    assert "has ranks [1] of 3" in str(error)
    assert store.there("shards/") == []


def test_a_rank_that_looks_only_when_its_peer_has_closed_again_is_told_so(store, monkeypatch):
    """A rank that starts over instead waits for a peer that has been there already."""
    join, waits, looks = membership.join, threading.Event(), threading.Event()

    def slow_join(view, who, nonce):
        step = join(view, who, nonce)
        if isinstance(step, Wait) and who.rank == 1:
            waits.set()
            assert looks.wait(10)
        return step

    monkeypatch.setattr(membership, "join", slow_join)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(store.join, "r", 1, 2)
        assert waits.wait(10)
        store.join("r", 0, 2).close()
        looks.set()
        with pytest.raises(SeatLost, match="rank 0 closed its handle"):
            slow.result(15)


def test_an_end_that_was_learned_when_ctrl_c_came_is_not_learned_again(store, monkeypatch):
    group = store.join("r")
    call = GroupCall(group, 1, "agree", Asked("replicate"), Deadline("agree", 5))
    call.start(group.seat, group.session)
    call._ends_by, group.ledger.unfinished = call.abandoned, call
    end = GroupCall.end

    def struck(self, *args):
        end(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(GroupCall, "end", struck)
    with pytest.raises(KeyboardInterrupt):
        group.catch_up(Deadline("publish", 5))
    monkeypatch.undo()
    assert publish(group, 1).version == 1


def test_a_rank_that_was_started_twice_waits_for_the_first_to_go(store):
    error_or_group = at_once(
        partial(store.join, "r", 0, 2, timeout_s=1), partial(store.join, "r", 0, 2, timeout_s=1)
    )
    assert all(isinstance(found, DeadlineExceeded) for found in error_or_group)


def test_who_was_not_given_the_nonce_is_not_one_of_those_who_share_it(store):
    """Else ranks of two starts would make calls together, each with its own tensors."""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(store.join, "r", 0, 2, nonce="abc")
        until(lambda: store.there("shards/"))
        stranger = pool.submit(store.join, "r", 1, 2, timeout_s=2)
        assert isinstance(first.exception(15), SeatLost)
        with pytest.raises(DeadlineExceeded, match="has ranks"):
            stranger.result(15)


def test_a_rank_that_lost_its_lease_while_it_waited_meets_its_peers_all_the_same(store):
    """Those who were given a nonce: one of them starts over, the other comes later."""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(store.join, "r", 0, 2, nonce="abc", ttl_s=2)
        until(lambda: store.there("shards/"))
        expire(store, "shards/")
        until(lambda: any(".abc" in key or "abc." in key for key in store.there("shards/")))
        second = pool.submit(store.join, "r", 1, 2, nonce="abc", ttl_s=2)
        ranks = [first.result(15), second.result(15)]
    assert ranks[0].seat.inst == ranks[1].seat.inst
    refs = at_once(*(partial(publish, rank, 1) for rank in ranks))
    assert [ref.version for ref in refs] == [1, 1]


def expire(store, part):
    """End the leases of what is there."""
    view = store.kv.read(Read((under(f"/torch-ros/{store.keys.model}/{part}"),)), timeout_s=5)
    for lease_id in {entry.lease_id for entry in view.entries.values()}:
        store.kv.revoke(lease_id, timeout_s=5)


def test_a_process_that_is_started_again_alone_is_no_peer_of_those_that_made_calls(store):
    """It was given the nonce of its predecessor, and has nothing of what its peers hold."""
    first, second = store.replica("r", 2, nonce="abc", ttl_s=2)
    at_once(*(partial(publish, rank, 1) for rank in (first, second)))
    kill(second)
    store.kv.revoke(second.session.lease_id, timeout_s=5)
    with pytest.raises(UsageError, match=r"ranks \[1\] were started again, alone"):
        store.join("r", 1, 2, nonce="abc", timeout_s=15)
    first.check_final()  # it waits for the peer that it had
    assert listing(store.join("other")) == {}


def test_runs_order_versions_and_a_rollback_starts_a_new_one(store):
    trainer, rollout = store.join("trainer"), store.join("rollout")
    publish(trainer, 100)
    assert replicate(rollout).version == 100
    resumed = store.join("resumed", run="new")
    assert resumed.seat.run != trainer.seat.run
    ref = publish(resumed, 90)
    late = store.join("late")
    assert replicate(late) == ref
    assert listing(late) == {90: {"resumed", "late"}}
    held = listing(rollout)
    assert held == {90: {"resumed", "late"}}


def test_a_model_used_again_starts_with_a_clean_slate(store):
    trainer = store.join("trainer")
    publish(trainer, 100)
    trainer.close()
    again = store.join("trainer")
    assert publish(again, 1).version == 1
    assert len(store.there("runs/")) == 1
    assert len(store.there("versions/")) == 1


def test_old_version_records_are_forgotten(store):
    trainer = store.join("trainer")
    for version in range(5):
        unpublish(trainer, publish(trainer, version))
    assert len(store.there("versions/")) == 1


def test_a_named_run_is_shared_by_those_who_name_it(store):
    first, second = store.join("a", run="x"), store.join("b", run="x")
    assert first.seat.run == second.seat.run == "x"
    assert publish(first, 3) == publish(second, 3)


def test_who_waits_for_a_version_notices_that_an_older_run_counts_again(store):
    old, new = store.join("old", run="x"), store.join("new", run="new")
    publish(old, 12)
    ref = publish(new, 0)
    waiter, waits = store.join("waiter"), threading.Event()
    keys = waiter.seat.keys

    def eight(view):
        found = versions.resolve(view, keys, Spec.parse(8))
        waits.set()
        return found

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(waiter.ask, spec_ranges(keys), eight, Deadline("wait", 20))
        assert waits.wait(10)
        unpublish(new, ref)
        with pytest.raises(VersionNotFound, match="12"):
            asked.result(5)  # it would look again by itself after 10 s


def test_who_comes_back_goes_on_in_the_run_of_the_newest_version_though_an_older_one_lives(store):
    rollout = store.join("rollout")
    trainer = store.join("trainer", run="new")
    ref = publish(trainer, 5)
    assert replicate(rollout) == ref
    unpublish(rollout, ref)  # in the middle of an update
    unpublish(trainer, ref)
    trainer.close()
    back = store.join("trainer")
    assert back.seat.run == ref.run != rollout.seat.run
    assert publish(back, 6).order > ref.order


def test_an_older_run_in_which_somebody_publishes_is_the_one_that_counts(store):
    trainer, guest = store.join("trainer"), store.join("guest", run="new")
    unpublish(guest, publish(guest, 5))
    guest.close()
    publish(trainer, 10)
    assert store.join("second").seat.run == trainer.seat.run


def test_two_first_processes_find_one_run(store):
    def applicant(name):
        shard, lease_id = ShardRecord("host", 1, b""), store.kv.grant(5, timeout_s=5)[0]
        whose = {"lease_id": lease_id, "nonce": "n", "fresh_run": f"run-{name}"}
        return Applicant(store.keys, name, 0, 1, shard, None, "dc", spot=False, **whose)

    one_, two = applicant("one"), applicant("two")
    views = [store.kv.read(Read(membership.open_ranges(who)), timeout_s=5) for who in (one_, two)]
    first, second = (
        membership.create_group(view, who).txn for view, who in zip(views, (one_, two), strict=True)
    )
    assert store.kv.commit(first, timeout_s=5).applied
    assert not store.kv.commit(second, timeout_s=5).applied
    again = store.kv.read(Read(membership.open_ranges(two)), timeout_s=5)
    assert store.kv.commit(membership.create_group(again, two).txn, timeout_s=5).applied
    assert len(store.there("runs/")) == 1


def test_two_starts_that_met_by_name_are_not_one(store):
    """One makes the record and hears nothing; the other sits down in it."""
    met = []

    class Deaf:
        def __init__(self, kv):
            self._kv = kv

        def __getattr__(self, name):
            return getattr(self._kv, name)

        def commit(self, txn, *, timeout_s):
            reply = self._kv.commit(txn, timeout_s=timeout_s)
            if not met:
                met.append(store.join("trainer"))
                raise StoreUnavailable("etcd://test", timeout_s, "no answer")
            return reply

    place = Applicant(
        *(store.keys, "trainer", 0, 1, ShardRecord("host", 0, b"card"), None, "default", False),
        ttl_s=5,
    )
    group = Group.join(Deaf(connect(store.endpoint, timeout_s=5)), place, Deadline("open", 10))
    store.groups.append(group)
    until(lambda: met[0].state != "seated")
    with pytest.raises(SeatLost, match="another start has taken its name"):
        met[0].check_final()
    assert publish(group, 1).version == 1


def test_ranks_that_were_told_differently_go_by_what_the_record_says(store):
    ranks = at_once(
        *(partial(store.join, "r", rank, 2, nonce="n", spot=rank == 0) for rank in range(2))
    )
    assert ranks[0].seat.spot == ranks[1].seat.spot


def test_a_publication_that_is_made_again_is_no_conflict_with_its_own_readers(store):
    trainer, rollout = store.join("trainer"), store.join("rollout")
    ref = publish(trainer, 7)
    replicate(rollout)
    holding = Delete(one(trainer.seat.holding(ref)))
    store.kv.commit(Txn(ops=(holding,)), timeout_s=5)  # as after a seat was lost
    keys, run = store.keys, trainer.seat.run
    ranges = (*trainer.seat.own, keys.versions(run), keys.holdings(run))
    view = store.kv.read(Read(ranges), timeout_s=5)
    call = Call(2, "publish", Asked("publish", 7), 0)
    again = calls.announce_version(view, trainer.seat, call, 7, ref.uid)
    assert store.kv.commit(again.txn, timeout_s=5).applied
    assert isinstance(
        attempt(partial(calls.announce_version, view, trainer.seat, call, 7, "another")),
        VersionConflict,
    )


def test_the_same_number_with_other_content_is_newer_than_what_the_store_forgot(store):
    trainer, rollout = store.join("trainer"), store.join("rollout")
    ref = publish(trainer, 7)
    held = VersionRef(ref.run, ref.version, "forgotten", ref.run_number)
    view = store.kv.read(Read(spec_ranges(store.keys)), timeout_s=5)
    assert versions.newer(view, store.keys, Spec.parse("latest"), held).ref == ref
    assert versions.newer(view, store.keys, Spec.parse("latest"), ref) is None
    assert rollout.ledger.held is None


def test_a_rank_ignores_what_it_does_not_know_of_a_call_unless_it_must_know_it(store):
    trainer = store.join("t")
    publish(trainer, 1)
    [one_, other] = store.replica("r", 2, knows=["mine"])
    made = at_once(*(partial(extended_replicate, each, more=["new"]) for each in (one_, other)))
    assert [(call.must, [*call.more], len(call.sources)) for call in made] == [({}, ["new"], 1)] * 2
    unpublish_both = (partial(unpublish, each, each.ledger.held.ref) for each in (one_, other))
    assert at_once(*unpublish_both) == [None, None]
    made = at_once(*(partial(extended_replicate, each, must=["mine"]) for each in (one_, other)))
    assert [([*call.must], call.sources) for call in made] == [(["mine"], [])] * 2
    at_once(*(partial(unpublish, each, each.ledger.held.ref) for each in (one_, other)))
    for error in at_once(
        *(partial(extended_replicate, each, must=["new"]) for each in (one_, other))
    ):
        assert isinstance(error, UsageError)
        assert "was opened without new=..." in str(error)


def test_a_seat_that_is_lost_while_no_thread_is_to_be_had_is_taken_again_later(
    store, monkeypatch, caplog
):
    group = store.join("r", ttl_s=2)
    monkeypatch.setattr(run, "next_line_s", lambda _: 0.0)  # all that may be said is
    left, start = ["seats", "seats", "watches"], threading.Thread.start

    def refuse(thread):
        if left and thread.name.startswith(f"torch_ros {left[0]}"):
            left.pop(0)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    store.kv.revoke(group.session.lease_id, timeout_s=5)
    until(lambda: not left)
    watch = f"torch_ros watches {group.seat.inst}"
    until(lambda: watch in [thread.name for thread in threading.enumerate()])
    assert (group.state, group.ledger.seats_lost) == ("seated", 1)
    assert group.session.is_valid()
    assert "cannot take its seat" not in caplog.text  # it has it: only the watch was missing


def test_who_cannot_take_its_seat_again_says_so_ever_more_seldom(store, monkeypatch, caplog):
    group = store.join("trainer")
    tries, are_many = [], threading.Event()

    def grant(*_, **__):
        tries.append(time.monotonic())
        if len(tries) == 100:
            are_many.set()
        raise StoreUnavailable("memory://", 5.0, "for a test")

    monkeypatch.setattr(seating, "RETRY_S", 0.005)
    monkeypatch.setattr(run, "next_line_s", lambda after_s: max(0.05, 2 * after_s))
    monkeypatch.setattr(group.kv, "grant", grant)
    with caplog.at_level("WARNING"):
        group.fence(SeatLost("trainer", "for a test"))
        assert are_many.wait(10)
    lasts_s = time.monotonic() - tries[0]
    lines = [record for record in caplog.records if "cannot take its seat" in record.message]
    assert 1 <= len(lines) <= 2 + math.log2(max(1.0, lasts_s / 0.05))
