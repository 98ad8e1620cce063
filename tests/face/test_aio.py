"""Calls as coroutines: the loop goes on, and a task that is cancelled leaves nothing behind."""
# needs features following

import asyncio
import threading
import time

import pytest
import torch
from kit import inside

from torch_ros import errors
from torch_ros.features.following import flow
from torch_ros.memory.transport import MemoryTransfer

SOON_S = 10

pytestmark = pytest.mark.usefixtures("quick_looks")


def rollout_of(opened, name="rollout", **options):
    handle = opened(name, **options)
    handle.register({"w": torch.zeros(8)})
    return handle


def publisher(opened):
    handle = opened("trainer", {"w": torch.ones(8)})
    handle.publish(1)
    return handle


def threads():
    return [each for each in threading.enumerate() if each.name == "torch_ros aio"]


async def cancelled(task):
    """How long it took for a task to end that is cancelled."""
    began_s = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not threads()
    return time.monotonic() - began_s


async def until(holds):
    async with asyncio.timeout(SOON_S):
        while not holds():  # noqa: ASYNC110  # set by threads
            await asyncio.sleep(0.01)


def pending(handle):
    return inside(handle).group.ledger.pending


def test_they_are_the_calls_of_the_handle(opened):
    async def main():
        rollout = rollout_of(opened)
        assert await rollout.aio.replicate(missing_ok=True) is None
        assert await rollout.aio.update(wait_s=0.1) is False
        with pytest.raises(errors.DeadlineExceeded):
            await rollout.aio.replicate(timeout_s=0.1)
        trainer = publisher(opened)
        assert await rollout.aio.wait(bool) == {1: {"trainer"}}
        assert await rollout.aio.replicate() == 1
        trainer.unpublish()
        trainer.publish(2)
        async for version in rollout.aio.follow():
            assert version == rollout.version == 2
            break

    asyncio.run(main())
    assert not threads()


def test_the_loop_goes_on_while_a_call_waits(opened):
    async def main():
        rollout = rollout_of(opened)
        waiting = asyncio.create_task(rollout.aio.replicate())
        await until(lambda: pending(rollout))
        publisher(opened)  # by this very thread
        assert await waiting == 1

    asyncio.run(main())


def test_a_cancelled_call_ends_on_all_ranks_and_the_handles_are_of_use(opened, ranks, pool):
    first, second = ranks("rollout")
    for handle in (first, second):
        handle.register({"w": torch.zeros(8)})

    async def main():
        waiting = asyncio.create_task(first.aio.replicate())
        await until(lambda: pending(first))
        peer = pool.submit(second.replicate)
        await until(lambda: pending(second))
        assert await cancelled(waiting) < SOON_S
        return peer

    error = asyncio.run(main()).exception(SOON_S)
    assert isinstance(error, errors.CallAborted)
    assert "Cancelled: its task was cancelled" in str(error)
    publisher(opened)
    each = [pool.submit(handle.replicate) for handle in (first, second)]
    assert [one.result(SOON_S) for one in each] == [1, 1]


@pytest.mark.parametrize("call", ["update", "follow", "wait"])
def test_what_waits_without_end_can_be_cancelled(opened, call):
    async def follow(handle):
        async for _ in handle.aio.follow():
            pass

    calls = {
        "update": lambda handle: handle.aio.update(wait_s=1e6),
        "follow": follow,
        "wait": lambda handle: handle.aio.wait(lambda there: 7 in there, timeout_s=1e6),
    }

    async def main():
        rollout = rollout_of(opened)
        waiting = asyncio.create_task(calls[call](rollout))
        await until(threads)
        await asyncio.sleep(0.1)
        assert await cancelled(waiting) < SOON_S
        publisher(opened)
        assert await rollout.aio.update(wait_s=SOON_S)

    asyncio.run(main())


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_follower_can_be_cancelled_while_etcd_is_away(opened, monkeypatch):
    rollout, tries = rollout_of(opened), 0
    kv = inside(rollout).group.kv
    read = kv.read

    def away(request, *, timeout_s):
        nonlocal tries
        tries += 1
        if tries > 100:  # or one that fails would not end
            return read(request, timeout_s=timeout_s)
        raise errors.StoreUnavailable("memory", timeout_s, "it is away")

    async def main():
        waiting = asyncio.create_task(anext(rollout.aio.follow()))
        await until(threads)
        await asyncio.sleep(0.1)
        monkeypatch.setattr(kv, "read", away)
        publisher(opened)
        await until(lambda: tries)
        assert await cancelled(waiting) < SOON_S

    asyncio.run(main())
    assert tries < 100


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_follower_that_pauses_can_be_cancelled(opened, monkeypatch):
    publisher(opened)
    rollout, is_lost = rollout_of(opened, ttl_s=60), threading.Event()

    def lost(*_):
        is_lost.set()
        raise errors.SourceLost("trainer", "it is gone")

    monkeypatch.setattr(flow, "replicate", lost)

    async def main():
        waiting = asyncio.create_task(anext(rollout.aio.follow()))
        await until(is_lost.is_set)
        monkeypatch.setattr(flow, "LOSSES_MAX", 2)
        assert await cancelled(waiting) < SOON_S

    asyncio.run(main())


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_read_that_does_not_go_on_can_be_cancelled(opened, monkeypatch):
    publisher(opened)
    rollout = rollout_of(opened, "rollout")
    posted = threading.Event()

    def is_done(_):
        posted.set()
        return False

    async def main():
        reading = asyncio.create_task(rollout.aio.replicate())
        await until(posted.is_set)
        assert await cancelled(reading) < SOON_S

    with monkeypatch.context() as patched:
        patched.setattr(MemoryTransfer, "is_done", is_done)
        asyncio.run(main())
    assert rollout.version is None
    assert rollout.replicate() == 1


def test_who_waits_for_his_turn_can_be_cancelled(opened):
    async def main():
        rollout = rollout_of(opened)
        first = asyncio.create_task(rollout.aio.replicate())
        await until(lambda: pending(rollout))
        second = asyncio.create_task(rollout.aio.replicate())
        await until(lambda: len(threads()) == 2)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert len(threads()) == 1
        publisher(opened)
        assert await first == 1

    asyncio.run(main())


def test_a_timeout_of_asyncio_is_one(opened):
    async def main():
        rollout = rollout_of(opened)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await rollout.aio.replicate()
        publisher(opened)
        assert await rollout.aio.replicate() == 1

    asyncio.run(main())
    assert not threads()


def test_it_is_cancelled_once_however_often_it_is_asked_for(opened):
    async def main():
        rollout = rollout_of(opened)
        waiting = asyncio.create_task(rollout.aio.replicate())
        await until(lambda: pending(rollout))
        for _ in range(3):
            waiting.cancel()
            await asyncio.sleep(0)
        assert await cancelled(waiting) < SOON_S

    asyncio.run(main())


def test_a_handle_that_is_closed_ends_its_coroutines(opened):
    async def main():
        rollout = rollout_of(opened)
        waiting = asyncio.create_task(rollout.aio.replicate())
        await until(lambda: pending(rollout))
        rollout.close()
        with pytest.raises(errors.ClosedError):
            await waiting

    asyncio.run(main())
