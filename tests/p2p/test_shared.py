"""Memory that others can map, and a system that has none."""

import errno
import mmap
import os

import pytest
import torch

import torch_ros
from torch_ros.p2p import shared


@pytest.fixture
def no_files(monkeypatch):
    """The system gives no memory that has a file."""

    def refuse(*_):
        raise OSError(errno.ENOSYS, "memfd_create")

    monkeypatch.setattr(os, "memfd_create", refuse)


def test_a_copy_is_published_from_ordinary_memory_if_there_is_no_other(no_files):
    with pytest.raises(OSError):
        shared.allocate(mmap.PAGESIZE)
    source, reader = (torch_ros.open("m", endpoint="memory://no-files") for _ in range(2))
    target = torch.zeros(8)
    try:
        source.publish_copy(1, {"weight": torch.ones(8)})
        reader.register({"weight": target})
        reader.replicate("latest")
    finally:
        reader.close()
        source.close()
    assert target.eq(1).all()
