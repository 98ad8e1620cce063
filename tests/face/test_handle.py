"""ShardHandle, one process: over memory, and over a real etcd with NIXL."""

import contextlib
import copy
import gc
import multiprocessing
import os
import pickle
import re
import signal
import socket
import threading
import time
import uuid
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import kit
import numpy as np
import pytest
import torch
from kit import both_stores, inside, publisher, until

import torch_ros
from torch_ros import errors
from torch_ros.costs import NIXL_COSTS
from torch_ros.deadline import Deadline
from torch_ros.face import opening
from torch_ros.memory import store as memory
from torch_ros.memory.transport import MemoryTransfer
from torch_ros.protocol.group import GroupTask
from torch_ros.protocol.records import Asked, Holding
from torch_ros.shard import core
from torch_ros.store.txn import Put
from torch_ros.transfer import batches

DTYPES = [
    value
    for value in {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    if not str(value).startswith(("torch.q", "torch.bits", "torch.int1", "torch.uint1"))
    and value.itemsize >= 1
]


# The same code whatever the endpoint.
endpoint = pytest.fixture(kit.store)  # in memory, where nothing else is said


def raw(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.ndim else tensor


def every_kind():
    tensors = {
        "plain": torch.randn(64, 33),
        "uneven": torch.randn(1031, 7),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 5),
        "transposed": torch.randn(40, 30).t(),
        "column": torch.randn(128, 64)[:, 5:9],
        "bool": torch.randn(100) > 0,
        "parameter": torch.nn.Parameter(torch.randn(5)),
        "long rows": torch.randn(8, 100_000)[:, :50_000],
    }
    for dtype in DTYPES:
        random = torch.randint(0, 2, (48 * dtype.itemsize,), dtype=torch.uint8)
        tensors[str(dtype)] = random.view(dtype)
    tensors["tied"] = tensors["plain"]
    return tensors


def targets_for(tensors):
    return {
        fqn: torch.zeros(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        .view(tensor.dtype)
        .reshape(tensor.shape)
        for fqn, tensor in tensors.items()
    }


@both_stores
def test_every_kind_of_tensor_arrives_bit_for_bit(opened):
    tensors = every_kind()
    publisher(opened, tensors)
    got = targets_for(tensors)
    rollout = opened("rollout", got)
    assert rollout.replicate() == 1
    for fqn, tensor in tensors.items():
        assert got[fqn].dtype == tensor.dtype, fqn
        assert torch.equal(raw(got[fqn]), raw(tensor)), fqn
    report = rollout.last_read
    assert (report.version, report.source) == (1, "trainer")
    assert report.bytes_total == sum(t.numel() * t.element_size() for t in tensors.values())
    assert set(report.stages_s) == {"decide", "manifests", "plan", "read", "commit"}


@both_stores
def test_non_contiguous_targets_and_sources_meet(opened):
    source = torch.randn(50, 60)
    publisher(opened, {"w": source.t()})
    buffer = torch.zeros(120, 50)
    rollout = opened("rollout", {"w": buffer[::2]})
    rollout.replicate()
    assert torch.equal(buffer[::2], source.t())
    assert torch.count_nonzero(buffer[1::2]) == 0


def test_published_in_place_and_read_in_place(opened):
    source, target = torch.randn(1000), torch.zeros(1000)
    trainer = publisher(opened, {"w": source})
    assert inside(trainer).mailbox.manifest.addresses == (source.data_ptr(),)
    rollout = opened("rollout", {"w": target})
    where, before = target.data_ptr(), target._version
    rollout.replicate()
    assert target.data_ptr() == where
    assert target._version > before, "autograd must notice"
    assert torch.equal(source, target)


def test_inference_tensors_can_be_filled(opened):
    publisher(opened, {"w": torch.ones(10)})
    with torch.inference_mode():
        target = torch.zeros(10)
        rollout = opened("rollout", {"w": target})
        rollout.replicate()
        assert torch.equal(target, torch.ones(10))


@both_stores
def test_update_follows_and_says_whether_it_did(opened):
    source, target = {"w": torch.zeros(100)}, {"w": torch.full((100,), -1.0)}
    trainer, rollout = publisher(opened, source, 0), opened("rollout", target)
    assert rollout.update("latest") is True  # holding nothing, it replicates
    assert rollout.update("latest") is False
    for version in (1, 2, 5):
        trainer.unpublish()
        source["w"].fill_(version)
        trainer.publish(version)
        assert rollout.update("latest") is True
        assert (rollout.version, target["w"][7].item()) == (version, version)
        assert rollout.update(version) is False
    assert rollout.list() == {5: {"trainer", "rollout"}}


@both_stores
def test_update_never_goes_back(opened):
    old = publisher(opened, {"w": torch.zeros(3)}, 3, name="old")
    new = publisher(opened, {"w": torch.ones(3)}, 4, name="new")
    rollout = opened("rollout", {"w": torch.full((3,), -1.0)})
    rollout.replicate()
    new.close()
    assert rollout.update("latest") is False
    assert rollout.version == 4
    assert rollout.update("latest-1") is False  # 3 is older
    assert rollout.update(3) is True  # but may be asked for
    assert old.version == 3


def test_a_second_of_anything_is_refused_and_unpublish_may_be_repeated(opened):
    handle = opened("r")
    handle.unpublish()
    with pytest.raises(errors.UsageError, match="no tensors"):
        handle.publish(1)
    with pytest.raises(errors.UsageError, match="no tensors"):
        handle.replicate()
    handle.register({"w": torch.ones(3)})
    with pytest.raises(errors.UsageError, match="unregister"):
        handle.register({"w": torch.ones(3)})
    handle.publish(1)
    for call in (lambda: handle.publish(2), handle.replicate, handle.unregister):
        with pytest.raises(errors.UsageError, match="holds version 1"):
            call()
    handle.unpublish()
    handle.unpublish()
    handle.unregister()
    handle.unregister()
    assert (handle.version, handle.list()) == (None, {})


@pytest.mark.parametrize("bad", ["7", "newest", "latest-", -1, 1.5, True, None, 2**63])
def test_bad_versions_are_named(opened, bad):
    handle = opened("r", {"w": torch.ones(3)})
    with pytest.raises(errors.UsageError, match="version"):
        handle.replicate(bad, timeout_s=1)
    if not isinstance(bad, str):
        with pytest.raises(errors.UsageError, match="version"):
            handle.publish(bad)
    handle.publish(1)  # and the handle goes on


@both_stores
def test_what_does_not_fit_is_named_and_leaves_the_handle_usable(opened):
    publisher(opened, {"a": torch.ones(3), "b": torch.ones(2, 2)})
    rollout = opened("rollout")
    for tensors, found in (
        ({"a": torch.zeros(3)}, "found 'b' that no rank of this replica registered"),
        ({}, "found 'a', 'b' that no rank"),
        ({"model.a": torch.zeros(3)}, "version has 'a': drop the prefix 'model.'"),
        ({"a": torch.zeros(3), "b": torch.zeros(2, 3)}, r"float32 \[2, 3\]"),
        ({"a": torch.zeros(3).double(), "b": torch.zeros(2, 2)}, "does not cast"),
        ({"a": torch.zeros(3), "b": torch.zeros(2, 2), "c": torch.zeros(1)}, "'c'"),
    ):
        rollout.register(tensors)
        with pytest.raises(errors.ManifestMismatch, match=found):
            rollout.replicate()
        assert rollout.version is None
        rollout.unregister()
    rollout.register({"a": torch.zeros(3), "b": torch.zeros(2, 2)})
    assert rollout.replicate() == 1


def test_a_deadline_names_what_it_waited_for(opened):
    rollout = opened("rollout", {"w": torch.ones(3)})
    with pytest.raises(errors.DeadlineExceeded, match="none is available yet") as caught:
        rollout.replicate(timeout_s=0.2)
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(errors.DeadlineExceeded, match="available: nothing"):
        rollout.wait(lambda versions: 3 in versions, timeout_s=0.2)


@both_stores
def test_wait_wakes_when_its_predicate_holds(opened):
    trainer, rollout = opened("trainer", {"w": torch.ones(3)}), opened("rollout")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rollout.wait, lambda versions: 3 in versions)
        trainer.publish(3)
        assert waiting.result(10) == {3: {"trainer"}}


def test_an_absolute_version_that_is_being_filled_is_waited_for(opened):
    trainer = publisher(opened, {"w": torch.ones(3)}, 7)
    trainer.unpublish()
    rollout = opened("rollout", {"w": torch.zeros(3)})
    with pytest.raises(errors.VersionNotFound, match="no replica holds it now"):
        rollout.replicate(7)


def test_a_publication_that_failed_leaves_no_number_behind(opened):
    publisher(opened, {"w": torch.ones(3)}, 1, name="a")
    other = opened("b", {"w": torch.ones(4)})
    with pytest.raises(errors.ManifestMismatch):
        other.publish(1)
    lonely = opened("lonely", {"w": torch.ones(3)}, rank=0, world_size=1)
    group = inside(lonely).group

    def fails(call):
        call.decide_to_publish(9)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        group.make(GroupTask("publish", Asked("publish", 9), _deadline(), fails))
    lonely.publish(2)
    assert lonely.list() == {1: {"a"}, 2: {"lonely"}}


def _deadline():
    return Deadline("test", 5)


@both_stores
def test_a_closed_handle_says_so_and_closes_again(opened):
    handle = opened("r", {"w": torch.ones(3)})
    handle.publish(1)
    other = opened("other")
    handle.close()
    handle.close()
    assert other.list() == {}
    for call in (handle.unpublish, handle.list, lambda: handle.publish(2), handle.replicate):
        with pytest.raises(errors.ClosedError):
            call()


def test_a_handle_that_is_dropped_goes_on_serving(opened, endpoint):
    model = "m-" + uuid.uuid4().hex[:8]
    handle = torch_ros.open(model, endpoint=endpoint, replica="dropped")
    handle.register({"w": torch.full((1000,), 5.0)})
    handle.publish(1)
    there = weakref.ref(handle)
    del handle
    gc.collect()
    assert there() is None, "its shard needs no more than the tensors"
    with torch_ros.open(model, endpoint=endpoint, replica="rollout") as rollout:
        target = torch.zeros(1000)
        rollout.register({"w": target})
        rollout.replicate()
        assert torch.equal(target, torch.full((1000,), 5.0))
    (left,) = (shard for shard in core._open_shards if shard.model == model)
    left.close(linger_s=0.0)


@both_stores
def test_several_handles_of_one_process_are_several_replicas(opened):
    publisher(opened, {"w": torch.ones(3)})
    for name in "abc":
        rollout = opened(name, {"w": torch.zeros(3)})
        rollout.replicate()
    assert rollout.list() == {1: {"trainer", "a", "b", "c"}}


def test_bad_arguments_of_open_are_named(endpoint):
    for options, found in (
        ({"retain": ("newest",)}, "'newest'"),
        ({"retain": ("latest@there",)}, "'latest@there'"),
        ({"retain": ("@here",)}, "'@here'"),
        ({"retain": (-1,)}, "-1"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"rank": 0, "world_size": 2}, "no process group"),
        ({"replica": ""}, "replica ''"),
        ({"ttl_s": 1}, "ttl_s"),
        ({"transport": "carrier pigeon"}, "carrier pigeon"),
        ({"digests": "some"}, "digests='some'"),
        ({"endpoint": "http://x"}, "http://x"),
        ({"endpoint": 5}, "endpoint 5"),
        ({"replica": 3}, "replica 3"),
        ({"replica": "\ud800"}, "UTF-8"),
        ({"run": ""}, "run ''"),
        ({"rank": "0"}, "rank='0'"),
        ({"world_size": 0}, "world_size=0"),
        ({"datacenter": 3}, "datacenter 3"),
        ({"spot": "no"}, "spot='no'"),
        ({"relay": None}, "relay=None"),
        ({"timeout_s": None}, "timeout_s=None"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"ttl_s": "10"}, "ttl_s='10'"),
        ({"ttl_s": 10**12}, "2 to 86,400"),
        ({"drain_s": -1}, "drain_s=-1"),
        ({"staging_bytes": 1.5}, "staging_bytes=1.5"),
        ({"staging_bytes": -1}, "staging_bytes=-1"),
        ({"costs": 3}, "torch_ros.costs.Costs"),
    ):
        with pytest.raises(errors.UsageError, match=found):
            torch_ros.open("m", **{"endpoint": endpoint, "timeout_s": 1, **options})
    for model in ("", None, 3, "\ud800"):
        with pytest.raises(errors.UsageError, match="model"):
            torch_ros.open(model, endpoint=endpoint)


