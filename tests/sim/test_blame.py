"""A short form of `tests/sim/blame.py`, which plays thousands of seeds."""
# needs features deltas, fallback, following, installs, lending, pace, seeding, streams, tcp

from unittest.mock import patch

import blame
import pytest

from torch_ros.cli import waits

EACH = pytest.mark.parametrize("kind", list(blame.KINDS))


def told(kind, rounds):
    first = [*blame.KINDS].index(kind)
    found = [blame.blame(first + len(blame.KINDS) * number) for number in rounds]
    assert {each[0] for each in found} == {kind}
    return [words for _, is_right, words in found if not is_right]


@EACH
def test_the_one_that_holds_a_replica_up_is_blamed(kind):
    assert told(kind, range(2)) == []


@pytest.mark.long
@EACH
def test_the_one_that_holds_a_replica_up_is_blamed_in_more_histories(kind):
    assert told(kind, range(2, 12)) == []


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("_of_source", "a source that is slow, or stops"),
        ("_of_reader", "a slow reader in a drain"),
        ("_differed", "CallMismatch"),
        ("_keeping", "a retained copy that waits"),
    ],
)
def test_a_rule_that_is_left_out_blames_another(rule, kind):
    nothing = waits._Found("is fine", "nothing")
    none = rule in {"_differed", "_keeping"}
    with patch.object(waits, rule, lambda *_: None if none else nothing):
        assert told(kind, range(4))
