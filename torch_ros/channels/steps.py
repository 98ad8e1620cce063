"""Steps that wait for a while, or for no longer than that."""

import errno
import os
import socket
import time
from contextlib import closing

from torch_ros.channels.addresses import TcpRoute
from torch_ros.channels.meeting import LATER, WRITE, Answer, Running, Steps


def within(steps: Running[Answer], limit_s: float) -> Running[Answer]:
    """The same steps, closed after that time. Raises: TimeoutError: It is over."""
    end_s = time.monotonic() + limit_s
    with closing(steps):
        while True:
            try:
                event = next(steps)
            except StopIteration as end:
                answer: Answer = end.value
                return answer
            if time.monotonic() > end_s:
                raise TimeoutError(f"it did not answer within {limit_s:g} s")
            yield event


def connected(sock: socket.socket, route: TcpRoute) -> Steps:
    where = (str(route.address), route.port)
    while (error := sock.connect_ex(where)) not in {0, errno.EISCONN}:
        if error not in {errno.EAGAIN, errno.EALREADY, errno.EINPROGRESS}:
            raise OSError(error, os.strerror(error))
        yield WRITE


def pause(wait_s: float) -> Steps:
    end_s = time.monotonic() + wait_s
    while time.monotonic() < end_s:
        yield LATER