def test_bad_arguments_of_calls_are_named(opened):
    handle = opened("r")
    for tensors, found in (
        (None, "a NoneType, expected a mapping"),
        ([("w", torch.ones(1))], "a list, expected a mapping"),
        (lambda: torch.nn.Linear, "a type, expected a mapping"),
        ({"model": {"w": torch.ones(1)}}, "flatten it"),
    ):
        with pytest.raises(errors.UsageError, match=found):
            handle.register(tensors)
    handle.register({"w": torch.ones(3)})
    for call, found in (
        (lambda: handle.publish(1, timeout_s="3"), "timeout_s='3'"),
        (lambda: handle.list(timeout_s=-1), "timeout_s=-1"),
        (lambda: handle.guard(None), "Optimizer"),  # feature contract
        (lambda: handle.publish_copy(1, {}, transform="bf16"), "transform='bf16'"),
        (lambda: handle.publish_copy(1, {}, transform=torch.bfloat16), "transform=torch.bf"),
        # feature transforms {
        (lambda: handle.publish_copy(1, {}, transform=[torch_ros.Cast]), "transform=.*Cast"),
        # } transforms
        (lambda: handle.publish_copy(1, {}, to="cuda"), "to='cuda'"),
        (lambda: handle.publish_copy(1, {}, copy_bytes=-1), "copy_bytes=-1"),
    ):
        with pytest.raises(errors.UsageError, match=found):
            call()


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_handle_cannot_be_copied_and_says_where_to_open_one(opened, copied):
    with pytest.raises(errors.UsageError, match="own seat; call torch_ros.open in the process"):
        copied(opened("r"))


