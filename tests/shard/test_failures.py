"""What a handle does when sources, seats and stores fail: one process, memory and etcd."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kit import inside, until

import torch_ros
from torch_ros.deadline import Deadline
from torch_ros.errors import (
    ContractBroken,
    CorruptWeights,
    DeadlineExceeded,
    SeatLost,
    SourceLost,
    StoreUnavailable,
    VersionNotFound,
)
from torch_ros.local import etcd as local
from torch_ros.memory import store as memory
from torch_ros.protocol import calls
from torch_ros.protocol.call import GroupCall
from torch_ros.protocol.group import Group
from torch_ros.protocol.records import Asked, Failure
from torch_ros.shard import replication
from torch_ros.shard.tally import tallies
from torch_ros.store.loops import Done
from torch_ros.transfer import batches, reading, stall
from torch_ros.transfer.feed import Progress
from torch_ros.transfer.registered import LocalState
from torch_ros.weights import manifest
from torch_ros.weights.local import LocalChunk, LocalTensor

only_memory = pytest.mark.parametrize("endpoint", ["memory"], indirect=True)


@pytest.mark.long
@pytest.mark.parametrize("endpoint", ["local"])
def test_handles_go_on_when_the_local_etcd_was_killed(opened, tmp_path, monkeypatch):
    directory = tmp_path / "local"
    monkeypatch.setenv(local.DIRECTORY, str(directory))
    trainer, rollout = opened("trainer"), opened("rollout")
    trained, mine = weights(1), weights(0)
    trainer.register(trained)
    rollout.register(mine)
    trainer.publish(1)
    assert rollout.update()
    try:
        os.kill(local.find(directory).etcd_pid, signal.SIGKILL)
        trainer.unpublish()  # nobody calls open
        for tensor in trained.values():
            tensor.add_(1)
        trainer.publish(2)
        rollout.wait(lambda available: 2 in available)
        assert rollout.update()
        assert all(torch.equal(mine[name], trained[name]) for name in trained)
    finally:
        local.stop(directory)


def weights(value, count=8):
    return {f"w{i}": torch.full((1000,), float(value) + i) for i in range(count)}


def publisher(opened, value=1, version=1, name="trainer", **options):
    handle = opened(name, **options)
    tensors = weights(value)
    handle.register(tensors)
    handle.publish(version)
    return handle, tensors


def reader(opened, name, **options):
    handle = opened(name, **options)
    tensors = weights(-1000)
    handle.register(tensors)
    return handle, tensors


def same(tensors, others):
    return all(torch.equal(tensors[fqn], others[fqn]) for fqn in others)


def batches_of(monkeypatch, size_bytes):
    """They are small, whatever the way, and in flight one at a time."""
    for name in ("BATCH_BYTES", "STEP_BYTES"):
        monkeypatch.setattr(batches, name, size_bytes)
    for name in ("FLIGHT", "STEPS_FLIGHT"):
        monkeypatch.setattr(reading, name, 1)


class Stop:
    """Stops a reader once some of its chunks have landed, until it is told to go on."""

    def __init__(self, monkeypatch, handle, after):
        self.reached, self.go_on = threading.Event(), threading.Event()
        add = Progress.add

        def stopping(progress, *arguments):
            add(progress, *arguments)
            if progress._mailbox is inside(handle).mailbox and progress.done.sum() >= after:
                self.reached.set()
                assert self.go_on.wait(15)

        batches_of(monkeypatch, 4000)  # one for each tensor
        monkeypatch.setattr(Progress, "add", stopping)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as made:
        yield made


def test_a_reader_whose_source_dies_goes_on_from_another_with_what_it_has(
    opened, monkeypatch, pool, caplog
):
    first, tensors = publisher(opened, name="first")
    second, _ = publisher(opened, name="second")
    rollout, got = reader(opened, "rollout")
    stop = Stop(monkeypatch, rollout, 3)
    reads = pool.submit(rollout.replicate)
    assert stop.reached.wait(10)
    (source,) = {key.split("/")[-3].split("@")[0] for key in readers_of(rollout)}
    {"first": first, "second": second}[source].close()
    stop.go_on.set()
    assert reads.result(15) == 1
    assert same(got, tensors)
    report = rollout.last_read
    assert (report.source, report.reroutes) == ({"first", "second"} - {source}, 1) or (
        report.source != source
    )
    assert report.reroutes >= 1
    assert report.bytes_read == report.bytes_total, "what was there was read again"
    assert f"lost {source!r}" in caplog.text


def readers_of(handle):
    """The reader records of the model."""
    group = inside(handle).group
    keys = group.seat.keys
    rule = lambda view: torch_ros.store.loops.Done([k for k, _ in view.within(keys.readers())])
    deadline = torch_ros.store.run.Deadline("look", 5)
    return group.ask((keys.readers(),), rule, deadline)


def test_without_another_source_it_is_an_error_and_the_next_publish_heals(
    opened, monkeypatch, pool
):
    trainer, _ = publisher(opened)
    rollout, got = reader(opened, "rollout")
    stop = Stop(monkeypatch, rollout, 3)
    reads = pool.submit(rollout.replicate)
    assert stop.reached.wait(10)
    trainer.close()
    stop.go_on.set()
    with pytest.raises(SourceLost, match="no other replica"):
        reads.result(15)
    assert rollout.version is None
    _, tensors = publisher(opened, 5, 2, name="again")
    assert rollout.replicate() == 2
    assert same(got, tensors)


def test_a_call_that_was_left_open_does_not_keep_a_replaced_handle_from_its_tensors(
    opened, monkeypatch
):
    """The store says that the seat is lost before anything of this process has noticed."""
    monkeypatch.setattr(Group, "_watch", lambda _: None)
    first, tensors = publisher(opened)
    inside(first).group.ledger.unfinished = call = GroupCall(
        inside(first).group, 2, "agree", Asked("check"), Deadline("check", 1)
    )
    call._ends_by = Failure.of(RuntimeError("etcd was away"), replica="trainer", call=2, rank=0)
    opened("trainer")
    first.unpublish()
    assert first.version is None
    tensors["w0"].fill_(666)
    with pytest.raises(SeatLost, match="another start has taken its name"):
        first.publish(2)


@only_memory
def test_a_version_is_not_looked_up_in_tensors_that_were_taken_back(opened):
    """Until its lease ends, the store offers what this process could not unpublish there."""
    trainer, _ = publisher(opened)
    inside(trainer).mailbox.withdraw()
    with pytest.raises(DeadlineExceeded, match="rank 0 has taken its tensors back"):
        trainer.checkpoints.inspect("latest", 0.2)


@pytest.mark.parametrize("dies", ["nobody", "trainer", "first"])
def test_full_replicas_that_nobody_reads_from_share_the_work(opened, monkeypatch, pool, dies):
    """Of three, two are read from at the same time. The third is left to the next newcomer."""
    trainer, tensors = publisher(opened)
    first, _ = reader(opened, "first")
    second, _ = reader(opened, "second")
    assert (first.replicate(), second.replicate()) == (1, 1)
    newcomer, got = reader(opened, "newcomer")
    stop = Stop(monkeypatch, newcomer, 3)
    reads = pool.submit(newcomer.replicate)
    assert stop.reached.wait(10)
    claimed = {key.split("/")[-3].partition("@")[0] for key in readers_of(newcomer)}
    assert claimed == {"trainer", "first"}
    if dies != "nobody":
        {"trainer": trainer, "first": first}[dies].close()
    time.sleep(0.2)
    stop.go_on.set()
    assert reads.result(15) == 1
    assert same(got, tensors)
    report = newcomer.last_read
    assert report.bytes_read == report.bytes_total, "something was read twice"
    left = {"nobody": "trainer, first", "trainer": "first", "first": "trainer"}[dies]
    assert (report.source, report.reroutes) == (left, int(dies != "nobody"))
    assert inside(newcomer).observed.tally.reroutes == report.reroutes
    assert report.stages_s["read"] > 0.2, "what was read from who was lost took time, too"
    assert readers_of(newcomer) == []


def test_sources_take_turns(opened, monkeypatch):
    batches_of(monkeypatch, 8000)  # two tensors each
    _, tensors = publisher(opened)
    early = [reader(opened, name)[0] for name in ("first", "second")]
    assert [handle.replicate() for handle in early] == [1, 1]
    newcomer, got = reader(opened, "newcomer")
    newcomer.replicate()
    ((_, made),) = inside(newcomer).reading._prepared.values()
    assert [batch.supply for batch in made] == [0, 1, 0, 1]
    assert [each.size_bytes for batch in made for each in batch.transfers] == [8000] * 4
    assert same(got, tensors)


def test_a_version_of_less_than_a_batch_for_each_comes_from_one_source(opened):
    _, tensors = publisher(opened)
    early = [reader(opened, name)[0] for name in ("first", "second")]
    assert [handle.replicate() for handle in early] == [1, 1]
    newcomer, got = reader(opened, "newcomer")
    newcomer.replicate()
    assert newcomer.last_read.source == "trainer"
    assert same(got, tensors)


def test_a_rank_that_lost_its_seat_before_it_heard_of_the_end_reports_what_it_read(
    opened, monkeypatch, pool
):
    _, tensors = publisher(opened)
    ranks = list(pool.map(lambda r: reader(opened, "r", rank=r, world_size=2), range(2)))
    lost, await_outcome = [], calls.await_outcome

    def losing(view, seat, call, **told):
        step = await_outcome(view, seat, call, **told)
        if call.kind == "replicate" and isinstance(step, Done) and not lost:
            lost.append(seat.rank)
            raise SeatLost(seat.replica, "its lease ended")
        return step

    monkeypatch.setattr(calls, "await_outcome", losing)
    reads = [pool.submit(handle.replicate) for handle, _ in ranks]
    assert [read.result(20) for read in reads] == [1, 1]
    assert lost, "nobody had to wait for the end"
    for handle, got in ranks:
        assert handle.last_read.bytes_read == handle.last_read.bytes_total == 32000
        assert same(got, tensors)


def cut(opened, name, dim, rank, world_size, fill=-1.0):
    """A handle with this rank's part of eight matrices that are cut along `dim`."""
    handle = opened(name, rank=rank, world_size=world_size)
    sizes = [4, 6]
    sizes[dim] //= world_size
    offsets = tuple(rank * sizes[dim] if axis == dim else 0 for axis in range(2))
    mine = {f"m{i}": torch.full(sizes, fill) for i in range(8)}
    chunks = {fqn: (LocalChunk(offsets, tensor),) for fqn, tensor in mine.items()}
    tensors = [LocalTensor(fqn, torch.float32, (4, 6), c, spread=True) for fqn, c in chunks.items()]
    inside(handle).tensors.show(LocalState(tensors, {}, {}))
    return handle, mine


