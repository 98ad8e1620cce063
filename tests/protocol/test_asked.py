"""Calls are compared as values; people read them as words."""

import pytest

from torch_ros.protocol.meeting import Meeting, meet
from torch_ros.protocol.records import Asked, Call, Outcome

WORDS = {
    "publish 7": Asked("publish", 7),
    "check before save 7": Asked("save", 7).check,
    "unpublish": Asked("unpublish"),
    "update latest, waiting": Asked("update", "latest", waits=True),
    "check before update latest, waiting": Asked("update", "latest", waits=True).check,
    "replicate latest not below 5": Asked("replicate", "latest", floor=5),
    "replicate 7, if it is there": Asked("replicate", 7, if_there=True),
    "replicate latest-1, if it is there or in a bucket": Asked(
        "replicate", "latest-1", if_there=True, or_in="a bucket"
    ),
    "installed 7 (3)": Asked("installed", 7, attempt=3),
}


@pytest.mark.parametrize(("words", "asked"), WORDS.items())
def test_people_read_words(words, asked):
    assert f"{asked}" == words
    assert Asked.decode(asked.encode(), "key") == asked
    assert asked.check.after_check == asked.after_check


@pytest.mark.parametrize(
    "given",
    ["latest", "7", -1, True, 7.0, None, 2**63, 10**5000, "\ud800", "x" * 10**6],
    ids=lambda given: type(given).__name__,
)
def test_what_is_no_number_of_a_version_is_a_text_and_can_be_written(given):
    asked = Asked.of("publish", given)
    assert isinstance(asked.version, str)
    assert len(asked.encode()) < 5000
    assert Asked.decode(asked.encode(), "key") == asked != Asked.of("publish", 7)


def test_equal_words_are_not_the_same_call():
    own = Call(3, "publish", Asked("publish", 7))
    met = Call(3, "publish", Asked("publish", "7"))
    assert f"{met.asked}" == f"{own.asked}"
    assert meet(met, own) is Meeting.OTHER
    assert meet(own, own) is Meeting.SAME


STEPS = [  # what is found, the rank's own, and the meaning
    (Asked("save", 6), Asked("save", 7), Meeting.LATE),
    (Asked("save", 8), Asked("save", 7).check, Meeting.AHEAD),
    (Asked("save", 7), Asked("save", 7).check, Meeting.OTHER),
    (Asked("save", 6), Asked("publish", 7), Meeting.OTHER),
    (Asked("save", "latest"), Asked("save", 7), Meeting.OTHER),
    (Asked("replicate", 6), Asked("replicate", 7), Meeting.OTHER),
]


@pytest.mark.parametrize(("found", "own", "meaning"), STEPS)
def test_versions_of_one_verb_say_which_rank_is_behind(found, own, meaning):
    assert meet(Call(3, "publish", found), Call(3, "publish", own)) is meaning


REFUSED = [  # by this rank, what peers are in, and whether that is one call of the caller
    (Asked("publish", "-1"), Asked("publish", 7), Meeting.SAME),
    (Asked("publish", 6), Asked("publish", 7), Meeting.AHEAD),
    (Asked("update", 6), Asked("update", 6, waits=True), Meeting.SAME),
    (Asked("update", 6, waits=True), Asked("update", 7, waits=True), Meeting.AHEAD),
]


@pytest.mark.parametrize(("own", "found", "meaning"), REFUSED)
def test_two_numbers_are_two_steps_whatever_else_is_asked(own, found, meaning):
    assert meet(Call(3, "agree", found), Call(3, "agree", own), refuses=True) is meaning


def test_the_caller_is_written_only_where_it_asks_something_else():
    part = Call(3, "agree", Asked("save", 7).check, outcome=Outcome())
    assert part.caller == Asked("save", 7)
    assert b"part_of" not in part.encode()
    unpublish = Call(4, "unpublish", Asked("unpublish", 6), part_of=Asked("save", 7))
    assert unpublish.caller == Asked("save", 7)


def test_each_meeting_says_what_the_rank_does():
    assert all(len(each.value.split()) > 3 for each in Meeting)
    assert len({each.value for each in Meeting}) == len(Meeting)
