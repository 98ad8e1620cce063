"""The first version of an engine: how its start comes to one, or goes on without.

Imports nothing of vLLM.
"""

import logging
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch_ros.errors import (
    AccessDenied,
    BackendError,
    Contention,
    DeadlineExceeded,
    Fenced,
    NotAvailable,
    PeerError,
    SeatLost,
    StoreUnavailable,
)
from torch_ros.integrations.installation import Installer
from torch_ros.integrations.together import Together
from torch_ros.printable import log_of

log: logging.Logger = log_of("vllm.torch_ros")  # vLLM configures its own loggers only

ANSWER_S = 5.0  # for etcd and a holder to answer, however short the wait is
LOOK_S = 10.0  # of a wait, until it is seen whether anybody still wants the engine
PAUSE_S = 1.0  # after what fails at once
TELL_S = 60.0  # between log lines of an engine that waits
AWAY = (StoreUnavailable, Contention, DeadlineExceeded)  # etcd, or the other ranks
PASSING = (NotAvailable, PeerError, SeatLost, BackendError)
FINAL = (Fenced, AccessDenied)  # of these, those that do not pass
CORE_TITLE = b"EngineCore"  # in the title of a process of vLLM's


class FirstVersion:
    """One rank's way to its engine's first version. All ranks call its methods together.

    All of it takes `wait_s` and `timeout_s` at most, and what rank 0 sees decides.

    Args:
        version: As for `replicate`.
        wait_s: For how long it is waited for, and etcd, and another version in the place of one
            that does not fit; again, after a read that failed. None: for ever.
        timeout_s: For one read; and for all that goes on when `wait_s` are over.
    """

    def __init__(
        self, together: Together, version: int | str, wait_s: float | None, timeout_s: float
    ) -> None:
        self._together, self._version, self._timeout_s = together, version, timeout_s
        self._wait_s = math.inf if wait_s is None else wait_s
        self._began_s = self._told_s = time.monotonic()
        self._until_s = self._began_s + self._wait_s
        self._refused, self._reason = "", ""  # a content that does not fit, and why
        self._parents = parents()

    def open(self, step: Callable[[], None], undo: Callable[[], None]) -> str:
        """Open the handles of all ranks; the reason why that has to be done later, or "".

        Raises: As `step`, of which `undo` takes back what another rank has done.
        """
        while True:
            try:
                self._together.step(step)
            except Exception as error:
                undo()
                if not all(self._together.gather(isinstance(error, AWAY))):
                    raise
                lack = self._together.gather(_told(error))[0]
            else:
                return ""
            if self._gives_up(lack):
                return lack

    def bring(self, installer: Installer) -> str:
        """Install it; the reason why there is none, or "".

        Raises:
            UsageError: There can be no such version.
            Fenced, AccessDenied: Another has the engine's name, or it may not read.
            NotAvailable: The process that has started the engine has ended.
        """
        while True:
            found = self._together.step(lambda: self._look(installer))
            number, uid, lack = self._together.gather(found)[0]
            if not lack and not (lack := self._install(installer, number, uid)):
                return ""
            if self._gives_up(lack):
                return lack

    def _look(self, installer: Installer) -> tuple[int, str, str]:
        """The version that rank 0 finds, its content, and the reason why there is none, or ""."""
        if self._together.rank != 0:
            return 0, "", ""
        left_s = min(LOOK_S, self._until_s - time.monotonic())
        try:
            timeout_s = max(ANSWER_S, left_s)
            found = installer.handle.contents(self._version, timeout_s=timeout_s)
        except PASSING as error:
            if isinstance(error, FINAL):
                raise
            return 0, "", _told(error)
        return found.version, found.uid, self._reason if found.uid == self._refused else ""

    def _install(self, installer: Installer, number: int, uid: str) -> str:
        """Bring it in; the reason why not, or ""."""
        left_s = self._began_s + self._wait_s + self._timeout_s - time.monotonic()
        try:
            installer.install(number, min(self._timeout_s, max(ANSWER_S, left_s)))
        except Exception as error:  # noqa: BLE001  # told and judged below, by all ranks
            failed: Exception | None = error
        else:
            failed = None
        # Each rank has an error of its own, and all go the same way.
        passes = isinstance(failed, PASSING) or failed is None
        is_final = isinstance(failed, FINAL)
        said = self._together.gather((passes, is_final, _told(failed) if failed else ""))
        if failed is not None and any(each for _, each, _ in said):
            raise failed
        lacks = [lack for each, _, lack in said if not each]
        if lacks:  # it does not fit one of them
            self._refused, self._reason = uid, lacks[0]
            log.error("the first version cannot be loaded: %s", lacks[0], exc_info=failed)
            return lacks[0]
        if lack := next(filter(None, (each for *_, each in said)), ""):
            now_s = time.monotonic()
            end_s = self._began_s + self._wait_s + self._timeout_s
            self._until_s = min(now_s + self._wait_s, end_s)
        return lack

    def _gives_up(self, lack: str) -> bool:
        """Pause, unless the wait is over; a log line tells of it now and then."""

        def look() -> bool:
            if self._together.rank != 0:
                return False
            if self._parents != parents():
                raise NotAvailable("nobody: the process that has started this engine has ended")
            now_s = time.monotonic()
            if now_s >= self._until_s:
                return True
            if now_s - self._told_s >= TELL_S:
                self._told_s = now_s
                log.info("the engine has waited for %.0f s: %s", now_s - self._began_s, lack)
            time.sleep(min(PAUSE_S, self._until_s - now_s))
            return False

        return self._together.gather(self._together.step(look))[0]


def parents() -> tuple[int, ...]:
    """The processes that have started this one; none of a process that was not started to help.

    vLLM's workers are children of its engine core, which is a child of its server, or in it.
    """
    if multiprocessing.parent_process() is None:
        return ()
    mine = os.getppid()
    with suppress(OSError):
        if CORE_TITLE in Path(f"/proc/{mine}/cmdline").read_bytes():
            stat = Path(f"/proc/{mine}/stat").read_text()
            return mine, int(stat.rpartition(")")[2].split()[1])
    return (mine,)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
