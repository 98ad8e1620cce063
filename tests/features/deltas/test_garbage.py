"""Whatever a source shows as its deltas, a reader has its content afterwards, or an error of ours.

TORCH_ROS_FUZZ=n tries n times as much.
"""

import os
import uuid

import msgspec
import numpy as np
import pytest
import torch
from features.deltas.changing import copies, made
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import torch_ros
from torch_ros.codec.table import TABLE_BYTES
from torch_ros.digests import digest_of
from torch_ros.errors import CorruptWeights, SourceLost
from torch_ros.features.deltas.making import Ring

TIMES = int(os.environ.get("TORCH_ROS_FUZZ", "1"))
FAR = torch_ros.Costs(read_bytes_per_s=1e6)  # deltas are taken, but nobody waits long for one
WITHIN_S = 20  # of each read; on an idle machine it takes 10 ms
SHAPES = {"x": (300, 40), "y": (7,), "z": ()}

numbers = st.sampled_from([0, 1, 2, 7, 16, 255, 2**16, 2**32 - 1, 2**32, 2**40, 2**62, 2**64 - 16])
wrong = st.one_of(
    numbers,
    numbers.map(lambda number: number - 1),
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=40),
    st.lists(st.integers(0, 2**32), max_size=6),
)
paths = st.lists(st.integers(0, 20), max_size=3)
places = st.tuples(st.sampled_from(["table", "head", "index", "body", "bytes", "coming"]), paths)


def replaced(value, path, other):
    """`value`, of lists, with `other` at some place."""
    if not path or not isinstance(value, list) or not value:
        return other
    at = path[0] % len(value)
    return [*value[:at], replaced(value[at], path[1:], other), *value[at + 1 :]]


def flipped(array, path, other):
    """Change some bytes of it."""
    if array.nbytes:
        at = (sum(path) * 97 + 13 * len(path)) % array.nbytes
        array[at] ^= other % 255 + 1 if isinstance(other, int) else 1


def put(ring, fields):
    content = msgspec.msgpack.encode(fields)[: TABLE_BYTES - 24]
    whole = len(content).to_bytes(8, "little") + digest_of(content) + content
    ring.bytes[: len(whole)] = np.frombuffer(whole, np.uint8)


def spoil(ring, where, other):
    """Write something else there; what has a digest has that of what is written."""
    kind, path = where
    [entry] = ring.table.entries
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(ring.table))
    start = entry.address - ring.address
    head = ring.bytes[start + entry.body_bytes :][: entry.head_bytes]
    match kind:
        case "table":
            put(ring, replaced(fields, path, other))
        case "coming":
            put(ring, [[], [entry.base, entry.uid, "u"][len(path) % 3]])
        case "head" | "index":
            told = msgspec.msgpack.decode(head.tobytes())
            if kind == "head":
                told = replaced(told, path, other)
            else:
                index = np.frombuffer(told[2], np.uint32).copy()
                index[sum(path) % len(index)] = other % 2**32 if isinstance(other, int) else 9
                told[2] = index.tobytes()
            content = msgspec.msgpack.encode(told)
            room = ring.bytes[start + entry.body_bytes :]
            content = content[: len(room)]
            room[: len(content)] = np.frombuffer(content, np.uint8)
            fields[0][0][4:] = [len(content), digest_of(content)]
            put(ring, fields)
        case "body":
            flipped(ring.bytes[start:][: entry.body_bytes], path, other)
        case "bytes":
            flipped(ring.bytes[: TABLE_BYTES if path else None], path, other)


def update_from(transport, where, other, *, has_another):
    options = {
        "endpoint": "memory://" + uuid.uuid4().hex,
        "transport": transport,
        "digests": "full",
        "timeout_s": WITHIN_S,
    }
    names = ("bad", "me", "good")
    bad, me, good = (torch_ros.open("m", replica=name, costs=FAR, **options) for name in names)
    with good, me, bad:
        tensors = {fqn: torch.randn(shape) for fqn, shape in SHAPES.items()}
        found = {fqn: torch.zeros(shape) for fqn, shape in SHAPES.items()}
        me.register(found)
        for version in (0, 1):
            tensors["x"][version::30, 7] += 1
            tensors["y"][2] += 1
            bad.publish_copy(version, tensors, deltas=2)
            if version == 0:
                me.replicate()
        made(bad)
        ring = copies(bad)._ring
        assert isinstance(ring, Ring)
        if has_another:
            good.register({fqn: torch.zeros(shape) for fqn, shape in SHAPES.items()})
            good.replicate()
        spoil(ring, where, other)
        try:
            assert me.update() is True
        except (SourceLost, CorruptWeights):
            assert not has_another
            assert me.version is None
        else:
            for fqn, tensor in tensors.items():
                assert torch.equal(found[fqn], tensor)


long = settings(
    deadline=None, suppress_health_check=list(HealthCheck), print_blob=True, database=None
)


@pytest.mark.timeout(120 + 10 * TIMES)
@settings(long, max_examples=30 * TIMES)
@given(places, wrong, st.booleans())
@example(("head", [0, 0]), 2**62, False)
@example(("table", [0, 0, 2]), 2**64 - 16, False)
@example(("table", [0, 0, 4]), 2**62, False)
@example(("index", [0, 0, 2]), 2**32 - 1, False)
@pytest.mark.long
def test_a_reader_believes_no_delta_that_is_none(where, other, has_another):
    update_from("auto", where, other, has_another=has_another)


@pytest.mark.long
@pytest.mark.timeout(120 + 30 * TIMES)
@settings(long, max_examples=2 * TIMES)
@given(places, wrong, st.booleans())
@example(("table", [0, 0, 2]), 2**62, True)
def test_a_reader_believes_no_delta_that_is_none_over_nixl(where, other, has_another):
    update_from("ucx", where, other, has_another=has_another)
