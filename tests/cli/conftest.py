"""A store, a model in it, and commands that are asked about them in this process."""

import uuid
from contextlib import closing

import pytest
from crowd import Crowd

from torch_ros.store.endpoint import connect


@pytest.fixture
def store(endpoint):
    with closing(connect(endpoint, timeout_s=10)) as kv:
        yield kv


@pytest.fixture
def crowd(store):
    """A model with a trainer that has published version 1."""
    crowd = Crowd(store, "m-" + uuid.uuid4().hex[:8])
    crowd.join("trainer")
    crowd.publish("trainer", 1)
    crowd.commit()
    return crowd
