"""Sources over each way, in processes of their own: one suite for the ways that are ours.

TORCH_ROS_KILLS=50 has the whole numbers, another one so much of them.
"""

import os

import pytest
from features.tcp.conftest import Source

KILLS = int(os.environ.get("TORCH_ROS_KILLS", "1"))


def times(few, whole):
    """How often something is done: `few` times, unless more is asked for."""
    return few if KILLS == 1 else max(1, whole * KILLS // 50)


def over(*ways, among=("tcp", "kernel", "mapped"), fixture="way"):
    """Run a test over all ways, of which `make test` has these."""
    later = [pytest.param(way, marks=pytest.mark.long) for way in among if way not in ways]
    return pytest.mark.parametrize(fixture, [*ways, *later], indirect=True)


@pytest.fixture
def way(request):
    """See `over`."""
    return request.param


@pytest.fixture
def start(started, way):
    """Start a source that is read over the way of this test."""
    return lambda **options: Source(started, way=way, **options)
