"""The programs of docs/TUTORIAL.md run as printed, and survive what it does to them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from demos import descendants, read_until

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

    def ended(self, words):
        program = self.started(words)
        output, _ = program.communicate(timeout=60)
        assert program.returncode == 0, output
        return output


@pytest.fixture
def reader(tmp_path, surroundings):
    (tmp_path / "tutorial").mkdir()
    return Reader(tmp_path / "tutorial", surroundings)


def kill(program, named):
    """All processes of it whose command has this name."""
    found = [pid for pid, command in descendants(program.pid).items() if named in command]
    assert found
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def test_ten_lines(reader, started):
    reader.come_to(1)
    started.start(reader.folder / "ten_lines.py").finish(60)


@pytest.mark.timeout(240)
def test_a_rollout_follows_and_comes_back(reader):
    reader.come_to(2)
    with reader.running("trainer.py") as trainer:
        with reader.running("rollout.py") as rollout:
            read_until(rollout, "version 2: ")
        with reader.running("rollout.py") as rollout:
            read_until(rollout, "on the way to 8")
            read_until(rollout, "on the way to 8")
        read_until(trainer, "version 5: loss")


@pytest.mark.timeout(240)
def test_a_rollout_reads_what_ranks_save(reader):
    reader.come_to(2)
    commands = reader.commands
    reader.come_to(4)
    reader.commands += commands
    with reader.running("torchrun") as trainer, reader.running("python rollout.py") as rollout:
        read_until(trainer, "version 2: loss")
        read_until(rollout, "version 3: ")


@pytest.mark.timeout(300)
def test_a_trainer_that_is_killed_goes_on_from_a_rollout(reader):
    reader.come_to(2)
    follow = next(line for line in reader.commands if "rollout.py" in line)
    reader.come_to(6)
    watch = reader.commands
    reader.come_to(5)
    reader.commands += [follow, *watch]
    with reader.running("until torchrun") as trainer, reader.running("rollout.py") as rollout:
        read_until(trainer, "begins after version 0")
        read_until(rollout, "version 3: ")
        assert "trainer" in reader.ended("torch-ros ls")
        assert "trainer, rank 1: host" in reader.ended("torch-ros why")
        kill(trainer, "trainer.py")  # torchrun's command has this word, too
        began = int(read_until(trainer, "begins after version").split()[-1])
        assert began >= 3
        read_until(rollout, f"version {began + 2}: ")
