"""A process that listens where a source would, and has what a test gives it.

It speaks the source's half of docs/protocol/tcp.md, from that page alone.
"""

import contextlib
import secrets
import socket
import struct
import threading
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from features.tcp.hostile import KNOCK, MODES, ROW, Ended, Line, Sealed, Tls, piece_sizes

PEM = Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()


class Identity:
    """A certificate, and a file with its key."""

    def __init__(self, folder):
        self.key = ec.generate_private_key(ec.SECP256R1())
        nobody = x509.Name([])
        made = x509.CertificateBuilder(nobody, nobody, self.key.public_key(), 1)
        made = made.not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))
        made = made.not_valid_after(datetime(2100, 1, 1, tzinfo=UTC))
        signed = made.sign(self.key, hashes.SHA256())
        self.certificate = signed.public_bytes(Encoding.DER)
        self.pin = sha256(self.certificate).digest()
        self.file = Path(folder, secrets.token_hex(4))
        self.file.write_bytes(signed.public_bytes(Encoding.PEM) + self.key.private_bytes(*PEM))


class Impostor:
    """A source as the page says; a subclass does one thing otherwise.

    Args:
        card: Of the source that it claims to be; its port is the impostor's own.
        identity: Its certificate: the card's has another pin, unless the test made that.
        content: All memory, from address 0 on.
    """

    def __init__(self, card, identity, content=b""):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.card = card.but(port=self.listener.getsockname()[1])
        self.identity, self.content = identity, content
        self.heard, self.modes = [], []  # the proofs of readers, and how they came
        self.open = []
        threading.Thread(target=self._run, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for sock in self.open:
            sock.close()

    def _run(self):
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                self.open.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock):
        line = Line(sock)
        try:
            self.serve(line)
        except (Ended, OSError):
            pass
        finally:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def serve(self, line):
        channel = self.meet(line)
        while True:
            head = self.request(channel)
            self.answer(channel, head)

    # The page

    def meet(self, line):
        _, _, number, nonce, _ = KNOCK.unpack(line.take(KNOCK.size))
        mode = MODES[number - 1]
        line.send(b"\0")
        channel = line
        if mode == "tls":
            channel = Tls(line, self.identity)
            channel.shake()
        mine = secrets.token_bytes(32)
        shown = mine + self.proof(mode, nonce, mine)
        if mode == "tls":
            out, into = secrets.token_bytes(32), secrets.token_bytes(32)
            channel.send(shown + out + into)
            channel = Sealed(line, out, into)
        else:
            signature = self.sign(nonce + mine)
            lengths = struct.pack("<HH", len(self.identity.certificate), len(signature))
            channel.send(shown + lengths + self.identity.certificate + signature)
        self.heard.append(channel.take(32))
        assert self.heard[-1] == self.card.proof("reader", mode, nonce, mine)
        self.modes.append(mode)
        return channel

    def proof(self, mode, *nonces):
        return self.card.proof("source", mode, *nonces)

    def sign(self, nonces):
        said = b"source near".ljust(16, b"\0") + nonces + self.card.pin + self.card.agent.encode()
        return self.identity.key.sign(said, ec.ECDSA(hashes.SHA256()))

    def request(self, channel):
        count, _ = struct.unpack("<II", channel.take(8))
        return list(ROW.iter_unpack(channel.take(count * ROW.size)))

    def answer(self, channel, rows):
        channel.send(struct.pack("<Q", 0))
        whole = b"".join(self.content[at : at + size] for _, at, size in rows)
        for size in piece_sizes(row[2] for row in rows):
            channel.send(whole[:size])
            whole = whole[size:]
