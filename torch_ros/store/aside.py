"""Work that signals must not reach, done by threads that they do not reach."""

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Aside:
    """Threads that do for the main one what an exception in the middle would break.

    `docs/ARCHITECTURE.md` ("Ctrl-C") tells why. A request that an exception leaves alone ends in
    peace.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid, self._idle = os.getpid(), list[_Worker]()

    def run(self, job: Callable[[], T]) -> T:
        """The answer or the error of `job`. By the calling thread, unless that is the main one."""
        if threading.current_thread() is not threading.main_thread():
            return job()
        if os.getpid() != self._pid:  # after fork() they are not there
            self._pid, self._idle = os.getpid(), []
        try:
            worker = self._idle.pop()
        except IndexError:  # at first; after Ctrl-C; for a signal handler, within a request
            try:
                worker = _Worker(self._name)
            except RuntimeError:  # no thread to be had, as where the interpreter ends
                return job()
        try:
            worker.jobs.put(job)
            result, error = worker.replies.get()
        except BaseException:
            worker.jobs.put(None)  # it ends with this job, whose reply nobody takes
            raise
        self._idle.append(worker)
        if error is not None:
            try:
                raise error
            finally:
                del error  # or it is kept by the frame that it keeps
        return result  # type: ignore[no-any-return]

    def leave(self, job: Callable[[], object]) -> None:
        """Have `job` done, and do not wait for it."""
        worker = _Worker(self._name)
        worker.jobs.put(job)
        worker.jobs.put(None)

    def close(self, job: Callable[[], object], timeout_s: float) -> bool:
        """Do `job`, the last one; False: it is not done within `timeout_s`, and goes on."""
        worker = self._idle.pop() if self._idle else _Worker(self._name)
        worker.jobs.put(job)
        worker.jobs.put(None)
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().jobs.put(None)
        try:
            worker.replies.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True


class _Worker:
    """One such thread. With those who ask it shares only queues in C, which no signal tears."""

    def __init__(self, name: str) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        try:
            threading.Thread(target=self._work, name=name, daemon=True).start()
        except BaseException:
            self.jobs.put(None)
            raise

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            reply: tuple[Any, BaseException | None]
            try:
                reply = job(), None
            except BaseException as error:  # noqa: BLE001  # raised where it was asked
                reply = None, error
            self.replies.put(reply)
            del job, reply  # what they refer to may be large
