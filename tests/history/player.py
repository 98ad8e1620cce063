"""One process of the workload, which writes down all it does. Run, never imported:

python player.py '{"who": "r1", "rank": 0, ...}'

The trainer publishes one version after another from the same tensors; rollouts follow `latest`
into theirs and check every word. A version's number is never used twice, whatever happens to its
publisher, so a word tells for certain when it was written.
"""

import faulthandler
import json
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pattern import Pattern
from verdict import GIVEN_UP

import torch_ros
from torch_ros import errors
from torch_ros.protocol.keys import replica_of

TENSORS, WORDS = 12, 2 << 20  # of 16 MiB each: a transfer of three batches
CALL_S = 6.0
OPEN_S = 20.0
STEP_S = 0.7
LOOK_S = 1.0  # rollouts wait that long for news, then ask anyway
RETRY_S = 0.1
FAILED = object()


@dataclass(frozen=True)
class Part:
    """What this process is in the workload."""

    who: str
    rank: int
    ranks: int
    life: int
    model: str
    endpoint: str
    folder: str
    retain: list[str]
    spot: bool
    ttl_s: int
    drain_s: float
    huge_pages: bool

    @property
    def tensors(self):
        """The numbers of the tensors that this rank has."""
        return range(TENSORS * self.rank // self.ranks, TENSORS * (self.rank + 1) // self.ranks)


class Player:
    def __init__(self, part):
        self.part = part
        self.is_over = False
        self.handle = None
        self.number = 0
        self.learned = {}
        name = f"{part.who}-{part.rank}"
        self.file = Path(part.folder, f"{name}.jsonl").open("ab", buffering=0)  # noqa: SIM115  # until the end
        self.counter = Path(part.folder, f"{name}.version")
        self.torch = {n: torch.zeros(WORDS, dtype=torch.int64) for n in part.tensors}
        self.words = {n: t.numpy().view(np.uint64) for n, t in self.torch.items()}
        self.pattern = Pattern(WORDS)

    # The history

    def note(self, event, **more):
        """One line, written at once: what a killed process did last is there."""
        line = {"at": time.monotonic(), "life": self.part.life, "event": event, **more}
        self.file.write((json.dumps(line) + "\n").encode())

    def attempt(self, call, ask, timeout_s=CALL_S):
        """What the call answers, or FAILED; both written down."""
        self.number += 1
        self.note("begin", n=self.number, call=call, timeout_s=timeout_s)
        answer, error = FAILED, None
        try:
            answer = ask()
        except errors.TorchRosError as raised:
            error = raised
        self.note(
            "end",
            n=self.number,
            call=call,
            answer=None if answer is FAILED or call == "open" else answer,
            error=type(error).__name__ if error else "",
            text=str(error) if error else "",
            version=self.handle.version if self.handle else None,
            group=self.new_ends(),
        )
        is_lost = isinstance(error, errors.Fenced)
        if self.handle is not None and (is_lost or isinstance(error, errors.ClosedError)):
            self.close()
        return answer

    def new_ends(self):
        """How calls of the group ended, as far as this rank has learned since it said so last."""
        if self.handle is None:
            return None
        group = self.handle._shard.group
        news = []
        for call in list(group.ledger.ended):
            failure = call.outcome.failure
            end = [f"{call.asked}", call.ref.version if call.ref else None]
            # Its own note, upon which nobody has acted: any other end that somebody knows counts.
            is_given_up = failure is not None and failure.kind == errors.CutOff.__name__
            end.append(GIVEN_UP if is_given_up else failure.kind if failure else "")
            if self.learned.get(call.number) != end:
                self.learned[call.number] = end
                news.append([call.number, *end])
        return {
            "family": group.seat.nonce.partition(".")[0],
            "seat": group.seat.nonce,
            "ends": news,
        }

    # The handle

    def open(self):
        part = self.part

        def ask():
            return torch_ros.open(
                part.model,
                endpoint=part.endpoint,
                replica=part.who,
                rank=part.rank,
                world_size=part.ranks,
                retain=part.retain,
                spot=part.spot,
                ttl_s=part.ttl_s,
                drain_s=part.drain_s,
                huge_pages=part.huge_pages,
                timeout_s=OPEN_S,
            )

        handle = self.attempt("open", ask, OPEN_S)
        if handle is FAILED:
            return FAILED
        self.handle, self.learned = handle, {}
        handle.register({f"w{number}": tensor for number, tensor in self.torch.items()})
        return None

    def close(self):
        handle, self.handle = self.handle, None
        self.attempt("close", handle.close, 0.0)

    def play(self, scene):
        while not self.is_over:
            if (self.open() if self.handle is None else scene()) is FAILED:
                time.sleep(RETRY_S)
        if self.handle is not None:
            self.close()
        self.note("over")

    # What trainers and rollouts do

    def train(self):
        """One step."""
        started_s = time.monotonic()
        if self.attempt("unpublish", lambda: self.handle.unpublish(timeout_s=CALL_S)) is FAILED:
            return FAILED  # the tensors are not ours yet
        version = 1 + int(self.counter.read_text() if self.counter.exists() else 0)
        draft = self.counter.with_suffix(".draft")
        draft.write_text(str(version))
        draft.replace(self.counter)
        self.pattern.fill(self.words, version)
        publish = lambda: self.handle.publish(version, timeout_s=CALL_S)
        if self.attempt(f"publish {version}", publish) is FAILED:
            return FAILED
        time.sleep(max(0.0, started_s + STEP_S - time.monotonic()))
        return None

    def follow(self):
        """Look for news and take them; leave the version now and then, and come back to it."""
        handle, held = self.handle, self.handle.version
        is_news = lambda there: max(there, default=-1) > (-1 if held is None else held)
        self.attempt("wait", lambda: sorted(handle.wait(is_news, timeout_s=LOOK_S)), LOOK_S)
        if self.handle is None:
            return FAILED
        changed = self.attempt("update", lambda: handle.update("latest", timeout_s=CALL_S))
        if changed is not True:
            return changed
        self.verify()
        if handle.version % 4:
            return None
        if self.attempt("unpublish", lambda: handle.unpublish(timeout_s=CALL_S)) is FAILED:
            return FAILED
        self.pattern.fill(self.words, 0)  # the tensors are ours; whoever reads them still sees that
        replicate = lambda: handle.replicate("latest", timeout_s=CALL_S)
        if self.attempt("replicate", replicate) is FAILED:
            return FAILED
        self.verify()
        return None

    def verify(self):
        version = self.handle.version
        source = replica_of(self.handle.last_read.source)
        torn = self.pattern.torn(self.words, version)
        reroutes = self.handle.last_read.reroutes
        self.note("verified", version=version, torn=torn, source=source, reroutes=reroutes)


class Clock(logging.Formatter):
    """The same clock as in the histories."""

    def formatTime(self, record, datefmt=None):  # noqa: N802  # logging's name
        return f"{time.monotonic():.3f}"


def main():
    torch.set_num_threads(1)
    log = logging.StreamHandler()
    log.setFormatter(Clock("%(asctime)s %(levelname)s %(threadName)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[log])
    player = Player(Part(**json.loads(sys.argv[1])))

    def end(*_):
        player.is_over = True

    signal.signal(signal.SIGTERM, end)
    faulthandler.register(signal.SIGUSR1)  # says in the log where it hangs
    player.note("born", pid=os.getpid())
    player.play(player.train if player.part.who == "trainer" else player.follow)


if __name__ == "__main__":
    main()
