"""The wire of docs/protocol/tcp.md, from that page alone, so that tests can speak it wrongly.

A `Reader` is one connection to a source, each step of whose meeting a test may leave out, change or
cut short. An `Impostor` listens as a source does, and has what the test gives it.
"""

import contextlib
import hmac
import secrets
import socket
import ssl
import struct
from dataclasses import astuple, dataclass, replace
from hashlib import sha256

import msgspec
import numpy as np
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MODES = ("near", "tls")
KNOCK = struct.Struct("<4sHH32s32s")  # magic, format, mode, nonce, proof
ROW = struct.Struct("<16sQQ")  # id, address, bytes
ROWS_MAX, BYTES_MAX = 4096, 32 << 20
PIECE, PIECE_ROWS, TAG = 1 << 20, 256, 16
LATE_S = 20.0  # nothing takes that long, even on busy cores


class Ended(Exception):
    """The other end has closed the connection, or reset it."""


class CutShort(Exception):
    """As many bytes were sent as the test wants."""


@dataclass(frozen=True)
class Card:
    agent: str
    boot: str
    network: int
    port: int
    addresses: list
    pin: bytes
    token: bytes

    @classmethod
    def read(cls, connection):
        while (fields := msgspec.msgpack.decode(connection))[0] != "tcp":
            connection = fields[-1]  # of what stands around the transport: TCP is the last way
            while isinstance(connection, list):
                connection = connection[-1]
        return cls(*fields[1:])

    def but(self, **changed):
        return replace(self, **changed)

    def encode(self):
        return msgspec.msgpack.encode(("tcp", *astuple(self)))

    def proof(self, who, mode, *nonces):
        label = f"{who} {mode}".encode().ljust(16, b"\0")
        parts = *nonces, self.pin, self.agent.encode()
        return hmac.digest(self.token, label + b"".join(parts), "sha256")

    def knock(self, mode, nonce, *, magic=b"TROS", form=1, number=None):
        proof = self.proof("knock", mode, nonce)
        number = 1 + MODES.index(mode) if number is None else number
        return KNOCK.pack(magic, form, number, nonce, proof)


def regions_of(descriptor):
    """The id of a registration in host memory, and the starts and ends of its regions."""
    *_, said = msgspec.msgpack.decode(descriptor)
    if isinstance(said, bytes):  # what the kernel's way says stands around it
        return regions_of(said)
    [[name, _, bounds]] = said
    starts, ends = np.frombuffer(bounds, np.uint64).reshape(2, -1).tolist()
    return name, starts, ends


# The parts of a connection


