"""Which content a reader has, and which the source has deltas from: real publishers and readers."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from features.deltas.changing import FAR, assert_same, first, publish, step


@pytest.fixture
def pair(opened):
    """A trainer, and a rollout to which it is far."""
    return opened("trainer", digests="full"), opened("rollout", digests="full", costs=FAR)


def test_versions_that_are_further_back_than_deltas_are_kept_are_read_in_full(pair):
    trainer, rollout = pair
    tensors, found = first(trainer, rollout)
    for newest, via, links in ((2, "delta", 2), (5, "full", 0), (7, "delta", 2)):
        for version in range(rollout.version + 1, newest + 1):
            step(tensors, version)
            publish(trainer, version, tensors, deltas=2)
        rollout.update()
        assert (rollout.last_read.via, rollout.last_read.links) == (via, links)
        assert_same(found, tensors)


def test_what_a_trainer_that_has_gone_published_is_no_base_for_the_next_one(pair, opened):
    trainer, rollout = pair
    tensors, found = first(trainer, rollout)
    trainer.close()
    other = opened("next", digests="full")
    publish(other, 1, tensors)
    for version, via in ((2, "full"), (3, "delta")):
        step(tensors, version)
        publish(other, version, tensors)
        rollout.update()
        assert rollout.last_read.via == via
        assert_same(found, tensors)


def test_tensors_that_overlap_are_read_in_full(pair):
    trainer, rollout = pair
    theirs, mine = torch.randn(3000), torch.zeros(3000)
    views = lambda whole: {"a": whole[:2000], "b": whole[1000:]}
    publish(trainer, 0, views(theirs))
    rollout.register(views(mine))
    rollout.replicate()
    theirs[::1000] += 1
    publish(trainer, 1, views(theirs))
    rollout.update()
    assert rollout.last_read.via == "full"
    assert torch.equal(mine, theirs)


@pytest.mark.long
def test_a_reader_follows_a_trainer_that_does_not_wait_for_it(pair):
    trainer, rollout = pair
    tensors, found = first(trainer, rollout)
    contents, ways = {}, Counter()

    def train():
        for version in range(1, 41):
            step(tensors, version)
            contents[version] = {name: tensor.clone() for name, tensor in tensors.items()}
            trainer.publish_copy(version, tensors, deltas=3)
            time.sleep(0.02 * (version % 3))

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        while rollout.version != 40:
            if training.done():
                training.result()
            if rollout.update():
                ways[rollout.last_read.via] += 1
                assert_same(found, contents[rollout.version])
    assert ways["delta"] >= 5, ways
