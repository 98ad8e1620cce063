"""Processes that do as they are told, forked from a parent that has imported torch already."""

import atexit
import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from puppets.servers import free_port

START_S = 60.0  # until the parent has imported torch, on a busy machine
WARM = Path(__file__).with_name("warm.py")
NAMESPACES = Path("/proc/thread-self/ns/net"), Path("/proc/thread-self/ns/mnt")
# Processes of tests share few cores, and say what tests look for.
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}

SHARED = "PUPPETS_PARENT"  # where it listens
# It imports torch, for seconds, when a test needs it.
FIRST_ASKED = """
import os, select, sys
if 0 not in select.select([0, int(sys.argv[2])], [], [])[0]:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def is_readable(fd, timeout_s=None):
    """Whether there is something to read from that file, whatever its number: one may be large."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


class Puppet:
    """One process, in a session of its own, on the network of the thread that starts it.

    It ends with its test.

    Args:
        program: A path, or source code that runs as with `python -c`.
        environment: All of it.
        log: A file, which is appended to: standard error, and standard output unless it talks.
        talks: Whether the test tells it lines and hears lines from it.
    """

    def __init__(self, program, arguments, environment, log, *, talks):
        self.log, self.pid, self.returncode, self._stops = log, None, None, 0
        is_path = isinstance(program, Path)
        request = {
            "name": str(program) if is_path else "<string>",
            "source": program.read_text() if is_path else program,
            "arguments": [str(argument) for argument in arguments],
            "environment": environment,
        }
        with log.open("ab") as errors, contextlib.ExitStack() as stack:
            here = [stack.enter_context(namespace.open()) for namespace in NAMESPACES]
            self._reports, report = os.pipe()
            stdin, said = os.pipe() if talks else (os.open(os.devnull, os.O_RDONLY), None)
            heard, stdout = os.pipe() if talks else (None, os.dup(errors.fileno()))
            files = [stdin, stdout, errors.fileno(), report, *(file.fileno() for file in here)]
            socket.send_fds(warm_parent(), [json.dumps(request).encode()], files)
        for file in (stdin, stdout, report):
            os.close(file)
        self.stdin = os.fdopen(said, "w", buffering=1) if talks else None
        self.stdout = os.fdopen(heard) if talks else None
        self._follow(lambda: self.pid is not None, START_S)

    # What it says

    def tell(self, *words):
        print(*words, file=self.stdin)

    def hear(self):
        """Its next line."""
        line = self.stdout.readline()
        assert line, self.end_of_log()
        return line.rstrip("\n")

    def end_of_log(self):
        return self.log.read_text(errors="replace")[-6000:]

    # Its end

    def poll(self):
        """The exit code, negative for a signal; None while it runs."""
        self._follow(lambda: False, 0)
        return self.returncode

    def wait(self, timeout_s=None):
        self._follow(lambda: self.returncode is not None, timeout_s)
        if self.returncode is None:
            raise TimeoutError(f"process {self.pid} runs after {timeout_s} s: {self.end_of_log()}")
        return self.returncode

    def finish(self, timeout_s=90):
        """Wait until it has ended well."""
        assert self.wait(timeout_s) == 0, self.end_of_log()

    def await_stop(self, timeout_s=60):
        """Wait until it has been stopped by a signal, once more than at the last call."""
        self._follow(lambda: self._stops or self.returncode is not None, timeout_s)
        assert self._stops, self.end_of_log()
        self._stops = 0

    def signal(self, number):
        """Send it a signal; SIGKILL is waited for."""
        if self.poll() is None:
            os.kill(self.pid, number)
            if number == signal.SIGKILL:
                self.wait(START_S)  # the parent, which reaps it, may be starting others

    def kill(self):
        self.signal(signal.SIGKILL)

    def close(self):
        """End it, if it still runs, with all that it has forked."""
        if self.poll() is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has no session of its own yet
                self.kill()
            self.wait(START_S)
        os.close(self._reports)
        for stream in filter(None, (self.stdin, self.stdout)):
            stream.close()

    def _follow(self, is_enough, timeout_s):
        """Read what the warm parent reports, until it is enough or the process has ended."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self.returncode is None and not is_enough():
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if not is_readable(self._reports, left_s):
                return
            reports = os.read(self._reports, 4096).decode().split()
            assert reports, "the warm parent has ended"
            for what, number in zip(reports[::2], map(int, reports[1::2]), strict=True):
                match what:
                    case "pid":
                        self.pid = number
                    case "stopped":
                        self._stops += 1
                    case "ended":
                        self.returncode = number


class Puppets:
    """The processes of one test, or of one module's tests; `close` ends those that still run.

    Args:
        folder: For their logs.
        environment: Of each of them, beside that of the tests.
    """

    def __init__(self, folder, **environment):
        self.folder, self.started = Path(folder), []
        self.environment = environment
        warm_parent()  # here, not on a network that this thread may enter and that ends before it

    def start(self, program, *arguments, name=None, talks=False, **environment):
        log = self.folder / f"{name or len(self.started)}.log"
        environment = {**os.environ, **QUIET, **self.environment, **environment}
        self.started.append(Puppet(program, arguments, environment, log, talks=talks))
        return self.started[-1]

    def start_ranks(self, count, program, *arguments, **environment):
        """Ranks of one job, with the environment that torchrun would give them."""
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        job |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        return [
            self.start(
                program, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), **job, **environment
            )
            for rank in range(count)
        ]

    def close(self):
        for puppet in self.started:
            puppet.close()


def share_warm_parent():
    """Let this process and those that it starts have one; it ends when this one does."""
    folder = Path(tempfile.mkdtemp())
    os.environ[SHARED] = str(folder / "warm")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.environ[SHARED])
        listener.listen()
        parent = subprocess.Popen(
            [sys.executable, "-c", FIRST_ASKED, WARM, str(listener.fileno())],
            env={**os.environ, **QUIET},
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )

    owner = os.getpid()

    def end():
        if os.getpid() == owner:  # it is no fork
            parent.stdin.close()
            parent.wait()
            shutil.rmtree(folder)

    atexit.register(end)


@functools.cache
def warm_parent():
    """The socket on which processes are asked for."""
    if SHARED not in os.environ:
        share_warm_parent()
    requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    requests.connect(os.environ[SHARED])
    return requests
