"""A call's life as one rank knows it: its states, and all that leads from one to another. Pure.

docs/protocol/life.md says what follows from them.
"""

from enum import Enum


class CallLife(Enum):
    """A state of one rank's part in a call."""

    NEW = "made, or to be made again: its number is free"
    OPEN = "its number is used up; its end is not known"
    READY = "the same, and this rank has said that it is ready: it may have ended well"
    UNWAITED = "a publication that this rank shows, and did not wait for; no peer was told of it"
    READY_UNWAITED = "the same, of which peers may have been told before"
    PASSED = "peers are at another call: it is not made, and its number is free"
    ENDED = "its end is known, or this rank gave it up without a seat"

    __hash__ = object.__hash__  # each member is one object; in C: a call asks some ten times


class CallEvent(Enum):
    """A thing that happens to a call, as the rank that makes it sees it."""

    COUNTED = "the group has it, or may have it"
    CHANGED = "it is decided anew, for another content"
    SAID = "this rank says that it is ready"
    SHOWN = "this rank shows its part without etcd"
    SEATED = "the seat is back before the call has returned without it"
    MET_ANOTHER = "peers are in an unpublish, or wait in a later call"
    CUT_OFF = "this rank gives it up and has no seat"
    ENDS = "this rank learns, or makes, its end"

    __hash__ = object.__hash__


NEW, OPEN, READY = CallLife.NEW, CallLife.OPEN, CallLife.READY
UNWAITED, READY_UNWAITED = CallLife.UNWAITED, CallLife.READY_UNWAITED

NUMBER_IS_FREE = frozenset({NEW, CallLife.PASSED})
IS_UNWAITED = frozenset({UNWAITED, READY_UNWAITED})
WAS_READY = frozenset({READY, READY_UNWAITED})
MAY_HOLD = WAS_READY | IS_UNWAITED
"""The lives in which the group may hold a version because of the call."""

NOTHING = "nothing"
DECIDED = "`decisions/<inst>`: the call, by the rank that comes first"
SAYS_READY = "`ready/<inst>/<n>/<rank>`; nothing in a group of one"
BRINGS = "nothing; `ready` in the Shard record of its next seat"
AN_END = "`decisions/<inst>`: its outcome, by the rank that makes it"
TOLD_LATER = "nothing; its failure is in the Shard record of its next seat"

TABLE: tuple[tuple[tuple[CallLife, ...], CallEvent, CallLife | None, str], ...] = (
    ((NEW,), CallEvent.COUNTED, OPEN, DECIDED),
    ((OPEN, READY, UNWAITED, READY_UNWAITED), CallEvent.COUNTED, None, NOTHING),
    ((READY,), CallEvent.CHANGED, OPEN, NOTHING),
    ((OPEN,), CallEvent.SAID, READY, SAYS_READY),
    ((READY,), CallEvent.SAID, None, SAYS_READY),
    ((NEW, OPEN), CallEvent.SHOWN, UNWAITED, BRINGS),
    ((READY,), CallEvent.SHOWN, READY_UNWAITED, BRINGS),
    ((NEW, READY), CallEvent.SEATED, None, NOTHING),
    ((OPEN, UNWAITED), CallEvent.SEATED, NEW, NOTHING),
    ((READY_UNWAITED,), CallEvent.SEATED, READY, NOTHING),
    ((NEW, OPEN, READY), CallEvent.MET_ANOTHER, CallLife.PASSED, NOTHING),
    ((NEW, OPEN, UNWAITED), CallEvent.CUT_OFF, CallLife.ENDED, TOLD_LATER),
    ((NEW, OPEN, READY, UNWAITED, READY_UNWAITED), CallEvent.ENDS, CallLife.ENDED, AN_END),
)
"""The lives, the event, the life that it leads to (None: it stays), and what is written in etcd.
A pair of life and event that is not here cannot happen."""

_NEXT = {(life, event): to or life for lives, event, to, _ in TABLE for life in lives}


def after(life: CallLife, event: CallEvent) -> CallLife:
    """The life that `event` leads to. KeyError: not in `TABLE`, so it is a mistake of ours."""
    return _NEXT[life, event]
