"""A feature of one's own is told of what happens, and takes part in copies and in updates."""

import pytest
import torch
from kit import inside, memory

from torch_ros.shard.report import Via
from torch_ros.shard.seams import Feature
from torch_ros.transfer.attending import Attendant

endpoint = pytest.fixture(memory)


@pytest.fixture
def opened_with():
    return {"digests": "full"}


class Told(Feature):
    """Notes each event."""

    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if name in ("registers", "gives_up", "overwrites", "closes", "has_closed"):
            return lambda: self.events.append(name)
        return super().__getattribute__(name)


def test_a_feature_is_told_what_becomes_of_tensors_and_of_the_handle(opened):
    trainer, rollout, told = opened("trainer", {"w": torch.ones(3)}), opened("rollout"), Told()
    trainer.publish(1)
    inside(rollout).attach(told)
    rollout.register({"w": torch.zeros(3)})
    rollout.replicate()
    rollout.unpublish()
    rollout.unregister()
    rollout.close()
    expected = ["registers", "overwrites", "gives_up", "gives_up", "closes", "has_closed"]
    assert told.events == expected


class Attending(Attendant):
    """Shows a pool of its own beside the copy."""

    def __init__(self):
        self.events, self.memory = [], torch.arange(8.0)

    def begins(self, chunks, objects):
        self.events.append(("begins", [fqn for fqn, _ in chunks], dict(objects)))

    def pool(self, copy_bytes):
        self.events.append(("pool", copy_bytes > 0))
        return self.memory

    def shown(self, registered):
        self.events.append(("shown", registered.memory[0].tolist()))

    def more(self, uid, *, is_offered):
        self.events.append(("more", is_offered))
        return {"there": self.memory.data_ptr()}

    def published(self, uid, *, is_offered):
        self.events.append(("published", is_offered))


class Attends(Feature):
    def __init__(self):
        self.attending = Attending()

    def attend(self, copying, version):
        return self.attending


def test_who_attends_a_copy_is_told_of_it_in_order_and_shows_more_beside_it(opened):
    trainer, feature = opened("trainer"), Attends()
    inside(trainer).attach(feature)
    trainer.publish_copy(1, {"w": torch.ones(3)})
    assert feature.attending.events == [
        ("begins", ["w"], {}),
        ("pool", True),
        ("shown", [1.0] * 3),
        ("more", True),
        ("published", True),
    ]
    place = feature.attending.memory.data_ptr()
    assert inside(trainer).mailbox.manifest.more == {"there": place}
    regions = inside(trainer).mailbox.regions
    assert any(each.address <= place < each.address + each.size_bytes for each in regions)


class Fills(Feature):
    """Adds one to what was held, instead of reading."""

    def __init__(self):
        self.offset, self.bases, self.was_wrong = 1.0, [], 0

    def fill(self, progress, change, watch):
        if change is None:
            return None
        self.bases.append(change.base.ref.version)
        for tensor in progress.target.phases[-1].memory:
            tensor += self.offset
        progress.fill(0)
        return Via(base=change.base.ref.version)

    def has_read_wrong(self):
        self.was_wrong += 1


@pytest.mark.parametrize("offset", [1.0, 2.0])
def test_what_a_feature_has_made_of_what_was_there_is_compared_with_what_was_published(
    opened, offset
):
    trainer, rollout, feature = opened("trainer"), opened("rollout"), Fills()
    source, target = torch.ones(300), torch.zeros(300)
    trainer.register({"w": source})
    rollout.register({"w": target})
    inside(rollout).attach(feature)
    trainer.publish(1)
    rollout.replicate()
    assert feature.bases == []  # nothing was there
    trainer.unpublish()
    source += 1
    trainer.publish(2)
    feature.offset = offset
    assert rollout.update()
    assert torch.equal(source, target)
    is_wrong = offset != 1
    assert (feature.bases, feature.was_wrong) == ([1], int(is_wrong))
    read = rollout.last_read
    assert (read.base, read.bytes_read > 0) == ((None, True) if is_wrong else (1, False))