def test_who_is_replaced_is_named_with_its_host(opened, caplog):
    opened("r")
    opened("r")
    here = f"{socket.gethostname()}:{os.getpid()}"
    there = f"({here}|a process that has ended since)"  # it leaves as soon as it notices
    assert re.search(f"'r' was already there, in {there}, and is replaced by {here}", caplog.text)


# feature contract {
def test_the_environment_turns_the_check_of_the_contract_on(opened, monkeypatch):
    monkeypatch.setenv("TORCH_ROS_CHECK_CONTRACT", "1")
    tensors = {"w": torch.ones(3)}
    handle = publisher(opened, tensors)
    tensors["w"].zero_()
    with pytest.raises(errors.ContractBroken, match="'w'"):
        handle.unpublish()


# } contract
def test_a_handle_says_where_it_stands(opened):
    handle = opened("r")
    assert (handle.state, "seated" in repr(handle)) == ("seated", False)
    opened("r")  # takes the name
    with pytest.raises(errors.SeatLost):
        while True:
            with suppress(errors.UsageError):  # it has nothing registered, and has not noticed yet
                handle.update(timeout_s=0)
    assert (handle.state, repr(handle).endswith(", gone)")) == ("gone", True)
    handle.close()
    assert (handle.state, repr(handle).endswith(", closed)")) == ("closed", True)


