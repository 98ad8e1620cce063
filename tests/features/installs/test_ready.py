"""`torch-ros ready`: what the ranks of an engine tell in files, and what a probe makes of them."""

import json
import os
import signal
import subprocess
import sys

import kit
import msgspec
import pytest
from features.installs.engines import engine, install
from kit import at_once, inside, published, until

from torch_ros import environment
from torch_ros.cli import main
from torch_ros.errors import UsageError
from torch_ros.features.installs import ready
from torch_ros.features.installs.records import Install, Rejection
from torch_ros.p2p.voucher import line_of, started_at
from torch_ros.protocol.records import VersionRef

endpoint = pytest.fixture(kit.store)
OLD, NEW = VersionRef("run", 1, "a", 1), VersionRef("run", 4, "b", 1)
NEXT_RUN = VersionRef("other", 0, "c", 2)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(environment.READY_DIR, str(tmp_path / "ready"))
    return tmp_path / "ready"


@pytest.fixture
def probe(folder, asked):
    """Ask of a handle's replica: the exit code, and what was printed."""
    return lambda handle, *arguments: asked(
        "ready", "--model", handle.model, "--replica", "engine", *arguments
    )


def told(rank, install, pid=1):
    return ready.RankUse("a", rank, pid, 0, install)


# The decision


@pytest.mark.parametrize(
    ("installs", "states", "reason"),
    [
        ([], [], "no engine of this user"),
        ([Install(1, OLD)], ["S"], ""),
        ([Install(1, OLD), Install(1, OLD)], ["R", "D"], ""),
        ([Install(1, OLD), Install(1, OLD)], ["S", ""], "rank 1, process 1, has ended"),
        ([Install(1, OLD)], ["Z"], "has ended"),
        ([Install(1, OLD)], ["T"], "is stopped"),
        ([Install(1, OLD), Install(2, NEW)], ["S", "S"], "different versions"),
        ([Install(1, OLD), Install()], ["S", "S"], "rank 1 has no version yet"),
        ([Install(2, None, NEW)], ["S"], "rank 0 is installing version 4"),
        ([Install(2, None, None, OLD, Rejection(NEW, 0, "NaN"))], ["S"], "4 was rejected: NaN"),
    ],
)
def test_an_engine_is_ready_if_all_its_ranks_here_live_and_use_one_version(
    installs, states, reason
):
    found = ready.in_use([told(rank, each) for rank, each in enumerate(installs)], states)
    assert (reason in found) if reason else found == OLD


@pytest.mark.parametrize(
    ("version", "newest", "most", "reason"),
    [
        (None, None, 0, ""),
        (1, None, 0, ""),
        (2, None, 0, "uses version 1, not 2"),
        (None, OLD, 0, ""),
        (None, NEW, 3, ""),
        (None, NEW, 2, "version 1, 3 behind"),
        (None, NEXT_RUN, 100, "other is newer"),
    ],
)
def test_a_probe_may_ask_for_a_version_or_how_far_behind_one_may_be(version, newest, most, reason):
    found = ready.lack_of(OLD, version, newest, most)
    assert (reason in found) if reason else found == ""


def test_an_engine_that_has_a_newer_run_than_the_newest_is_not_behind():
    assert ready.lack_of(NEXT_RUN, None, NEW, 0) == ""


def test_what_a_killed_start_has_left_counts_until_the_next_one_lives():
    old, new = (
        told(1, Install(1, OLD)),
        msgspec.structs.replace(told(0, Install(1, NEW)), start="b"),
    )
    assert ready.in_use([new, old], ["S", ""]) == NEW
    assert ready.in_use([old, new], ["", "S"]) == NEW
    assert "has ended" in ready.in_use([new, old], ["", ""])


def test_a_process_that_has_the_number_of_one_that_ended_is_another():
    pid = os.getpid()
    mine = ready.RankUse("a", 0, pid, started_at(line_of(pid)), Install())
    assert ready.state_of(mine) == "R"
    assert ready.state_of(msgspec.structs.replace(mine, started=mine.started - 1)) == ""


# The files


def test_an_engine_is_ready_from_its_first_version_to_its_closing(opened, trainer, probe):
    handle = engine(opened)
    assert probe(handle)[0] == 1
    install(handle, 1)
    assert probe(handle) == (0, "ready: version 1\n", "")
    assert probe(handle, "--version", "1")[0] == 0
    assert probe(handle, "--version", "2")[0] == 1
    published(trainer, 2)
    with pytest.raises(RuntimeError, match="loader"), handle.installing(2):
        assert probe(handle)[1] == "not ready: rank 0 is installing version 2\n"
        raise RuntimeError("the engine's loader")
    assert "version: 2 was rejected: RuntimeError: the engine's loader" in probe(handle)[1]
    install(handle, 2)
    assert probe(handle)[0] == 0
    handle.close()
    assert probe(handle)[0] == 1


