"""The bytes of cards, descriptors, requests and answers over TCP. Pure: no memory, no socket.

Numbers are little-endian. All that comes from others is parsed here, or is `Garbage`.
"""

import hmac
import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple, cast

import msgspec
import numpy as np
from msgspec import Meta

from torch_ros.channels.locks import openssl
from torch_ros.p2p.regions import Uint64s
from torch_ros.spans import HOST

MAGIC, FORMAT = b"TROS", 1
KNOCK = struct.Struct("<4sHH32s32s")  # magic, format, mode, nonce, proof
HEAD = struct.Struct("<II")  # rows, zero
ROW = struct.Struct("<16sQQ")  # id of a registration, address, bytes
STATUS = struct.Struct("<Q")
ROWS_MAX, BYTES_MAX = 4096, 32 << 20  # of a request
PIECE_BYTES, PIECE_ROWS = 1 << 20, 256  # of what is copied, and sealed, at once
PLAIN_BYTES = 4 << 20  # of plain bytes that are copied at once: nobody else sees how they are cut
NONCE_BYTES = PROOF_BYTES = KEY_BYTES = 32
WORD_BYTES = 8
ADDRESSES_MAX = 8
DEVICES_MAX = 1024
HERE, IS_GONE = 0, 1  # an answer's status: bytes follow; an id is unknown, and no bytes come
WELCOME, FULL = b"\0", b"\1"  # the answers to a knock
NEAR, SEALED = 1, 2  # modes: plain, over loopback; TLS, then sealed pieces

_KIND = "tcp"
_Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Secret = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Address = Annotated[bytes, Meta(min_length=4, max_length=16)]
_Addresses = Annotated[tuple[_Address, ...], Meta(max_length=ADDRESSES_MAX)]
_Port = Annotated[int, Meta(ge=1, le=65535)]
_Name = Annotated[str, Meta(min_length=1, max_length=1024)]
_Device = Annotated[int, Meta(ge=HOST, lt=DEVICES_MAX)]


class Garbage(ConnectionError):
    """These bytes mean nothing, or something that is not allowed; why."""


class TcpCard(NamedTuple):
    """All that a reader has to know to connect. Whoever knows the token may read."""

    kind: Literal["tcp"]
    agent: _Name
    boot: str  # the host's, of this start of its kernel
    network: int  # the namespace that its loopback is in
    port: _Port
    addresses: _Addresses  # 4 bytes each, or 16
    pin: _Secret  # the SHA-256 of its certificate
    token: _Secret

    def __repr__(self) -> str:
        return f"TcpCard(agent={self.agent!r}, port={self.port})"  # the token is in no log


class Named(NamedTuple):
    """A registration's regions on one device, as peers are told of them."""

    id: _Id
    device: _Device  # HOST, or a CUDA device as the source counts them
    bounds: bytes  # starts, then ends: disjoint, in order

    def regions(self) -> tuple[Uint64s, Uint64s]:
        """Raises: Garbage: They are none, or not in order."""
        if not self.bounds or len(self.bounds) % 16:
            raise Garbage("these are no regions of memory")
        starts, ends = np.frombuffer(self.bounds, np.uint64).reshape(2, -1)
        if (starts >= ends).any() or (ends[:-1] > starts[1:]).any():
            raise Garbage("its regions are empty, or not in order")
        return starts, ends


class _Descriptor(NamedTuple):
    kind: Literal["tcp"]
    agent: _Name
    named: tuple[Named, ...]


def card_of(
    agent: str,
    place: tuple[str, int],
    port: int,
    addresses: Sequence[bytes],
    secrets: Sequence[bytes],
) -> bytes:
    return msgspec.msgpack.encode((_KIND, agent, *place, port, tuple(addresses), *secrets))


def parse_card(connection: bytes) -> TcpCard:
    """Raises: Garbage: These are other bytes."""
    try:
        return msgspec.msgpack.decode(connection, type=TcpCard)
    except (msgspec.DecodeError, ValueError) as error:
        raise Garbage(
            'its connection is not one of transport="tcp", which both ends need'
        ) from error


def descriptor_of(agent: str, named: Sequence[Named]) -> bytes:
    return msgspec.msgpack.encode((_KIND, agent, tuple(named)))