def test_a_replica_that_is_filling_serves_those_that_are_cut_otherwise(opened, monkeypatch, pool):
    trainer, whole = cut(opened, "trainer", 0, 0, 1)
    for number, tensor in enumerate(whole.values()):
        tensor.copy_(100 * number + torch.arange(24).view(4, 6))
    trainer.publish(1)
    columns = list(pool.map(lambda rank: cut(opened, "columns", 1, rank, 2), range(2)))
    rows = list(pool.map(lambda rank: cut(opened, "rows", 0, rank, 2), range(2)))
    one, got = cut(opened, "one", 0, 0, 1)
    stops = [Stop(monkeypatch, handle, 5) for handle, _ in columns]
    batches_of(monkeypatch, 1)  # one for each tensor

    def begin(*handles):
        return [pool.submit(handle.replicate) for handle in handles]

    def await_five(*handles):
        mailboxes = [inside(handle).mailbox for handle in handles]
        until(lambda: all(mailbox.word.position == 5 for mailbox in mailboxes))

    calls = begin(*(handle for handle, _ in columns))
    assert all(stop.reached.wait(10) for stop in stops)
    calls += begin(one)
    await_five(one)
    calls += begin(*(handle for handle, _ in rows))
    await_five(*(handle for handle, _ in rows))
    assert same(
        {f"m{i}": got[f"m{i}"] for i in range(5)}, {f"m{i}": whole[f"m{i}"] for i in range(5)}
    )
    assert (got["m5"] == -1).all()
    for stop in stops:
        stop.go_on.set()
    assert [call.result(15) for call in calls] == [1] * 5
    assert same(got, whole)
    for dim, parts in ((1, columns), (0, rows)):
        halves = [tensors for _, tensors in parts]
        assert all(
            torch.equal(torch.cat([h[fqn] for h in halves], dim), whole[fqn]) for fqn in whole
        )
    assert one.last_read.source == "columns"
    assert {handle.last_read.source for handle, _ in rows} == {"one"}


