"""How two ends of a connection come to trust each other, and what they speak through then.

All that waits is a generator of `Steps`, which yields what it waits for. Whoever runs it does so
when the socket is ready, and may end it at each step.
"""

import hashlib
import hmac
import os
import secrets
import socket
import ssl
import struct
from collections.abc import Callable, Generator, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from typing import Protocol, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from torch_ros.channels import wire
from torch_ros.channels.locks import openssl
from torch_ros.channels.views import PieceBuffers, rest
from torch_ros.channels.wire import KEY_BYTES, NEAR, NONCE_BYTES, PROOF_BYTES, Garbage, TcpCard

Answer = TypeVar("Answer")
Running = Generator[int, None, Answer]
Steps = Running[None]
GO_ON, READ, WRITE, LATER = 0, 1, 2, 4  # run it again: at once, if others may too; ready; later

FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
TAG_BYTES = 16
TLS_BYTES_MAX = 64 << 10  # from a peer, in one meeting
SIGNED_BYTES_MAX = 4096  # a certificate and a signature
_READ_BYTES = 16 << 10
_LENGTHS = struct.Struct("<HH")  # of the certificate and of the signature


class TcpIdentity:
    """A certificate and a token, by which readers know this process; made with its listeners."""

    def __init__(self) -> None:
        with openssl:
            self._key = ec.generate_private_key(ec.SECP256R1())
            self.certificate: bytes = self._signed().public_bytes(serialization.Encoding.DER)
            self.context: ssl.SSLContext = self._context()
            self.pin: bytes = hashlib.sha256(self.certificate).digest()
        self.token: bytes = secrets.token_bytes(KEY_BYTES)

    def _signed(self) -> x509.Certificate:
        """A certificate that says nothing; readers compare it, and not its dates."""
        nobody = x509.Name([])
        made = x509.CertificateBuilder(nobody, nobody, self._key.public_key(), 1)
        made = made.not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))
        made = made.not_valid_after(datetime(2100, 1, 1, tzinfo=UTC))
        return made.sign(self._key, hashes.SHA256())

    def _context(self) -> ssl.SSLContext:
        """The source's side of TLS. `ssl` takes keys from files alone: one in memory, for once."""
        context = _plain_context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # so that no byte of TLS is left when it is over
        fd = os.memfd_create("torch_ros", os.MFD_CLOEXEC)
        with os.fdopen(fd, "wb") as file:
            form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            file.write(self._key.private_bytes(serialization.Encoding.PEM, *form))
            file.write(ssl.DER_cert_to_PEM_cert(self.certificate).encode())
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        return context

    def sign(self, said: bytes) -> bytes:
        with openssl:
            return self._key.sign(said, ec.ECDSA(hashes.SHA256()))


class Channel(Protocol):
    """A connection whose ends have met."""

    sock: socket.socket
    piece_bytes: int  # into pieces of so many bytes an answer is cut

    def send(self, *parts: bytes, more: bool = False) -> Steps:
        """Send them as one piece. `more`: the next one follows at once."""

    def receive(self, size_bytes: int) -> Running[bytes]:
        """Receive a piece. Raises: ConnectionError: It ended."""

    def fill(self, views: Sequence[memoryview]) -> Steps:
        """Receive a piece into these."""


