"""A trainer for tests of installs."""

import pytest
from kit import published


@pytest.fixture
def trainer(opened):
    handle = opened("trainer")
    published(handle, 1)
    return handle