def test_tab_completion_finds_the_face():
    assert {"open", "ShardHandle", "Chunked", "ReadReport", "Costs", "errors"} <= set(
        dir(torch_ros)
    )


def test_no_etcd_is_said_in_time():
    started = time.monotonic()
    with pytest.raises(errors.StoreUnavailable, match="127.0.0.1:1"):
        torch_ros.open("m", endpoint="etcd://127.0.0.1:1", timeout_s=1)
    assert time.monotonic() - started < 15


@both_stores
def test_a_forked_child_is_inert(opened):
    handle = publisher(opened, {"w": torch.ones(3)})
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def child():
        try:
            handle.list()
        except errors.ClosedError as error:
            answers.put(str(error))
        handle.close()
        os._exit(0)

    process = context.Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert "is its fork" in answers.get()
    assert handle.list() == {1: {"trainer"}}
    rollout = opened("rollout", {"w": torch.zeros(3)})
    assert rollout.replicate() == 1


@both_stores
def test_data_loader_workers_do_not_disturb(opened):
    handle = publisher(opened, {"w": torch.ones(3)})
    loader = torch.utils.data.DataLoader(range(8), num_workers=2, multiprocessing_context="fork")
    assert sum(int(batch) for batch in loader) == 28
    assert handle.list() == {1: {"trainer"}}
    handle.unpublish()


