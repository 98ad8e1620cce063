"""Spans of any size are read in parts of a bounded one."""

import random

import numpy as np
import torch

import torch_ros
from torch_ros.exchange import READ_BYTES, _cut


def test_spans_are_cut_as_a_loop_would():
    rng = random.Random(0)
    for _ in range(300):
        rows = []
        for _ in range(rng.randrange(1, 5)):
            size = rng.choice((1, 2, 3)) * READ_BYTES + rng.choice((-1, 0, 1, -(READ_BYTES // 2)))
            rows.append((rng.randrange(2**40), 2**63 + rng.randrange(2**40), size))
        expected = [
            (source + done, target + done, min(READ_BYTES, size - done))
            for source, target, size in rows
            for done in range(0, size, READ_BYTES)
        ]
        assert _cut(np.array(rows, np.uint64)).tolist() == [list(row) for row in expected]


def test_a_tensor_larger_than_a_batch_arrives(etcd_endpoint):
    sent = torch.arange((READ_BYTES * 2 + 4096) // 4, dtype=torch.int32)
    got = torch.zeros_like(sent)
    with (
        torch_ros.open("large", endpoint=etcd_endpoint, replica="trainer") as trainer,
        torch_ros.open("large", endpoint=etcd_endpoint, replica="rollout") as rollout,
    ):
        trainer.register({"w": sent})
        trainer.publish(1)
        rollout.register({"w": got})
        rollout.replicate()
        assert torch.equal(sent, got)