def in_blocks(monkeypatch, size_bytes):
    for module in (manifest, batches):
        monkeypatch.setattr(module, "BLOCK_BYTES", size_bytes)
    batches_of(monkeypatch, size_bytes)


def matrix(opened, name, rank=0, world_size=1, *, fill=-1.0, costs=None):
    """A handle with all of the matrix "m", or with this rank's columns of it."""
    handle = opened(name, rank=rank, world_size=world_size, costs=costs)
    columns = 1000 // world_size
    mine = torch.full((8, columns), fill)
    chunk = LocalChunk((0, rank * columns), mine)
    inside(handle).tensors.show(
        LocalState([LocalTensor("m", mine.dtype, (8, 1000), (chunk,), spread=False)], {}, {})
    )
    return handle, mine


def test_a_part_of_a_large_tensor_is_passed_on(opened, monkeypatch, pool):
    in_blocks(monkeypatch, 4000)  # a row
    trainer, weights = matrix(opened, "trainer", fill=1.0)
    weights += torch.arange(8)[:, None]
    trainer.publish(1)
    first, _ = matrix(opened, "first")
    second, got = matrix(opened, "second")
    stop = Stop(monkeypatch, first, 5)
    filling_first = pool.submit(first.replicate)
    assert stop.reached.wait(10)
    chained = pool.submit(second.replicate)
    until(lambda: inside(second).mailbox.word.position == 5)
    assert torch.equal(got[:5], weights[:5])
    assert (got[5:] == -1).all()
    stop.go_on.set()
    assert filling_first.result(15) == chained.result(15) == 1
    assert torch.equal(got, weights)
    assert second.last_read.source == "first"


