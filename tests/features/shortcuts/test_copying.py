"""How many threads copy."""

import math

import pytest

from torch_ros.features.shortcuts import copying


@pytest.mark.parametrize(
    ("there", "quota", "ranks", "threads"),
    [(16, math.inf, "", 4), (16, 2.5, "", 2), (16, 0.5, "", 1), (2, 8, "", 2), (16, 6.0, "3", 2)],
)
def test_no_more_threads_copy_than_the_quota_allows(monkeypatch, there, quota, ranks, threads):
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(there))
    monkeypatch.setattr("torch_ros.copies.cgroups.cores", lambda: quota)
    assert copying.thread_count() == threads
