"""Connections are waited for, and memory is looked at, at no cost that grows."""

import ctypes
import socket
from types import SimpleNamespace

import numpy as np
import pytest

from torch_ros.channels import wire
from torch_ros.channels.addresses import LOOPBACK, TcpRoute
from torch_ros.channels.meeting import GO_ON, LATER, READ
from torch_ros.channels.pool import SMALL_BYTES, Flight, Sockets, wait
from torch_ros.channels.views import PieceBuffers, at

MANY = 2 * SMALL_BYTES


def test_what_can_go_on_at_once_is_not_waited_for():
    here, there = socket.socketpair()
    with here, there:
        cut, silent = Flight(here, GO_ON), Flight(there, READ)
        assert wait([cut, silent], 3600) == {cut}
        here.send(b"x")
        assert wait([cut, silent], 3600) == {cut, silent}
        assert wait([silent, Flight(here, READ), Flight(None, LATER)], 3600) == {silent}


def test_views_of_memory_make_no_class_of_each_size():
    held = np.arange(100, dtype=np.uint8)
    before = len(ctypes.Array.__subclasses__())
    views = [at(held.ctypes.data, size) for size in range(1, 101)]
    assert len(ctypes.Array.__subclasses__()) == before
    assert all(bytes(view) == held[: len(view)].tobytes() for view in views)
    views[9][:] = bytes(10)
    assert not held[:10].any()
    assert held[10] == 10


def test_who_waits_for_a_connection_gets_one_in_turn():
    """One that is passed over, as by each new read, would hold up all blocks behind its own."""
    sockets = Sockets(None, (), PieceBuffers(1))
    sockets._most = lambda: 0
    first, second, small = (sockets.take(Flight(), size) for size in (MANY, MANY, 8))
    assert [next(each) for each in (first, second)] == [LATER, LATER]
    channel = SimpleNamespace(sock=socket.socket())
    sockets._idle.append(channel)
    assert next(second) == LATER
    with pytest.raises(StopIteration) as got:
        next(first)
    assert got.value.value == (channel, True)
    sockets._idle.append(channel)
    with pytest.raises(StopIteration):  # few bytes do not queue
        next(small)
    sockets._idle.append(channel)
    second.close()
    assert not sockets._waiting
    channel.sock.close()


def test_the_route_that_led_there_is_tried_first_from_then_on():
    near, far, other = (
        TcpRoute(mode, LOOPBACK, port)
        for mode, port in ((wire.NEAR, 1), (wire.SEALED, 2), (wire.SEALED, 3))
    )
    sockets = Sockets(None, (near, far, other), PieceBuffers(1))
    sockets._prefer(near)
    assert sockets.is_near
    sockets._prefer(other)
    assert sockets._routes == [other, near, far]
    assert not sockets.is_near, "what is said of the way is true of the connection"
