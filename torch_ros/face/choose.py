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
from torch_ros.memory.transport import MemoryTransport
from torch_ros.p2p.room import require_files, require_home
from torch_ros.p2p.transport import CONNECT_S, Transport
from torch_ros.printable import log_of

log: logging.Logger = log_of(__name__)

TransportName = Literal[
    "auto",
    "ucx",
    "ucx-tcp",
    "tcp",  # feature tcp
    "memory",
]
NIXL = "torch_ros.p2p.nixl"
REPLICA_CHARS_MAX = 64  # in an agent's name, which has to fit into mailboxes


@dataclass(frozen=True, slots=True)
class Network:
    """Where a process is, and how it is reached from elsewhere."""

    # feature fabrics {
    fabric: str = ways.DEFAULT_FABRIC  # within it UCX takes whatever it finds
    wan_devices: Sequence[str] = ()  # for TCP to other fabrics; none: all that there are
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

    A process that names no fabric has one way; for the other one it would have an agent more, with
    a thread and all registrations.

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
    # feature tcp {
    if name == "tcp":
        return _over_tcp(agent, network, reason)
    # } tcp
    require_home()
    # Importing nixl loads UCX and takes a second; a store in memory can do without. Ctrl-C must not
    # reach it: C++ classes that are half made cannot be made again in this process.
    if NIXL not in sys.modules and threading.current_thread() is threading.main_thread():
        with ThreadPoolExecutor(1, "torch_ros loads NIXL") as aside:
            aside.submit(import_module, NIXL).result()
    from torch_ros.p2p.nixl import NixlTransport  # noqa: PLC0415

    how = ", TCP" if name == "ucx-tcp" else ""
    how += "; memory of this host is copied" if name == "auto" else ""  # feature shortcuts
    named = environment.value("UCX_NET_DEVICES")
    with ExitStack() as undo:

        def reaching(interfaces: Sequence[str], *, is_copied: bool) -> Transport:
            made: Transport = NixlTransport(
                agent, interfaces=interfaces, connect_s=network.connect_s
            )
            undo.callback(made.close)
            # feature shortcuts {
            # Both ends can talk, whether they copy or not.
            made = ShortcutTransport(made, is_used=is_copied, threads=thread_count())
            undo.callback(made.close)
            # } shortcuts
            return made

        tcp = interfaces_for((), named) if name == "ucx-tcp" else ()
        transport = reaching(tcp, is_copied=name == "auto")
        # feature fabrics {
        reached = [(network.fabric, transport)]
        if network.wan_devices or network.fabric != ways.DEFAULT_FABRIC:
            wan = interfaces_for(network.wan_devices, named)
            how += f"; TCP beyond fabric {network.fabric!r}, on {', '.join(wan)}"
            reached.append((ways.EVERYBODY, reaching(wan, is_copied=False)))
        transport = ways.WaysTransport(reached)
        # } fabrics
        undo.pop_all()
    log.info("transport: NIXL over UCX%s (%s)", how, reason)
    return transport


# feature tcp {
def _over_tcp(agent: str, network: Network, reason: str) -> Transport:
    """Raises: UsageError: As `choose_transport`."""
    # Loads what encrypts, which takes a moment; the others can do without.
    from torch_ros.features.tcp.transport import at  # noqa: PLC0415

    # feature fabrics {
    if network.wan_devices:
        found = f"wan_devices={tuple(network.wan_devices)}: those are for UCX"
        raise UsageError(f'{found}; with transport="tcp" say listen={network.wan_devices[0]!r}')
    # } fabrics
    listen = network.listen or environment.value(environment.LISTEN)
    made = at(listen, agent, connect_s=network.connect_s)
    log.info("transport: TCP at %s (%s)", made.where, reason)
    transport: Transport = made
    # feature shortcuts {
    try:
        transport = ShortcutTransport(made, threads=thread_count())
    except BaseException:
        made.close()
        raise
    # } shortcuts
    return transport


# } tcp
def interfaces_for(wanted: Sequence[str], ucx_net_devices: str) -> tuple[str, ...]:
    """The network interfaces of this host for TCP.

    Args:
        wanted: The user's choice, if there is one.
        ucx_net_devices: The value of UCX_NET_DEVICES. Devices that are no interfaces are RDMA's.

    Raises:
        UsageError: This host lacks one of those wanted.
    """
    there = tuple(name for _, name in socket.if_nameindex())
    if lacking := [name for name in wanted if name not in there]:
        raise UsageError(f"wan_devices={lacking}: this host has {', '.join(there)}")
    named = [name for name in ucx_net_devices.split(",") if name in there]
    return tuple(wanted) or tuple(named) or there
