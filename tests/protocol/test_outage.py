"""How long a call waits for a seat that is lost, and how often the log says so."""

import math

import pytest

from torch_ros.protocol.outage import Outage, Patience
from torch_ros.store import run
from torch_ros.store.run import Reminder, next_line_s

TTL_S = 10.0


def outage(lost_s, *, alone_s=None, is_away=False, has_failed=False):
    alone_since_s = None if alone_s is None else -alone_s
    return Outage(TTL_S, -lost_s, alone_since_s, is_away=is_away, has_failed=has_failed)


@pytest.mark.parametrize(
    ("patience", "found", "called_s", "left_s"),
    [
        (Patience(), outage(500), 5, math.inf),  # to its deadline
        (Patience(), outage(50, alone_s=12), 5, 8),  # a peer that lives has noticed by then
        (Patience(), outage(19, has_failed=True), 0, math.inf),
        (Patience(), outage(20, has_failed=True), 0, 0),
        (Patience(), outage(21, alone_s=1, has_failed=True), 0, 0),
        (Patience(peers_s=math.inf), outage(99, alone_s=90, has_failed=True), 0, math.inf),
        (Patience(store_wait_s=0), outage(1), 0, 0),
        (Patience(store_wait_s=3), outage(50, has_failed=True), 1, 2),
        (Patience(is_unpublish=True), outage(0), 4, 6),  # one TTL from the call
        (Patience(is_unpublish=True), outage(9), 0, 1),  # and from when the seat was lost
        (Patience(is_unpublish=True), outage(11, alone_s=11), 0, -1),
        (Patience(is_unpublish=True), outage(1, is_away=True), 0, 0),
    ],
)
def test_how_long_a_call_waits_for_its_seat(patience, found, called_s, left_s):
    assert patience.left_s(found, -called_s, 0) == left_s


def test_lines_become_seldom():
    said = [0.0]
    while said[-1] < 300:
        said.append(next_line_s(said[-1]))
    assert said == [0, 2, 4, 8, 16, 32, 60, 120, 180, 240, 300]


@pytest.mark.parametrize(
    ("first_s", "said"), [(0, [0, 2, 4, 8, 16, 32, 60, 120]), (10, [10, 20, 40, 60, 120])]
)
def test_what_lasts_is_said_at_these_seconds(monkeypatch, first_s, said):
    now_s = 1000.0
    monkeypatch.setattr(run.time, "monotonic", lambda: now_s)
    reminder = Reminder(first_s)
    found = []
    for second in range(130):
        now_s = 1000.0 + second
        assert reminder.lasts_s == second
        if reminder.is_due():
            found.append(second)
    assert found == said
