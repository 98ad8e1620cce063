"""How a job ends: what only one replica has, and who has it afterwards. One process, in memory."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import kit
import pytest
import torch
from features.retention.kept import copies_of
from kit import at_once, inside, until

from torch_ros.errors import ClosedError, UsageError
from torch_ros.features.handover import flow
from torch_ros.memory import store as memory
from torch_ros.shard import core

LONG_S = 60.0  # to linger for; tests end earlier

endpoint = pytest.fixture(kit.memory)


@pytest.fixture
def opened_with():
    return {"linger_s": LONG_S, "ttl_s": 10}


def group(opened, size, value=0.0, **options):
    open_ = lambda rank: opened("trainer", value, rank=rank, world_size=size, **options)
    return at_once(*(partial(open_, rank) for rank in range(size)))


def tensor_of(handle):
    return handle.checkpoints.registered.memory[0]


def lingering(handle, version):
    """Once it does."""
    return handle.wait(lambda there: any("+linger" in name for name in there.get(version, ())))


class Closing:
    """A handle's close, in a thread."""

    def __init__(self, handle, **options):
        self.error = None
        self._thread = threading.Thread(target=self._close, args=(handle, options))
        self._thread.start()

    def _close(self, handle, options):
        try:
            handle.close(**options)
        except BaseException as error:
            self.error = error

    @property
    def is_over(self):
        return not self._thread.is_alive()

    def join(self, timeout_s=20):
        self._thread.join(timeout_s)
        assert self.is_over
        assert self.error is None


def two_versions(trainer, rollout):
    """The trainer has 2, the rollout 1."""
    trainer.publish(1)
    rollout.update("latest")
    trainer.unpublish()
    tensor_of(trainer).fill_(2.0)
    trainer.publish(2)


@pytest.mark.parametrize("is_copy", [False, True])
def test_the_last_version_stays_until_a_rollout_has_it(opened, is_copy):
    trainer, rollout = opened("trainer", 1.0), opened("rollout", retain=("latest",))
    two_versions(trainer, rollout)
    if is_copy:
        trainer.unpublish()
        tensor_of(trainer).fill_(666)
    closing = Closing(trainer)
    lingering(rollout, 2)
    assert not closing.is_over
    with pytest.raises(ClosedError):
        trainer.publish(3)
    assert rollout.update("latest")
    assert torch.equal(tensor_of(rollout), torch.full((4,), 2.0))
    closing.join()
    rollout.wait(lambda there: there == {2: {"rollout"}})  # its copy of 1 goes by itself


def test_who_is_waited_for_is_said(opened, caplog, monkeypatch):
    monkeypatch.setattr(flow, "QUIET_S", 0.1)
    caplog.set_level(logging.INFO, "torch_ros")
    trainer, rollout = opened("trainer", 1.0), opened("rollout", retain=("latest",))
    two_versions(trainer, rollout)
    trainer.close(linger_s=0.5)
    said = [r for r in caplog.records if "to fetch version 2" in r.getMessage()]
    assert [r.levelname for r in said] == ["INFO", "WARNING"]
    assert "for rollout to fetch version 2, which only this replica holds" in said[0].getMessage()
    assert "version 2 was held nowhere else and is gone; latest is now 1" in caplog.text
    assert rollout.list() == {1: {"rollout"}}


@pytest.mark.parametrize("options", [{}, {"spot": True}])
def test_nobody_is_waited_for_who_does_not_count(opened, caplog, options):
    trainer = opened("trainer", 1.0, retain=("latest",))
    if options:
        opened("rollout", **options)
    trainer.publish(1)
    began_s = time.monotonic()
    trainer.close()
    assert time.monotonic() - began_s < LONG_S / 2
    assert "version 1 was held nowhere else and is gone; no version is left" in caplog.text


def test_what_nobody_retains_goes_at_once(opened, caplog):
    trainer, rollout = opened("trainer", 1.0), opened("rollout")
    trainer.publish(1)
    trainer.close()
    assert rollout.list() == {}
    assert "is gone" not in caplog.text


