import pytest
from kit import memory

import torch_ros


@pytest.fixture
def handles():
    """A trainer and a rollout, in one process."""
    options = {"endpoint": memory(), "timeout_s": 10}
    with (
        torch_ros.open("m", replica="trainer", **options) as trainer,
        torch_ros.open("m", replica="rollout", **options) as rollout,
    ):
        yield trainer, rollout