class FlakyKV:
    """A connection that stops answering: after a commit applied, and until it is told."""

    def __init__(self, kv, is_fatal):
        self._kv, self._is_fatal, self.is_away = kv, is_fatal, False
        self.endpoint = kv.endpoint

    def commit(self, txn, *, timeout_s):
        if self.is_away:
            raise errors.StoreUnavailable(self.endpoint, timeout_s, "away")
        reply = self._kv.commit(txn, timeout_s=timeout_s)
        if reply.applied and self._is_fatal(txn):
            self.is_away, self._is_fatal = True, lambda txn: False
            raise errors.StoreUnavailable(self.endpoint, timeout_s, "away")
        return reply

    def read(self, request, *, timeout_s):
        if self.is_away:
            raise errors.StoreUnavailable(self.endpoint, timeout_s, "away")
        return self._kv.read(request, timeout_s=timeout_s)

    def __getattr__(self, name):
        return getattr(self._kv, name)


def test_a_version_that_may_be_offered_is_unpublished_before_it_is_written(monkeypatch):
    """The commit that completes a publish applies, and etcd is away until the deadline."""

    def completes(txn):
        puts = [op for op in txn.ops if isinstance(op, Put) and "/holdings/" in op.key]
        return any(Holding.decode(put.value, put.key).state == "full" for put in puts)

    space = uuid.uuid4().hex
    flaky = []
    connect = lambda endpoint, timeout_s: (
        flaky.append(FlakyKV(memory.named(space), completes)) or flaky[-1]
    )
    monkeypatch.setattr(opening, "connect_store", connect)
    monkeypatch.setattr("torch_ros.protocol.call.CLEAN_UP_S", 0.5)
    trainer = torch_ros.open("m", endpoint=f"memory://{space}", replica="t", ttl_s=60)
    trainer.register({"w": torch.ones(3)})
    with pytest.raises(errors.StoreUnavailable):
        trainer.publish(1, timeout_s=1)
    flaky[0].is_away = False
    assert trainer.list() == {1: {"t"}}, "the fault did not happen"
    assert trainer.version == 1
    trainer.unpublish()
    assert trainer.list() == {}
    trainer.publish(2)
    trainer.close()


def test_ctrl_c_while_waiting_leaves_the_handle_usable(opened, ctrl_c):
    rollout = opened("rollout", {"w": torch.zeros(3)})
    with pytest.raises(KeyboardInterrupt):  # it may come at once
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        rollout.replicate()
    publisher(opened, {"w": torch.ones(3)})
    assert rollout.replicate() == 1