def test_without_anything_to_hand_over_nothing_is_asked(opened, monkeypatch):
    trainer, _ = opened("trainer", 1.0), opened("rollout", retain=("latest",))
    trainer.publish(1)
    trainer.unpublish()
    wait_until = lambda: not copies_of(trainer)
    rollout = opened("other")
    rollout.replicate()
    until(wait_until)
    asked = []
    monkeypatch.setattr(memory.MemoryKV, "read", lambda *_, **__: asked.append(1))
    trainer.close()
    assert not asked


@pytest.mark.parametrize("how", ["goes on", "at once"])
def test_a_rank_that_does_not_come_ends_it(opened, how):
    first, second = group(opened, 2, 1.0)
    opened("rollout", retain=("latest",))
    at_once(partial(first.publish, 1), partial(second.publish, 1))
    closing = Closing(first)
    key = inside(first).group.seat.keys.readies(inside(first).group.seat.inst, 0)
    until(lambda: any(entry in key for entry in store_of(first)._entries))
    if how == "goes on":
        second.unpublish()
    else:
        second.close(linger_s=0)
    closing.join(LONG_S / 2)


def test_an_exception_ends_a_block_at_once(opened):
    rollout = opened("rollout", retain=("latest",))
    began_s = time.monotonic()

    def train(error):
        with opened("trainer", 1.0) as trainer:
            trainer.publish(1)
            raise error

    for error in (ZeroDivisionError(), KeyboardInterrupt(), SystemExit()):
        with pytest.raises(type(error)):
            train(error)
    trainer = opened("trainer", 1.0)
    try:
        trainer.publish(1)
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        trainer.close()
    trainer = opened("trainer", 1.0)
    trainer.publish(1)
    core._close_open_shards()  # as at exit
    assert time.monotonic() - began_s < LONG_S / 2
    assert rollout.is_closed


def test_a_block_that_ends_in_order_lingers(opened):
    rollout = opened("rollout", retain=("latest",))

    def train():
        with opened("trainer", 1.0) as trainer:
            trainer.publish(1)

    with ThreadPoolExecutor() as pool:
        training = pool.submit(train)
        lingering(rollout, 1)
        assert rollout.replicate() == 1
        training.result(20)


def test_an_interrupt_ends_the_wait(opened, monkeypatch):
    trainer, rollout = opened("trainer", 1.0), opened("rollout", retain=("latest",))
    trainer.publish(1)

    run, steps = flow.run, []

    def interrupted(*args, **options):
        steps.append(1)
        if len(steps) > 2:  # it lingers
            raise KeyboardInterrupt
        return run(*args, **options)

    monkeypatch.setattr(flow, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.close()
    monkeypatch.undo()
    assert trainer.is_closed
    assert rollout.list() == {}


def test_a_rollout_that_dies_is_not_waited_for_longer_than_its_lease(opened):
    trainer, rollout = opened("trainer", 1.0), opened("rollout", retain=("latest",))
    trainer.publish(1)
    closing = Closing(trainer)
    lingering(rollout, 1)
    inside(rollout).group.close()  # as if its process had gone: its records vanish
    closing.join()


def test_a_second_close_waits_for_the_first_and_may_end_it(opened):
    trainer, rollout = opened("trainer", 1.0), opened("rollout", retain=("latest",))
    trainer.publish(1)
    closings = [Closing(trainer)]
    lingering(rollout, 1)
    closings.append(Closing(trainer))
    assert not closings[1].is_over
    trainer.close(linger_s=0)
    for closing in closings:
        closing.join()
    assert rollout.list() == {}


def test_how_long_is_a_number_of_seconds(opened):
    trainer = opened("trainer", 1.0)
    with pytest.raises(UsageError, match="linger_s"):
        trainer.close(linger_s=-1)
    assert not trainer.is_closed
    with pytest.raises(UsageError, match="linger_s"):
        opened("other", linger_s="long")


def store_of(handle):
    return memory._spaces[inside(handle).group.kv.endpoint.removeprefix("memory://")]
