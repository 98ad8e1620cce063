"""A model's fleet, kept by one watch, for commands that go on showing it."""

import threading
from collections.abc import Iterator

from torch_ros.cli.asking import ANSWER_S
from torch_ros.errors import BackendError, ClosedError
from torch_ros.fleet.fleet import Fleet, fleet_ranges
from torch_ros.protocol.keys import Keys
from torch_ros.store.kv import KV
from torch_ros.store.txn import Follow, Read, View, whole

PERIOD_S = 0.1  # between two fleets: what changes more often is seen together
LOOK_S = 2.0  # of a watch, then another: so soon is it noticed that nobody looks any more


def fleets(
    kv: KV, model: str, over: threading.Event, period_s: float = PERIOD_S
) -> Iterator[Fleet | BackendError]:
    """The fleet, and again whenever it has changed, until `over` is set or `kv` is closed.

    An error stands for a fleet that cannot be told now; the next one that can be told follows it.
    """
    keys = Keys(model)
    ranges = fleet_ranges(keys)
    view: View | None = None
    while not over.is_set():
        try:
            if view is None:
                view = kv.read(Read(ranges), timeout_s=ANSWER_S)
                yield Fleet.of(view, keys)
            changes = kv.follow(Follow(whole(ranges), view.rev, ""), timeout_s=LOOK_S)
            if changes is None:
                view = None
            elif changes.entries:
                view = view.after(changes)
                yield Fleet.of(view, keys)
        except ClosedError:
            return
        except BackendError as error:
            view = None
            yield error
            over.wait(PERIOD_S)
        over.wait(period_s)
