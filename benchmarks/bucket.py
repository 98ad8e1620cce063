"""What a trainer notices of an archiver: CPU seconds and waiting per step, off and on, in one run.

A step multiplies matrices, gives the last version up, writes all tensors, and publishes; or, by
copy, writes and calls `publish_copy`. A round has some steps without an archiver, as many with one
that follows into a directory, and as many while one follows another model: as much work on the same
machine, which has nothing to do with the trainer. Rounds begin with each by turns. CPU seconds are
of all threads of the trainer's process; waiting is the time in the calls of its handle.
Prints a row of JSON per way to publish, with the medians, in ms, and their ratios to those without.
"""

import argparse
import json
import tempfile
import threading
import time
from functools import partial
from statistics import median

import torch
from harness import Actors, etcd_at, say, seconds, started

import torch_ros
import torch_ros.bucket
from torch_ros.bucket.archive import Archiver, Form
from torch_ros.errors import NotAvailable, PeerError

STEPS = 8  # of each kind, a round
KINDS = ("off", "on", "other")
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

    def steps(self, count: int) -> list[tuple[float, float, float]]:
        """CPU seconds of each step, the seconds in calls of the handle, and in all."""
        found = []
        for _ in range(count):
            began_s, waited_s, at_s = time.process_time(), 0.0, time.perf_counter()
            self._version += 1
            for _ in range(PRODUCTS):
                self._matrix = (self._matrix @ self._matrix).clamp_(-1, 1)
            if self._way == "in place":
                waited_s += seconds(self._handle.unpublish)
            for tensor in self._tensors.values():
                tensor.fill_(self._version)
            waited_s += seconds(self._publish)
            cpu_s, all_s = time.process_time() - began_s, time.perf_counter() - at_s
            found.append((cpu_s, waited_s, all_s))
        return found

    def _publish(self) -> None:
        if self._way == "in place":
            self._handle.publish(self._version)
        else:
            self._handle.publish_copy(self._version, self._tensors)

    def close(self) -> None:
        self._handle.close(linger_s=0)


class Work:
    """Something that a thread does again and again, from `begin` to `end`."""

    def __init__(self) -> None:
        self._ends, self._thread, self._count = threading.Event(), threading.Thread(), 0

    def begin(self, period_s: float) -> None:
        self._ends.clear()
        self._thread = threading.Thread(target=self._work, args=(period_s,))
        self._thread.start()

    def _work(self, period_s: float) -> None:
        raise NotImplementedError

    def end(self) -> int:
        """How often it was done, in all."""
        self._ends.set()
        self._thread.join()
        return self._count


class Publish(Work):
    """Publishes tensors that nobody changes, in a process of its own, as often as a trainer."""

    def __init__(self, model: str, size_mib: int) -> None:
        super().__init__()
        elements = (size_mib << 20) // TENSORS // 2
        self._handle = torch_ros.open(model, replica="trainer")
        self._handle.register(
            {f"w{n}": torch.zeros(elements, dtype=torch.bfloat16) for n in range(TENSORS)}
        )

    def _work(self, period_s: float) -> None:
        while not self._ends.wait(period_s):
            self._handle.unpublish()
            self._count += 1
            self._handle.publish(self._count)

    def close(self) -> None:
        self._handle.close(linger_s=0)


class Follow(Work):
    """An archiver, in a process of its own, that follows or does nothing."""

    def __init__(self, model: str, folder: str) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self._handle = torch_ros.open(model, replica="archiver", spot=True)
        bucket = torch_ros.bucket.open(folder, model)
        form = Form(deltas=0)  # all bytes, each time
        self._archiver = Archiver(self._handle, bucket, keep=1, grace_s=60, form=form)

    def _work(self, _: float) -> None:
        while not self._ends.is_set():
            try:
                if self._archiver.archive(lambda *_: None) is None:
                    self._ends.wait(0.05)
                    continue
            except (NotAvailable, PeerError):  # the version went
                continue
            self._count += 1
            self._archiver.collect()

    def close(self) -> None:
        self._handle.close(linger_s=0)


def trainer(model: str, way: str, size_mib: int) -> Actors:
    return {"trainer": Steps(model, way, size_mib)}


def other_trainer(model: str, size_mib: int) -> Actors:
    return {"work": Publish(model, size_mib)}


def archiver(model: str, folder: str) -> Actors:
    return {"work": Follow(model, folder)}


def measured(way: str, size_mib: int, rounds: int, folder: str) -> dict[str, object]:
    model = f"bench-bucket-{way.replace(' ', '-')}"
    other = f"{model}-other"
    builds = {
        "trainer": partial(trainer, model, way, size_mib),
        "archiver": partial(archiver, model, folder),
        "other trainer": partial(other_trainer, other, size_mib),
        "other archiver": partial(archiver, other, folder),
    }
    found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in KINDS}
    with started(builds) as (steps, follow, *others):
        works = {"off": [], "on": [follow], "other": others}
        period_s = 1.0
        for number in range(rounds + 1):
            for kind in (*KINDS[number % 3 :], *KINDS[: number % 3]):
                for work in works[kind]:
                    work.ask("work", "begin", period_s)
                sample = steps.ask("trainer", "steps", STEPS)
                for work in works[kind]:
                    work.ask("work", "end")
                period_s = median(all_s for _, _, all_s in sample)
                if number:
                    found[kind] += sample
            say(f"  {way}: round {number} of {rounds}" if number else f"  {way}: warm-up")
        archived = [work.ask("work", "end") for work in (follow, others[-1])]
    row: dict[str, object] = {"way": way, "size_mib": size_mib, "steps": rounds * STEPS}
    row |= {"archived": archived[0], "archived_other": archived[1]}
    for position, name in enumerate(("cpu", "wait")):
        middle = {kind: median(each[position] for each in found[kind]) for kind in KINDS}
        row |= {f"{name}_{kind}_ms": round(1e3 * middle[kind], 2) for kind in KINDS}
        row |= {
            f"{name}_{kind}_ratio": round(middle[kind] / middle["off"], 3) for kind in KINDS[1:]
        }
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
