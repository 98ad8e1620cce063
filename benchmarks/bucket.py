"""What a trainer notices of an archiver: CPU seconds and waiting per step, off and on, in one run.

A step multiplies matrices, gives the last version up, writes all tensors, and publishes; or, by
copy, writes and calls `publish_copy`. A round has some steps with an archiver that follows into a
directory, and as many with one that is open and idle; rounds begin with either by turns. CPU
seconds are of all threads of the trainer's process; waiting is the time in the calls of its handle.
Prints a row of JSON per way to publish, with the medians, in ms, and their ratios on / off.
"""

import argparse
import json
import tempfile
import threading
import time
from functools import partial
from statistics import median

import torch
from harness import Actors, Child, etcd_at, say, seconds, started

import torch_ros
import torch_ros.bucket
from torch_ros.bucket.archive import Archiver, Form
from torch_ros.errors import NotAvailable, PeerError

STEPS = 8  # with the archiver, and as many without, a round
SIDE, PRODUCTS = 1024, 60  # of a step's matrices: half a second of one core
TENSORS = 50
WAYS = ("in place", "copy")


class Steps:
    """A trainer, in a process of its own."""

    def __init__(self, model: str, way: str, size_mib: int) -> None:
        torch.set_num_threads(1)
        self._handle, self._way, self._version = torch_ros.open(model, replica="trainer"), way, 0
        elements = (size_mib << 20) // TENSORS // 2
        self._tensors = {
            f"w{n}": torch.zeros(elements, dtype=torch.bfloat16) for n in range(TENSORS)
        }
        self._matrix = torch.randn(SIDE, SIDE)
        if way == "in place":
            self._handle.register(self._tensors)
        self.steps(1)

    def steps(self, count: int) -> list[tuple[float, float]]:
        """CPU seconds of each step, and the seconds in calls of the handle."""
        found = []
        for _ in range(count):
            began_s, waited_s = time.process_time(), 0.0
            self._version += 1
            for _ in range(PRODUCTS):
                self._matrix = (self._matrix @ self._matrix).clamp_(-1, 1)
            if self._way == "in place":
                waited_s += seconds(self._handle.unpublish)
            for tensor in self._tensors.values():
                tensor.fill_(self._version)
            waited_s += seconds(self._publish)
            found.append((time.process_time() - began_s, waited_s))
        return found

    def _publish(self) -> None:
        if self._way == "in place":
            self._handle.publish(self._version)
        else:
            self._handle.publish_copy(self._version, self._tensors)

    def close(self) -> None:
        self._handle.close(linger_s=0)


class Follow:
    """An archiver, in a process of its own, that follows or does nothing."""

    def __init__(self, model: str, folder: str) -> None:
        torch.set_num_threads(1)
        self._handle = torch_ros.open(model, replica="archiver", spot=True)
        bucket = torch_ros.bucket.open(folder, model)
        form = Form(deltas=0)  # all bytes, each time
        self._archiver = Archiver(self._handle, bucket, keep=1, grace_s=60, form=form)
        self._ends, self._thread, self._count = threading.Event(), threading.Thread(), 0

    def begin(self) -> None:
        self._ends.clear()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        while not self._ends.is_set():
            try:
                if self._archiver.archive(lambda *_: None) is None:
                    self._ends.wait(0.05)
                    continue
            except (NotAvailable, PeerError):  # the version went
                continue
            self._count += 1
            self._archiver.collect()

    def end(self) -> int:
        """How many versions it has written, of all."""
        self._ends.set()
        self._thread.join()
        return self._count

    def close(self) -> None:
        self._handle.close(linger_s=0)


def trainer(model: str, way: str, size_mib: int) -> Actors:
    return {"trainer": Steps(model, way, size_mib)}


def archiver(model: str, folder: str) -> Actors:
    return {"archiver": Follow(model, folder)}


def round_of(steps: Child, follow: Child, is_on: bool) -> list[tuple[float, float]]:
    if is_on:
        follow.ask("archiver", "begin")
    found: list[tuple[float, float]] = steps.ask("trainer", "steps", STEPS)
    if is_on:
        follow.ask("archiver", "end")
    return found


def measured(way: str, size_mib: int, rounds: int, folder: str) -> dict[str, object]:
    model = f"bench-bucket-{way.replace(' ', '-')}"
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    builds = {
        "trainer": partial(trainer, model, way, size_mib),
        "archiver": partial(archiver, model, folder),
    }
    with started(builds) as (steps, follow):
        for number in range(rounds + 1):
            for is_on in (True, False) if number % 2 else (False, True):
                sample = round_of(steps, follow, is_on)
                if number:
                    found[is_on] += sample
            say(f"  {way}: round {number} of {rounds}" if number else f"  {way}: warm-up")
        written = follow.ask("archiver", "end")
    row: dict[str, object] = {"way": way, "size_mib": size_mib, "steps": rounds * STEPS}
    row["archived"] = written
    for position, name in enumerate(("cpu", "wait")):
        off, on = (median(each[position] for each in found[is_on]) for is_on in (False, True))
        row |= {f"{name}_off_ms": round(1e3 * off, 2), f"{name}_on_ms": round(1e3 * on, 2)}
        row[f"{name}_ratio"] = round(on / off, 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="of the bucket; by default a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder, etcd_at("local"):
        for way in WAYS:
            print(json.dumps(measured(way, given.size_mib, given.rounds, folder)), flush=True)


if __name__ == "__main__":
    main()
