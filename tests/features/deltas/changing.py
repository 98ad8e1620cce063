"""A trainer that makes deltas, and what reads them."""

import itertools
import threading
import uuid
from contextlib import contextmanager

import torch
from kit import until

import torch_ros
from torch_ros.features.deltas import making
from torch_ros.features.deltas.reading import DeltaRead

FAR = torch_ros.Costs(read_bytes_per_s=1e7)  # so that deltas are faster, and waited for


def weights():
    return {"w": torch.randn(400, 1000).bfloat16(), "b": torch.randn(5), "s": torch.tensor(1.0)}


def step(tensors, version):
    """Change few elements; among them NaN and -0.0."""
    places = torch.randint(0, tensors["w"].numel(), (2000,))
    tensors["w"].view(-1)[places] += 1
    tensors["b"][version % 5] = (float("nan"), -0.0, 0.0)[version % 3]
    tensors["s"] += 1


def assert_same(found, expected):
    for name, tensor in expected.items():
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (found[name], tensor)]
        assert torch.equal(*bits), name


def write_astray(found, tensors):
    """Where no delta has anything, which would write over it."""
    same = (found["w"] == tensors["w"]).view(-1).nonzero()[0]
    found["w"].view(-1)[same] += 1


def copies(trainer):
    """The maker of its deltas."""
    return trainer._deltas.copies


def made(trainer):
    """Wait until its delta is made: the next save would end that."""
    current = copies(trainer)._making
    until(lambda: current is None or current.has_ended, pause_s=0.001)


def publish(trainer, version, tensors, deltas=8):
    trainer.publish_copy(version, tensors, deltas=deltas)
    made(trainer)


def first(trainer, rollout):
    tensors = weights()
    publish(trainer, 0, tensors)
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    rollout.register(found)
    rollout.replicate()
    return tensors, found


def options(endpoint):
    return {"endpoint": endpoint, "digests": "full", "timeout_s": 20}


def pair(options):
    model = "m-" + uuid.uuid4().hex[:8]
    trainer = torch_ros.open(model, replica="trainer", **options)
    rollout = torch_ros.open(model, replica="rollout", costs=FAR, **options)
    yield trainer, rollout
    rollout.close()
    trainer.close()


@contextmanager
def being_made(trainer, monkeypatch):
    """Within, deltas are made when the event that it yields is set, unless they are cut off."""
    made, was = threading.Event(), making.compare

    def compare(older, newer):
        current = copies(trainer)._making
        while not (current.is_told_to_stop or made.wait(0.01)):
            pass
        return was(older, newer)

    with monkeypatch.context() as patched:
        patched.setattr(making, "compare", compare)
        try:
            yield made
        finally:
            made.set()


@contextmanager
def looks(monkeypatch, count, then):
    """Within, `then` is called before the look at a source's tables that has this number."""
    was, numbers = DeltaRead._tables, itertools.count(1)

    def tables(self):
        if next(numbers) == count:
            then()
        return was(self)

    with monkeypatch.context() as patched:
        patched.setattr(DeltaRead, "_tables", tables)
        yield
