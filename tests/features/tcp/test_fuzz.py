"""Requests by chance get what is registered or nothing, and hurt nobody.

TORCH_ROS_FUZZ=n tries n times as much.
"""

import contextlib
import os
import random

import numpy as np
import pytest
from features.tcp.hostile import BYTES_MAX, MODES, ROW, ROWS_MAX, Ended, Reader

from torch_ros.channels import wire
from torch_ros.features.tcp.serving import Table
from torch_ros.p2p.regions import Cover
from torch_ros.spans import HOST

pytestmark = pytest.mark.timeout(240)

TIMES = int(os.environ.get("TORCH_ROS_FUZZ", "1"))
SIZES = [70_001, 5000]
WRAP = 1 << 64

modes = pytest.mark.parametrize("mode", MODES)


def fuzzed(rng, source):
    """A request that is likely to be nearly right: its rows, its count, and its second word."""
    rows = []
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        name, address, size = rng.choice(source.regions[:2])
        ends = (address, address + size, 0, WRAP, 1 << 63)[: rng.choice((1, 1, 2, 5))]
        at = rng.choice(ends) + rng.choice((-4096, -2, -1, 0, 0, 1, 2, 4096, rng.randrange(size)))
        length = rng.choice((0, 1, 2, size - 1, size, size + 1, WRAP - 1, WRAP - address))
        if rng.random() < 0.1:
            name = rng.randbytes(16)
        rows.append((name, at % WRAP, (length + rng.choice((0, 0, 0, -1, 1))) % WRAP))
    wild = rng.choice((0, 1, 5000, rng.randrange(1 << 32)))
    count = len(rows) if rng.random() < 0.95 else wild
    zero = 0 if rng.random() < 0.97 else rng.randrange(1 << 32)
    return rows[:count] if 0 < count <= ROWS_MAX else rows, count, zero


def expected_of(source, rows, count, zero):
    """None: the connection ends. A number: so many rows' bytes, or no byte of an unknown id."""
    if zero or count != len(rows) or not all(row[2] for row in rows):
        return None
    if sum(row[2] for row in rows) > BYTES_MAX:
        return None
    bounds = {name: (start, start + size) for name, start, size in source.regions}
    known = [row for row in rows if row[0] in bounds]
    is_in = [bounds[n][0] <= at and at + size <= bounds[n][1] for n, at, size in known]
    if len(known) < len(rows):
        return "unknown" if all(is_in) else "unknown or refused"
    return "bytes" if all(is_in) else None


def test_fuzzed_requests_get_what_is_registered_or_nothing(source):
    fuzz(source, 600 * TIMES)


@pytest.mark.long
def test_many_fuzzed_requests_get_what_is_registered_or_nothing(source):
    fuzz(source, 20_000 * TIMES)


def fuzz(source, count):
    rng, reader = random.Random(5), source.reader()
    seen = dict.fromkeys((None, "unknown", "unknown or refused", "bytes"), 0)
    content = {
        name: (start, source.pattern(number).tobytes())
        for number, (name, start, _) in enumerate(source.regions)
    }
    for _ in range(count):
        rows, said, zero = fuzzed(rng, source)
        expected = expected_of(source, rows, said, zero)
        seen[expected] += 1
        if said > len(rows) and said <= ROWS_MAX:
            continue  # it would wait for the rest
        try:
            reader.ask(*rows, count=said, zero=zero)
            status = reader.status()
        except Ended:
            assert expected in {None, "unknown or refused"}, (rows, said, zero)
            reader.line.sock.close()
            reader = source.reader()
            continue
        assert (status == 1) == (expected in {"unknown", "unknown or refused"}), (rows, said, zero)
        assert (status == 0) == (expected == "bytes"), (rows, said, zero)
        if status == 0:
            found = b"".join(reader.content(*rows))
            for name, at, size in rows:
                start, whole = content[name]
                assert found[:size] == whole[at - start : at - start + size]
                found = found[size:]
    reader.line.sock.close()
    assert min(seen.values()) > count // 500, seen


@modes
def test_noise_instead_of_a_request_ends_the_connection_or_is_unknown(source, mode):
    rng = random.Random(6)
    for _ in range(50 * TIMES):
        with source.reader(mode) as reader, contextlib.suppress(Ended):
            reader.line.send(rng.randbytes(rng.choice((8, 40, 200, 4000))))
            reader.line.finish()
            assert set(reader.rest()) <= ({0, 1} if mode == "near" else set())


def test_noise_within_tls_hurts_nobody(source):
    rng = random.Random(7)
    for _ in range(50 * TIMES):
        with Reader(source.card, "tls") as reader, contextlib.suppress(Ended):
            reader.knock()
            assert reader.is_welcome()
            reader.line.send(b"\x16\x03\x01" + rng.randbytes(rng.choice((2, 60, 600, 70_000))))
            reader.line.finish()
            reader.rest()