@pytest.mark.parametrize("leaver", ["the first", "the second"])
def test_a_peer_that_leaves_in_order_is_no_accident_to_unpublish(endpoint, leaver):
    model = "m-" + uuid.uuid4().hex[:8]
    with ThreadPoolExecutor(2) as pool:
        opened = [
            pool.submit(
                torch_ros.open, model, endpoint=endpoint, replica="t", rank=rank, world_size=2
            )
            for rank in (0, 1)
        ]
        first, second = (each.result(10) for each in opened)
        for handle in (first, second):
            handle.register({"w": torch.ones(3)})
        for each in [pool.submit(handle.publish, 1) for handle in (first, second)]:
            each.result(10)
    order = [first, second] if leaver == "the first" else [second, first]
    order[0].close()
    left = order[1]
    left.unpublish()
    left.unpublish()
    assert left.list() == {}
    with pytest.raises(errors.SeatLost, match="closed its handle"):
        left.publish(2)
    left.close(linger_s=0.0)


@pytest.mark.parametrize(("alarm_s", "level"), [(0.0, "WARNING"), (60.0, "INFO")])
def test_a_long_wait_says_what_it_waits_for(opened, endpoint, monkeypatch, caplog, alarm_s, level):
    caplog.set_level("INFO")
    monkeypatch.setattr("torch_ros.store.run.PATIENCE_S", 0.1)
    monkeypatch.setattr("torch_ros.store.run.ALARM_S", alarm_s)  # from when on it is a warning
    there = "seen-" + uuid.uuid4().hex[:8]
    rollout = opened("rollout", {"w": torch.zeros(3)})
    with (
        torch_ros.open(there, endpoint=endpoint, replica="other") as other,
        ThreadPoolExecutor(1) as pool,
    ):
        other.register({"w": torch.ones(3)})
        other.publish(6)
        with pytest.raises(
            errors.DeadlineExceeded, match=rf"other models .*{there}' \(version 6\)"
        ):
            rollout.replicate(timeout_s=0.1)
        waiting = pool.submit(rollout.replicate)
        until(lambda: "none is available yet" in caplog.text)
        publisher(opened, {"w": torch.ones(3)})
        assert waiting.result(10) == 1
        with pytest.raises(errors.DeadlineExceeded, match=r"available: \{1: .*\}$"):
            rollout.wait(lambda _: False, timeout_s=0.1)
    (line,) = (r for r in caplog.records if "none is available yet" in r.getMessage())
    assert line.levelname == level
    assert f"with etcd at {endpoint}" in line.getMessage()
    assert f"{there!r} (version 6)" in line.getMessage()


@both_stores
def test_tied_tensors_are_read_once_and_arrive_under_both_names(opened, monkeypatch):
    for name in ("BATCH_BYTES", "STEP_BYTES"):  # so that a batch is not all of it
        monkeypatch.setattr(batches, name, 4096)
    shared, between = torch.randn(1000), torch.randn(3000)
    publisher(opened, {"embed": shared, "between": between, "head": shared})
    tied, apart = opened("tied"), opened("apart")
    target, other = torch.zeros(1000), torch.zeros(3000)
    tied.register({"embed": target, "between": other, "head": target})
    tied.replicate()
    assert torch.equal(target, shared)
    assert torch.equal(other, between)
    assert tied.last_read.bytes_read == shared.nbytes + between.nbytes
    two = {"embed": torch.zeros(1000), "between": torch.zeros(3000), "head": torch.zeros(1000)}
    apart.register(two)
    apart.replicate()
    assert torch.equal(two["embed"], shared)
    assert torch.equal(two["head"], shared)
    assert apart.last_read.bytes_read == 2 * shared.nbytes + between.nbytes


