"""The library as it is, and as it might be: each a context in which scenarios run.

An alteration patches the library itself, so that all of it meets the change. Add one, and run it
beside the present: `python benchmarks/scale/scale.py --rules today,"polls of 1 ms" --only burst`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest.mock import patch

import network
import plane

from torch_ros.transfer import batches, stall

TODAY = "today"
MIB = 1 << 20


@contextmanager
def steps_of(size_bytes: int) -> Iterator[None]:
    """Relays pass on `size_bytes` at a time; several sources take turns by 64 MiB as before."""
    with patch.object(batches, "BATCH_BYTES", size_bytes):
        yield


@contextmanager
def polls_of(seconds: float) -> Iterator[None]:
    """A reader that waits for a relay asks at least every `seconds`."""
    with (
        patch.object(stall, "POLL_S_MAX", seconds),
        patch.object(network, "POLL_S_MAX", seconds),
        patch.object(plane, "POLL_S_MAX", seconds),
    ):
        yield


@contextmanager
def both(*all_: AbstractContextManager[None]) -> Iterator[None]:
    with all_[0], both(*all_[1:]) if len(all_) > 1 else nullcontext():
        yield


RULES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    TODAY: nullcontext,
    "polls of 1 ms": lambda: polls_of(0.001),
    "steps of 4 MiB": lambda: steps_of(4 * MIB),
    "steps of 4 MiB and polls of 1 ms": lambda: both(steps_of(4 * MIB), polls_of(0.001)),
}