class PlainChannel:
    """Bytes as they are."""

    piece_bytes: int = wire.PLAIN_BYTES

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, *parts: bytes, more: bool = False) -> Steps:
        yield from sent(self.sock, b"".join(parts), more=more)

    def receive(self, size_bytes: int) -> Running[bytes]:
        body = bytearray(size_bytes)
        yield from self.fill([memoryview(body)])
        return bytes(body)

    def fill(self, views: Sequence[memoryview]) -> Steps:
        while views:
            try:
                count, _, _, _ = self.sock.recvmsg_into(views, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                yield READ
                continue
            if not count:
                raise ConnectionError("it ended the connection")
            views = rest(views, count)


class SealedChannel:
    """AES-256-GCM, with a key and a counter each way; each piece ends in a tag."""

    piece_bytes: int = wire.PIECE_BYTES

    def __init__(
        self, sock: socket.socket, sends: bytes, receives: bytes, buffers: PieceBuffers
    ) -> None:
        self.sock = sock
        with openssl:
            self._sends, self._receives = AESGCM(sends), AESGCM(receives)
        self._sent = self._received = 0
        self._plain, self._buffers = PlainChannel(sock), buffers

    def send(self, *parts: bytes, more: bool = False) -> Steps:
        yield from self.seal(b"".join(parts), more=more)

    def seal(self, piece: bytes | memoryview, *, more: bool = False) -> Steps:
        """Send a piece; it may be overwritten once this has yielded."""
        with self._buffers.one(len(piece) + TAG_BYTES) as sealed:
            nonce, self._sent = _nonce(self._sent), self._sent + 1
            self._sends.encrypt_into(nonce, piece, None, sealed)
            yield from sent(self.sock, sealed, more=more)

    def receive(self, size_bytes: int) -> Running[bytes]:
        body = bytearray(size_bytes)
        yield from self.fill([memoryview(body)])
        return bytes(body)

    def fill(self, views: Sequence[memoryview]) -> Steps:
        """Bytes that have landed count only when this ends: the tag is looked at last."""
        size = sum(map(len, views))
        with self._buffers.one(size + TAG_BYTES) as sealed:
            yield from self._plain.fill([sealed])
            if len(views) == 1:
                self._open(sealed, views[0])
                return
            with self._buffers.one(size) as opened:
                self._open(sealed, opened)
                for view in views:
                    view[:] = opened[: len(view)]
                    opened = opened[len(view) :]  # noqa: PLW2901

    def _open(self, sealed: memoryview, into: memoryview) -> None:
        nonce, self._received = _nonce(self._received), self._received + 1
        try:
            self._receives.decrypt_into(nonce, sealed, None, into)
        except InvalidTag as error:
            raise Garbage("bytes were changed on the way") from error


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")


def sent(sock: socket.socket, body: bytes | memoryview, *, more: bool = False) -> Steps:
    flags = FLAGS | (socket.MSG_MORE if more else 0)
    view = memoryview(body)
    while view:
        try:
            view = view[sock.send(view, flags) :]
        except BlockingIOError:
            yield WRITE


def accept(
    sock: socket.socket,
    identity: TcpIdentity,
    agent: str,
    buffers: PieceBuffers,
    welcome: Callable[[int], bool],
) -> Running[Channel]:
    """The source's side of a meeting.

    `welcome` is asked with the mode, once the reader has shown that it knows the token: False if
    there is no room.

    Raises: ConnectionError: It ended, or it is nobody who may read.
    """
    plain = PlainChannel(sock)
    knock = yield from plain.receive(wire.KNOCK.size)
    mode, theirs = wire.parse_knock(knock, identity.token, identity.pin, agent)
    is_welcome = welcome(mode)
    yield from plain.send(wire.WELCOME if is_welcome else wire.FULL)
    if not is_welcome:
        raise ConnectionError("there is no room for it")
    mine = secrets.token_bytes(NONCE_BYTES)
    said = theirs, mine, identity.pin, agent.encode()
    shown = mine + wire.proof(identity.token, "source", mode, *said)
    channel: Channel = plain
    if mode == NEAR:
        signature = identity.sign(wire.label("source", NEAR) + b"".join(said))
        lengths = _LENGTHS.pack(len(identity.certificate), len(signature))
        yield from plain.send(shown, lengths, identity.certificate, signature)
    else:
        keys = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES)
        tls = _Tls(sock, identity.context, is_source=True)
        yield from tls.met()
        yield from tls.send(shown + b"".join(keys))
        tls.end()
        channel = SealedChannel(sock, *keys, buffers)
    proof = yield from channel.receive(PROOF_BYTES)
    if not hmac.compare_digest(proof, wire.proof(identity.token, "reader", mode, *said)):
        raise Garbage("a reader without the token")
    return channel


class Full(ConnectionError):
    """A source has no room for another connection at the moment."""


def greet(sock: socket.socket, card: TcpCard, mode: int, buffers: PieceBuffers) -> Running[Channel]:
    """The reader's side of a meeting. Nothing of the card is sent before the certificate is seen.

    Raises: ConnectionError: It ended, or it is not the process of the card.
    """
    plain = PlainChannel(sock)
    mine = secrets.token_bytes(NONCE_BYTES)
    yield from plain.send(wire.knock(mode, mine, card.token, card.pin, card.agent))
    answer = yield from plain.receive(1)
    if answer == wire.FULL:
        raise Full("it has no room for another connection")
    if answer != wire.WELCOME:
        raise Garbage("something else listens there")
    channel: Channel = plain
    if mode == NEAR:
        theirs = yield from _near(plain, mine, card)
    else:
        theirs, channel = yield from _sealed(sock, mine, card, buffers)
    said = mine, theirs, card.pin, card.agent.encode()
    yield from channel.send(wire.proof(card.token, "reader", mode, *said), more=True)
    return channel


