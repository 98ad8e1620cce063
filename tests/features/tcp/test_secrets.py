"""The token and the keys of a source are in its card, in its memory, and nowhere else."""

import base64
import contextlib
import gc
import logging
import os
import pickle
import socket
import threading
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from features.tcp.hostile import MODES, Card, Ended, Line, Reader
from kit import inside, until
from p2p.steps import region

from torch_ros.errors import TransferFailed
from torch_ros.features.tcp.transport import TcpTransport
from torch_ros.store.txn import Entry

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def opened_with():
    return {"transport": "tcp"}


def forms(secret):
    """How a secret could stand in a text."""
    half = secret[:12]
    yield from (
        half.hex(),
        base64.b64encode(half).decode().rstrip("="),
        repr(half)[2:-1],
        str(list(half))[1:-1],
    )


def told(error):
    """All that a log, a debugger or a peer could show of an error."""
    shown = []
    while error is not None:
        shown += [f"{error!s} {error!r} {error.args} {vars(error)} {pickle.dumps(error)}"]
        shown += traceback.format_exception(error)
        error = error.__cause__ or error.__context__
    return "\n".join(shown)


def shown_of(*objects):
    """The representations of these, and of all of the package's that they refer to."""
    found, left = {}, list(objects)
    while left:
        each = left.pop()
        if id(each) in found or not str(type(each).__module__).startswith("torch_ros"):
            continue
        if isinstance(each, Entry):  # of the store in memory, in which the card is
            continue
        found[id(each)] = f"{each!r} {each!s}"
        for more in gc.get_referents(each):
            left += more.values() if isinstance(more, dict) else [more]
            left += more if isinstance(more, list | tuple | set) else []
    return "\n".join(found.values())


def failures(card):
    """The errors of readers whose card is wrong, and the texts that connecting gives."""
    reader = TcpTransport(connect_s=1)
    wrong = {"token": bytes(32)}, {"pin": bytes(32)}, {"agent": "another"}, {"port": 1}, {"port": 0}
    for changed in (
        *wrong,
        {"boot": "another", "addresses": []},
        {"addresses": [bytes(3)]},
        {"token": card.token[1:]},
    ):
        with pytest.raises(TransferFailed) as caught:
            reader.connect(card.but(**changed).encode())
        yield told(caught.value)
    reader.close()


def hurt(card):
    """Be a stranger, so that the source logs that one was here."""
    for said in (b"x" * 72, card.knock("near", bytes(32)), b""):
        with Reader(card) as reader, contextlib.suppress(Ended):
            reader.line.send(said)
            reader.line.finish()
            reader.rest()
    with Reader(card).meet() as reader:
        reader.ask((bytes(16), 1, 0))
        reader.rest()


def test_the_token_is_in_no_log_error_representation_or_page(opened, asked, caplog):
    caplog.set_level(logging.DEBUG)
    trainer = opened("trainer", {"w": torch.ones(1000)})
    rollout = opened("rollout", {"w": torch.zeros(1000)})
    trainer.publish(1)
    assert rollout.replicate() == 1
    card = Card.read(inside(trainer).transport.connection)
    hurt(card)
    words = [*failures(card), shown_of(trainer, rollout, inside(trainer).transport)]
    for command in (["ls", "--json"], ["ls"], ["why", trainer.model], ["doctor"]):
        with contextlib.suppress(SystemExit):
            words += map(str, asked(*command))
    trainer.unpublish()
    everything = "\n".join([*words, caplog.text])
    assert "rollout" in everything
    assert card.agent in everything
    for secret in (card.token, Card.read(inside(rollout).transport.connection).token):
        assert not [form for form in forms(secret) if form in everything]


def test_a_secret_would_be_found():
    secret = os.urandom(32)

    class Shown:
        __module__ = "torch_ros.test"

        def __repr__(self):
            return f"Shown({secret!r})"

    class Holder:
        __module__ = "torch_ros.test"

        def __init__(self):
            self.inner = [Shown()]

    assert [form for form in forms(secret) if form in shown_of(Holder())]


def test_no_key_of_tls_is_written_where_the_environment_says(start, tmp_path):
    path = tmp_path / "keys"
    source = start(sizes=[5000], environment={"SSLKEYLOGFILE": str(path)})
    with source.reader("tls") as reader:
        assert reader.read(source.regions[0]) == source.pattern(0).tobytes()
    assert not path.exists()


def test_no_file_is_left_that_has_the_private_key(start):
    source = start(sizes=[5000])
    for link in Path(f"/proc/{source.pid}/fd").iterdir():
        if "memfd" in str(link.readlink()):
            assert b"PRIVATE KEY" not in link.read_bytes()


class Between:
    """Passes on all that the two say, and keeps it."""

    def __init__(self, to):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.to, self.seen = to, bytearray()
        self.card = to.but(port=self.listener.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def _run(self):
        with contextlib.suppress(OSError):
            while True:
                ends = Line(self.listener.accept()[0]), Reader(self.to).line
                for source, target in (ends, ends[::-1]):
                    threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source, target):
        with contextlib.suppress(Ended, OSError):
            while True:
                some = source.some(1 << 16)
                self.seen += some
                target.send(some)


@pytest.mark.parametrize("mode", MODES)
def test_neither_end_sends_the_token(mode):
    with contextlib.closing(TcpTransport()) as source, contextlib.closing(TcpTransport()) as reader:
        card = Card.read(source.connection)
        if mode == "tls":
            card = card.but(network=0, addresses=[b"\x7f\0\0\1"])
        memory, target = np.full(5000, 7, np.uint8), np.zeros(5000, np.uint8)
        shown = source.register([region(memory)])
        reader.register([region(target)])
        with Between(card) as between:
            peer = reader.connect(between.card.encode())
            peer.attach(shown.descriptor)
            span = [[memory.ctypes.data, target.ctypes.data, 5000]]
            read = peer.prepare(np.array(span, np.uint64))
            read.post()
            until(read.is_done)
            peer.close()
        assert (target == 7).all()
        assert len(between.seen) > 5000
        assert (bytes(100 * [7]) in between.seen) == (mode == "near")
        assert card.token[:12] not in between.seen
        assert card.agent.encode() not in between.seen
