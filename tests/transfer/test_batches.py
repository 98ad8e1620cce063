"""Batches: each missing block is read in one of them, with all that it needs."""

import numpy as np
import pytest
import torch

import torch_ros
from torch_ros.transfer import batches
from torch_ros.transfer.batches import Preparation


@pytest.mark.parametrize(("most_bytes", "count"), [(1, 9), (8000, 5), (1 << 20, 1)])
def test_each_block_is_read_in_one_batch_and_nothing_else_with_it(monkeypatch, most_bytes, count):
    made, prepared = [], Preparation.batches

    def noted(self, supplies, missing):
        made[:] = prepared(self, supplies, missing)
        return list(made)

    monkeypatch.setattr(Preparation, "batches", noted)
    for name in ("BATCH_BYTES", "STEP_BYTES"):
        monkeypatch.setattr(batches, name, most_bytes)
    tensors = {f"t{n}": torch.full((1000,), float(n)) for n in range(9)}
    where = f"memory://batches-{most_bytes}"
    with (
        torch_ros.open("m", endpoint=where) as source,
        torch_ros.open("m", endpoint=where) as reader,
    ):
        source.register(tensors)
        source.publish(1)
        reader.register(got := {name: torch.zeros(1000) for name in tensors})
        reader.replicate()
        reader.unpublish()
    assert len(made) == count
    assert np.concatenate([batch.blocks for batch in made]).tolist() == list(range(9))
    assert [batch.size_bytes for batch in made] == [4000 * len(batch.blocks) for batch in made]
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)
