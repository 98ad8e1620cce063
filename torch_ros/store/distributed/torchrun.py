"""``torchrun --rdzv-backend=torch-ros --rdzv-endpoint=host:port --rdzv-id=JOB ...``.

The rendezvous is torch's own, with its state in an `EtcdStore` (`docs/DISTRIBUTED.md`).
"""

import os
import uuid
from datetime import timedelta

from torch.distributed import DistNetworkError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from torch_ros import environment
from torch_ros.errors import StoreUnavailable, UsageError
from torch_ros.local import etcd as local
from torch_ros.store.distributed.rendezvous import url_of
from torch_ros.store.distributed.store import EtcdStore

BACKEND = "torch-ros"
READ_TIMEOUT_S = 60  # as torch's c10d backend
NO_RUN_ID = "none"  # torchrun's default


class _State(C10dRendezvousBackend):
    """torch's state in one value that is replaced by compare_set; which store is all the same."""

    @property
    def name(self) -> str:
        return BACKEND


class RosRendezvousHandler(DynamicRendezvousHandler):
    """One agent's part in the rendezvous. Tells its workers, by their environment, where etcd is.

    Each round has a store of its own, so that no worker meets what an earlier one left.
    """

    endpoint: str

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round, and name its store to the workers that this agent starts."""
        joined = super().next_rendezvous()
        # The first to come names the store for all. The number of the round would not do: it
        # begins anew when all agents were gone for a while.
        name = joined.store.compare_set("torch_ros/workers", "", uuid.uuid4().hex).decode()
        os.environ[environment.INIT_METHOD] = url_of(
            self.endpoint, f"torchrun/{self.get_run_id()}/{name}"
        )
        os.environ.setdefault(environment.ENDPOINT, self.endpoint)
        return joined

    def shutdown(self) -> bool:
        is_closed = super().shutdown()
        assert isinstance(self._store, EtcdStore)
        self._store.close()
        return is_closed


def create_handler(parameters: RendezvousParameters) -> RosRendezvousHandler:
    """Called by torchrun; `docs/DISTRIBUTED.md` ("torchrun") has its options.

    Raises:
        UsageError: There is no id, or the endpoint is none.
        RendezvousConnectionError: etcd did not answer within read_timeout.
    """
    if parameters.run_id == NO_RUN_ID:
        raise UsageError(
            f"--rdzv-backend={BACKEND} without --rdzv-id: the jobs of one etcd are told apart by it"
        )
    read_timeout = timedelta(seconds=parameters.get_as_int("read_timeout") or READ_TIMEOUT_S)
    try:
        endpoint = _endpoint(parameters.endpoint, read_timeout.total_seconds())
        store = EtcdStore(endpoint, f"torchrun/{parameters.run_id}", timeout=read_timeout)
    except (DistNetworkError, StoreUnavailable) as error:
        raise RendezvousConnectionError(str(error)) from error
    # Else torch hands the workers the address of a TCPStore that it made for the first round, also
    # when the node that has it is gone, and never tells it to nodes that join later.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    handler: RosRendezvousHandler = RosRendezvousHandler.from_backend(
        parameters.run_id,
        store,
        _State(store, parameters.run_id),
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        RendezvousTimeout(
            *(_timeout(parameters, name) for name in ("join", "last_call", "close", "heartbeat"))
        ),
        keep_alive_interval=parameters.get_as_int("keep_alive_interval") or 5,
        keep_alive_max_attempt=parameters.get_as_int("keep_alive_max_attempt") or 3,
    )
    handler.endpoint = endpoint
    return handler


def _endpoint(given: str, timeout_s: float) -> str:
    chosen = given or environment.value(environment.ENDPOINT) or "local"
    if chosen == "local":
        return f"etcd://{local.ensure(timeout_s)}"
    return chosen if "://" in chosen else f"etcd://{chosen}"


def _timeout(parameters: RendezvousParameters, name: str) -> timedelta | None:
    seconds = parameters.get_as_int(f"{name}_timeout")
    return None if seconds is None else timedelta(seconds=seconds)
