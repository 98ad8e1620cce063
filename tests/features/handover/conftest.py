"""Handles of one model, which are closed at once when a test has ended."""

import uuid

import pytest
import torch

import torch_ros


@pytest.fixture
def opened(endpoint, linger_s):
    model, handles = "m-" + uuid.uuid4().hex[:8], []

    def open_(replica, value=0.0, **options):
        options = {"endpoint": endpoint, "timeout_s": 20, "linger_s": linger_s, **options}
        handle = torch_ros.open(model, replica=replica, **options)
        handles.append(handle)
        handle.register({"w": torch.full((4,), value)})
        return handle

    yield open_
    for handle in handles:
        handle.close(linger_s=0)