def test_a_retained_version_is_lost_with_its_last_holder_and_the_next_publish_heals(opened):
    trainer, _ = publisher(opened, retain=("latest",))
    keeper, _ = reader(opened, "keeper", retain=("latest",))
    trainer.close(linger_s=0)
    with pytest.raises(VersionNotFound):
        keeper.replicate(1)
    _, tensors = publisher(opened, 3, 2, name="again")
    assert keeper.replicate() == 2
    assert same(keeper_tensors(keeper), tensors)


def keeper_tensors(handle):
    layout, memory = handle.checkpoints.registered.layout, handle.checkpoints.registered.memory
    return {layout.tensors[c.tensor].fqn: t for c, t in zip(layout.chunks, memory, strict=True)}


@only_memory
def test_a_replica_whose_lease_ended_offers_again_what_it_holds(opened, endpoint):
    trainer, tensors = publisher(opened)
    other, got = reader(opened, "other")
    kv = memory.named(endpoint.removeprefix("memory://"))
    before = inside(trainer).group.seat.inst
    kv.revoke(inside(trainer).group.session.lease_id, timeout_s=1)
    until(lambda: inside(trainer).group.seat.inst != before)
    assert trainer.version == 1
    assert other.list() == {1: {"trainer"}}
    assert other.replicate() == 1
    assert same(got, tensors)
    trainer.unpublish()
    trainer.publish(2)
    assert other.update() is True


@only_memory
def test_a_store_that_is_wiped_is_filled_again_by_those_who_hold_something(opened, endpoint):
    trainer, tensors = publisher(opened, version=7, retain=("latest",))
    rollout, _ = reader(opened, "rollout")
    rollout.replicate()
    idle, got = reader(opened, "idle")
    trainer.unpublish()
    wipe(endpoint)
    until(lambda: idle.list() == {7: {"rollout"}})
    assert idle.replicate() == 7
    assert same(got, weights(1))
    for tensor in tensors.values():
        tensor.fill_(2)
    trainer.publish(8)
    assert rollout.update() is True
    assert idle.update() is True


def wipe(endpoint):
    space = memory._spaces[endpoint.removeprefix("memory://")]
    with space.changed:
        space._entries.clear()
        space._keys.clear()
        space._leases.clear()
        space._changes.clear()
        space.rev = 1
        space.changed.notify_all()


