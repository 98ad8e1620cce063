"""Deltas between copies: which are made and listed, where, and who waits for the thread."""

import itertools
import math
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import prometheus_client
import pytest
import torch
import torch.distributed.checkpoint as dcp
from features.deltas.changing import copies
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import inside, memory, until

from torch_ros.codec.delta import SEGMENT, apply, pieces
from torch_ros.codec.table import TABLE_BYTES, DeltaEntry, DeltaHead, DeltaTable
from torch_ros.copies import buffers as copy_buffers
from torch_ros.dcp import ROSWriter
from torch_ros.errors import UsageError, VersionConflict
from torch_ros.features.deltas import making as deltas
from torch_ros.features.deltas.making import CopyDeltas, Ring
from torch_ros.metrics import HandleCollector
from torch_ros.weights.local import build, local_chunks

endpoint = pytest.fixture(memory)

WITHIN_S = 20


@pytest.fixture
def opened_with():
    return {"digests": "full", "timeout_s": WITHIN_S}


def made(handle):
    """The table that a reader finds, once no delta is being made."""
    making = copies(handle)._making
    until(lambda: making is None or making.has_ended)
    return shown(handle)


def shown(handle):
    ring, address = copies(handle)._ring, inside(handle).mailbox.manifest.more["deltas"]
    assert address == ring.address
    table = DeltaTable.decode(ring.bytes[:TABLE_BYTES].tobytes())
    assert table is not None
    return table


def applied(handle, entry, tensors):
    """Do to these, laid out as the copy is, what an entry says."""
    manifest = inside(handle).mailbox.manifest
    ring = copies(handle)._ring
    regions = inside(handle).mailbox.regions
    assert any(r.address == ring.address and r.size_bytes == ring.size_bytes for r in regions)

    def read(start, size):
        first = entry.address - ring.address + start
        assert TABLE_BYTES <= first <= first + size <= ring.size_bytes
        return ring.bytes[first : first + size]

    payload = read(entry.body_bytes, entry.head_bytes).tobytes()
    head = DeltaHead.decode(payload, entry, manifest.layout)
    _, memory = build(local_chunks(tensors), {})
    for piece in pieces([manifest.layout], manifest.layout):
        found = head.segments(piece.source_chunk, piece.place.first, piece.end)
        if found is not None:
            parts = (read(span.offset, span.size_bytes) for span in (found.gaps, found.values))
            apply(found.received(*parts), memory[piece.target_chunk], piece)
    return head.changed


def stepped(tensors, share=0.01):
    """The same with some other elements."""
    newer = {}
    for fqn, tensor in tensors.items():
        new = tensor.clone()
        new[torch.rand(tensor.shape) < share] += 1
        newer[fqn] = new
    return newer


def model(elements=200_000):
    return {"a": torch.randn(elements).bfloat16(), "b": torch.randn(3, 40)}


def test_each_copy_has_a_delta_from_the_one_before(opened):
    trainer = opened("trainer")
    contents, uids = [model()], []
    for version in range(5):
        trainer.publish_copy(version, contents[-1], deltas=3)
        uids.append(inside(trainer).held.uid)
        table = made(trainer)
        assert table.coming is None
        links = [(entry.base, entry.uid) for entry in table.entries]
        assert links == [*itertools.pairwise(uids)][::-1][:3]
        for age, entry in enumerate(table.entries):
            base = {fqn: t.clone() for fqn, t in contents[-2 - age].items()}
            assert 0 < applied(trainer, entry, base) < 5000
            assert all(torch.equal(base[fqn], t) for fqn, t in contents[-1 - age].items())
        contents.append(stepped(contents[-1]))
    assert inside(trainer).observed.tally.ended["deltas"] == {"made": 4}


def test_the_first_reader_is_told_what_is_coming(opened, monkeypatch):
    trainer, may_go, real = opened("trainer"), threading.Event(), deltas.compare
    monkeypatch.setattr(deltas, "compare", lambda *a: may_go.wait(WITHIN_S) and real(*a))
    weights = model()
    trainer.publish_copy(1, weights, deltas=1)
    first = inside(trainer).held.uid
    assert shown(trainer) == DeltaTable()
    trainer.publish_copy(2, stepped(weights), deltas=1)
    assert shown(trainer) == DeltaTable((), first)
    may_go.set()
    table = made(trainer)
    assert table.coming is None
    assert [entry.base for entry in table.entries] == [first]


