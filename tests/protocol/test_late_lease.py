"""A lease that etcd grants later than it lasts."""

import threading

import pytest

from torch_ros.deadline import Deadline
from torch_ros.errors import SeatLost
from torch_ros.memory.store import MemoryKV, Space
from torch_ros.protocol import seating
from torch_ros.protocol.applicant import Applicant
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.records import ShardRecord
from torch_ros.store.session import Session


class Late(MemoryKV):
    def grant(self, ttl_s, *, timeout_s):
        return super().grant(ttl_s, timeout_s=timeout_s)[0], 0


class Hasty(Session):
    """The thread that renews the lease notices its end before anybody has the session."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._thread.join(0.2)


def test_a_lease_that_ends_while_it_is_granted_ends_the_taking_of_the_seat(monkeypatch):
    monkeypatch.setattr(seating, "Session", Hasty)
    raised, told = [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", raised.append)
    who = Applicant(
        Keys("m"), "r", 0, 1, ShardRecord("host", 1, b""), None, "d", spot=False, ttl_s=1
    )
    taking = seating._Taking(Late(Space()), who, Deadline("taking", 10.0), lambda *_: told.set())
    assert told.wait(10)
    assert not raised
    with pytest.raises(SeatLost, match="not renewed in time"):
        taking.check()
    taking.session.close()
