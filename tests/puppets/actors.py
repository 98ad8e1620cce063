"""Processes with one handle each, which do as they are told; programs/actor.py has them."""

import json
import signal
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "actor.py"


class Actor:
    """A process with one handle: `tell` it what to do and `hear` its answer, or both: `ask`.

    Args:
        options: The program's options: the model, how many tensors of how many elements, and what
            `torch_ros.open` takes.
    """

    def __init__(self, started, name, environment, **options):
        given = json.dumps({"name": name, **options})
        self.name = name
        self.process = started.start(PROGRAM, given, name=name, talks=True, **environment)

    def tell(self, do, **more):
        self.process.tell(json.dumps({"do": do, **more}))

    def hear(self):
        return json.loads(self.process.hear())

    def ask(self, do, **more):
        self.tell(do, **more)
        return self.answer_of(self.hear())

    def answer_of(self, heard):
        assert "error" not in heard, (heard, self.log())
        return heard["answer"]

    def log(self):
        return self.process.log.read_text()

    def resume(self):
        self.process.signal(signal.SIGCONT)
