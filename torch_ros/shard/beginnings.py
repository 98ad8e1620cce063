"""Calls of DCP from where they begin: each uses one number of the group, whatever becomes of it.

dcp asks planner and storage one after the other and tells no hook of an error. A rank on which one
raised would never make the group's call that its peers wait in, and would be one behind for good.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch_ros.errors import CallAborted, TorchRosError
from torch_ros.printable import log_of
from torch_ros.protocol.group import Group
from torch_ros.protocol.records import Asked

T = TypeVar("T")
log: logging.Logger = log_of(__name__)

PATIENCE_S = 30.0  # planning takes seconds; the peers wait
LOOK_S = 0.5  # a call that is quicker costs nothing
LOOK_MAX_S = 4.0  # between two looks whether all ranks have begun


@dataclass(eq=False)
class Beginning:
    """One call of DCP on this rank. It has `begun` until it comes to write_data or read_data."""

    asked: Asked
    number: int  # of the group's next call when it began
    storage: weakref.ref[object]  # the writer or reader
    thread: int
    left_s: float  # when dcp left the last hook
    is_in_hook: bool = False
    state: Literal["begun", "here", "over"] = "begun"
    failure: TorchRosError | None = None  # with which it was ended before it came
    told: str = ""  # the incarnation whose records say that it has begun
    looked_s: float = 0.0  # when it was last asked for
    all_s: float | None = None  # the last look before all had begun; None: they have not

    @contextmanager
    def hook(self) -> Iterator[None]:
        """Within a hook of this storage, which may take its time, nobody is impatient."""
        self.is_in_hook = True
        try:
            yield
        finally:
            self.is_in_hook = False
            self.touch()

    def touch(self) -> None:
        self.left_s = time.monotonic()

    @property
    def lost(self) -> str:
        """The reason with which it is ended if it never comes to its save or load."""
        return f"'{self.asked}' failed on this rank before its data were asked for"

    def must_look(self, inst: str, now_s: float) -> bool:
        """Whether to say that it has begun, or to ask, more and more rarely, whether all have."""
        pause_s = min(LOOK_MAX_S, max(LOOK_S, (now_s - self.left_s) / 8))
        is_waiting = self.state == "begun" and self.all_s is None
        return self.told != inst or (is_waiting and now_s >= self.looked_s + pause_s)

    def is_late(self, now_s: float) -> bool:
        """Whether this rank keeps the others waiting, all of which have begun it."""
        if self.state != "begun" or self.all_s is None:
            return False
        return now_s > max(self.all_s, self.left_s) + PATIENCE_S

    def come(self, call: Callable[[], T]) -> T:
        """Make the save or load itself.

        Raises: CallAborted: Too late: it was ended, for all ranks.
        """
        if self.failure is not None:
            raise self.failure
        self.state = "here"
        try:
            return call()
        finally:
            self.state = "over"


class Beginnings:
    """The beginnings of one handle.

    Args:
        end: Makes the group's next call, as the call of DCP, and lets it fail with that error on
            all ranks. Called with nothing locked.
    """

    def __init__(self, group: Group, end: Callable[[Beginning, TorchRosError], None]) -> None:
        self._group, self._end = group, end
        self._lock = threading.Lock()
        self._all: list[Beginning] = []
        self._is_minded = False

    def begin(self, asked: Asked, storage: object) -> Beginning:
        """Note that a call of DCP begins on this rank. Returns at once.

        A thread asks whether the others have begun it, too, and ends the call on all ranks if it
        never comes here. A replica of one rank needs none: nobody waits for it.
        """
        group = self._group
        number, now_s = group.ledger.calls_made + 1, time.monotonic()
        made = Beginning(asked, number, weakref.ref(storage), threading.get_ident(), now_s)
        if group.seat.world_size > 1:
            with self._lock:
                self._all = [one for one in self._all if one.state != "over"]
                self._all.append(made)
                if not self._is_minded:
                    self._is_minded = True
                    group.start(f"torch_ros minds {group.seat.replica}", self._mind)
        return made

    def left(self, mine: Beginning | None) -> list[Beginning]:
        """The beginnings that will not come any more, when this thread makes a call.

        One thread makes one call at a time, so its earlier beginnings are over; and where another
        one of DCP begins, `mine`, so are those of all threads.
        """
        me = threading.get_ident()
        return [
            one
            for one in list(self._all)
            if one.state == "begun" and one is not mine and (mine is not None or one.thread == me)
        ]

    def error(self, why: str) -> CallAborted:
        seat = self._group.seat
        return CallAborted(seat.replica, self._group.ledger.calls_made + 1, seat.rank, why)

    def _mind(self) -> None:
        """In a thread, while there are beginnings: end those that will not come, or are late."""
        while True:
            self._group.pause()
            with self._lock:
                self._all = [one for one in self._all if one.state != "over"]
                if not self._all or self._group.ledger.is_closed:
                    self._is_minded = False
                    return
                minded = list(self._all)
            for one in minded:
                try:
                    self._end_if_late(one)
                except TorchRosError as error:  # etcd is away, say: the next call ends it
                    log.debug("%s: %s", one.asked, error)
                except Exception:  # this thread minds the others too
                    log.exception("%s: its beginning is not minded", one.asked)

    def _end_if_late(self, one: Beginning) -> None:
        """End a beginning that will not come here, or that keeps the others waiting too long."""
        if one.state == "begun" and one.storage() is None:
            self._end(one, self.error(one.lost))
            return
        if one.state == "begun" and one.is_in_hook:
            return
        now_s, inst = time.monotonic(), self._group.seat.inst
        if one.must_look(inst, now_s):
            # The last rank may have begun right after the look before this one.
            before_s, one.looked_s = one.looked_s or one.left_s, now_s
            have_all_begun = self._group.have_all_begun(one.number, one.asked)
            one.told = inst
            if have_all_begun and one.all_s is None:
                one.all_s = before_s
        if one.is_late(now_s):
            since = f"{PATIENCE_S:g} s after all ranks had begun '{one.asked}'"
            self._end(one, self.error(f"{since}, this one had not come"))