@only_memory
def test_a_copy_in_host_memory_is_offered_again_after_the_store_was_wiped(opened, endpoint):
    trainer, _ = publisher(opened, retain=("latest",))
    trainer.unpublish()
    rollout, got = reader(opened, "rollout")
    wipe(endpoint)
    until(lambda: 1 in rollout.list())
    assert rollout.replicate() == 1
    assert same(got, weights(1))


# Digests


@pytest.mark.parametrize("depth", ["sampled", "full"])
def test_what_was_read_is_verified_whatever_the_sharding(opened, depth):
    publisher(opened, digests=depth)
    rollout, got = reader(opened, "rollout", digests=depth)
    assert rollout.replicate() == 1
    assert same(got, weights(1))
    assert "digest" in rollout.last_read.stages_s
    after, got = reader(opened, "after", digests="full")
    rollout.list()
    assert after.replicate() == 1
    assert inside(after).digests.totals == inside(rollout).digests.totals


def corrupt(tensors):
    tensors["w3"].view(torch.int32)[7] ^= 1


def test_a_flipped_bit_is_found_and_names_the_tensor(opened):
    _, tensors = publisher(opened, digests="full")
    corrupt(tensors)
    rollout, _ = reader(opened, "rollout", digests="full")
    with pytest.raises(CorruptWeights, match="'w3'"):
        rollout.replicate()
    assert rollout.version is None
    tally = inside(rollout).observed.tally
    assert (tally.corrupt, tally.ended["failures"]) == (2, {"CorruptWeights": 1})
    careless, _ = reader(opened, "careless")
    assert careless.replicate() == 1


def test_corrupt_weights_are_healed_from_another_source(opened, caplog):
    trainer, tensors = publisher(opened, digests="full")
    good, _ = reader(opened, "good", digests="full")
    good.replicate()
    expected = {fqn: tensor.clone() for fqn, tensor in tensors.items()}
    corrupt(tensors)
    for number in range(3):
        rollout, got = reader(opened, f"rollout{number}", digests="full")
        assert rollout.replicate() == 1
        assert same(got, expected)
    healed = caplog.text.count("reading it again")
    assert healed, "nobody has read from the corrupt source"
    found = [tally for whose, tally in tallies.all().items() if whose.model == trainer.model]
    assert sum(tally.corrupt for tally in found) == healed
    assert trainer.version == 1


def test_what_cannot_be_told_to_others_is_read_again_all_the_same(opened, monkeypatch, caplog):
    _, tensors = publisher(opened, digests="full")
    corrupt(tensors)
    rollout, _ = reader(opened, "rollout", digests="full")

    def away(*_):
        raise StoreUnavailable("etcd://test", 1.0, "it is away")

    monkeypatch.setattr(replication, "suspect", away)
    with pytest.raises(CorruptWeights):
        rollout.replicate()
    assert "may be read from again" in caplog.text


@pytest.mark.parametrize("depths", [("full", "off"), ("full", "sampled")])
def test_digests_that_not_all_ranks_of_the_source_have_verify_nothing(opened, pool, caplog, depths):
    opens = [
        pool.submit(opened, "trainer", rank=rank, world_size=2, digests=depth)
        for rank, depth in enumerate(depths)
    ]
    ranks = [each.result(10) for each in opens]
    tensors = weights(1)
    names = sorted(tensors)
    for handle, part in zip(ranks, (names[:3], names[3:]), strict=True):
        handle.register({fqn: tensors[fqn] for fqn in part})
    for each in [pool.submit(handle.publish, 1) for handle in ranks]:
        each.result(10)
    rollout, got = reader(opened, "rollout", digests="full")
    assert rollout.replicate() == 1
    assert same(got, tensors)
    assert "have digests of one depth" in caplog.text


