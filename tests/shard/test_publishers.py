"""Several publishers of one number: equal bytes are legal, and others are told."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit import inside, memory

import torch_ros
from torch_ros.dcp import ROSWriter
from torch_ros.errors import ManifestMismatch, VersionConflict
from torch_ros.protocol.keys import replica_of
from torch_ros.shard import manifests
from torch_ros.shard.manifests import Manifests
from torch_ros.transfer.reading import Reading

endpoint = pytest.fixture(memory)

MIXTURE, SHARED = "is read from two publishers", "is also published by"
"""Beginnings of the two warnings."""


def publisher(opened, replica, value, **options):
    handle = opened(replica, **options)
    handle.register({f"w{n}": torch.full((1024,), value) for n in range(8)})
    return handle


@pytest.mark.parametrize("depth", ["full", "sampled"])
def test_the_second_publisher_of_other_bytes_is_refused(opened, depth):
    first = publisher(opened, "first", 1.0, digests=depth)
    second = publisher(opened, "second", 2.0, digests=depth)
    first.publish(1)
    with pytest.raises(VersionConflict, match=r"'first' has published it .* tensor 'w0'"):
        second.publish(1)
    assert second.version is None
    assert first.list() == {1: {"first"}}
    second.publish(2)


def test_a_publisher_whose_ranks_go_on_to_other_tensors_does_not_fail_the_next(opened, monkeypatch):
    """One of its ranks shows the next version by now, in which a tensor has another dtype."""
    publisher(opened, "first", 1.0).publish(1)
    goes_on, second = opened("goes on"), publisher(opened, "second", 1.0)
    goes_on.register({"w0": torch.ones(1024, dtype=torch.float64)})
    of = Manifests.of

    def shown(self, inst, deadline, world_size):
        return [*of(self, inst, deadline, world_size), inside(goes_on).mailbox.manifest]

    monkeypatch.setattr(Manifests, "of", shown)
    second.publish(1)
    assert second.version == 1


def test_one_tensor_among_many_that_differs_is_named(opened):
    first = publisher(opened, "first", 1.0, digests="full")
    second = opened("second", digests="full")
    tensors = {f"w{n}": torch.ones(1024) for n in range(8)}
    tensors["w5"][1023] = 7
    first.publish(1)
    with pytest.raises(BaseException, match="tensor 'w5'"):
        dcp.save(tensors, storage_writer=ROSWriter(1, handle=second))


@pytest.mark.parametrize("depths", [("full", "full"), ("full", "sampled"), ("off", "full")])
def test_publishers_of_the_same_bytes_share_a_number(opened, depths, caplog):
    handles = [
        publisher(opened, f"t{n}", 1.0, digests=depth)
        for n, depth in enumerate((*depths, depths[1]))
    ]
    for version in (1, 2):
        for handle in handles:
            handle.publish(version)
        assert handles[0].list() == {version: {"t0", "t1", "t2"}}
        for handle in handles:
            handle.unpublish()
    assert SHARED not in caplog.text
    assert MIXTURE not in caplog.text


def test_who_publishes_at_the_same_time_waits_for_the_first(opened):
    handles = [publisher(opened, f"t{n}", float(n), digests="full") for n in range(3)]

    def publish(handle):
        try:
            return handle.publish(1)
        except VersionConflict:
            return None

    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(publish, handles))
    assert sorted(map(str, said)) == ["None", "None", "True"]


def test_several_ranks_compare_all_of_their_parts(opened):
    def rank(replica, number, value):
        handle = opened(replica, rank=number, world_size=2, digests="full")
        chunk = torch_ros.Chunked(
            (4, 4), torch.float32, {(2 * number, 0): torch.full((2, 4), value)}
        )
        handle.register({"w": chunk})
        return handle

    with ThreadPoolExecutor(4) as pool:
        both = lambda name, values: list(pool.map(lambda n: rank(name, n, values[n]), range(2)))
        first, second, third = both("a", (1.0, 1.0)), both("b", (1.0, 1.0)), both("c", (1.0, 2.0))
        assert list(pool.map(lambda h: h.publish(1), first)) == [True, True]
        assert list(pool.map(lambda h: h.publish(1), second)) == [True, True]
        for failed in [pool.submit(handle.publish, 1) for handle in third]:
            with pytest.raises(VersionConflict, match="'w'"):
                failed.result(20)


@pytest.mark.parametrize("left", [0, 1])
def test_a_publisher_that_has_lost_a_process_is_not_compared(opened, pool, monkeypatch, left):
    def rank(replica, number):
        handle = opened(replica, rank=number, world_size=2, digests="full")
        handle.register({f"w{number}": torch.full((4,), float(number))})
        return handle

    first = list(pool.map(lambda n: rank("first", n), range(2)))
    second = list(pool.map(lambda n: rank("second", n), range(2)))
    assert list(pool.map(lambda handle: handle.publish(1), first)) == [True, True]
    records = manifests._records

    def some(view, inst, *args):
        return records(view, inst, *args)[: left if replica_of(inst) == "first" else None]

    monkeypatch.setattr(manifests, "_records", some)
    assert list(pool.map(lambda handle: handle.publish(1), second)) == [True, True]


@pytest.mark.parametrize(("model", "is_told"), [("default", True), ("m", False)])
def test_without_digests_only_the_name_that_nobody_chose_is_told_of(opened, model, is_told, caplog):
    first, second = (publisher(opened, name, 1.0, model=model) for name in ("first", "second"))
    for version in (1, 2):
        first.publish(version)
        second.publish(version)
        first.unpublish()
        second.unpublish()
    assert caplog.text.count(SHARED) == is_told


class Lost:
    """Closes a source when a part of it has been read."""

    def __init__(self, monkeypatch, source):
        self.is_over, real = False, Reading.read

        def read(reading, supplies, phase, progress, deadline, told):
            def tell(*args):
                told(*args)
                if not self.is_over and progress.bytes_read:
                    self.is_over = True
                    source.close(linger_s=0)

            return real(reading, supplies, phase, progress, deadline, tell)

        monkeypatch.setattr(Reading, "read", read)


@pytest.mark.parametrize("depth", ["off", "full"])
def test_a_reader_that_goes_on_from_another_publisher_says_so(opened, monkeypatch, caplog, depth):
    monkeypatch.setattr("torch_ros.transfer.batches.BATCH_BYTES", 4096, raising=False)
    first, second = (publisher(opened, name, 1.0, digests=depth) for name in ("a", "b"))
    first.publish(1)
    lost = Lost(monkeypatch, first)
    reader = opened("reader", digests=depth)
    got = {f"w{n}": torch.zeros(1024) for n in range(8)}
    reader.register(got)
    second.publish(1)
    reader.replicate(1)
    assert lost.is_over
    is_mixed = reader.last_read.reroutes == 1
    assert (MIXTURE in caplog.text) is (is_mixed and depth == "off")
    assert is_mixed


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"w1": None}, r"'w1' \(none, there float32 \[1024\]\); publish it under a new number"),
        ({"b": torch.ones(2)}, r"'b' \(float32 \[2\], there none\); publish"),
        ({"w7": torch.ones(9).double()}, r"'w7' \(float64 \[9\], there float32 \[1024\]\)"),
        ({f"w{n}": None for n in range(5)}, "'w0' .*, 'w1' .*, 'w2' .* and 2 more"),
    ],
)
def test_the_second_publisher_of_other_tensors_hears_which(opened, change, found):
    publisher(opened, "first", 1.0).publish(1)
    second = opened("second")
    tensors = {f"w{n}": torch.ones(1024) for n in range(8)} | change
    second.register({name: each for name, each in tensors.items() if each is not None})
    with pytest.raises(ManifestMismatch, match=f"that 'first' published it with, found {found}"):
        second.publish(1)
    assert second.version is None
    assert second.list() == {1: {"first"}}
