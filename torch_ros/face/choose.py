"""Chooses a process's transport by name, and knows the costs of each."""

import logging
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from torch_ros import environment
from torch_ros.errors import UsageError
from torch_ros.features.fabrics import ways  # feature fabrics
from torch_ros.features.shortcuts.copying import thread_count  # feature shortcuts
from torch_ros.features.shortcuts.transport import ShortcutTransport  # feature shortcuts
from torch_ros.fleet.life import is_frozen  # feature shortcuts
from torch_ros.memory.transport import MemoryTransport
from torch_ros.p2p import rdma
from torch_ros.p2p.room import require_files, require_home
from torch_ros.p2p.transport import CONNECT_S, Transport
from torch_ros.p2p.ucx import has_gpu
from torch_ros.printable import log_of

log: logging.Logger = log_of(__name__)

TransportName = Literal[
    "auto",
    "nixl",
    "ucx",
    "ucx-tcp",
    "tcp",  # feature tcp
    "memory",
]
NIXL = "torch_ros.p2p.nixl"
HOW = {
    "nixl": "NIXL without a port to other hosts",
    "tcp": "TCP",
    "ucx": "NIXL over UCX",
    "ucx-tcp": "NIXL over UCX, TCP",
}
REPLICA_CHARS_MAX = 64  # in an agent's name, which has to fit into mailboxes


@dataclass(frozen=True, slots=True)
class Network:
    """Where a process is, and how it is reached from elsewhere."""

    # feature fabrics {
    fabric: str = ways.DEFAULT_FABRIC  # within it NIXL reaches others
    # } fabrics
    listen: str = ""  # feature tcp
    connect_s: float = CONNECT_S  # for a peer's first answer


def choose_transport(
    name: str,
    network: Network = Network(),
    *,
    replica: str,
    rank: int,
    in_process: bool,
    reason: str,
) -> Transport:
    """Make the transport of that `TransportName`.

    Args:
        replica, rank: By these the logs of peers name this process.
        in_process: The store is in this process too, so that "auto" needs no other.
        reason: Why it is this one, for the log.

    Raises:
        UsageError: There is no such device, UCX cannot use it, or this process may open too few
            files, or nothing in HOME; or it cannot listen where it is told to.
    """
    if name == "memory" or (name == "auto" and in_process):
        log.info("transport: within this process")
        return MemoryTransport()
    require_files()
    agent = f"{replica[:REPLICA_CHARS_MAX]}/{rank}-{secrets.token_hex(3)}"
    with ExitStack() as undo:
        made = _ways(name, agent, network, undo)
        how = [HOW[name if kind == "nixl" and name in HOW else kind] for kind, _ in made]
        transport = made[0][1]
        # feature fabrics {
        transport = ways.WaysTransport(network.fabric, made)
        undo.callback(transport.close)
        # } fabrics
        # feature shortcuts {
        # Both ends can talk, whether they copy or not.
        is_copied = name in {"auto", "tcp"}
        how += ["memory of this host is copied"] if is_copied else []
        transport = ShortcutTransport(
            transport, is_used=is_copied, threads=thread_count(), is_frozen=is_frozen
        )
        # } shortcuts
        undo.pop_all()
    log.info("transport: %s (%s)", "; ".join(how), reason)
    return transport


def _ways(
    name: str, agent: str, network: Network, undo: ExitStack
) -> Sequence[tuple[str, Transport]]:
    """The kinds of ways that a process has, and their transports. One whose fabric has a name also
    has TCP, for those that are elsewhere.
    """
    over, has_both = {"auto": "ucx"}.get(name, name), False
    # feature tcp {
    if name == "auto":
        over = "nixl" if rdma.has_devices() or has_gpu() else "tcp"
    # } tcp
    # feature fabrics {
    has_both = name == "auto" or network.fabric != ways.DEFAULT_FABRIC
    has_both |= _where(network) != ""  # feature tcp
    # } fabrics
    made = list[tuple[str, Transport]]()
    if over != "tcp":
        try:
            made.append(("nixl", _over_nixl(agent, over, network)))
            undo.callback(made[-1][1].close)
        except UsageError as error:
            must = True
            must = name != "auto"  # feature tcp
            if must:
                raise
            log.warning("without NIXL, neither RDMA nor NVLink is used: %s", error)
    # feature tcp {
    if has_both or not made:
        made.append(("tcp", _over_tcp(agent, network)))
        undo.callback(made[-1][1].close)
    # } tcp
    return made


def _over_nixl(agent: str, name: str, network: Network) -> Transport:
    """Raises: UsageError: As `choose_transport`."""
    require_home()
    # Importing nixl loads UCX and takes a second; a store in memory can do without. Ctrl-C must not
    # reach it: C++ classes that are half made cannot be made again in this process.
    if NIXL not in sys.modules and threading.current_thread() is threading.main_thread():
        with ThreadPoolExecutor(1, "torch_ros loads NIXL") as aside:
            aside.submit(import_module, NIXL).result()
    from torch_ros.p2p.nixl import NixlTransport  # noqa: PLC0415

    devices = interfaces_for(environment.value("UCX_NET_DEVICES")) if name == "ucx-tcp" else ()
    is_closed = name == "nixl"
    return NixlTransport(
        agent, interfaces=devices, is_closed=is_closed, connect_s=network.connect_s
    )


# feature tcp {
def _over_tcp(agent: str, network: Network) -> Transport:
    """Raises: UsageError: As `choose_transport`."""
    # Loads what encrypts, which takes a moment; the others can do without.
    from torch_ros.features.tcp.transport import at  # noqa: PLC0415

    made = at(_where(network), agent, connect_s=network.connect_s)
    log.info("TCP is reached at %s", made.where)
    return made


def _where(network: Network) -> str:
    return network.listen or environment.value(environment.LISTEN)


# } tcp
def interfaces_for(ucx_net_devices: str) -> tuple[str, ...]:
    """The network interfaces of this host for UCX's TCP.

    Args:
        ucx_net_devices: The value of UCX_NET_DEVICES. Devices that are no interfaces are RDMA's.
    """
    there = tuple(name for _, name in socket.if_nameindex())
    named = [name for name in ucx_net_devices.split(",") if name in there]
    return tuple(named) or there