def test_a_group_verifies_what_its_ranks_read_together(opened, pool):
    _, tensors = publisher(opened, digests="full")
    ranks = [
        each.result(10)
        for each in [
            pool.submit(opened, "tp", rank=r, world_size=2, digests="full") for r in (0, 1)
        ]
    ]
    names = sorted(tensors)
    parts = [{fqn: torch.zeros(1000) for fqn in part} for part in (names[:3], names[3:])]
    for handle, part in zip(ranks, parts, strict=True):
        handle.register(part)
    assert [each.result(10) for each in [pool.submit(h.replicate) for h in ranks]] == [1, 1]
    for handle in ranks:
        pool.submit(handle.unpublish)
    corrupt(tensors)
    until(lambda: ranks[0].version is None and ranks[1].version is None)
    errors = [each.exception(15) for each in [pool.submit(h.replicate) for h in ranks]]
    assert [type(error) for error in errors] == [CorruptWeights] * 2
    assert "'w3'" in str(errors[0])


# feature contract {
def test_writing_to_published_tensors_is_found_by_who_checks_the_contract(opened):
    trainer, tensors = publisher(opened, check_contract=True)
    tensors["w5"][3] += 1
    with pytest.raises(ContractBroken, match="'w5'"):
        trainer.unpublish()
    assert trainer.version is None
    trainer.publish(2)
    trainer.unpublish()


def test_a_guarded_optimizer_unpublishes_before_it_steps(opened):
    module = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    trainer = opened("trainer", check_contract=True)
    hook = trainer.guard(optimizer)
    trainer.register(dict(module.named_parameters()))
    for version in range(3):
        trainer.publish(version)
        module(torch.ones(4)).sum().backward()
        before = module.weight.detach().clone()
        optimizer.step()
        assert trainer.version is None
        assert not torch.equal(module.weight, before)
    trainer.publish(7)
    hook.remove()
    module(torch.ones(4)).sum().backward()
    optimizer.step()
    with pytest.raises(ContractBroken):
        trainer.unpublish()


# } contract
@pytest.mark.parametrize("has_other", [False, True])
@pytest.mark.parametrize("is_full", [False, True])
def test_a_source_that_does_not_answer_is_left_only_for_another(monkeypatch, has_other, is_full):
    now_s, asked = [100.0], []
    monkeypatch.setattr(stall.time, "monotonic", lambda: now_s[0])
    deadline = Deadline("read", 60, started_s=100.0)
    others = (lambda _: has_other) if is_full else None  # who fills answers, and is waited for
    patience = stall.SourceWait("t", deadline, lambda: not asked.append(now_s[0]), others)
    with pytest.raises(SourceLost if is_full and has_other else DeadlineExceeded) as error:
        while True:
            now_s[0] += stall.BLINK_S / 2
            patience.look("'t' does not answer")
    assert len(asked) > 0.9 * (now_s[0] - 100) / stall.STALL_S - 1
    if error.type is SourceLost:
        assert stall.SILENCE_S < now_s[0] - 100 < stall.SILENCE_S + 2 * stall.STALL_S


@pytest.mark.parametrize("limit_s", [1.5, 4.0, 7.4])
def test_a_mute_source_is_left_when_its_time_is_over_and_no_second_later(monkeypatch, limit_s):
    now_s = [100.0]
    monkeypatch.setattr(stall.time, "monotonic", lambda: now_s[0])
    deadline = Deadline("read", 60, started_s=100.0)
    patience = stall.SourceWait("t", deadline, lambda: True, lambda _: True, limit_s)
    with pytest.raises(SourceLost, match=f"for {limit_s} s"):
        while True:
            now_s[0] += stall.BLINK_S / 4
            patience.look("'t' does not answer")
    assert limit_s <= now_s[0] - 100 < limit_s + stall.BLINK_S


def test_a_source_that_is_gone_is_lost_after_a_second_or_so(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(stall.time, "monotonic", lambda: now_s[0])
    patience = stall.SourceWait("t", Deadline("read", 60, started_s=100.0), lambda: False)
    with pytest.raises(SourceLost, match="it is gone"):
        while True:
            now_s[0] += stall.BLINK_S / 2
            patience.look("'t' does not answer")
    assert now_s[0] - 100 < 2 * stall.STALL_S


def test_that_this_process_stood_still_is_not_held_against_its_source(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(stall.time, "monotonic", lambda: now_s[0])
    deadline = Deadline("read", 600, started_s=100.0)
    patience = stall.SourceWait("t", deadline, lambda: False, lambda _: True)
    for _ in range(5):
        now_s[0] += 60  # stopped, or the host slept
        patience.look("'t' does not answer")