@pytest.mark.parametrize("call", ["close", "unpublish", "unregister"])
def test_a_handle_is_not_closed_nor_called_within_one_of_its_calls(etcd_endpoint, call):
    """A signal handler that does it would leave the call in memory that may be written or freed."""
    with torch_ros.open("m-" + uuid.uuid4().hex[:8], endpoint=etcd_endpoint) as handle:
        before = signal.signal(signal.SIGALRM, lambda *_: getattr(handle, call)())
        try:
            handle.register({"w": torch.zeros(3)})
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(errors.UsageError, match="let the signal handler raise"):
                handle.replicate(7, timeout_s=20)
        finally:
            signal.signal(signal.SIGALRM, before)
        handle.publish(1)
    assert handle.is_closed


@both_stores
def test_close_tells_readers_before_it_frees_the_tensors(opened):
    memory = np.zeros(1 << 20, np.uint8)
    handle = opened("t")
    word, words = inside(handle).mailbox._word, []
    weakref.finalize(memory, lambda: words.append(int(word[0])))
    handle.register({"w": torch.from_numpy(memory)})
    handle.publish(1)
    del memory
    assert word[0]
    assert not words, "who publishes keeps the tensors"
    handle.close()
    assert words == [0]


def test_close_ends_a_read_that_does_not_go_on(opened, monkeypatch):
    publisher(opened, {"w": torch.zeros(3)})
    rollout = opened("rollout", {"w": torch.zeros(3)})
    reads = threading.Event()

    def is_done(_):
        reads.set()
        return False

    monkeypatch.setattr(MemoryTransfer, "is_done", is_done)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(rollout.replicate)
        assert reads.wait(10)
        rollout.close()
        assert isinstance(call.exception(5), errors.ClosedError)


# feature fabrics {
def test_devices_that_cannot_be_had_are_refused(etcd_endpoint):
    options = {"endpoint": etcd_endpoint, "transport": "ucx", "timeout_s": 20}
    with pytest.raises(errors.UsageError, match="no device 'nosuch' with an address; it has .*lo"):
        torch_ros.open("m", wan_devices=["nosuch"], **options)
    with pytest.raises(errors.UsageError, match="expected a list"):
        torch_ros.open("m", wan_devices="lo", **options)


def test_an_open_that_finds_no_device_leaves_no_voucher(etcd_endpoint):
    with pytest.raises(errors.UsageError, match="nosuch"):
        torch_ros.open("m", wan_devices=["nosuch"], endpoint=etcd_endpoint, timeout_s=20)
    files = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    assert not [name for name in files if "torch_ros voucher" in name]


# } fabrics


def test_tcp_alone_can_be_asked_for(etcd_endpoint):
    model = "m-" + uuid.uuid4().hex[:8]
    options = {"endpoint": etcd_endpoint, "transport": "ucx-tcp", "timeout_s": 20}
    source, target = torch.randn(100_000), torch.zeros(100_000)
    with (
        torch_ros.open(model, replica="trainer", **options) as trainer,
        torch_ros.open(model, replica="rollout", **options) as rollout,
    ):
        trainer.register({"w": source})
        trainer.publish(1)
        rollout.register({"w": target})
        rollout.replicate()
    assert torch.equal(source, target)


# feature tcp {
def test_weights_come_over_sockets_of_our_own(etcd_endpoint, monkeypatch):
    model = "m-" + uuid.uuid4().hex[:8]
    options = {"endpoint": etcd_endpoint, "transport": "tcp", "timeout_s": 20}
    monkeypatch.setenv("UCX_TLS", "tcp")  # nothing is copied
    source, target = torch.randn(100_000), torch.zeros(100_000)
    with (
        torch_ros.open(model, replica="trainer", listen="127.0.0.1", **options) as trainer,
        torch_ros.open(model, replica="rollout", **options) as rollout,
    ):
        trainer.register({"w": source})
        rollout.register({"w": target})
        for version in (1, 2, 3):
            trainer.publish(version)
            rollout.update()
            assert torch.equal(source, target)
            assert dict(rollout.last_read.ways) == {"tcp, plain": target.nbytes}
            trainer.unpublish()
            source += 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"listen": "nosuch"}, "no device 'nosuch' with an address; it has .*lo"),
        ({"listen": ":0"}, "expected addresses or devices, then a port"),
        ({"listen": 7000}, "expected a string"),
        ({"listen": "lo", "wan_devices": ["lo"]}, "expected one of the two"),  # feature fabrics
    ],
)
def test_a_place_where_it_cannot_listen_is_an_error(etcd_endpoint, options, reason):
    options = {"endpoint": etcd_endpoint, "transport": "tcp", "timeout_s": 20} | options
    with pytest.raises(errors.UsageError, match=reason):
        torch_ros.open("m", **options)


