"""Steps that the tests of shortcuts share."""

import itertools
import uuid
from contextlib import contextmanager
from types import SimpleNamespace

from torch_ros.errors import TransferFailed, UsageError
from torch_ros.features.shortcuts.peer import ShortcutTransfer
from torch_ros.features.shortcuts.transport import ShortcutTransport
from torch_ros.memory.transport import MemoryTransport


def copied(read):
    return read.size_bytes if isinstance(read, ShortcutTransfer) else 0


@contextmanager
def pair_of(threads):
    """A source and a reader that copies with so many threads."""
    made = [ShortcutTransport(MemoryTransport(), threads=threads) for _ in range(2)]
    made[1].never = 0  # here both ends are one process
    yield made
    for each in made:
        each.close()


class Refusing:
    """A base that reaches nobody, and reads nothing: it only says that something is registered."""

    def __init__(self):
        self.agent, self.count = str(uuid.uuid4()), itertools.count()
        self.connection = self.agent.encode()
        self.asked = []  # connections

    def register(self, regions):
        if any(each.size_bytes <= 0 for each in regions):
            raise UsageError("an empty region")
        said = f"{self.agent}/{next(self.count)}" if regions else ""
        return SimpleNamespace(descriptor=said.encode(), close=lambda: None)

    def connect(self, connection):
        self.asked.append(connection)
        raise TransferFailed(connection.decode(), "the base reaches nobody")

    def close(self):
        pass
