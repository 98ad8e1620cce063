"""Addresses: those at which a source listens, and those at which its readers look for it."""

import errno
import ipaddress
import re
import socket
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_ros.channels.wire import ADDRESSES_MAX, NEAR, SEALED, TcpCard
from torch_ros.errors import UsageError
from torch_ros.p2p import shared
from torch_ros.printable import log_of

log = log_of(__name__)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
LOOPBACK = ipaddress.IPv4Address("127.0.0.1")
BACKLOG = 512
KNOCK_S = 5  # until a connection without a byte takes a place
TRIES = 16  # for a number that is free at all addresses, where the kernel chooses
EXPECTED = (
    "expected addresses or devices, then a port or a range of ports: 'eth0', '10.0.0.7,eth1:7000', "
    "'[fd00::7]:7000-7099', ':7000-7099'"
)
_LISTEN = re.compile(
    r"(?P<hosts>(\[[^\]]*\]|[^:\[\]])*)(:(?P<first>\d{1,5})(-(?P<last>\d{1,5}))?)?"
)

# The kernel's rtnetlink: a question for all addresses, and the beginning of an answer.
_ASK = struct.pack("<LHHLL", 20, 22, 0x301, 1, 0) + bytes(4)  # RTM_GETADDR, REQUEST and DUMP
_MESSAGE, _OF, _ATTRIBUTE = struct.Struct("<LHHLL"), struct.Struct("<BBBBL"), struct.Struct("<HH")
_NEW_ADDRESS, _DONE, _ADDRESS, _LOCAL = 20, 3, 1, 2


@dataclass(frozen=True, slots=True)
class Listen:
    """Addresses or devices, none: all; and ports of which the first free one is taken, 0: any."""

    hosts: Sequence[str] = ()
    ports: range = range(1)
    text: str = ""


@dataclass(frozen=True, slots=True)
class TcpRoute:
    """One way to try."""

    mode: int
    address: Address
    port: int

    def __str__(self) -> str:
        host = f"[{self.address}]" if self.address.version == 6 else f"{self.address}"
        return f"{host}:{self.port}"


def parse_listen(text: str) -> Listen:
    """Raises: UsageError: It is not of that form."""
    found = _LISTEN.fullmatch(text)
    if not found:
        raise UsageError(f"listen={text!r}: {EXPECTED}")
    hosts = tuple(host.strip("[] ") for host in found["hosts"].split(",")) if found["hosts"] else ()
    first = int(found["first"] or 0)
    last = int(found["last"] or first)
    is_named = found["first"] is not None
    if not all(hosts) or last > 65535 or (is_named and not 0 < first <= last):
        raise UsageError(f"listen={text!r}: {EXPECTED}")
    return Listen(hosts, range(first, last + 1), text)


def plain(address: bytes | str) -> Address:
    """An address of which the same one has no other form. Raises: ValueError: It is none."""
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def place() -> tuple[str, int]:
    """This start of this host's kernel, and the namespace of its network that this process is in.
    Two that share both reach each other by loopback.
    """
    try:
        return shared.host(), Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return "", 0


def own() -> list[tuple[str, Address]]:
    """The addresses of this host with their devices.

    Raises: OSError: The kernel does not tell.
    """
    found: list[tuple[str, Address]] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC) as kernel:
        kernel.settimeout(1.0)
        kernel.send(_ASK)
        while answer := kernel.recv(64 << 10):
            for kind, body in _messages(answer):
                if kind == _DONE:
                    return sorted(found, key=lambda each: each[1].version)
                if kind == _NEW_ADDRESS and (one := _address(body)):
                    found.append(one)
    return found


def _messages(answer: bytes) -> Iterator[tuple[int, bytes]]:
    while len(answer) >= _MESSAGE.size:
        size, kind, *_ = _MESSAGE.unpack_from(answer)
        yield kind, answer[_MESSAGE.size : size]
        answer = answer[max(_MESSAGE.size, size + 3 & ~3) :]


def _address(body: bytes) -> tuple[str, Address] | None:
    family, _, _, _, index = _OF.unpack_from(body)
    body, said = body[_OF.size :], dict[int, bytes]()
    while len(body) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(body)
        said[kind] = body[_ATTRIBUTE.size : size]
        body = body[max(_ATTRIBUTE.size, size + 3 & ~3) :]
    raw = said.get(_LOCAL, said.get(_ADDRESS, b""))
    if family not in {socket.AF_INET, socket.AF_INET6} or len(raw) not in {4, 16}:
        return None
    try:
        return socket.if_indextoname(index), plain(raw)
    except OSError:  # the device has gone meanwhile
        return None


