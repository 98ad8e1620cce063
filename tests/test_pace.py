"""Readers that are behind their source, and those that only wait for it."""

from torch_ros.transfer import pace
from torch_ros.transfer.pace import CAUGHT_UP_BYTES, PACE_BYTES, PACE_S, Pace

GB = 1 << 30


def looks(judge, *points):
    return [judge.is_behind(*point) for point in points]


def test_a_reader_that_gets_a_tenth_is_behind():
    assert looks(Pace(), (0, 0, GB), (PACE_S, GB // 10, 2 * GB)) == [False, True]


def test_a_reader_that_gets_as_much_is_not_however_late_it_came():
    assert looks(Pace(), (0, 0, 9 * GB), (PACE_S, GB, 10 * GB), (1, 8 * GB, 17 * GB)) == [False] * 3


def test_a_source_that_waits_for_its_own_proves_nothing():
    came = PACE_BYTES - 1
    assert looks(Pace(), (0, 0, GB), (PACE_S, 0, GB + came), (9, 0, GB + came)) == [False] * 3


def test_who_has_caught_up_is_judged_anew():
    judge, up = Pace(), (1, 2 * GB - CAUGHT_UP_BYTES, 2 * GB)
    assert looks(judge, (0, 0, GB), up, (1 + PACE_S, 2 * GB, 4 * GB)) == [False] * 3


def test_so_little_time_proves_nothing():
    assert looks(Pace(), (0, 0, GB), (0.9 * PACE_S, 0, 3 * GB)) == [False, False]


def test_a_full_source_is_compared_with_the_rate_of_another():
    first = Pace()
    looks(first, (0, 0, GB), (PACE_S, 0, 2 * GB))
    assert first.rate == GB / PACE_S
    second = Pace(first.rate)
    assert looks(second, (0, 0, 9 * GB), (PACE_S, GB // 4, 9 * GB)) == [False, True]
    assert looks(Pace(), (0, 0, 9 * GB), (PACE_S, GB // 4, 9 * GB)) == [False, False]
    assert pace.PACE_SHARE == 3
