"""Installs: the version that an engine uses, who says so, and who waits for that. Invariant I10."""

import os
import sys
import threading
import time
from contextlib import suppress

import kit
import pytest
import torch
import torch.distributed.checkpoint as dcp
from features.installs.engines import engine, install
from kit import at_once, both_stores, inside, published, until

import torch_ros.dcp
from torch_ros import errors
from torch_ros.features.installs import installing
from torch_ros.features.installs.records import NAME, Install, Rejection
from torch_ros.features.installs.rules import own_key
from torch_ros.memory.store import MemoryKV
from torch_ros.protocol import membership
from torch_ros.protocol.records import Holding, ShardRecord, VersionRef
from torch_ros.store.txn import Put, Txn

endpoint = pytest.fixture(kit.store)  # in memory, where nothing else is said


def says(handle, name="engine"):
    """A replica's answer: active, trying and rejected versions."""
    found = handle.installs()[name]
    rejected = found.rejected and found.rejected.ref
    return tuple(ref and ref.version for ref in (found.active, found.trying, rejected))


def vanish(handle, *, for_good=False):
    """The process loses its lease, as one that is killed or cut off."""
    group = inside(handle).group
    if for_good:
        group._come_back = lambda: None
    group.kv.revoke(group.session.lease_id, timeout_s=5)


@both_stores
def test_a_trainer_waits_until_an_engine_uses_its_version(opened, trainer):
    rollout = engine(opened)
    assert says(trainer) == (None, None, None)
    with pytest.raises(errors.DeadlineExceeded, match="'engine' is at no version"):
        trainer.wait_installed(1, timeout_s=0.2)
    with rollout.installing("latest") as ref:
        assert says(trainer) == (None, 1, None)
        rollout.read(ref.version, {"w": torch.empty(4)})
    found = trainer.wait_installed(1)
    assert (list(found.active), found.rejected, found.gone) == (["engine"], {}, ())
    assert trainer.installs()["engine"].active == ref
    published(trainer, 2)
    with rollout.installing(2):
        # It goes on to a newer one: it can use none below 1 any more.
        assert trainer.wait_installed(1, timeout_s=1).active
        with pytest.raises(errors.DeadlineExceeded, match="trying 2"):
            trainer.wait_installed(2, timeout_s=0.2)
        rollout.read(2, {"w": torch.empty(4)})


@both_stores
def test_an_exception_rejects_and_an_empty_block_says_that_the_old_weights_are_back(
    opened, trainer
):
    rollout, keeps = engine(opened), opened("keeps", {"w": torch.empty(4)})
    keeps.replicate(1)
    install(rollout, 1)
    published(trainer, 2)
    with pytest.raises(ValueError, match="no place"), rollout.installing(2):
        raise ValueError("no place for w")
    assert says(trainer) == (None, None, 2)
    with pytest.raises(
        errors.InstallRejected, match=r"rank 0 of 'engine': ValueError: no place for w"
    ):
        trainer.wait_installed(2, timeout_s=5)
    with rollout.installing(1):
        pass
    assert says(trainer) == (1, None, 2)  # until 2 or a newer one is active
    install(rollout, 2)
    assert says(trainer) == (2, None, None)
    with pytest.raises(errors.UsageError, match="only grow within a run"):
        install(rollout, 1)
    assert says(trainer) == (2, None, None)  # refused at once


@both_stores
def test_several_engines_answer_each_for_itself(opened, trainer):
    good, bad = engine(opened, "good"), engine(opened, "bad")
    install(good, 1)
    with pytest.raises(ZeroDivisionError), bad.installing(1):
        raise ZeroDivisionError
    found = trainer.wait_installed(1)
    assert list(found.active) == ["good"]
    assert found.rejected == {"bad": (0, "ZeroDivisionError: ")}
    with pytest.raises(errors.DeadlineExceeded, match="'later' is missing, and was not heard of"):
        trainer.wait_installed(1, replicas=["good", "later"], timeout_s=0.2)
    assert list(trainer.wait_installed(1).active) == ["good"]  # named in that wait only