DTYPES = [torch.bool, torch.uint8, torch.float8_e5m2, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128])
def test_tensors_of_any_dtype_and_shape_are_compared(opened, dtype):
    shapes = [(), (0,), (7,), (3, 0), (2, 5, 3), (SEGMENT + 3,)]

    def content():
        raw = (torch.randint(0, 2, (math.prod(s) * dtype.itemsize,)).byte() for s in shapes)
        return {
            f"t{number}": each.view(dtype).reshape(shape) if math.prod(shape) else
            torch.empty(shape, dtype=dtype)
            for number, (shape, each) in enumerate(zip(shapes, raw, strict=True))
        }  # fmt: skip

    trainer, older, newer = opened("trainer"), content(), content()
    # All of this is no more than the room of a ring that is larger than a quarter of it.
    trainer.publish_copy(1, older, deltas=1, delta_bytes=8 << 20)
    trainer.publish_copy(2, newer, deltas=1, delta_bytes=8 << 20)
    (entry,) = made(trainer).entries
    applied(trainer, entry, older)
    for fqn, tensor in newer.items():
        bits = [t.reshape(-1).view(torch.uint8) if t.numel() else t for t in (older[fqn], tensor)]
        assert torch.equal(*bits)


def test_a_copy_in_which_nothing_has_changed_has_an_empty_delta(opened):
    trainer, weights = opened("trainer"), model()
    for version in range(2):
        trainer.publish_copy(version, weights, deltas=1)
    (entry,) = made(trainer).entries
    assert entry.body_bytes == 0
    assert applied(trainer, entry, weights) == 0


# The base


def test_only_a_held_copy_with_the_same_layout_is_a_base(opened):
    trainer, other = opened("trainer"), opened("other")
    weights = model()

    def links(version, tensors=weights):
        trainer.publish_copy(version, tensors, deltas=4)
        return [(entry.base, entry.uid) for entry in made(trainer).entries]

    assert links(1) == []
    first = inside(trainer).held.uid
    (link,) = links(2)
    assert link == (first, inside(trainer).held.uid)
    trainer.unpublish()
    assert links(3) == [link]  # nothing was held
    with pytest.raises(VersionConflict):
        trainer.publish_copy(1, weights, deltas=4)  # fails after its fill
    third = inside(trainer).held.uid
    fourth = links(4)
    assert fourth == [(third, inside(trainer).held.uid), link]
    larger = {"a": torch.zeros(300_000).bfloat16(), "b": weights["b"]}
    assert links(5, larger) == []  # a new ring
    assert links(6, weights) == []  # and again
    trainer.unpublish()
    trainer.register(weights)
    trainer.publish(7)  # in place
    assert inside(trainer).mailbox.manifest.more == {}
    assert links(8) == []
    other.register({fqn: torch.zeros_like(t) for fqn, t in weights.items()})
    other.replicate(8)
    trainer.unpublish()
    trainer.replicate(8)  # into what is registered
    assert inside(trainer).mailbox.manifest.more == {}
    assert links(9) == []


def test_a_content_that_keeps_its_uid_has_no_delta_to_itself(opened):
    trainer, fellow, weights = opened("trainer"), opened("fellow"), model()
    fellow.register(weights)
    fellow.publish(8)
    for _ in range(2):
        trainer.publish_copy(8, weights, deltas=1)
        assert made(trainer) == DeltaTable()
    assert inside(trainer).held == inside(fellow).held


def test_a_copy_without_deltas_lets_go_of_the_ring(opened):
    trainer, weights = opened("trainer"), model()
    for version in range(2):
        trainer.publish_copy(version, weights, deltas=1)
    assert made(trainer).entries
    trainer.publish_copy(3, weights)
    assert inside(trainer).mailbox.manifest.more == {}
    assert copies(trainer).size_bytes == 0
    trainer.publish_copy(4, weights, deltas=1)  # from 3, which was a copy, too
    assert [entry.uid for entry in made(trainer).entries] == [inside(trainer).held.uid]


# The thread


class Held:
    """Holds the thread that makes a delta between two windows, until it is told to go on."""

    def __init__(self, monkeypatch):
        self.is_there, self.may_go, self.seen = threading.Event(), threading.Event(), None
        real = deltas.compare

        def compare(older, newer):
            for each in real(older, newer):
                self.is_there.set()
                assert self.may_go.wait(WITHIN_S)
                if self.seen is None:  # that of this delta, not of the next
                    self.seen = older.clone()
                yield each

        monkeypatch.setattr(deltas, "compare", compare)


@pytest.fixture
def held(monkeypatch):
    it = Held(monkeypatch)
    yield it
    it.may_go.set()


