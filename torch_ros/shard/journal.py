"""The journal that a process writes where the environment asks for one: `TORCH_ROS_TRACE`.

A call puts its report into a list, and wakes nobody: that would take it longer than all else. A
thread looks there and writes the lines.
"""

import atexit
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, final
from urllib.parse import quote

from torch_ros import environment
from torch_ros.printable import log_of
from torch_ros.protocol import keys as k
from torch_ros.protocol.journal import FORMAT, SUFFIX, Author, Journaled, line
from torch_ros.protocol.seat import Seat
from torch_ros.release import RELEASE
from torch_ros.shard.report import DrainReport, PublishReport, ReadReport, Report

log: logging.Logger = log_of(__name__)

FLUSH_S = 2.0  # for the lines that are left, at the end of the process
PERIOD_S = 0.2  # between two looks: a process that is killed has told of what was before
WAITING_MAX = 4096  # reports, some hundred bytes each; more wait where the disk stands still
BOOT = Path("/proc/sys/kernel/random/boot_id")


class _Told(NamedTuple):
    report: Report
    seat: Seat
    at_ns: int  # of the monotonic clock


class _Journal:
    """A file, and the thread that writes it."""

    def __init__(self, folder: str) -> None:
        """Raises: OSError: The folder cannot be written."""
        host = socket.gethostname()
        name = f"{quote(host, safe='')}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        clock = BOOT.read_text().strip() if BOOT.exists() else host
        # The wall clock may jump later; the journal goes on with this difference.
        self._since_ns = time.time_ns() - time.monotonic_ns()
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = FileIO(Path(folder, name), "x")
        self._write(Author(FORMAT, RELEASE, host, os.getpid(), clock))
        self._told = deque[_Told | threading.Event]()
        self._is_flushed = threading.Event()
        self._is_broken = False
        threading.Thread(target=self._run, name="torch_ros journal", daemon=True).start()

    def tell(self, seat: Seat, report: Report) -> None:
        at_ns = time.monotonic_ns()
        if len(self._told) < WAITING_MAX:
            self._told.append(_Told(report, seat, at_ns))
        else:
            self._end(f"{WAITING_MAX} calls wait to be written")

    def flush(self, timeout_s: float) -> None:
        is_done = threading.Event()
        self._told.append(is_done)
        self._is_flushed.set()
        is_done.wait(timeout_s)

    def _run(self) -> None:
        while True:
            self._is_flushed.wait(PERIOD_S)
            self._is_flushed.clear()
            while self._told:
                told = self._told.popleft()
                if isinstance(told, threading.Event):
                    told.set()
                elif not self._is_broken:
                    self._add(told)

    def _add(self, told: _Told) -> None:
        try:
            self._write(_done(told, self._since_ns))
        except Exception as error:  # noqa: BLE001  # the disk is full; the job goes on
            self._end(error)

    def _write(self, each: Author | Journaled) -> None:
        """In one piece, so that a process which is killed leaves whole lines."""
        text = line(each)
        if self._file.write(text) != len(text):
            raise OSError("no room for a line")

    def _end(self, reason: object) -> None:
        """A line that is missing in the middle would be missed by nobody."""
        if not self._is_broken:
            self._is_broken = True
            log.warning("the journal %s ends here: %s", self._file.name, reason)


@final
class _Journals:
    """Those of this process, by folder; None: it cannot be written."""

    def __init__(self) -> None:
        self.there: dict[str, _Journal | None] = {}
        self._lock = threading.Lock()

    def at(self, folder: str) -> _Journal | None:
        with self._lock:
            if folder not in self.there:
                _flush_at_exit()
                self.there[folder] = _begun(folder)
            return self.there[folder]


_journals = _Journals()
os.register_at_fork(after_in_child=_journals.__init__)  # the threads are the parent's


def listeners(seat: Seat) -> list[Callable[[Report], object]]:
    """The one that writes the reports of a handle, if the environment asks for it, or none."""
    folder = environment.value(environment.TRACE)
    journal = _journals.at(folder) if folder else None
    return [] if journal is None else [partial(journal.tell, seat)]


def flush(timeout_s: float = FLUSH_S) -> None:
    """Wait for the lines of calls that have returned."""
    for journal in filter(None, _journals.there.values()):
        journal.flush(timeout_s)


@cache
def _flush_at_exit() -> None:
    atexit.register(flush)


def _begun(folder: str) -> _Journal | None:
    try:
        return _Journal(folder)
    except OSError as error:  # a job does not fail for want of a journal
        log.warning("no journal is written, %s=%r: %s", environment.TRACE, folder, error)
        return None


def _done(told: _Told, since_ns: int) -> Journaled:
    report, seat, at_ns = told
    common: dict[str, Any] = {
        "model": seat.keys.model,
        "replica": seat.replica,
        "rank": seat.rank,
        "start": k.family(seat.nonce),
        "call": report.call,
        "version": report.version,
        "uid": report.uid,
        "ended_ns": at_ns + since_ns,
        "elapsed_s": report.elapsed_s,
    }
    match report:
        case ReadReport():
            return Journaled(
                kind="read",
                **common,
                stages_s=dict(report.stages_s),
                sources=[name for name in report.source.split(", ") if name],
                size_bytes=report.bytes_total,
                ways=dict(report.ways),
                reroutes=report.reroutes,
            )
        case PublishReport():
            return Journaled(
                kind="publish",
                **common,
                stages_s=dict(report.stages_s),
                is_offered=report.is_offered,
                size_bytes=report.bytes_total,
            )
        case DrainReport():
            return Journaled(
                kind="drain",
                **common,
                waited_for=list(report.waited_for),
                left_behind=list(report.left_behind),
            )
