"""Around the examples: their etcd, and their processes, which end whatever happens."""

import contextlib
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

END_S = 10.0
LOOK_S = 1.0
SILENCE_S = 180.0  # of all children at the same time, at least, before they count as hanging
LONGER = 10.0  # than any silence before it
LOG_LINES = 60
ETCD = [sys.executable, "-m", "torch_ros.store.local"]
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run"),
    *("--standalone", "--nproc-per-node", "2"),
]


@contextlib.contextmanager
def launched(name: str, **environment: str) -> Iterator[tuple["Children", Path]]:
    """An etcd, and children with a directory that they share; these end with the block."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & has it ignored
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("told to end; everything but etcd has ended"))
    # A name of its own, so that two runs on one etcd do not meet.
    mark = f"TORCH_ROS_MODEL={name}-{os.getpid()}-{secrets.token_hex(4)}"
    is_local = os.environ.get("TORCH_ROS_ENDPOINT", "local") == "local"
    try:
        if is_local:  # whoever opens a handle would start it as well; so you see where it is
            subprocess.run([*ETCD, "start"], check=True)
        with tempfile.TemporaryDirectory(prefix=f"torch-ros-{name}-") as directory:
            environment |= {
                "OMP_NUM_THREADS": "1",  # there are more processes than cores
                "PYTHONUNBUFFERED": "1",
                "HF_HUB_OFFLINE": "1",
                "TMPDIR": directory,  # what torchrun leaves behind goes with it
            }
            with Children(mark, environment) as children:
                yield children, Path(directory)
    except KeyboardInterrupt:
        sys.exit("interrupted; everything but etcd has ended")
    finally:
        if is_local:
            print("\netcd runs on, for the next time; this stops it:", *ETCD, "stop")


class Children:
    """Processes that carry `mark` in their environment, and so do their own children.

    That is how all of them are found at the end: torchrun gives its workers sessions of their
    own, and when it dies before them, nothing else ties them to this run.
    """

    def __init__(self, mark: str, environment: Mapping[str, str]) -> None:
        name, _, value = mark.partition("=")
        self._mark, self._environment = mark, {**os.environ, **environment, name: value}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._running: set[str] = set()  # that `wait` has not seen the end of
        self._logs: dict[str, Path] = {}
        self._listeners: list[threading.Thread] = []
        self._ended: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._is_silent = False
        self._heard_s, self._longest_silence_s = time.monotonic(), 0.0

    def start(self, name: str, command: Sequence[str], log: Path | None = None) -> None:
        """Run it without our terminal: a Ctrl-C there is ours to handle.

        With a log, stderr goes there, and its end is printed if the process fails.
        """
        with Path(log or os.devnull).open("w") as stderr:
            process = subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr if log else subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        if log:
            self._logs[name] = log
        self._processes[name] = process
        self._running.add(name)
        listener = threading.Thread(target=self._listen, args=(name, process), daemon=True)
        watcher = threading.Thread(target=self._watch, args=(name, process), daemon=True)
        self._listeners.append(listener)
        listener.start()
        watcher.start()

    def _listen(self, name: str, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            now_s = time.monotonic()
            self._longest_silence_s = max(self._longest_silence_s, now_s - self._heard_s)
            self._heard_s = now_s
            if not self._is_silent:
                sys.stdout.write(f"{name:>14} | {line}")
                sys.stdout.flush()

    def _watch(self, name: str, process: subprocess.Popen[str]) -> None:
        # The end of its output says less: workers can outlive their torchrun, and hold it open.
        self._ended.put((name, process.wait()))

    def wait(self) -> None:
        """Until all have ended well. Exits with what happened as soon as one did not.

        It also exits when nobody has printed a line for far longer than ever before in this run:
        a slow machine gets the time that it needs, and a hang ends.
        """
        while running := self._running:
            try:
                name, status = self._ended.get(timeout=LOOK_S)
            except queue.Empty:
                limit_s = max(SILENCE_S, LONGER * self._longest_silence_s)
                if time.monotonic() - self._heard_s > limit_s:
                    names = ", ".join(sorted(running))
                    sys.exit(f"nothing was printed for {limit_s:.0f} s; still running: {names}")
                continue
            if status:
                end_all(self._mark)
                self._hear_out()
                if name in self._logs:
                    print(*self._logs[name].read_text().splitlines()[-LOG_LINES:], sep="\n")
                sys.exit(f"the {name} ended with exit status {status}; its last lines are above")
            running.remove(name)
        self._hear_out()

    def _hear_out(self) -> None:
        """All writers have ended: print what they wrote last."""
        for listener in self._listeners:
            listener.join(END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not stop us halfway
        self._is_silent = True
        end_all(self._mark)
        for process in self._processes.values():
            process.wait(END_S)


def end_all(mark: str) -> None:
    """Kill what carries `mark`, and what that started meanwhile.

    Nothing here needs an orderly end: what they wrote to etcd vanishes with their leases.
    """
    deadline_s = time.monotonic() + END_S
    while found := marked(mark):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            sys.exit(f"processes {found} do not end")
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """The processes that were started with `mark` in their environment; zombies show none."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or gone by now
            if mark.encode() in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found
