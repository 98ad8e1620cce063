"""Jobs of one rank or several, which save, load and follow one model; programs/jobs.py has them."""

import json
import time
import uuid
from pathlib import Path

RANKS_S = 90.0
PROGRAMS = Path(__file__).parent / "programs"
PROGRAM = PROGRAMS / "jobs.py"


class Jobs:
    """The jobs of one test.

    Args:
        folder: Where they say how far they are.
    """

    def __init__(self, endpoint, folder, started):
        self.model, self.folder, self.started = "m-" + uuid.uuid4().hex[:8], folder, started
        self.environment = {"TORCH_ROS_ENDPOINT": endpoint}

    def start(self, job, **arguments):
        """A job of one process."""
        return self.started.start(PROGRAM, *self._arguments(job, arguments), **self.environment)

    def run_ranks(self, count, job, **arguments):
        """A job of ranks that meet over gloo, until all have ended well."""
        command = PROGRAM, *self._arguments(job, arguments)
        ranks = self.started.start_ranks(count, *command, **self.environment)
        deadline = time.monotonic() + RANKS_S
        while any(rank.poll() is None for rank in ranks):
            for rank in ranks:  # one that fails is told before the others wait for it in vain
                assert rank.poll() in (None, 0), rank.end_of_log()
            assert time.monotonic() < deadline, "\n".join(rank.end_of_log() for rank in ranks)
            time.sleep(0.01)
        for rank in ranks:
            rank.finish()

    def path(self, name):
        return Path(self.folder, name)

    def await_path(self, name, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while not self.path(name).exists():
            for puppet in self.started.started:
                assert puppet.poll() in (None, 0, -9), puppet.end_of_log()
            assert time.monotonic() < deadline, f"{name} did not appear"
            time.sleep(0.01)

    def _arguments(self, job, arguments):
        return job, json.dumps({"model": self.model, **arguments})
