"""The record of a group's calls stays small."""

import pytest
import torch
from kit import at_once, inside

from torch_ros.errors import Fenced
from torch_ros.protocol.seat import CALLS_KEPT, KNOWN_KEPT, calls_of, recall
from torch_ros.store.txn import Read


def seen_by(handle):
    group = inside(handle).group
    return group.kv.read(Read(group.seat.own), timeout_s=5), group.seat


def record_of(handle):
    view, seat = seen_by(handle)
    return calls_of(view, seat), view.entries[seat.decisions].value


def test_calls_that_all_ranks_have_made_are_forgotten(ranks):
    trainers = ranks("trainer", 2)
    for rank, trainer in enumerate(trainers):
        trainer.register({f"w{rank}": torch.ones(4)})
    for version in range(1, CALLS_KEPT):
        at_once(*(lambda t=trainer, v=version: t.publish(v) for trainer in trainers))
        calls, value = record_of(trainers[0])
        assert len(calls) <= KNOWN_KEPT
        assert len(value) < 400 * KNOWN_KEPT  # with the ids of a trace, where one is made
        at_once(*(trainer.unpublish for trainer in trainers))
    assert calls[-1].number == 2 * version - 1
    assert calls[-1].outcome.is_source


def test_a_call_that_is_forgotten_is_not_decided_again_however_few_are_remembered(ranks):
    [trainer] = ranks("trainer", 1)
    trainer.register({"w": torch.ones(4)})
    for version in range(KNOWN_KEPT):
        trainer.publish(version)
        trainer.unpublish()
    view, seat = seen_by(trainer)
    known = [call.number for call in calls_of(view, seat)]
    assert len(known) < CALLS_KEPT
    for number in range(1, known[0]):
        with pytest.raises(Fenced, match="older than the calls that the group remembers"):
            recall(view, seat, number)
    assert [recall(view, seat, number).number for number in known] == known
    assert recall(view, seat, known[-1] + 1) is None