# The parser alone

REGIONS = [(1 << 20, (1 << 20) + 70_001), (1 << 40, (1 << 40) + 5000), (WRAP - 9000, WRAP - 4096)]
IDS = [b"first registration"[:16], b"other registration"[:16], b"an unknown number"[:16]]


def a_table():
    """Two registrations: of the first two regions, and of the last one."""
    table = Table()
    for key, (name, regions) in enumerate(zip(IDS[:2], (REGIONS[:2], REGIONS[2:]), strict=True)):
        starts, ends = (np.array(bounds, np.uint64) for bounds in zip(*regions, strict=True))
        table.add(name, Cover(key, HOST, starts, ends))
    return table


def rows_by_chance(rng, count):
    """Ids, addresses and lengths of so many rows, of which half are nearly right."""
    edges = np.array([*sum(REGIONS, ()), 0, 1 << 63], np.uint64)
    near = rng.integers(-2, 3, (2, count)).astype(np.int64).view(np.uint64)
    at = rng.choice(edges, count) + near[0]
    sizes = np.array([0, 1, 8, 5000, 4904, 70_001, 1 << 25, 1 << 63, WRAP - 1], np.uint64)
    size = rng.choice(sizes, count) + near[1]
    to_end = rng.choice(edges, count) - at
    size = np.where(rng.random(count) < 0.5, to_end + near[1] * (rng.random(count) < 0.5), size)
    wild = rng.integers(0, WRAP, (2, count), np.uint64, endpoint=False)
    is_wild = rng.random((2, count)) < 0.05
    return (
        rng.integers(0, 3, count),
        np.where(is_wild[0], wild[0], at),
        np.where(is_wild[1], wild[1], size),
    )


def is_inside(number, at, size):
    """Whether each row lies in one region of its registration, reckoned without a sum."""
    found = np.zeros(len(at), bool)
    for region, (start, end) in enumerate(REGIONS):
        owner = 0 if region < 2 else 1
        start, end = np.uint64(start), np.uint64(end)
        here = (number == owner) & (at >= start) & (at < end)
        found |= here & (size <= np.where(here, end - at, 0))
    return found


def parse(count):
    """Parse so many requests of one row or some, and look each row up."""
    rng, table = np.random.default_rng(8), a_table()
    seen = dict.fromkeys(("refused", "unknown", "garbage", "here"), 0)
    for _ in range(count // 1000):
        lengths = rng.choice([1, 1, 1, 2, 3], 1000)
        ends = np.cumsum(lengths)
        number, at, size = rows_by_chance(rng, int(ends[-1]))
        inside = is_inside(number, at, size)
        body = np.zeros(len(at), np.dtype([("id", "S16"), ("at", "<u8"), ("size", "<u8")]))
        body["id"], body["at"], body["size"] = np.array(IDS)[number], at, size
        body = body.tobytes()
        sizes = size.tolist()
        for first, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True):
            asked = sizes[first:end]
            is_bad = not all(asked) or sum(asked) > BYTES_MAX
            try:
                rows = wire.parse_rows(body[first * ROW.size : end * ROW.size])
            except wire.Garbage:
                assert is_bad
                seen["refused"] += 1
                continue
            assert not is_bad
            assert len(rows) == end - first
            for row, place in zip(rows, range(first, end), strict=True):
                try:
                    found = "unknown" if table.find(*row) is None else "here"
                except wire.Garbage:
                    found = "garbage"
                is_known = number[place] < 2
                assert found == (
                    "unknown" if not is_known else "here" if inside[place] else "garbage"
                )
                seen[found] += 1
    assert min(seen.values()) > count // 100, seen


def test_fuzzed_rows_are_taken_only_if_they_lie_in_a_region():
    parse(20_000 * TIMES)


@pytest.mark.long
def test_a_million_fuzzed_requests_are_taken_only_if_they_lie_in_a_region():
    parse(1_000_000)


def test_heads_are_taken_only_with_rows_that_a_request_may_have():
    rng = random.Random(9)
    for _ in range(20_000 * TIMES):
        head = rng.randbytes(8) if rng.random() < 0.5 else rng.choice((0, 1, 4096, 4097, 1 << 32))
        head = head if isinstance(head, bytes) else head.to_bytes(8, "little")
        number = int.from_bytes(head, "little")
        if 0 < number <= ROWS_MAX:
            assert wire.parse_head(head) == number
        else:
            with pytest.raises(wire.Garbage):
                wire.parse_head(head)
