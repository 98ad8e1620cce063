"""A call's life is one table, which the code goes by."""

import pytest

from torch_ros.protocol.life import IS_UNWAITED, MAY_HOLD, TABLE, CallEvent, CallLife, after

MOVES = [(life, event, to or life) for lives, event, to, _ in TABLE for life in lives]


def test_each_event_leads_to_one_life_and_each_life_is_come_to():
    assert len({(life, event) for life, event, _ in MOVES}) == len(MOVES)
    assert {to for _, _, to in MOVES} == {*CallLife}
    assert {event for _, event, _ in MOVES} == {*CallEvent}


@pytest.mark.parametrize("event", CallEvent)
@pytest.mark.parametrize("life", [CallLife.PASSED, CallLife.ENDED])
def test_nothing_happens_any_more_to_what_is_over(life, event):
    with pytest.raises(KeyError):
        after(life, event)


def test_a_version_may_come_only_of_what_was_said_or_shown():
    for life, event, to in MOVES:
        if to in MAY_HOLD - {life}:
            assert event in {CallEvent.SAID, CallEvent.SHOWN, CallEvent.SEATED}
        if to in IS_UNWAITED - {life}:
            assert event is CallEvent.SHOWN
