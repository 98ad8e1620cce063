"""How many threads copy, and what they still begin of a copy that is dropped."""

import math
import threading

import pytest
from kit import until

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


def test_no_part_is_begun_while_a_copy_that_is_dropped_waits_for_another_one():
    """Or closing a read waits for nearly all of it: threads go on while it waits for the first."""
    begun, go_on, later = threading.Event(), threading.Event(), []

    def first():
        begun.set()
        assert go_on.wait(20)

    copy = copying.SharedCopy([first, lambda: later.append(True)])
    copier, closer = (threading.Thread(target=call) for call in (copy.run, copy.drop))
    copier.start()
    assert begun.wait(20)
    closer.start()
    until(lambda: copy.tasks[1].is_taken, 5)
    go_on.set()
    for each in (copier, closer):
        each.join(20)
    assert not later
    with pytest.raises(OSError, match="it was ended"):
        copy.is_done()
