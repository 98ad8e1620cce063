"""Faults to plant in how bytes are asked for, and sent."""

from contextlib import suppress

from faults import answers, fault, instead

from torch_ros.channels.meeting import PlainChannel
from torch_ros.channels.wire import NEAR, WORD_BYTES
from torch_ros.errors import TransferFailed


@instead(
    "tcp: an answer that is still due is one to what is asked now",
    "_Question.ask",
    scenario="answered late",
)
def _(ask, self, deadline, still):
    if not self.is_late:
        return ask(self, deadline, still)
    while not self.transfer.is_done():
        deadline.check("an answer is still due")
        still()
    self.is_late = False
    return self.buffer.tobytes()


@instead(
    "tcp: a connection that ends ends an answer", "PlainChannel.fill", scenario="answered in part"
)
def _(fill, self, views):
    with suppress(OSError):
        yield from fill(self, views)


@instead(
    "tcp: to close a read waits for its answer", "TcpTransfer.close", scenario="never answered"
)
def _(close, self):
    with suppress(TransferFailed):
        while self._state == "flying":
            self.is_done()
    close(self)


@instead(
    "tcp: a socket is used again with an answer due", "TcpTransfer._end", scenario="given up midway"
)
def _(end, self, reason):
    sock, self.flight.sock = self.flight.sock, None
    end(self, reason)
    if sock is not None:
        self.peer.sockets.give(self.flight, PlainChannel(sock))


@instead(
    "tcp: a word that does not come is the one before",
    "TcpTransfer._take_end",
    scenario="ends before the word",
)
def _(take_end, self, error):
    if self.size_bytes == WORD_BYTES and isinstance(error, OSError):
        self._has_all, error = True, StopIteration()
    take_end(self, error)


@fault(
    "tcp: whoever is at its address is the source",
    "channels:greet",
    "channels:accept",
    scenario="another at the address",
)
def _(_):
    def proves_nothing(sock, *others):
        if callable(others[-1]):  # the source's side
            others[-1](NEAR)
        return PlainChannel(sock)
        yield

    return proves_nothing


answers(
    "tcp: what was registered once may be read",
    "serving:Table.remove",
    scenario="lets go between requests",
)
answers(
    "tcp: what is sent in part is not asked for again",
    "Table.refuse_gone",
    scenario="lets go within an answer",
)


@instead("tcp: a connection that ends while idle is a loss", "Sockets.take", scenario="made anew")
def _(take, self, *args):
    channel, _ = yield from take(self, *args)
    return channel, False
