"""Spans of any size are read in parts of a bounded one; what is shown is what is found."""

import random
import uuid
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import torch_ros
from torch_ros.deadline import Deadline
from torch_ros.errors import DeadlineExceeded, SourceLost, TransferFailed
from torch_ros.features.huge_pages.pages import HugePages
from torch_ros.memory.transport import MemoryPeer, MemoryTransfer, MemoryTransport
from torch_ros.shard.beside import Dropped
from torch_ros.shard.tensors import Tensors
from torch_ros.transfer import mailbox as mailbox_module
from torch_ros.transfer import posting
from torch_ros.transfer.card import ALL_BLOCKS, Word
from torch_ros.transfer.feed import Progress
from torch_ros.transfer.mailbox import Mailbox
from torch_ros.transfer.peers import Peers
from torch_ros.transfer.posting import TRANSFER_BYTES, Watcher, cut, perform
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.local import local_chunks


class Clock:
    """Time that passes while somebody sleeps, by a little at least."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds + 5e-5


@pytest.mark.parametrize(
    ("lasts_s", "looks", "late_s"), [(5e-4, 11, 6e-5), (0.04, 150, 0.0013), (2.0, 550, 0.0051)]
)
def test_a_read_that_takes_long_is_looked_at_seldom(monkeypatch, lasts_s, looks, late_s):
    clock, seen = Clock(), []

    def is_done():
        seen.append(clock.now_s)
        return clock.now_s >= lasts_s

    monkeypatch.setattr(posting, "time", clock)
    read = SimpleNamespace(post=lambda: None, is_done=is_done, size_bytes=1)
    perform([read], Deadline("read", 60), Watcher(), pause_s=0.0)
    assert len(seen) <= looks
    assert seen[-1] - lasts_s <= late_s


def test_long_reads_fill_the_way_no_more_than_short_ones():
    flying, most = set(), []

    class Read:
        size_bytes = 32

        def post(self):
            flying.add(self)
            most.append(len(flying))

        def is_done(self):
            flying.discard(self)
            return True

    perform([Read() for _ in range(9)], Deadline("read", 60), Watcher(), flight=8, flight_bytes=70)
    assert max(most) == 2


def test_spans_are_cut_as_a_loop_would():
    rng = random.Random(0)
    for _ in range(300):
        rows = []
        for _ in range(rng.randrange(1, 5)):
            size = rng.choice((1, 2, 3)) * TRANSFER_BYTES + rng.choice(
                (-1, 0, 1, -(TRANSFER_BYTES // 2))
            )
            rows.append((rng.randrange(2**40), 2**63 + rng.randrange(2**40), size))
        expected = [
            (source + done, target + done, min(TRANSFER_BYTES, size - done))
            for source, target, size in rows
            for done in range(0, size, TRANSFER_BYTES)
        ]
        assert cut(np.array(rows, np.uint64)).tolist() == [list(row) for row in expected]


def test_a_tensor_larger_than_a_batch_arrives(etcd_endpoint):
    sent = torch.arange((TRANSFER_BYTES * 2 + 4096) // 4, dtype=torch.int32)
    got = torch.zeros_like(sent)
    with (
        torch_ros.open("large", endpoint=etcd_endpoint, replica="trainer") as trainer,
        torch_ros.open("large", endpoint=etcd_endpoint, replica="rollout") as rollout,
    ):
        trainer.register({"w": sent})
        trainer.publish(1)
        rollout.register({"w": got})
        rollout.replicate()
        assert torch.equal(sent, got)


def test_a_manifest_that_ctrl_c_left_half_written_is_written_again(monkeypatch):
    endpoint = f"memory://{uuid.uuid4().hex}"
    with (
        torch_ros.open("m", endpoint=endpoint, replica="t", digests="full") as trainer,
        torch_ros.open("m", endpoint=endpoint, replica="r", timeout_s=5) as rollout,
    ):
        sent, got = torch.ones(3), torch.zeros(3)
        trainer.register({"w": sent})
        rollout.register({"w": got})
        for version in (1, 2):
            trainer.publish(version)
            trainer.unpublish()
            sent.add_(1)

        def pressed(_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(mailbox_module, "digest_of", pressed)
            with pytest.raises(KeyboardInterrupt):
                trainer.publish(3)
        trainer.unpublish()
        trainer.publish(4)
        assert rollout.replicate() == 4
        assert torch.equal(got, sent)


def test_an_offer_in_the_place_of_one_that_is_gone_is_found():
    source, reader = MemoryTransport(), MemoryTransport()
    peers, deadline = Peers(reader), Deadline("look", 5)
    mailbox = Mailbox(source)
    address = mailbox._memory.ctypes.data
    mailbox.serve(7, 1)
    assert peers.state(mailbox.card, deadline).word.mark == 7
    mailbox.close()
    del mailbox
    mailboxes = [Mailbox(source)]
    while mailboxes[-1]._memory.ctypes.data != address and len(mailboxes) < 1000:
        mailboxes.append(Mailbox(source))
    assert mailboxes[-1]._memory.ctypes.data == address, "it was freed"
    mailboxes[-1].serve(8, 1)
    assert peers.state(mailboxes[-1].card, deadline).word.mark == 8
    peers.close()
    for transport in (source, reader):
        transport.close()


@pytest.mark.parametrize(
    ("error", "cuts"),
    [(SourceLost("r", "it is mute"), 1), (Dropped(), 0), (DeadlineExceeded("x", 1, "y"), 0)],
)
def test_only_a_source_that_is_mute_is_cut_off_while_its_manifest_is_read(monkeypatch, error, cuts):
    """The connection below is others' too, of this process."""
    source, reader, cuts_seen = MemoryTransport(), MemoryTransport(), []
    peers, deadline, mailbox = Peers(reader), Deadline("look", 5), Mailbox(source)
    state = LocalState(local_chunks({"w": torch.ones(3)}), {}, {})
    Tensors(mailbox, HugePages()).show(state)
    was = Peers._read_bytes

    def read_bytes(self, peer, notice, deadline, still):
        def stop():
            raise error

        return was(self, peer, notice, deadline, stop)

    def seen(peer):
        cuts_seen.append(peer)

    monkeypatch.setattr(MemoryPeer, "cut", seen)
    with monkeypatch.context() as patched:
        patched.setattr(Peers, "_read_bytes", read_bytes)
        with pytest.raises(type(error)):
            peers.state(mailbox.card, deadline)
    assert len(cuts_seen) == cuts
    assert peers.state(mailbox.card, deadline).manifest is not None
    peers.close()
    for transport in (source, reader):
        transport.close()