class Line:
    """A socket; `limit` is how many bytes go out before it is `CutShort`."""

    def __init__(self, sock, limit=None):
        self.sock, self.limit, self.sent = sock, limit, 0
        sock.settimeout(LATE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, content):
        left = len(content) if self.limit is None else self.limit - self.sent
        self.sent += len(content[:left])
        try:
            self.sock.sendall(content[:left])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Ended from error
        if left < len(content):
            raise CutShort

    def some(self, size):
        try:
            found = self.sock.recv(size)
        except ConnectionResetError as error:
            raise Ended from error
        if not found:
            raise Ended
        return found

    def take(self, size):
        """Exactly so many bytes."""
        found = bytearray()
        while len(found) < size:
            found += self.some(min(size - len(found), PIECE))
        return bytes(found)

    def finish(self):
        """Say that nothing more comes from here."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def rest(self):
        """Whatever still comes, until the other end closes the connection."""
        found = bytearray()
        with contextlib.suppress(Ended):
            while True:
                found += self.some(PIECE)
        return bytes(found)


class Tls:
    """TLS 1.3 over a line, without a byte that it has taken too much."""

    def __init__(self, line, identity=None):
        self.line, self.incoming, self.outgoing = line, ssl.MemoryBIO(), ssl.MemoryBIO()
        side = ssl.PROTOCOL_TLS_CLIENT if identity is None else ssl.PROTOCOL_TLS_SERVER
        context = ssl.SSLContext(side)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if identity:
            context.num_tickets = 0
            context.load_cert_chain(identity.file)
        self.inside = context.wrap_bio(
            self.incoming, self.outgoing, server_side=identity is not None
        )

    def _run(self, call, *arguments):
        while True:
            try:
                found = call(*arguments)
            except ssl.SSLWantReadError:
                self._flush()
                self.incoming.write(self.line.some(1 << 14))
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError) as error:
                raise Ended from error
            else:
                self._flush()
                return found

    def _flush(self):
        if content := self.outgoing.read():
            self.line.send(content)

    def shake(self):
        self._run(self.inside.do_handshake)
        return self.inside.getpeercert(binary_form=True)

    def send(self, content):
        self._run(self.inside.write, content)

    def take(self, size):
        found = b""
        while len(found) < size:
            part = self._run(self.inside.read, size - len(found))
            if not part:
                raise Ended
            found += part
        return found

    def end(self):
        """Leave TLS: no byte may be left in it, nor what would begin it again."""
        assert not self.inside.session.has_ticket
        assert (self.inside.pending(), self.incoming.pending) == (0, 0)


class Sealed:
    """AES-GCM in pieces over a line: a key and a counter for each direction."""

    def __init__(self, line, out, into):
        self.line, self.keys, self.counts = line, (out, into), [0, 0]
        self.out, self.into = AESGCM(out), AESGCM(into)

    def _nonce(self, way):
        self.counts[way] += 1
        return (self.counts[way] - 1).to_bytes(12, "little")

    def seal(self, piece):
        return self.out.encrypt(self._nonce(0), piece, None)

    def send(self, piece):
        self.line.send(self.seal(piece))

    def take(self, size):
        """One piece."""
        return self.into.decrypt(self._nonce(1), self.line.take(size + TAG), None)


# A reader


class Reader:
    """A connection to the source of that card. `meet` does all that comes before a request."""

    def __init__(self, card, mode="near", *, host="127.0.0.1", limit=None, buffer_bytes=None):
        self.card, self.mode, self.nonce = card, mode, secrets.token_bytes(32)
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        if buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        sock.settimeout(LATE_S)
        sock.connect((host, card.port))
        self.line = self.channel = Line(sock, limit)
        self.theirs = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.line.sock.close()

    def knock(self, content=None):
        self.line.send(self.card.knock(self.mode, self.nonce) if content is None else content)

    def is_welcome(self):
        return self.line.take(1) == b"\0"

    def hear(self):
        """The source's part of the meeting. False: it has not proved to be the card's."""
        if self.mode == "tls":
            self.channel = Tls(self.line)
            if sha256(self.channel.shake()).digest() != self.card.pin:
                return False
        self.theirs, self.heard = self.channel.take(32), self.channel.take(32)
        if self.heard != self.card.proof("source", self.mode, self.nonce, self.theirs):
            return False
        if self.mode == "tls":
            into, out = self.channel.take(32), self.channel.take(32)
            self.channel.end()
            self.channel = Sealed(self.line, out, into)
            return True
        sizes = struct.unpack("<HH", self.channel.take(4))
        certificate, signature = map(self.channel.take, sizes)
        return is_signed(self.card, certificate, signature, self.nonce + self.theirs)

    def prove(self, proof=None):
        mine = self.card.proof("reader", self.mode, self.nonce, self.theirs)
        self.channel.send(mine if proof is None else proof)

    def meet(self):
        self.knock()
        assert self.is_welcome()
        assert self.hear()
        self.prove()
        return self

    def ask(self, *rows, count=None, zero=0):
        """Send a request for rows of (id, address, length)."""
        head = struct.pack("<II", len(rows) if count is None else count, zero)
        body = b"".join(ROW.pack(*row) for row in rows)
        if self.mode == "tls":
            self.channel.send(head)
            if body:
                self.channel.send(body)
        else:
            self.channel.send(head + body)

    def status(self):
        return struct.unpack("<Q", self.channel.take(8))[0]

    def content(self, *rows):
        """The next bytes, and the next, of the answer to these rows."""
        if self.mode == "near":
            left = sum(row[2] for row in rows)
            while left:
                yield (found := self.channel.some(min(left, PIECE)))
                left -= len(found)
        else:
            yield from map(self.channel.take, piece_sizes(row[2] for row in rows))

    def read(self, *rows):
        """The bytes of a request, which is answered."""
        self.ask(*rows)
        assert self.status() == 0
        return b"".join(self.content(*rows))

    def rest(self):
        return self.line.rest()


def piece_sizes(sizes):
    """An answer is cut after each MiB, and after parts of 256 rows."""
    piece = parts = 0
    for size in sizes:
        left = size
        while left:
            taken = min(left, PIECE - piece)
            left, piece, parts = left - taken, piece + taken, parts + 1
            if piece == PIECE or parts == PIECE_ROWS:
                yield piece
                piece = parts = 0
    if piece:
        yield piece


def is_signed(card, certificate, signature, nonces):
    """Whether the owner of the card's certificate has signed these nonces."""
    if sha256(certificate).digest() != card.pin:
        return False
    key = x509.load_der_x509_certificate(certificate).public_key()
    said = b"source near".ljust(16, b"\0") + nonces + card.pin + card.agent.encode()
    try:
        key.verify(signature, said, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True