def test_all_ranks_or_none(opened, ranks, pool, trainer):
    pair = ranks("engine", 2, installs=True)

    def bring(handle, fails=-1):
        with handle.installing(1):
            handle.read(1, {"w": torch.empty(4)})
            if handle.rank == fails:
                raise ValueError("rank's own")

    def tried(handle):
        try:
            bring(handle, fails=1)
        except (errors.InstallRejected, ValueError) as error:
            return error

    zero, one = pool.map(tried, pair)
    assert isinstance(one, ValueError)
    assert isinstance(zero, errors.InstallRejected)
    assert (zero.rank, zero.reason) == (1, "ValueError: rank's own")
    assert says(trainer) == (None, None, 1)
    list(pool.map(bring, pair))  # the next one is in step
    assert says(trainer) == (1, None, None)


def test_a_rank_that_fails_before_its_peers_read_ends_their_block(ranks, pool, trainer):
    pair, failed = ranks("engine", 2, installs=True, timeout_s=15), threading.Event()

    def tried(handle):
        try:
            with handle.installing(1):
                if handle.rank == 1:
                    raise ValueError("early")
                failed.wait(10)
                handle.read(1, {"w": torch.empty(4)}, timeout_s=15)
        except errors.InstallRejected as error:
            return error.rank
        except ValueError:
            failed.set()

    assert list(pool.map(tried, pair)) == [1, None]
    list(pool.map(lambda handle: install(handle, 1), pair))
    assert says(trainer) == (1, None, None)


@pytest.mark.parametrize("when", ["before its peers read", "while they wait"])
def test_a_rank_whose_block_is_refused_when_its_peers_are_in_it_ends_theirs(
    ranks, pool, trainer, when
):
    pair, refused = ranks("engine", 2, installs=True, timeout_s=15), threading.Event()
    entered = threading.Event()

    def enter():
        try:
            with pair[0].installing(1):
                entered.set()
                assert when == "while they wait" or refused.wait(10)
                pair[0].read(1, {"w": torch.empty(4)})
        except errors.InstallRejected as error:
            return error.rank, error.reason

    def be_refused():
        assert entered.wait(10)
        if when == "while they wait":
            group = pair[0]._shard.group
            until(lambda: group.ledger.pending > 1)
        with pytest.raises(errors.UsageError, match="newest"), pair[1].installing("newest"):
            pass
        refused.set()

    began_s = time.monotonic()
    (rank, reason), _ = at_once(enter, be_refused)
    assert time.monotonic() - began_s < 5
    assert rank == 1
    assert reason.startswith("UsageError: ")
    assert says(trainer) == (None, None, 1)
    list(pool.map(lambda handle: install(handle, 1), pair))  # the next one is in step
    assert says(trainer) == (1, None, None)


def test_a_block_brings_one_content_and_all_of_it(opened, trainer):
    rollout = engine(opened)
    with pytest.raises(errors.UsageError, match="has read nothing"), rollout.installing(1):
        pass
    with pytest.raises(errors.UsageError, match="did not bring all"), rollout.installing(1):
        stream = rollout.stream(1, ["w"], buffer_bytes=64)
    stream.close()
    with rollout.installing(1):
        assert dict(rollout.stream(1, ["w"], buffer_bytes=64))
    published(trainer, 2)
    with pytest.raises(errors.UsageError, match=r"has read \[2\]"), rollout.installing(1):
        rollout.read(2, {"w": torch.empty(4)})
    for call in (
        lambda: rollout.read(2, {"w": torch.empty(4)}),
        lambda: rollout.stream(2, ["w"], buffer_bytes=64),
        rollout.replicate,
        rollout.update,
    ):
        with pytest.raises(errors.UsageError, match="within `with handle.installing"):
            call()
    with pytest.raises(errors.UsageError, match="open the handle with installs=True"):
        trainer.installing(1).__enter__()


