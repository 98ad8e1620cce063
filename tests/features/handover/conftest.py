"""Handles with a tensor of one value, of one model."""

import pytest
import torch


@pytest.fixture
def opened(opened):
    return lambda replica, value=0.0, **options: opened(
        replica, {"w": torch.full((4,), value)}, **options
    )