def parse_descriptor(descriptor: bytes) -> tuple[str, tuple[Named, ...]]:
    """The agent, and what it has registered. Raises: Garbage: These are other bytes."""
    try:
        said = msgspec.msgpack.decode(descriptor, type=_Descriptor)
    except (msgspec.DecodeError, ValueError) as error:
        raise Garbage("these bytes are no descriptor of a TcpTransport") from error
    return said.agent, said.named


def proof(
    token: bytes, who: Literal["knock", "source", "reader"], mode: int, *parts: bytes
) -> bytes:
    """The MAC by which `who` shows that it knows the token. One of another mode, or of the other
    end, is none.
    """
    with openssl:
        return hmac.digest(token, label(who, mode) + b"".join(parts), "sha256")


def label(who: str, mode: int) -> bytes:
    return f"{who} {'near' if mode == NEAR else 'tls'}".encode().ljust(16, b"\0")


def knock(mode: int, nonce: bytes, token: bytes, pin: bytes, agent: str) -> bytes:
    shown = proof(token, "knock", mode, nonce, pin, agent.encode())
    return KNOCK.pack(MAGIC, FORMAT, mode, nonce, shown)


def parse_knock(body: bytes, token: bytes, pin: bytes, agent: str) -> tuple[int, bytes]:
    """The mode and the reader's nonce. Raises: Garbage: It does not know the token."""
    magic, form, mode, nonce, shown = KNOCK.unpack(body)
    if (magic, form) != (MAGIC, FORMAT) or mode not in {NEAR, SEALED}:
        raise Garbage("no knock of this format")
    if not hmac.compare_digest(shown, proof(token, "knock", mode, nonce, pin, agent.encode())):
        raise Garbage("a knock without the token")
    return mode, nonce


def request(rows: Sequence[tuple[bytes, int, int]]) -> tuple[bytes, bytes]:
    """The head and the body."""
    return HEAD.pack(len(rows), 0), b"".join(ROW.pack(*row) for row in rows)


def parse_head(head: bytes) -> int:
    """How many rows follow. Raises: Garbage: None, or too many."""
    count, zero = HEAD.unpack(head)
    if not 0 < count <= ROWS_MAX or zero:
        raise Garbage(f"a request of {count} rows")
    return cast("int", count)


def parse_rows(body: bytes) -> list[tuple[bytes, int, int]]:
    """Ids, addresses and lengths. Raises: Garbage: One is empty, or it is too much."""
    rows = cast("list[tuple[bytes, int, int]]", list(ROW.iter_unpack(body)))
    if not all(row[2] for row in rows) or sum(row[2] for row in rows) > BYTES_MAX:
        raise Garbage("a request of an empty row, or of too many bytes")
    return rows


def is_word(rows: Sequence[tuple[bytes, int, int]]) -> bool:
    """Whether it may be the word that is asked for, which never arrives torn."""
    return len(rows) == 1 and rows[0][2] == WORD_BYTES and rows[0][1] % WORD_BYTES == 0


def pieces(sizes: Sequence[int], bytes_max: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut an answer into pieces, of each the parts: number of the row, first byte, bytes. Both ends
    cut alike what they seal.
    """
    return _cut(sizes, bytes_max, PIECE_ROWS)


def requests(
    rows: Sequence[tuple[bytes, int, int, int]],
) -> Iterator[list[tuple[bytes, int, int, int]]]:
    """Cut rows (id, source, target, bytes) into requests that a source takes."""
    for parts in _cut([size for _, _, _, size in rows], BYTES_MAX, ROWS_MAX):
        some = []
        for number, first, size in parts:
            name, source, target, _ = rows[number]
            some.append((name, source + first, target + first, size))
        yield some


def _cut(
    sizes: Sequence[int], bytes_max: int, parts_max: int
) -> Iterator[list[tuple[int, int, int]]]:
    """Lists of parts (number of the size, first byte, bytes), each list as full as it may be."""
    some: list[tuple[int, int, int]] = []
    room = bytes_max
    for number, size in enumerate(sizes):
        done = 0
        while done < size:
            taken = min(size - done, room)
            some.append((number, done, taken))
            done, room = done + taken, room - taken
            if not room or len(some) == parts_max:
                yield some
                some, room = [], bytes_max
    if some:
        yield some
