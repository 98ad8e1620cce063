"""The kit itself: a fork of the warm parent is what a process of its own would be."""

import os
import signal
from pathlib import Path

import pytest

from puppets.puppet import is_readable

TALK = """
import atexit, os, sys, threading
print(__name__, sys.argv[1:], os.environ["WHO"], "torch" in sys.modules, "grpc" in sys.modules)
atexit.register(print, "at the exit", file=sys.stderr)
threading.Thread(target=lambda: print("heard", sys.stdin.readline().strip())).start()
"""


def test_it_runs_as_a_script_does_and_ends_as_one(started):
    puppet = started.start(TALK, 1, "two", talks=True, WHO="me")
    assert puppet.hear() == "__main__ ['1', 'two'] me True False"
    assert puppet.poll() is None
    assert os.getsid(puppet.pid) == puppet.pid
    puppet.tell("a", 1)
    assert puppet.hear() == "heard a 1"
    puppet.finish()
    assert puppet.end_of_log() == "at the exit\n"


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; print('said'); os.abort()", -6, ""),
    ],
)
def test_its_end_is_known(started, program, code, words):
    puppet = started.start(program)
    assert puppet.wait(30) == code
    assert words in puppet.end_of_log()


def test_what_it_prints_is_in_its_log_unless_it_talks(started):
    puppet = started.start("print('said')")
    puppet.finish()
    assert puppet.end_of_log() == "said\n"


def test_it_is_stopped_and_goes_on(started):
    puppet = started.start("import os, signal\nwhile True: os.kill(os.getpid(), signal.SIGSTOP)")
    for _ in range(2):
        puppet.await_stop()
        puppet.signal(signal.SIGCONT)
    puppet.kill()
    assert puppet.returncode == -signal.SIGKILL


def test_a_puppet_that_does_not_end_is_said_to_run(started):
    puppet = started.start("import time; time.sleep(60)")
    with pytest.raises(TimeoutError, match=f"process {puppet.pid} runs"):
        puppet.wait(0.01)


def test_a_rank_knows_which_it_is(started):
    ranks = started.start_ranks(
        2,
        "import torch.distributed as d; d.init_process_group('gloo'); print(d.get_rank(), 'of', "
        "d.get_world_size()); d.barrier(); d.destroy_process_group()",
    )
    for rank in ranks:
        rank.finish()
    assert [rank.end_of_log() for rank in ranks] == ["0 of 2\n", "1 of 2\n"]


@pytest.mark.long
def test_a_puppet_ends_with_the_tests_that_started_it(started):
    tests = started.start(STARTER, Path(__file__).parents[1], started.folder, talks=True)
    puppet = os.pidfd_open(int(tests.hear()))
    tests.kill()
    assert is_readable(puppet, 20)
    os.close(puppet)


STARTER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from puppets import Puppets
puppet = Puppets(sys.argv[2]).start("import time; time.sleep(60)", name="other")
print(puppet.pid, flush=True)
time.sleep(60)
"""