def test_ranks_of_one_engine_have_a_file_each(opened, trainer, probe, folder):
    ranks = at_once(
        *(lambda rank=rank: engine(opened, rank=rank, world_size=2) for rank in range(2))
    )
    assert len(list(folder.glob("*/*"))) == 2
    at_once(*(lambda rank=rank: install(rank, 1) for rank in ranks))
    until(lambda: probe(ranks[0])[0] == 0)
    inside(ranks[1]).close(0)
    assert len(list(folder.glob("*/*"))) == 1


def test_a_probe_asks_etcd_how_far_behind_an_engine_is(opened, trainer, probe):
    handle = engine(opened)
    install(handle, 1)
    published(trainer, 3)
    assert probe(handle, "--behind", "2") == (0, "ready: version 1\n", "")
    assert probe(handle, "--behind", "1") == (1, "not ready: it uses version 1, 2 behind\n", "")


def test_an_etcd_that_is_away_makes_nobody_unready(opened, trainer, folder, capsys):
    handle = engine(opened)
    install(handle, 1)
    named = ("--model", handle.model, "--replica", "engine")
    assert main.main(["--endpoint", "etcd://127.0.0.1:9", "ready", *named, "--behind", "0"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "ready: version 1\n"
    assert "nobody knows how far behind" in printed.err


ENGINE = """
import os, sys, time
from torch_ros.features.installs.ready_file import ReadyFile
from torch_ros.features.installs.records import Install
from torch_ros.protocol.records import VersionRef
file = ReadyFile("m", "r", 0, "a")
file.tell(Install(1, VersionRef("run", 1, "a", 1)))
if os.fork() == 0:  # a child that outlives it is no engine, and takes no file along
    file.has_closed()
    time.sleep(float(sys.argv[1]))
    os._exit(0)
print("told", flush=True)
time.sleep(100)
"""


def ask(*arguments):
    command = [sys.executable, "-m", "torch_ros", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_a_process_that_is_stopped_or_killed_is_not_ready(folder, started):
    named = ("ready", "--model", "m", "--replica", "r")
    with subprocess.Popen([sys.executable, "-c", ENGINE, "60"], stdout=-1, text=True) as process:
        try:
            assert process.stdout.readline() == "told\n"
            assert ask(*named) == (0, "ready: version 1\n")
            process.send_signal(signal.SIGSTOP)
            until(lambda: "is stopped" in ask(*named)[1])
            process.kill()
            process.wait(30)
            code, printed = ask("--json", *named)
            assert code == 1
            assert json.loads(printed)["reason"] == f"rank 0, process {process.pid}, has ended"
        finally:
            process.kill()


def test_a_probe_imports_neither_torch_nor_grpc(folder):
    program = (
        "import sys; from torch_ros import __main__; sys.argv[1:] = "
        "['ready', '--model', 'm', '--replica', 'r']; __main__.main(); "
        "print(*({'torch', 'grpc', 'numpy', 'nixl'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[1:] == [""], done


@pytest.fixture
def own_folder(folder):
    made = folder / f"torch-ros-{os.geteuid()}"
    made.mkdir(parents=True, mode=0o700)
    return made


def test_a_folder_of_somebody_else_is_neither_read_nor_written_to(
    own_folder, opened, trainer, caplog
):
    os.chown(own_folder, 12345, 12345)
    with pytest.raises(OSError, match="not a folder of this user"):
        ready.all_told("m", "r")
    handle = engine(opened)
    install(handle, 1)
    handle.close()
    assert "torch-ros ready has no news" in caplog.text
    assert list(own_folder.iterdir()) == []


def test_a_file_of_another_release_is_named(own_folder):
    (own_folder / f"{ready.file_name('m', 'r')}-0").write_text("{}")
    with pytest.raises(UsageError, match="not of this release"):
        ready.all_told("m", "r")


def test_on_a_full_disk_an_engine_goes_on_and_is_not_ready(opened, trainer, caplog, probe):
    handle = engine(opened)
    install(handle, 1)
    published(trainer, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pathlib.Path.write_bytes", full)
        install(handle, 2)
    assert handle.installs()["engine"].active.version == 2
    assert probe(handle)[0] == 1
    assert "has no news" in caplog.text


def full(*_):
    raise OSError(28, "No space left on device")


def test_who_is_replaced_leaves_the_file_of_its_successor(opened, trainer, probe):
    old = engine(opened)
    new = engine(opened)
    install(new, 1)
    old.close()
    assert probe(new)[0] == 0
