"""Chooses a process's transport by name, and knows the costs of each."""

import logging
import secrets
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Literal

from torch_ros import environment
from torch_ros.costs import HOST_COSTS, NIXL_COSTS, TCP_COSTS, Costs
from torch_ros.p2p.copying import thread_count
from torch_ros.p2p.huge_pages import HugePages, obstacle
from torch_ros.p2p.memory import MemoryTransport
from torch_ros.p2p.near import NearTransport
from torch_ros.p2p.transport import Transport

log = logging.getLogger(__name__)

TransportName = Literal["auto", "ucx", "ucx-tcp", "memory"]
# For memory that this process copies itself, and for memory that it reads through the transport.
COSTS: Mapping[str, tuple[Costs, Costs]] = {
    "auto": (HOST_COSTS, NIXL_COSTS),
    "memory": (HOST_COSTS, HOST_COSTS),
    "ucx": (NIXL_COSTS, NIXL_COSTS),
    "ucx-tcp": (TCP_COSTS, TCP_COSTS),
}
NIXL = "torch_ros.p2p.nixl"
REPLICA_CHARS_MAX = 64  # in an agent's name, which has to fit into mailboxes


def choose_transport(
    name: str, *, replica: str, rank: int, in_process: bool, reason: str
) -> Transport:
    """Make the transport of that `TransportName`.

    Args:
        replica, rank: By these the logs of peers name this process.
        in_process: The store is in this process too, so that "auto" needs no other.
        reason: Why it is this one, for the log.
    """
    if name == "memory" or (name == "auto" and in_process):
        log.info("transport: within this process")
        return MemoryTransport()
    # Importing nixl loads UCX and takes a second; a store in memory can do without. Ctrl-C must not
    # reach it: C++ classes that are half made cannot be made again in this process.
    if NIXL not in sys.modules and threading.current_thread() is threading.main_thread():
        with ThreadPoolExecutor(1, "torch_ros loads NIXL") as aside:
            aside.submit(import_module, NIXL).result()
    from torch_ros.p2p.nixl import NixlTransport  # noqa: PLC0415

    how = {"ucx": "", "ucx-tcp": ", TCP", "auto": "; memory of this host is copied"}[name]
    log.info("transport: NIXL over UCX%s (%s)", how, reason)
    agent = f"{replica[:REPLICA_CHARS_MAX]}/{rank}-{secrets.token_hex(3)}"
    nixl = NixlTransport(agent, tcp_only=name == "ucx-tcp")
    # Both ends can talk, whether they copy or not.
    return NearTransport(nixl, is_used=name == "auto", threads=thread_count())


def huge_pages_for(transport: Transport, *, is_wanted: bool) -> HugePages:
    """Huge pages for memory that peers copy through the kernel; elsewhere a reason for none."""
    is_copied = isinstance(transport, NearTransport) and transport.host and transport.threads.count
    if not is_wanted:
        return HugePages("open(huge_pages=False)")
    if environment.value(environment.HUGE_PAGES) == "0":
        return HugePages(f"{environment.HUGE_PAGES}=0")
    return HugePages(obstacle() if is_copied else "no memory is read through the kernel here")