def publishing(trainer, weights):
    """Two copies, and the thread in the middle of their delta."""
    trainer.publish_copy(1, weights, deltas=2)
    trainer.publish_copy(2, stepped(weights), deltas=2)


def beside(call):
    """`call` in a thread of its own."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_a_fill_waits_until_the_thread_has_ended(opened, held, monkeypatch):
    trainer, weights, fills = opened("trainer"), model(), threading.Event()
    publishing(trainer, weights)
    assert held.is_there.wait(WITHIN_S)
    making, real = copies(trainer)._making, copy_buffers.make

    def make(*args):
        fills.set()
        real(*args)

    monkeypatch.setattr(copy_buffers, "make", make)
    saving = beside(lambda: trainer.publish_copy(3, stepped(weights), deltas=2))
    until(lambda: making.is_told_to_stop)
    assert not fills.wait(0.2)
    assert shown(trainer).coming is not None
    held.may_go.set()
    saving.join(WITHIN_S)
    assert torch.equal(held.seen, weights["a"])
    assert (making.outcome, making.has_ended) == ("cut off", True)
    (entry,) = made(trainer).entries
    assert entry.base == making._uid
    trainer.publish_copy(4, stepped(weights), deltas=2)
    assert made(trainer).entries[0].base == entry.uid
    assert inside(trainer).observed.tally.ended["deltas"] == {"cut off": 1, "made": 2}


def test_nobody_waits_after_a_delta_that_was_cut_off_until_one_ends_by_itself(opened, held):
    trainer, weights, offers = opened("trainer"), model(), []
    real = copies(trainer).offer

    def offer(link, *args, **options):
        address = real(link, *args, **options)
        offers.append(link.ring.table.coming is not None)
        return address

    copies(trainer).offer = offer
    publishing(trainer, weights)
    assert held.is_there.wait(WITHIN_S)
    copies(trainer).stop()
    held.may_go.set()
    for version in range(3, 6):
        trainer.publish_copy(version, stepped(weights), deltas=2)
        made(trainer)
    assert offers == [False, True, False, True, True]


def test_a_version_that_is_given_up_needs_no_delta(opened, held):
    trainer = opened("trainer")
    publishing(trainer, model())
    assert held.is_there.wait(WITHIN_S)
    making = copies(trainer)._making
    trainer.unpublish()  # does not wait for the thread
    assert making.is_told_to_stop
    assert not making.has_ended
    held.may_go.set()
    until(lambda: making.has_ended)
    assert making.outcome == "cut off"
    assert copies(trainer)._ring.table == DeltaTable()


def test_a_replicate_after_a_copy_waits_for_the_thread(opened, held):
    trainer, other, weights = opened("trainer"), opened("other"), model()
    trainer.register(weights)
    other.register({fqn: torch.zeros_like(t) for fqn, t in weights.items()})
    publishing(trainer, weights)
    other.replicate(2)
    assert held.is_there.wait(WITHIN_S)
    making = copies(trainer)._making
    trainer.unpublish()
    reading = beside(trainer.replicate)
    reading.join(0.2)
    assert reading.is_alive()
    assert not making.has_ended
    held.may_go.set()
    reading.join(WITHIN_S)
    assert making.has_ended
    assert trainer.version == 2


def test_close_waits_for_the_thread_before_it_lets_go_of_the_ring(opened, held):
    trainer = opened("trainer")
    publishing(trainer, model())
    assert held.is_there.wait(WITHIN_S)
    making, ring = copies(trainer)._making, copies(trainer)._ring
    closing = beside(trainer.close)
    until(lambda: making.is_told_to_stop)
    ring.bytes[-1] = 7
    closing.join(0.2)
    assert closing.is_alive()
    assert ring.bytes[-1] == 7
    held.may_go.set()
    closing.join(WITHIN_S)
    assert making.has_ended
    assert ring.bytes[-1] == 0  # its addresses stay: a reader may ask late
    assert copies(trainer).size_bytes == 0


def test_a_closed_handle_makes_none():
    pool = CopyDeltas()
    pool.close()
    pool.start(SimpleNamespace(base_of=lambda _: SimpleNamespace(uid="a")), "b")
    assert pool._making is None


def test_a_save_that_is_interrupted_while_it_waits_fails_and_the_next_waits_again(
    opened, held, monkeypatch
):
    trainer, weights = opened("trainer"), model()
    publishing(trainer, weights)
    assert held.is_there.wait(WITHIN_S)
    making = copies(trainer)._making

    def pressed(_):
        raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=pressed, perf_counter=time.perf_counter)
    with monkeypatch.context() as patched:
        patched.setattr(deltas, "time", clock)
        with pytest.raises(KeyboardInterrupt):
            trainer.publish_copy(3, stepped(weights), deltas=2)
    assert trainer.version == 2
    assert copies(trainer)._making is making
    assert not making.has_ended
    held.may_go.set()
    trainer.publish_copy(3, stepped(weights), deltas=2)
    assert making.has_ended
    assert making.outcome == "cut off"


def test_a_thread_that_cannot_be_had_leaves_nothing_to_wait_for(opened, monkeypatch):
    trainer, weights = opened("trainer"), model()
    trainer.publish_copy(1, weights, deltas=1)

    def start():
        raise RuntimeError("can't start new thread")

    threads = SimpleNamespace(Thread=lambda **_: SimpleNamespace(start=start))
    with monkeypatch.context() as patched:
        patched.setattr(deltas, "threading", threads)
        trainer.publish_copy(2, weights, deltas=1)
    assert shown(trainer) == DeltaTable()
    trainer.publish_copy(3, weights, deltas=1)
    assert len(made(trainer).entries) == 1


def test_an_error_in_the_thread_is_no_error_of_the_trainer(opened, monkeypatch, caplog):
    trainer, weights = opened("trainer"), model()

    def compare(*_):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(deltas, "compare", compare)
        publishing(trainer, weights)
        assert made(trainer) == DeltaTable()
    assert "no delta to version 2: an error" in caplog.text
    trainer.publish_copy(3, weights, deltas=1)
    assert len(made(trainer).entries) == 1


ENDS = """
import sys, threading, time
import torch, torch_ros
from torch_ros.features.deltas import making as deltas

