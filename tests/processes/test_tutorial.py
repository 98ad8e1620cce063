"""The programs of docs/TUTORIAL.md run as printed, and survive what it does to them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from demos import descendants, read_until, rollout_that_holds_nothing, running_children

TUTORIAL = Path(__file__).parents[2] / "docs" / "TUTORIAL.md"
PROGRAM = re.compile(r'^```python title="(\w+\.py)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Reader:
    """Somebody at a step, with the programs of all steps so far and the commands of this one."""

    def __init__(self, folder, surroundings):
        self.folder = folder
        self.environment = {
            **surroundings,
            "PATH": f"{sys.exec_prefix}/bin:{surroundings['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        self.commands = []

    def come_to(self, step):
        sections = re.split(r"^## ", TUTORIAL.read_text(), flags=re.MULTILINE)[1:]
        for number, text in enumerate(sections, 1):
            for name, code in PROGRAM.findall(text):
                (self.folder / name).write_text(code)
            self.commands = "".join(COMMAND.findall(text)).splitlines()
            if number == step:
                return

    def started(self, words):
        """The one command of this step with these words, in a session of its own."""
        [command] = [line for line in self.commands if words in line]
        return subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    @contextlib.contextmanager
    def running(self, words):
        with self.started(words) as program:
            try:
                yield program
            finally:
                for pid in [*descendants(program.pid), program.pid]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def ended(self, words, codes=(0,)):
        program = self.started(words)
        output, _ = program.communicate(timeout=60)
        assert program.returncode in codes, output
        return output


@pytest.fixture
def reader(tmp_path, surroundings):
    (tmp_path / "tutorial").mkdir()
    yield Reader(tmp_path / "tutorial", surroundings)
    for pid in running_children(surroundings, r"trainer\.py"):  # orphans of a torchrun
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def follow_to(rollout, version):
    """Until it has this version, or a newer one: it passes by what comes while it is busy."""
    while int(read_until(rollout, "on the way to 8").split()[1].rstrip(":")) < version:
        pass


def kill(program, who):
    """One rank, all ranks and torchrun, or torchrun alone."""
    found = descendants(program.pid)
    torchrun = [pid for pid, command in found.items() if "torchrun" in command]
    ranks = [pid for pid, command in found.items() if "-u trainer.py" in command]
    assert (len(torchrun), len(ranks)) == (1, 2), found
    for pid in {"a rank": ranks[:1], "all": torchrun + ranks, "torchrun": torchrun}[who]:
        os.kill(pid, signal.SIGKILL)


def test_ten_lines(reader, started):
    reader.come_to(1)
    started.start(reader.folder / "ten_lines.py").finish(60)


@pytest.mark.timeout(240)
def test_a_rollout_follows_and_comes_back(reader):
    reader.come_to(2)
    with reader.running("trainer.py") as trainer:
        with reader.running("rollout.py") as rollout:
            follow_to(rollout, 2)
        with reader.running("rollout.py") as rollout:
            read_until(rollout, "on the way to 8")
            read_until(rollout, "on the way to 8")
        read_until(trainer, "version 5: loss")


@pytest.mark.timeout(300)
def test_a_trainer_that_is_killed_goes_on_from_a_rollout(reader):
    reader.come_to(2)
    follow = next(line for line in reader.commands if "rollout.py" in line)
    reader.come_to(5)
    watch = reader.commands
    reader.come_to(4)
    reader.commands += [follow, *watch]
    with reader.running("until torchrun") as trainer, reader.running("rollout.py") as rollout:
        read_until(trainer, "begins after version 0")
        follow_to(rollout, 3)
        assert "trainer" in reader.ended("torch-ros ls")
        # 1: it may be asked while the trainer waits for the rollout that reads.
        assert "trainer, rank" in reader.ended("torch-ros why", codes=(0, 1))
        last = 3
        for who in ("a rank", "all", "torchrun"):
            kill(trainer, who)
            began = int(read_until(trainer, "begins after version").split()[-1])
            assert began >= last
            last = began + 2
            follow_to(rollout, last)


@pytest.mark.timeout(240)
def test_a_trainer_begins_anew_if_it_is_killed_when_only_it_has_a_version(reader):
    reader.come_to(4)
    with reader.running("until torchrun") as trainer:
        read_until(trainer, "version 2: loss")
        with rollout_that_holds_nothing(reader.environment, "tutorial") as rollout:
            kill(trainer, "a rank")
            read_until(trainer, "nobody has a version: begins anew")
            read_until(trainer, "version 1: loss")
            rollout.stdin.write("\n")
            rollout.stdin.flush()
            read_until(rollout, "reads")
