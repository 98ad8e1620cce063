"""Sockets in memory, of which a test sees and changes every byte."""

from collections import deque

from torch_ros.channels.meeting import GO_ON


class End:
    """One end of a pipe, with the calls of a socket that does not wait."""

    def __init__(self, sends, receives):
        self.sends, self.receives = sends, receives
        self.said = b""  # all that was sent

    def send(self, body, flags=0):
        self.said += bytes(body)
        self.sends.append(bytes(body))
        return len(body)

    def recv(self, size, flags=0):
        body = bytearray(size)
        count = self.recvmsg_into([body])[0]
        return bytes(body[:count])

    def recvmsg_into(self, views, ancillary=0, flags=0):
        if not self.receives:
            raise BlockingIOError
        some = self.receives.popleft()
        if some is None:
            self.receives.append(None)
            return 0, [], 0, None
        taken = min(len(some), len(views[0]))
        memoryview(views[0])[:taken] = some[:taken]
        if some[taken:]:
            self.receives.appendleft(some[taken:])
        return taken, [], 0, None

    def close(self):
        self.sends.append(None)


def pair():
    here, there = deque(), deque()
    return End(here, there), End(there, here)


def run(*several, rounds=1000):
    """The answers of generators that run in turns, or the error that ended each."""
    answers = [None] * len(several)
    left = dict(enumerate(several))
    for _ in range(rounds):
        for number, steps in list(left.items()):
            try:
                event = GO_ON
                while event == GO_ON:
                    event = next(steps)
            except StopIteration as end:
                answers[number] = end.value
                del left[number]
            except ConnectionError as error:
                answers[number] = error
                del left[number]
    for number, steps in left.items():
        steps.close()
        answers[number] = TimeoutError("it waits for ever")
    return answers