real, there = deltas.compare, threading.Event()

def slow(older, newer):
    for each in real(older, newer):
        there.set()
        time.sleep(0.05)
        yield each

deltas.compare = slow
handle = torch_ros.open("m", endpoint="memory://", digests="full")
weights = {"w": torch.zeros(1 << 26, dtype=torch.uint8)}
handle.publish_copy(1, weights, deltas=1)
handle.publish_copy(2, weights, deltas=1)
assert there.wait(20)
print(time.time(), flush=True)
"""


@pytest.mark.long
def test_a_script_that_ends_does_not_wait_for_the_whole_delta():
    run = [sys.executable, "-c", ENDS]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    took_s = time.time() - float(ended.stdout)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert took_s < 8  # 256 windows of 50 ms


# RingRoom


def test_a_delta_that_is_too_large_is_given_up_and_the_next_has_more_room(opened):
    trainer, weights = opened("trainer"), model()
    bound = TABLE_BYTES + 40_000

    def publish(version, share):
        weights.update(stepped(weights, share))
        trainer.publish_copy(version, weights, deltas=8, delta_bytes=bound)
        return len(made(trainer).entries)

    assert publish(1, 0.01) == 0
    assert publish(2, 0.01) == 1  # 2,000 changes: 6 KB
    assert publish(3, 0.3) == 1  # 180 KB
    rooms = [copies(trainer)._ring.room().size_bytes]
    for version in range(4, 7):
        publish(version, 0.3)
        rooms.append(copies(trainer)._ring.room().size_bytes)
    assert rooms == sorted(rooms)
    assert rooms[-1] == 40_000
    assert publish(7, 0.001) >= 1
    assert inside(trainer).observed.tally.ended["deltas"]["too large"] == 4
    assert copies(trainer).size_bytes == bound


def test_a_large_chunk_of_which_much_has_changed_is_not_encoded(opened, monkeypatch):
    monkeypatch.setattr(deltas, "CHANGED_MIN", 1000)
    trainer, weights = opened("trainer"), model()
    for version, share in enumerate((0.5, 0.5, 0.01, 0.01)):
        weights.update(stepped(weights, share))
        trainer.publish_copy(version, weights, deltas=8, delta_bytes=8 << 20)
        assert len(made(trainer).entries) == max(0, version - 1)
    assert inside(trainer).observed.tally.ended["deltas"] == {"too large": 1, "made": 2}


@settings(max_examples=200, deadline=None)
@given(
    st.integers(2 * TABLE_BYTES, 40_000),
    st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 99)), max_size=30),
)
def test_the_room_of_a_delta_is_inside_the_ring_and_overlaps_none_that_stays(size, wishes):
    ring = Ring(size)
    for number, (body, head) in enumerate(wishes):
        room = ring.room()
        assert TABLE_BYTES <= room.start <= room.start + room.size_bytes <= size
        assert room.start % 16 == 0
        stay = ring.outside(room)
        for entry in stay:
            start = entry.address - ring.address
            end = start + entry.body_bytes + entry.head_bytes
            assert end <= room.start or start >= room.start + room.size_bytes
        body -= body % 16
        if body + head > room.size_bytes:
            ring.filled(room.size_bytes)
            ring.write(DeltaTable(stay))
            continue
        ring.filled(body + head)
        at = ring.address + room.start
        made = DeltaEntry(str(number), str(number + 1), at, body, head, bytes(16))
        ring.write(DeltaTable((made, *stay)[:16]))
    ring.close()


def test_a_second_offer_of_one_save_lists_no_less_and_moves_no_room(opened):
    """A rank that has lost its seat offers again, under the mark that readers have seen."""
    trainer, weights = opened("trainer"), model()
    offers, real = [], copies(trainer).offer

    def twice(link, *args, **options):
        for _ in range(2):
            address = real(link, *args, **options)
            offers.append((link.room, shown_table(link)))
        return address

    def shown_table(link):
        return DeltaTable.decode(link.ring.bytes[:TABLE_BYTES].tobytes())

    copies(trainer).offer = twice
    for version in range(6):
        weights = stepped(weights)
        trainer.publish_copy(version, weights, deltas=8)
        made(trainer)
    assert all(a == b for a, b in zip(offers[::2], offers[1::2], strict=True))
    assert max(len(table.entries) for _, table in offers) >= 3


# Who may ask for them


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"deltas": -1}, "deltas=-1"),
        ({"deltas": 17}, "from 0 to 16"),
        ({"deltas": 1.5}, "deltas=1.5"),
        ({"deltas": 1, "delta_bytes": 4096}, "delta_bytes=4096"),
    ],
)
def test_deltas_are_a_small_number_and_have_some_room(opened, options, text):
    with pytest.raises(UsageError, match=text):
        opened("trainer").publish_copy(1, model(), **options)


@pytest.mark.parametrize("digests", ["off", "sampled"])
def test_deltas_need_digests_of_everything(opened, digests):
    trainer = opened(digests=digests)
    trainer.publish_copy(1, model())
    with pytest.raises(UsageError, match='digests="full"'):
        trainer.publish_copy(2, model(), deltas=1)
    assert trainer.version == 1


def test_a_state_dict_with_objects_has_no_deltas(opened):
    trainer, state = opened("trainer"), {"w": torch.zeros(8), "step": 7}
    with pytest.raises(dcp.api.CheckpointException) as told:
        dcp.save(state, storage_writer=ROSWriter(1, handle=trainer, mode="copy", deltas=2))
    (error,) = {str(e[0] if isinstance(e, tuple) else e) for e in told.value.failures.values()}
    assert "objects ('step')" in error
    with pytest.raises(UsageError, match="deltas and delta_bytes are of mode='copy'"):
        ROSWriter(1, handle=trainer, deltas=2)


def test_saves_of_dcp_make_deltas(opened):
    trainer, weights = opened("trainer"), model()
    for version in range(3):
        writer = ROSWriter(version, handle=trainer, mode="copy", deltas=2)
        dcp.save(weights, storage_writer=writer)
        assert len(made(trainer).entries) == version


def test_collectors_are_told_how_many_were_made(opened):
    trainer = opened("trainer")
    registry = prometheus_client.CollectorRegistry()
    registry.register(HandleCollector())
    for version in range(2):
        trainer.publish_copy(version, model(), deltas=1, delta_bytes=4 << 20)
    made(trainer)
    labels = inside(trainer).observed.tally.whose._asdict()
    value = registry.get_sample_value
    assert value("torch_ros_deltas_total", {**labels, "outcome": "made"}) == 1
    assert value("torch_ros_delta_bytes_total", labels) > 1000
    assert value("torch_ros_delta_seconds_total", labels) > 0
    assert value("torch_ros_staged_bytes", {**labels, "kind": "deltas"}) == 4 << 20


def test_a_publication_that_is_not_waited_for_promises_none():
    base, ring = SimpleNamespace(uid="a"), Ring(2 * TABLE_BYTES)
    planned = SimpleNamespace(base_of=lambda _: base, entries=(), ring=ring)
    for is_made, coming in ((True, "a"), (False, None)):
        assert CopyDeltas().offer(planned, "b", is_made=is_made) == ring.address
        assert ring.table == msgspec.structs.replace(DeltaTable(), coming=coming)
    assert np.array_equal(ring.bytes[TABLE_BYTES:], np.zeros(TABLE_BYTES, np.uint8))
    ring.close()
