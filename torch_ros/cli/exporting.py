"""`torch-ros export`: figures of fleets for Prometheus, of which each scrape asks etcd."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

from torch_ros.cli import asking
from torch_ros.cli.ending import told_to_end
from torch_ros.errors import AccessDenied, BackendError, StoreUnavailable
from torch_ros.fleet.fleet import Fleet
from torch_ros.store.kv import KV

SCRAPE_S = 4.0  # for one answer of etcd: Prometheus waits for ten seconds


def export(kv: KV, asked: argparse.Namespace, tell: Callable[[str], None]) -> None:
    """Serve until somebody ends this; `tell` is given the address. etcd may go and come back.

    A scrape costs one read for each model, and one of all keys where no model was named. A watch
    instead would be told of each reader's record as it comes and goes, between two scrapes too.
    """
    from torch_ros.metrics.fleets import FleetCollector  # noqa: PLC0415  # an extra
    from torch_ros.metrics.server import serving  # noqa: PLC0415

    for model in asked.models:
        asking.fleet_of(kv, model)
    fleets(
        kv, asked.models, SCRAPE_S
    )  # a role that may not is an error now, and not a figure later
    collector = FleetCollector(partial(fleets, kv, asked.models, SCRAPE_S))
    with told_to_end() as ends, serving(collector, asked.host, asked.port) as address:
        tell(address)
        ends.wait()


def fleets(
    kv: KV, models: Sequence[str] = (), timeout_s: float = asking.ANSWER_S
) -> dict[str, Fleet | BackendError]:
    """These, or all; an error stands for one of another release."""
    found: dict[str, Fleet | BackendError] = {}
    for model in models or asking.models(kv, timeout_s):
        try:
            found[model] = asking.fleet(kv, model, timeout_s)
        except (StoreUnavailable, AccessDenied):
            raise
        except BackendError as error:
            found[model] = error
    return found