def test_the_environment_says_where_to_listen(etcd_endpoint, monkeypatch):
    options = {"endpoint": etcd_endpoint, "timeout_s": 20}
    monkeypatch.setenv("TORCH_ROS_LISTEN", "nosuch:7000")
    with pytest.raises(errors.UsageError, match="listen='nosuch:7000'"):
        torch_ros.open("m", transport="tcp", **options)


# } tcp
WEST, EAST, UNNAMED = {"datacenter": "west"}, {"datacenter": "east"}, {}


@pytest.mark.parametrize(
    "ends",
    [
        (WEST, EAST),
        (WEST, UNNAMED),
        (UNNAMED, EAST),
        (WEST | {"wan_devices": ["lo"]}, WEST),  # feature fabrics
    ],
)
def test_processes_read_from_each_other_whether_both_name_their_place_or_one(etcd_endpoint, ends):
    model, content = "m-" + uuid.uuid4().hex[:8], torch.randn(100_000)
    options = {"endpoint": etcd_endpoint, "timeout_s": 20}
    with contextlib.ExitStack() as stack:
        trainer, rollout = (
            stack.enter_context(torch_ros.open(model, **named, **options)) for named in ends
        )
        trainer.register({"w": content})
        trainer.publish(1)
        target = torch.zeros(100_000)
        rollout.register({"w": target})
        rollout.replicate()
    assert torch.equal(content, target)


@pytest.mark.parametrize(
    ("transport", "costs", "amplification"),
    [
        ("auto", None, 1),  # copied, also within one process  # feature shortcuts
        ("ucx", None, 8),
        ("ucx-tcp", None, 1),
        ("ucx-tcp", NIXL_COSTS, 8),
    ],
)
def test_rows_are_read_for_an_eighth_of_them_only_where_each_span_is_dear(
    etcd_endpoint, transport, costs, amplification
):
    model = "m-" + uuid.uuid4().hex[:8]
    options = {"endpoint": etcd_endpoint, "transport": transport, "timeout_s": 20, "costs": costs}
    published = torch.randn(1024, 2048)[:, :256]
    with (
        torch_ros.open(model, replica="trainer", **options) as trainer,
        torch_ros.open(model, replica="rollout", **options) as rollout,
    ):
        trainer.register({"w": published})
        trainer.publish(1)
        target = torch.zeros(1024, 256)
        rollout.register({"w": target})
        rollout.replicate()
        assert torch.equal(published, target)
        found = rollout.last_read.bytes_read / rollout.last_read.bytes_total
    assert found == pytest.approx(amplification, rel=0.01)


def test_ctrl_c_at_the_very_end_of_a_call_does_not_take_its_number_away(opened):
    """It comes between the call's good end and its return."""
    handle = opened("t", {"w": torch.ones(3)})
    made = type(inside(handle).group.ledger).made

    def interrupted(*_):
        type(inside(handle).group.ledger).made = made
        raise KeyboardInterrupt

    for call in (lambda: handle.publish(1), handle.unpublish, lambda: handle.publish(2)):
        type(inside(handle).group.ledger).made = interrupted
        try:
            with pytest.raises(KeyboardInterrupt):
                call()
        finally:
            type(inside(handle).group.ledger).made = made
    assert (handle.version, handle.list()) == (2, {2: {"t"}})
    handle.unpublish()
    handle.publish(3)
    assert handle.list() == {3: {"t"}}