@pytest.mark.long
@both_stores
def test_a_missing_replica_has_not_answered_and_is_gone_after_two_ttls(opened, trainer):
    stays, dies = engine(opened, "stays"), engine(opened, "dies")
    for handle in (stays, dies):
        install(handle, 1)
    assert trainer.wait_installed(1).active.keys() == {"stays", "dies"}
    vanish(dies, for_good=True)
    trainer.wait(lambda _: "dies" not in trainer.installs(), timeout_s=5)
    with pytest.raises(errors.DeadlineExceeded, match="'dies' is missing, and was at 1"):
        trainer.wait_installed(1, timeout_s=2)
    trainer._installs._missing_s["dies"] = 9.5
    found = trainer.wait_installed(1, timeout_s=5)
    assert (list(found.active), found.gone) == (["stays"], ("dies",))
    assert trainer.wait_installed(1).gone == ()


def test_time_in_which_etcd_does_not_answer_is_no_absence(trainer, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(installing.time, "monotonic", lambda: clock[0])
    told = trainer._installs
    for step_s, there in ((0, {"e": Install()}), (50, {}), (500, {}), (1, {})):
        clock[0] += step_s
        told.note(there)
    assert told._missing_s == {"e": pytest.approx(2.5)}


@both_stores
def test_a_seat_that_is_lost_in_the_block_and_what_was_active_come_back(opened, trainer):
    rollout = engine(opened)
    with rollout.installing(1):
        rollout.read(1, {"w": torch.empty(4)})
        vanish(rollout)
    assert says(trainer) == (1, None, None)
    before = inside(rollout).group.seat
    vanish(rollout)
    until(lambda: inside(rollout).group.seat is not before and rollout.state == "seated")
    assert says(trainer) == (1, None, None)


def test_ctrl_c_before_a_block_is_left_does_not_refuse_the_next(opened, trainer):
    rollout = engine(opened)
    lost = rollout.installing(1)
    lost.__enter__()  # and Ctrl-C comes in the first instruction of __exit__
    install(rollout, 1)
    assert says(trainer) == (1, None, None)


def test_an_install_in_the_block_of_another_ends_that(opened, trainer):
    rollout = engine(opened)
    with (
        pytest.raises(errors.UsageError, match="another install was begun in the block"),
        rollout.installing(1),
    ):
        install(rollout, 1)
    install(rollout, 1)


def test_a_handle_that_is_closed_in_the_block_and_a_fork_tell_nobody(opened, trainer):
    rollout = engine(opened)
    with pytest.raises(errors.ClosedError), rollout.installing(1):
        rollout.close()
    assert "engine" not in trainer.installs()
    rollout = engine(opened)
    with rollout.installing(1):
        rollout.read(1, {"w": torch.empty(4)})
        if (child := os.fork()) == 0:
            rollout.installing(1)
            rollout._installs.open.__exit__(ValueError, ValueError(), None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert says(trainer) == (1, None, None)


def test_latest_waits_out_what_is_older_and_an_older_run_is_another(opened, trainer):
    rollout, slow = engine(opened), opened("slow", {"w": torch.empty(4)})
    slow.replicate(1)
    published(trainer, 2)
    install(rollout, 2)
    trainer.unpublish()  # the newest that is available is 1
    with pytest.raises(errors.DeadlineExceeded, match="not available again"):
        install_within(rollout, "latest", 0.2)
    assert says(trainer) == (2, None, None)
    other = opened("other", run="new")
    published(other, 1)
    assert install(rollout, 1).run == other.run
    with pytest.raises(errors.DeadlineExceeded, match=f"of run {other.run!r}"):
        trainer.wait_installed(2, timeout_s=0.2)


def install_within(handle, version, timeout_s):
    with handle.installing(version, timeout_s=timeout_s):
        pass


def test_an_unreadable_record_holds_a_wait_while_its_replica_lives(opened, trainer):
    rollout = engine(opened)
    install(rollout, 1)
    group = inside(rollout).group
    key = own_key(group.seat)
    stray = group.seat.keys.carried_at("nobody@0", NAME)
    group.kv.commit(Txn(ops=(Put(stray, b"?"),)), timeout_s=5)
    assert list(trainer.wait_installed(1).active) == ["engine"]
    group.kv.commit(Txn(ops=(Put(key, b"?"),)), timeout_s=5)
    with pytest.raises(errors.DeadlineExceeded, match="'engine' is at no version"):
        trainer.wait_installed(1, timeout_s=0.2)


def test_one_rank_asks_etcd_twice(opened, trainer, monkeypatch):
    rollout, asked = engine(opened), []
    install(rollout, 1)
    published(trainer, 2)
    rollout.contents(2)
    for name in ("read", "commit"):
        call = getattr(MemoryKV, name)
        monkeypatch.setattr(
            MemoryKV, name, lambda self, *a, c=call, **k: (asked.append(a), c(self, *a, **k))[1]
        )
    with rollout.installing(2):
        assert len(asked) == 1
        rollout.read(2, {"w": torch.empty(4)})
        asked.clear()
    assert len(asked) == 1


def test_a_version_that_does_not_come_takes_nothing_away(opened, trainer):
    rollout = engine(opened)
    install(rollout, 1)
    with pytest.raises(errors.DeadlineExceeded):
        install_within(rollout, 9, 0.2)
    published(trainer, 2)
    published(trainer, 3)
    with pytest.raises(errors.VersionNotFound):
        install_within(rollout, 2, 0.2)
    assert says(trainer) == (1, None, None)


def reads_still(rollout, ref):
    """Another replica reads `ref`, which nobody offers: it may be there again."""
    group = inside(rollout).group
    key = group.seat.keys.holding(ref.run, ref.version, "default", "other@0")
    record = Holding(ref.uid, call=1, state="filling", world_size=1)
    group.kv.commit(Txn(ops=(Put(key, record.encode()),)), timeout_s=5)


def test_a_version_that_goes_before_it_is_read_is_not_found(opened, trainer):
    rollout = engine(opened)
    rollout.register({"w": torch.empty(4)})
    with rollout.installing(1):
        rollout.replicate(1)
    published(trainer, 2)
    with (
        pytest.raises(errors.VersionNotFound, match="2: it went"),
        rollout.installing("latest") as new,
    ):
        trainer.unpublish()
        reads_still(rollout, new)
        assert not rollout.update(new.version)
    assert rollout.version == 1
    published(trainer, 3)
    with rollout.installing("latest") as new:
        assert rollout.update(new.version)
    assert says(trainer)[0] == 3


A, B = (VersionRef("run", number, f"uid{number}", 1) for number in (1, 2))
TRYING = Install(attempt=2, trying=B, floor=A)
ACTIVE, FAILED = TRYING.left(B), TRYING.refused(Rejection(B, 1, "why"))
OLD = Install(attempt=1, active=A, floor=A)


def _shard(install, *, is_back=False):
    carries = {} if install is None else {NAME: install.carried}
    return ShardRecord("h", 1, b"", is_back=is_back, carries=carries)


@pytest.mark.parametrize(
    ("ranks_bring", "adopted"),
    [
        ([OLD, OLD], OLD),
        ([OLD, TRYING], TRYING),  # a rank may write to its engine
        ([TRYING, ACTIVE], ACTIVE),  # all had left well, or nobody knew that
        ([ACTIVE, FAILED], FAILED),  # its owner may have put the old weights back
        ([TRYING, FAILED, OLD], FAILED),
        ([None, None], None),
    ],
)
def test_ranks_that_come_back_agree_on_what_their_engine_uses(ranks_bring, adopted):
    brought = [_shard(each, is_back=True) for each in ranks_bring]
    for shards in (brought, brought[::-1]):
        there = membership.adopted_values(shards)
        assert {name: Install.decode(bytes(value), name) for name, value in there.items()} == (
            {} if adopted is None else {NAME: adopted}
        )


def test_a_fresh_process_is_a_stranger_to_a_group_that_has_begun_an_install():
    fresh, back = _shard(Install()), _shard(Install(), is_back=True)
    assert membership._strange([back, fresh]) == []
    assert membership._strange([_shard(FAILED, is_back=True), fresh]) == [1]


def test_no_later_call_mends_one_that_has_not_brought_all(opened, trainer):
    rollout = engine(opened)
    with (
        pytest.raises(errors.UsageError, match=r"\['stream 1'\] of its block had begun"),
        rollout.installing(1),
        rollout.stream(1, ["w"], buffer_bytes=64),
    ):
        rollout.read(1, {"w": torch.empty(4)})
    with (
        pytest.raises(errors.UsageError, match=r"\['read 1'\] of its block had begun"),
        rollout.installing(1),
    ):
        with suppress(errors.TorchRosError):
            rollout.read(1, {"w": torch.empty(5)})
        assert dict(rollout.stream(1, ["w"], buffer_bytes=64))
    with rollout.installing(1):
        assert not dict(rollout.stream(1, [], buffer_bytes=64))
        rollout.read(1, {"w": torch.empty(4)})
    assert says(trainer) == (1, None, None)


def struck(line, block):
    """Strike Ctrl-C at a line of installing.py that is run, the n-th; whether it came."""
    left = line

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename != installing.__file__:
            return None
        if event == "line":
            left -= 1
            if not left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        block()
    except (KeyboardInterrupt, ZeroDivisionError):
        pass
    finally:
        sys.settrace(None)
    return left <= 0


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.long
def test_ctrl_c_at_any_line_of_an_install_leaves_nobody_active(opened, trainer, fails):
    rollout, line = engine(opened), 1

    def bring(fails=fails):
        with rollout.installing(1) as ref:
            rollout.read(ref.version, {"w": torch.empty(4)})
            if fails:
                raise ZeroDivisionError

    while struck(line, bring):
        assert rollout._installs.told.wait(5), line
        assert says(trainer)[0] is None, line
        bring(fails=False)
        assert says(trainer) == (1, None, None), line
        with pytest.raises(ZeroDivisionError):
            bring(fails=True)  # a block of what is active would change nothing
        line += 1
    assert line > 40


def test_what_one_thread_forgets_does_not_break_the_wait_of_another(trainer):
    told, others = trainer._installs, []

    class Meets(dict):
        def keys(self):
            found = set(super().keys())
            others.append(threading.Thread(target=told.forget, args=[found]))
            others[0].start()
            others[0].join(0.2)
            return found

    told._missing_s = Meets(gone=9.0)
    told.note({})
    others[0].join()
    assert told.heard_of() == ()


def test_one_name_is_no_list_of_replicas(trainer):
    with pytest.raises(errors.UsageError, match="replicas='engine': expected a list"):
        trainer.wait_installed(1, replicas="engine")


def test_dcp_reads_within_installing_only(opened, trainer):
    rollout, state = engine(opened), {"w": torch.empty(4)}
    reader = torch_ros.dcp.ROSReader(1, handle=rollout)
    with pytest.raises(dcp.CheckpointException, match="load 1: .*within `with handle.installing"):
        dcp.load(state, storage_reader=reader, no_dist=True)
    with rollout.installing(1):
        dcp.load(state, storage_reader=torch_ros.dcp.ROSReader(1, handle=rollout), no_dist=True)
    assert state["w"][0] == 1
    assert says(trainer) == (1, None, None)


def test_the_same_number_with_another_content_takes_what_is_active_away(opened, trainer):
    rollout = engine(opened)
    install(rollout, 1)
    trainer.unpublish()
    other = opened("other", run=trainer.run)
    trainer.close()
    published(other, 1, value=7)
    with rollout.installing(1):
        assert says(other) == (None, 1, None)
        rollout.read(1, {"w": torch.empty(4)})
    assert other.installs()["engine"].active == inside(other).held


@pytest.mark.long
def test_a_rank_that_fails_to_enter_what_is_active_ends_its_peers_block(
    ranks, pool, trainer, monkeypatch
):
    pair = ranks("engine", 2, installs=True, timeout_s=15)
    list(pool.map(lambda handle: install(handle, 1), pair))
    shard = inside(pair[1])

    def interrupted(task):
        monkeypatch.undo()
        shard.make(task)
        raise KeyboardInterrupt

    def tried(handle):
        try:
            return install(handle, 1)
        except (errors.InstallRejected, KeyboardInterrupt) as error:
            return type(error)

    monkeypatch.setattr(shard, "make", interrupted, raising=False)
    assert list(pool.map(tried, pair)) == [errors.InstallRejected, KeyboardInterrupt]
    assert says(trainer) == (None, None, 1)
    list(pool.map(lambda handle: install(handle, 1), pair))
    assert says(trainer) == (1, None, None)