@pytest.mark.parametrize(
    ("error", "late"),
    [
        (KeyboardInterrupt(), []),
        (TransferFailed("a", "gone"), []),
        (DeadlineExceeded("x", 1, "y"), [True]),
    ],
)
def test_only_an_answer_that_may_still_come_is_waited_for_before_the_next(monkeypatch, error, late):
    source, reader = MemoryTransport(), MemoryTransport()
    peers, deadline, mailbox = Peers(reader), Deadline("look", 5), Mailbox(source)
    mailbox.serve(7, 1)
    shown = peers.state(mailbox.card, deadline)

    def fails(_):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(MemoryTransfer, "is_done", fails)
        with pytest.raises(type(error)):
            peers.word(shown, deadline)
    assert [box.is_late for box in peers._mailboxes.values()] == late
    assert peers.word(shown, deadline) == Word(7, 1)
    peers.close()
    for transport in (source, reader):
        transport.close()


def test_readers_are_told_the_rate_beside_the_word_and_not_with_it():
    source, reader = MemoryTransport(), MemoryTransport()
    peers, deadline = Peers(reader), Deadline("look", 5)
    mailbox = Mailbox(source)
    mailbox.serve(7, 1)
    shown = peers.state(mailbox.card, deadline)
    assert peers.rate(shown, deadline) == 0
    mailbox.tell_rate(25_000_000_000)
    assert peers.rate(shown, deadline) == 25_000_000_000
    assert peers.word(shown, deadline) == Word(7, 1)
    mailbox.withdraw()
    assert peers.rate(shown, deadline) == 0
    mailbox.close()
    mailbox.tell_rate(1)  # its memory may be another's by now
    peers.close()
    for transport in (source, reader):
        transport.close()


def test_a_relay_tells_its_rate_until_it_has_everything():
    state = LocalState(local_chunks({"w": torch.zeros(4)}), {}, {})
    transport = MemoryTransport()
    mailbox, target = Mailbox(transport), state
    rate = mailbox._memory[-8:].view(np.uint64)
    mailbox.tell_rate(3)  # of another read
    progress = Progress(mailbox, target)
    assert rate[0] == 0
    progress.serve(5)
    progress.tell_rate(2.5e9)
    assert rate[0] == 2_500_000_000
    progress.add(np.arange(len(progress.done)), 16)
    assert (mailbox.word, rate[0]) == (Word(5, ALL_BLOCKS), 0)
    mailbox.close()
    transport.close()
