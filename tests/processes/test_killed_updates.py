"""Rollouts that are killed while they update by deltas: what takes over their memory is whole.

TORCH_ROS_KILLS=n kills so many, by default a handful. The memory is a file that outlives them.
"""

import inspect
import os
import random
import signal
import time
from collections import Counter

import numpy as np
import pytest
import torch
from kit import until

KILLS = int(os.environ.get("TORCH_ROS_KILLS", "5"))
ELEMENTS = (3, *[1 << 22] * 8, 70_001)  # of each tensor
STAGES = ("find", "stage", "word", "scatter", "verify")
SHARE, LINKS_MAX, WITHIN_S = 0.03, 3, 60


def mapped(path, elements):
    """Tensors that lie in a file, one behind the other."""
    whole = torch.from_file(str(path), shared=True, size=sum(elements), dtype=torch.bfloat16)
    return {f"w{n}": part for n, part in enumerate(whole.split(elements))}


ROLLOUT = f"""
import os, signal, sys, time
import numpy as np
import torch
import torch_ros
from torch_ros.shard.verification import Verification
from torch_ros.features.deltas.reading import DeltaRead

{inspect.getsource(mapped)}
endpoint, model, weights, marks = sys.argv[1:]
marks = np.memmap(marks, np.float64, "r+")  # the stage it is in, when each began, where to stop

def mark(owner, name, number):
    call = getattr(owner, name)
    def marked(*args, **options):
        marks[number], marks[0] = time.monotonic(), number
        if marks[7] == number:
            os.kill(os.getpid(), signal.SIGSTOP)
        return call(*args, **options)
    setattr(owner, name, marked)

stages = DeltaRead.find, DeltaRead.stage, DeltaRead._certify, DeltaRead.scatter, Verification.digest
for number, stage in enumerate(stages, 1):
    mark(Verification if number == 5 else DeltaRead, stage.__name__, number)
far = torch_ros.Costs(read_bytes_per_s=1e7)  # so that deltas are faster, and waited for
options = {{"replica": "rollout", "digests": "full", "ttl_s": 2, "timeout_s": {WITHIN_S}}}
handle = torch_ros.open(model, endpoint=endpoint, costs=far, **options)
handle.register(mapped(weights, {ELEMENTS}))
for line in sys.stdin:
    handle.update()
    marks[6], marks[0] = time.monotonic(), 6
    print(handle.last_read.via, handle.last_read.links, handle._shard.observed.tally.corrupt)
    sys.stdout.flush()
"""


class Trainer:
    """Publishes copies, and knows what they were."""

    def __init__(self, handle, tensors):
        self.handle, self.tensors, self.version = handle, tensors, 0
        self.publish()

    def publish(self):
        options = {"deltas": LINKS_MAX, "delta_bytes": sum(ELEMENTS)}
        self.handle.publish_copy(self.version, self.tensors, **options)

    def steps(self, count, *, is_made):
        """Change some elements, and publish, so many times; the last delta may be coming."""
        for number in range(count):
            for tensor in self.tensors.values():
                places = torch.randint(0, len(tensor), (1 + int(SHARE * len(tensor)),))
                tensor.view(torch.int16)[places] ^= 1 + number
            self.version += 1
            self.publish()
            making = self.handle._deltas.copies._making
            if is_made or number + 1 < count:
                until(lambda m=making: m.has_ended, pause_s=0.0002)


def bits(tensors):
    return torch.cat([tensor.view(torch.int16) for tensor in tensors.values()])


@pytest.mark.timeout(60 + 30 * KILLS)
def test_rollouts_that_are_killed_in_an_update_leave_memory_that_the_next_one_makes_whole(
    opened, endpoint, started, tmp_path
):
    if endpoint.startswith("memory:"):
        pytest.skip("a process of its own needs etcd")
    marks_at, weights_at = tmp_path / "marks", tmp_path / "weights"
    weights_at.write_bytes(bytes(2 * sum(ELEMENTS)))
    marks = np.memmap(marks_at, np.float64, "w+", shape=8)
    found = mapped(weights_at, ELEMENTS)
    tensors = {fqn: torch.randn(len(tensor)).bfloat16() for fqn, tensor in found.items()}
    trainer = Trainer(opened("trainer", digests="full", ttl_s=2), tensors)
    struck, halves, wrong = Counter(), 0, 0

    def start():
        names = endpoint, trainer.handle.model, weights_at, marks_at
        return started.start(ROLLOUT, *names, name="rollout", talks=True)

    def update(rollout):
        rollout.tell("update")
        via, links, corrupt = rollout.hear().split()
        assert corrupt == "0", "what it took for its base was none"
        return via, int(links)

    def wrong_elements():
        return int((bits(found) != bits(trainer.tensors)).sum())

    rollout = start()
    assert update(rollout) == ("full", 0)
    trainer.steps(1, is_made=True)
    assert update(rollout) == ("delta", 1)
    assert wrong_elements() == 0
    lasted_s = dict(zip(STAGES, np.diff(marks[1:7]), strict=True))
    for _ in range(KILLS):
        base = bits(found).clone()
        trainer.steps(links := random.randint(1, LINKS_MAX), is_made=random.random() < 0.7)
        changed = base != bits(trainer.tensors)
        number, stage = random.choice([*enumerate(STAGES, 1)])
        marks[7] = number
        rollout.tell("update")
        rollout.await_stop()
        rollout.signal(signal.SIGCONT)
        time.sleep(random.uniform(0, links * lasted_s[stage]))
        rollout.kill()
        marks[7] = 0
        brought = int((bits(found) == bits(trainer.tensors))[changed].sum())
        struck[(*STAGES, "whole")[int(marks[0]) - 1]] += 1
        halves += 0 < brought < int(changed.sum())
        if random.random() < 0.3:  # the next one begins with nothing
            for tensor in found.values():
                tensor.zero_()
        rollout = start()
        assert update(rollout) == ("full", 0)
        wrong += wrong_elements()
    print(f"{KILLS} kills: {dict(struck)}, {halves} left deltas half applied, {wrong} wrong")
    trainer.steps(1, is_made=True)
    assert update(rollout) == ("delta", 1)
    assert wrong + wrong_elements() == 0
    assert KILLS < 100 or (struck.keys() >= set(STAGES) and halves)
