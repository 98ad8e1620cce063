"""A trainer that goes from version to version, and the ranks of a rollout that come along."""

import kit
import torch

WAIT_S = 20


def publisher(opened, version=1, name="trainer", **options):
    return kit.publisher(opened, {"w": torch.full((8,), float(version))}, version, name, **options)


def go_on(trainer, version):
    trainer.unpublish()
    kit.inside(trainer).tensors.registered.memory[0].fill_(version)
    trainer.publish(version)


def replica(ranks):
    """The ranks of a rollout. For a module: `pytest.fixture(replica)`."""
    handles = ranks("rollout")
    for handle in handles:
        handle.register({"w": torch.zeros(8)})
    return handles


def on_all(pool, handles, call):
    """The answers of all ranks, or their errors."""
    each = [pool.submit(call, handle) for handle in handles]
    return [one.exception(WAIT_S) or one.result() for one in each]
