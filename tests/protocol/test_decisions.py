"""The record of a group's calls stays small."""

import torch
from kit import at_once

from torch_ros.protocol.seat import CALLS_KEPT, KNOWN_KEPT, calls_of
from torch_ros.store.txn import Read


def record_of(handle):
    group = handle._shard.group
    view = group.kv.read(Read(group.seat.own), timeout_s=5)
    return calls_of(view, group.seat), view.entries[group.seat.decisions].value


def test_calls_that_all_ranks_have_made_are_forgotten(ranks):
    trainers = ranks("trainer", 2)
    for rank, trainer in enumerate(trainers):
        trainer.register({f"w{rank}": torch.ones(4)})
    for version in range(1, CALLS_KEPT):
        at_once(*(lambda t=trainer, v=version: t.publish(v) for trainer in trainers))
        calls, value = record_of(trainers[0])
        assert len(calls) <= KNOWN_KEPT
        assert len(value) < 320 * KNOWN_KEPT
        at_once(*(trainer.unpublish for trainer in trainers))
    assert calls[-1].number == 2 * version - 1
    assert calls[-1].outcome.is_source
