"""The calls of a handle that wait for others, for programs on asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Literal, TypeVar, overload

from torch_ros.deadline import is_cancelled, unless_cancelled
from torch_ros.shard.core import Shard

if TYPE_CHECKING:
    from torch_ros.face.handle import ShardHandle

T = TypeVar("T")
TURN_S = 0.2  # between two looks of one that waits for its turn


class AsyncHandle:
    """`handle.aio`: those calls of a handle that wait for others, as coroutines.

    They have the names, arguments, answers and errors of the handle's own, and are made by a thread
    of their own, so the event loop goes on. Calls of the group are made one at a time all the same,
    in the order that all ranks keep: await one before the next. Copies of tensors are not
    interrupted.

    Cancelling the task ends the call as Ctrl-C would: on all ranks, where it is one of the group
    (`CallAborted` for the others). The task goes on being cancelled when the call has ended and the
    thread is gone, mostly within 2 s, and 5 s later if etcd is away. The handle can be used then;
    a call that had ended in time counts, and `version` tells.
    """

    def __init__(self, handle: ShardHandle, shard: Shard) -> None:
        self._handle, self._shard = handle, shard

    @overload
    async def replicate(
        self,
        version: int | str = "latest",
        *,
        missing_ok: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> int: ...

    @overload
    async def replicate(
        self, version: int | str = "latest", *, missing_ok: bool, timeout_s: float | None = None
    ) -> int | None: ...

    async def replicate(
        self,
        version: int | str = "latest",
        *,
        missing_ok: bool = False,
        timeout_s: float | None = None,
    ) -> int | None:
        """As `ShardHandle.replicate`."""
        handle = self._handle
        return await self._in_turn(
            lambda: handle.replicate(version, missing_ok=missing_ok, timeout_s=timeout_s)
        )

    async def update(
        self,
        version: int | str = "latest",
        *,
        skip: bool | None = None,  # feature seeding
        wait_s: float = 0.0,  # feature following
        timeout_s: float | None = None,
    ) -> bool:
        """As `ShardHandle.update`."""
        handle = self._handle
        return await self._in_turn(
            lambda: handle.update(
                version,
                skip=skip,  # feature seeding
                wait_s=wait_s,  # feature following
                timeout_s=timeout_s,
            )
        )

    # feature prefetch {
    async def prefetch(
        self, version: int | str = "latest", *, timeout_s: float | None = None
    ) -> int | None:
        """As `ShardHandle.prefetch`: beside other calls, also of this object."""
        return await _aside(lambda: self._handle.prefetch(version, timeout_s=timeout_s))

    # } prefetch

    # feature following {
    async def follow(
        self,
        version: str = "latest",
        *,
        stop: threading.Event | Callable[[], bool] | None = None,
        skip: bool | None = None,  # feature seeding
        timeout_s: float | None = None,
    ) -> AsyncIterator[int]:
        """As `ShardHandle.follow`. `stop` is asked in another thread."""
        versions = self._handle.follow(
            version,
            stop=stop,
            skip=skip,  # feature seeding
            timeout_s=timeout_s,
        )
        while (found := await self._in_turn(lambda: next(versions, None))) is not None:
            yield found

    # } following

    async def wait(
        self, predicate: Callable[[dict[int, set[str]]], bool], *, timeout_s: float | None = None
    ) -> dict[int, set[str]]:
        """As `ShardHandle.wait`. `predicate` is called in another thread."""
        return await _aside(lambda: self._handle.wait(predicate, timeout_s=timeout_s))

    async def _in_turn(self, call: Callable[[], T]) -> T:
        return await _aside(lambda: _in_turn(self._shard, call))


def _in_turn(shard: Shard, call: Callable[[], T]) -> T:
    """Make `call` when no other one is under way; by a thread that no signal reaches."""
    check = unless_cancelled()
    while not shard.lock.acquire(timeout=TURN_S):
        check()
    try:
        return call()
    finally:
        shard.lock.release()


async def _aside(call: Callable[[], T]) -> T:
    """Make `call` in a thread, with the context variables of the task.

    Raises:
        asyncio.CancelledError: The task was cancelled, and the thread has ended.
    """
    loop, is_cut = asyncio.get_running_loop(), threading.Event()
    ended: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        is_cancelled.set(is_cut.is_set)
        try:
            tell, told = ended.set_result, call()
        except BaseException as error:  # noqa: BLE001  # raised where it is awaited
            tell, told = ended.set_exception, error  # type: ignore[assignment]
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(tell, told)

    context = copy_context()
    thread = threading.Thread(target=context.run, args=(work,), name="torch_ros aio", daemon=True)
    thread.start()
    cancelled: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError as error:
            is_cut.set()
            cancelled = error
    thread.join()
    if cancelled is None:
        return ended.result()
    ended.exception()  # how it ended is of no interest any more
    raise cancelled
