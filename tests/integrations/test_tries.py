"""A content that fails again and again is tried ever more rarely; another one at once."""

import pytest

from torch_ros.errors import Fenced, ManifestMismatch, SourceLost, StoreUnavailable
from torch_ros.integrations.tries import IN_A_ROW, LONGEST_S, Tries

LOST = SourceLost("trainer", "it left", 0, 12)
NONE = Tries()


def after(*failures, start=NONE):
    """The tries after these failures, each of a content at a time."""
    for uid, now_s in failures:
        start = start.failed(uid, LOST, now_s)
    return start


def test_bad_luck_is_not_waited_for():
    tries = after(("a", 0), ("a", 0))
    assert tries.refusal("a", 0) is None
    assert not tries.is_told()


def test_each_failure_after_some_in_a_row_doubles_the_wait():
    tries, waits = Tries(), []
    for _ in range(IN_A_ROW + 12):
        tries = tries.failed("a", LOST, 100)
        waits.append(tries.again_s - 100)
    assert waits[:IN_A_ROW] == [0, 0, 1]
    assert waits[IN_A_ROW : IN_A_ROW + 5] == [2, 4, 8, 16, 32]
    assert set(waits[IN_A_ROW + 5 :]) == {LONGEST_S}


def test_the_last_error_is_given_until_the_wait_is_over():
    tries = after(("a", 0), ("a", 0)).failed("a", ManifestMismatch("x", "y", "z", "w"), 5)
    refusal = tries.refusal("a", 5.9)
    assert (type(refusal), refusal.args) == (ManifestMismatch, ("x", "y", "z", "w"))
    assert tries.refusal("a", 6) is None


def test_what_was_tried_is_not_kept():
    """An error's traceback holds the frames of the install, and these hold copies of weights."""
    try:
        raise ValueError("of the engine's loader")
    except ValueError as error:
        tries = Tries().failed("a", error, 0)
    assert tries.error.__traceback__ is tries.error.__context__ is tries.error.__cause__ is None
    assert str(tries.error) == "of the engine's loader"


def test_another_content_is_tried_at_once_and_ends_the_row():
    tries = after(("a", 0), ("a", 0), ("a", 0))
    assert tries.refusal("b", 0) is None
    tries = after(("b", 0), start=tries)
    assert tries.refusal("a", 0) is None
    assert tries.failures == 1


def test_a_warning_speaks_of_one_failure_alone():
    counts = [after(*[("a", 0)] * n).is_told() for n in range(8)]
    assert counts == [n == IN_A_ROW for n in range(8)]


@pytest.mark.parametrize(
    "error", [StoreUnavailable("etcd://x", 1, "away"), Fenced("r", "another start")]
)
def test_the_content_is_not_to_blame_for_a_store_that_is_away(error):
    tries = Tries()
    for _ in range(IN_A_ROW + 1):
        tries = tries.failed("a", error, 0)
    assert tries == Tries()