def chosen(listen: Listen) -> list[Address]:
    """The addresses to tell readers of: those that are asked for, or all that may be of use.

    Raises: UsageError: This host has none of that name.
    """
    try:
        there = own()
    except OSError as error:
        there = []
        log.warning("the addresses of this host cannot be seen (%s): name them by listen=", error)
    found: list[Address] = []
    for host in listen.hosts:
        at_device = [address for device, address in there if device == host and is_told(address)]
        found += at_device or [_named(host, listen, there)]
    if not listen.hosts:
        found = [address for _, address in there if is_told(address) and not address.is_loopback]
    found = list(dict.fromkeys(found))
    if len(found) > ADDRESSES_MAX:
        log.warning(
            "this host has %d addresses, and readers are told of %d: choose by listen=",
            *(len(found), ADDRESSES_MAX),
        )
    return found[:ADDRESSES_MAX]


def _named(host: str, listen: Listen, there: Collection[tuple[str, Address]]) -> Address:
    try:
        if is_told(address := plain(host)):
            return address
        problem = f"no other process can find {host}; leave the addresses out for all: ':7000'"
    except ValueError:
        devices = ", ".join(sorted({device for device, _ in there}))
        problem = f"this host has no device {host!r} with an address; it has {devices or 'none'}"
    raise UsageError(f"listen={listen.text!r}: {problem}; {EXPECTED}")


def is_told(address: Address) -> bool:
    """Whether it can be another host's, or this one's loopback."""
    return not (address.is_unspecified or address.is_multicast or address.is_link_local)


def routes(card: TcpCard, here: tuple[str, int]) -> list[TcpRoute]:
    """The ways to a source, in the order in which they are tried. Loopback is none to another host,
    whatever a card says.
    """
    is_here = bool(here[0]) and card.boot == here[0]
    is_near = is_here and card.network == here[1]
    addresses = [plain(each) for each in card.addresses if len(each) in {4, 16}]
    there = [each for each in addresses if is_told(each) and (is_here or not each.is_loopback)]
    near = [TcpRoute(NEAR, LOOPBACK, card.port)] if is_near else []
    return [*near, *(TcpRoute(SEALED, each, card.port) for each in there)]


def listeners(listen: Listen) -> tuple[list[socket.socket], int, list[Address]]:
    """Sockets that listen, on loopback too; their port; the addresses for readers elsewhere.

    Raises: UsageError: No port of the range is free, or an address is not this host's.
    """
    told = chosen(listen)
    at = list(dict.fromkeys((*told, LOOPBACK))) if listen.hosts else None
    for port in listen.ports if listen.ports[0] else [0] * TRIES:
        try:
            made = _bound(at, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise UsageError(f"listen={listen.text!r}: {error}; {EXPECTED}") from error
        return made, made[0].getsockname()[1], told
    ports = f"{listen.ports[0]} to {listen.ports[-1]}" if listen.ports[0] else "the kernel's choice"
    raise UsageError(
        f"listen={listen.text!r}: none of {len(listen.ports)} ports, {ports}, is free; each "
        "process of this host needs one of its own"
    )


def _bound(addresses: Sequence[Address] | None, port: int) -> list[socket.socket]:
    """Listeners on one port; `addresses` None: on all that there are, now and later.

    Raises: OSError: It is taken at one of them, and none is left.
    """
    made: list[socket.socket] = []
    try:
        if addresses is None:
            made.append(_everywhere(port))
        for address in addresses or ():
            family = socket.AF_INET if address.version == 4 else socket.AF_INET6
            made.append(_listening(family, f"{address}", port))
            port = made[0].getsockname()[1]
    except BaseException:
        for sock in made:
            sock.close()
        raise
    return made


def _everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return _listening(socket.AF_INET6, "::", port, both=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return _listening(socket.AF_INET, "0.0.0.0", port)  # noqa: S104  # strangers get nothing


def _listening(family: int, host: str, port: int, *, both: bool = False) -> socket.socket:
    """It may listen there again after a restart, and never beside another one."""
    sock = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    sock.settimeout(0)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, KNOCK_S)
    return sock


def tune(sock: socket.socket) -> None:
    """Send at once, and notice within 15 s that the host of an idle connection is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 6),
        (socket.TCP_KEEPINTVL, 3),
        (socket.TCP_KEEPCNT, 3),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
