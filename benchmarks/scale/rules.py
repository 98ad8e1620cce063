"""The library as it is, and as it might be: each a context in which scenarios run.

An alteration patches the library itself, so that all of it meets the change. Add one, and run it
beside the present: `scale.py --rules today,"steps of 64 MiB" --only burst`.
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
    """Relays pass on `size_bytes` at a time."""
    with patch.object(batches, "STEP_BYTES", size_bytes):
        yield


@contextmanager
def eager_for(seconds: float) -> Iterator[None]:
    """A reader that waits for a relay asks ever more seldom after `seconds`."""
    with (
        patch.object(stall, "EAGER_S", seconds),
        patch.object(network, "EAGER_S", seconds),
        patch.object(plane, "EAGER_S", seconds),
    ):
        yield


@contextmanager
def both(*all_: AbstractContextManager[None]) -> Iterator[None]:
    with all_[0], both(*all_[1:]) if len(all_) > 1 else nullcontext():
        yield


RULES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    TODAY: nullcontext,
    "steps of 64 MiB": lambda: steps_of(64 * MIB),
    "polls that back off": lambda: eager_for(0.0),
    "both": lambda: both(steps_of(64 * MIB), eager_for(0.0)),
}
