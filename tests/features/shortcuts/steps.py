"""Steps that the tests of shortcuts share."""

from contextlib import contextmanager

from torch_ros.features.shortcuts.transport import ShortcutTransfer, ShortcutTransport
from torch_ros.memory.transport import MemoryTransport


def copied(read):
    return read.copied_bytes if isinstance(read, ShortcutTransfer) else 0


@contextmanager
def pair_of(threads):
    """A source and a reader that copies with so many threads."""
    made = [ShortcutTransport(MemoryTransport(), threads=threads) for _ in range(2)]
    made[1].never = 0  # here both ends are one process
    yield made
    for each in made:
        each.close()
