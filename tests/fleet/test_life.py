"""The state of a process that was once told of, as this host shows it."""

import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
from kit import FREEZERS, freezer

from torch_ros import allocation
from torch_ros.fleet import life
from torch_ros.p2p.voucher import Voucher, started_at
from torch_ros.store import forking


@pytest.fixture
def child():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def of(process):
    started = started_at(Path(f"/proc/{process.pid}/stat").read_text())
    return life.own()._replace(started=started)


def test_a_process_runs_is_stopped_goes_on_and_ends(child):
    told = of(child)
    assert life.look(child.pid, told) == "running"
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert life.look(child.pid, told) == "stopped"
    child.send_signal(signal.SIGCONT)
    os.waitpid(child.pid, os.WCONTINUED)
    assert life.look(child.pid, told) == "running"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert life.look(child.pid, told) == "gone", "a zombie does nothing more"
    assert life.look(child.pid, told._replace(sign="0badcafe")) == "gone", "nor closed its handle"
    child.wait()
    assert life.look(child.pid, told) == "gone"


def test_another_process_with_its_number_is_not_taken_for_it(child):
    told = of(child)
    assert life.look(child.pid, told._replace(started=told.started - 1)) == "replaced"


def test_what_numbers_mean_elsewhere_is_not_looked_up_here(child):
    told = of(child)
    assert life.look(child.pid, told._replace(boot="another")) == "other host"
    assert life.look(child.pid, told._replace(namespace=1)) == "other container"
    assert life.look(child.pid, life.Life()) == "other host"


@pytest.fixture
def cut_name():
    """This process has the name of a program in Cyrillic, of which the kernel keeps 15 bytes."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes("обучение.py".encode())
    yield
    name.write_bytes(before)


@pytest.mark.usefixtures("cut_name")
def test_a_name_that_is_cut_within_a_character_hides_no_process():
    assert life.look(os.getpid(), life.own()) == "running"
    Voucher("agent").close()
    assert allocation._used()["VmSize:"] > 0
    forking._threads()


def test_a_number_that_no_process_can_have_is_gone():
    assert life.look(2**63 - 1, life.own()) == "gone"


def test_a_process_that_proc_hides_is_not_said_to_be_gone(child, monkeypatch):
    told = of(child)
    read_text = Path.read_text

    def hidden(path, **options):
        if str(path) == f"/proc/{child.pid}/stat":
            raise PermissionError
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", hidden)
    assert life.look(child.pid, told) == "hidden"


def test_a_sign_is_seen_until_it_is_closed():
    sign, other = life.Sign(), life.Sign()
    told = life.own()._replace(sign=sign.name)
    assert life.look(os.getpid(), told) == "running"
    sign.close()
    sign.close()
    assert life.look(os.getpid(), told) == "closed"
    assert life.look(os.getpid(), told._replace(sign=other.name)) == "running"
    other.close()


def test_signs_take_no_open_files():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = len([*Path("/proc/self/fd").iterdir()])
    resource.setrlimit(resource.RLIMIT_NOFILE, (there + 10, limits[1]))
    try:
        signs = [life.Sign() for _ in range(30)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for sign in signs:
        told = life.own()._replace(sign=sign.name)
        assert life.look(os.getpid(), told) == "running"
        sign.close()
        assert life.look(os.getpid(), told) == "closed"


def test_who_starts_another_program_has_closed_its_signs():
    sign = life.Sign()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        told = of(other)._replace(sign=sign.name)
        await_state(other.pid, told, "closed")
        other.kill()
    sign.close()


def test_where_the_system_shows_no_files_in_memory_nobody_is_said_to_have_closed(monkeypatch):
    monkeypatch.setattr(life, "_has_closed", lambda *_: True)
    assert life.Sign().name == ""


def test_files_that_cannot_be_seen_are_not_said_to_be_closed(child, monkeypatch):
    told = of(child)._replace(sign="0badcafe")
    assert life.look(child.pid, told) == "closed"

    read_text = Path.read_text

    def hidden(path, **options):
        if path.name == "maps":
            raise PermissionError
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", hidden)
    assert life.look(child.pid, told) == "running"


@pytest.fixture(params=FREEZERS)
def freezing(request, child):
    """Freezes the process by its cgroup; thaws it again."""
    with freezer(request.param, child.pid) as acts:
        yield acts


def test_a_process_that_its_cgroup_has_frozen_is_said_to_be(child, freezing):
    told, (freeze, thaw) = of(child), freezing
    for act, state in ((freeze, "frozen"), (thaw, "running"), (freeze, "frozen")):
        act()
        await_state(child.pid, told, state)


def await_state(pid, told, state):
    until_s = time.monotonic() + 10
    while life.look(pid, told) != state:
        assert time.monotonic() < until_s
        time.sleep(0.01)