def _near(plain: PlainChannel, mine: bytes, card: TcpCard) -> Running[bytes]:
    """The source's nonce, if what it shows is signed with the key of the card's certificate."""
    shown = yield from plain.receive(NONCE_BYTES + PROOF_BYTES)
    lengths = _LENGTHS.unpack((yield from plain.receive(_LENGTHS.size)))
    if sum(lengths) > SIGNED_BYTES_MAX:
        raise Garbage("a certificate that is too long")
    signed = yield from plain.receive(sum(lengths))
    certificate, signature = signed[: lengths[0]], signed[lengths[0] :]
    _refuse_other(card, certificate)
    theirs = _proven(shown, mine, card, NEAR)
    said = b"".join((wire.label("source", NEAR), mine, theirs, card.pin, card.agent.encode()))
    try:
        with openssl:
            key = x509.load_der_x509_certificate(certificate).public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise Garbage("its certificate has a key of another kind")
            key.verify(signature, said, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, UnsupportedAlgorithm, ValueError) as error:
        raise Garbage("it has not the key of its certificate") from error
    return theirs


def _sealed(
    sock: socket.socket, mine: bytes, card: TcpCard, buffers: PieceBuffers
) -> Running[tuple[bytes, Channel]]:
    """The source's nonce, and the channel of which it has sent the keys over TLS."""
    tls = _Tls(sock, _reader_context(), is_source=False)
    yield from tls.met()
    _refuse_other(card, tls.certificate() or b"")
    shown = yield from tls.receive(NONCE_BYTES + PROOF_BYTES + 2 * KEY_BYTES)
    tls.end()
    theirs = _proven(shown[: NONCE_BYTES + PROOF_BYTES], mine, card, wire.SEALED)
    receives, sends = shown[-2 * KEY_BYTES : -KEY_BYTES], shown[-KEY_BYTES:]
    return theirs, SealedChannel(sock, sends, receives, buffers)


def _refuse_other(card: TcpCard, certificate: bytes) -> None:
    with openssl:
        pin = hashlib.sha256(certificate).digest()
    if pin != card.pin:
        raise Garbage("its certificate is not that of its card")


def _proven(shown: bytes, mine: bytes, card: TcpCard, mode: int) -> bytes:
    """The source's nonce, if it knows the token."""
    theirs, proof = shown[:NONCE_BYTES], shown[NONCE_BYTES:]
    expected = wire.proof(card.token, "source", mode, mine, theirs, card.pin, card.agent.encode())
    if not hmac.compare_digest(proof, expected):
        raise Garbage("it does not know the token of its card")
    return theirs


def _plain_context(protocol: int) -> ssl.SSLContext:
    """TLS 1.3 alone. `create_default_context` would write keys where the environment says."""
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the pin is compared instead
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    return context


@cache
def _reader_context() -> ssl.SSLContext:
    with openssl:
        return _plain_context(ssl.PROTOCOL_TLS_CLIENT)


class _Tls:
    """TLS in memory: OpenSSL has no socket, to which it would write without MSG_NOSIGNAL."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, is_source: bool) -> None:
        self._sock = sock
        self._comes, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._left = TLS_BYTES_MAX
        with openssl:
            self._tls = context.wrap_bio(self._comes, self._goes, server_side=is_source)

    def met(self) -> Steps:
        yield from self._done(self._tls.do_handshake)

    def certificate(self) -> bytes | None:
        with openssl:
            return self._tls.getpeercert(binary_form=True)

    def send(self, body: bytes) -> Steps:
        yield from self._done(partial(self._tls.write, body))

    def receive(self, size_bytes: int) -> Running[bytes]:
        body = bytearray()
        while len(body) < size_bytes:
            some = yield from self._done(partial(self._tls.read, size_bytes - len(body)))
            if not some:
                raise ConnectionError("it ended the connection")
            body += some
        return bytes(body)

    def end(self) -> None:
        """Raises: Garbage: Bytes are left that nobody will read as TLS."""
        with openssl:
            if self._comes.pending or self._tls.pending():
                raise Garbage("bytes behind the end of TLS")

    def _done(self, call: Callable[[], Answer]) -> Running[Answer]:
        """The answer of a call, which is made until it has all that it wants."""
        answers: list[Answer] = []
        while True:
            with openssl:
                try:
                    answers.append(call())
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLError as error:
                    raise Garbage(f"no TLS of ours ({error.reason})") from error
                goes = self._goes.read()
            yield from sent(self._sock, goes)
            if answers:
                return answers[0]
            yield from self._fed()

    def _fed(self) -> Steps:
        while True:
            try:
                some = self._sock.recv(_READ_BYTES, socket.MSG_DONTWAIT)
                break
            except BlockingIOError:
                yield READ
        self._left -= len(some)
        if not some or self._left < 0:
            raise ConnectionError("it ended the connection, or never ends its greeting")
        self._comes.write(some)
