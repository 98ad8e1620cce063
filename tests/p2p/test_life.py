"""The state of a process that was once told of, as this host shows it."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from torch_ros.p2p import life
from torch_ros.p2p.voucher import started_at


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


def test_a_number_that_no_process_can_have_is_gone():
    assert life.look(2**63 - 1, life.own()) == "gone"


def test_a_process_that_proc_hides_is_not_said_to_be_gone(child, monkeypatch):
    told = of(child)
    read_text = Path.read_text

    def hidden(path):
        if str(path) == f"/proc/{child.pid}/stat":
            raise PermissionError
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", hidden)
    assert life.look(child.pid, told) == "hidden"
