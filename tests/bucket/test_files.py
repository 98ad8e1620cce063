"""Manifests and files that are not what they should be."""

import random

import msgspec
import pytest
import torch

from torch_ros.bucket import files
from torch_ros.bucket.files import (
    InBucket,
    Mismatch,
    Parts,
    StoredFile,
    StoredTensor,
    StoredVersion,
)

NAMED = InBucket(1, "r", 7, 1000, "u", "0a1b")


def manifest(**changes):
    tensors = (StoredTensor("a", "bfloat16", (3, 5)), StoredTensor("b", "float32", ()))
    file = StoredFile("model.safetensors", 134, 100, tensors, b"x" * 16)
    one = StoredVersion(1, "m", "r", 7, "u", (file,), (), "archiver")
    return msgspec.structs.replace(one, **changes)


def file(**changes):
    return (msgspec.structs.replace(manifest().files[0], **changes),)


def test_a_manifest_comes_back():
    assert files.decoded(manifest().encode(), "m", NAMED) == manifest()
    assert manifest().files[0].starts == [100, 130, 134]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 8}, "the manifest of"),
        ({"uid": "other"}, "the manifest of"),
        ({"run": "other"}, "the manifest of"),
        ({"model": "other"}, "the manifest of"),
        ({"format": 2}, "no manifest of this release"),
        ({"files": file() * 2}, "two of its tensors"),
        ({"files": (*file(), *file(tensors=(), size_bytes=100))}, "two of its files"),
        ({"files": file(name="../model.safetensors")}, "no manifest of this release"),
        ({"files": file(name="/model.safetensors")}, "no manifest of this release"),
        ({"files": file(size_bytes=133)}, "model.safetensors has 133 bytes, its tensors 134"),
        ({"files": file(header_bytes=104)}, "its tensors 138"),
        ({"files": file(parts=b"x" * 15)}, "15 bytes of digests for 1 parts"),
        ({"files": file(parts=b"")}, "0 bytes of digests"),
        ({"files": file(tensors=(StoredTensor("a", "float9", (1,)),))}, "this torch lacks"),
        ({"files": file(tensors=(StoredTensor("a", "load", (1,)),))}, "this torch lacks"),
        ({"files": file(tensors=(StoredTensor("a", "int8", (2**40, 2**40)),))}, "larger than"),
        ({"files": file(tensors=(StoredTensor("a", "int8", (0, 2**61)),))}, "larger than"),
        ({"files": file(tensors=(StoredTensor("a", "int8", (-1,)),))}, "no manifest of this"),
    ],
)
def test_a_manifest_that_contradicts_its_name_or_itself_is_refused(changes, says):
    with pytest.raises(Mismatch, match=says):
        files.decoded(manifest(**changes).encode(), "m", NAMED)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff", manifest().encode()[:-1], manifest().encode()[:-1] + b',"x":1}'],
)
def test_bytes_that_are_no_manifest_are_refused(content):
    with pytest.raises(Mismatch, match="no manifest of this release"):
        files.decoded(content, "m", NAMED)


def test_a_manifest_that_was_changed_anywhere_is_refused_or_still_adds_up():
    whole, rng, refused = manifest().encode(), random.Random(3), 0
    for _ in range(3000):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(content))
            match rng.randrange(3):
                case 0:
                    content[at] ^= 1 << rng.randrange(8)
                case 1:
                    del content[at : at + rng.randint(1, 9)]
                case 2:
                    content[at:at] = content[rng.randrange(len(content)) :][: rng.randint(1, 9)]
        try:
            found = files.decoded(bytes(content), "m", NAMED)
        except Mismatch:
            refused += 1
            continue
        [one] = found.files
        assert one.starts[-1] == one.size_bytes
        assert len(one.layout.boxes.sizes) == len(one.tensors)
    assert refused > 2000


@pytest.mark.parametrize("cut", [1, 7, 1000, 1 << 30])
def test_parts_do_not_depend_on_how_the_bytes_come(monkeypatch, cut):
    monkeypatch.setattr(files, "PART_BYTES", 1000)
    for size in (0, 1, 999, 1000, 1001, 3500):
        whole, parts = bytes(n * 7 % 251 for n in range(size)), Parts()
        pieces = [memoryview(whole)[at : at + cut] for at in range(0, size, cut)]
        assert b"".join(parts.passing(pieces)) == whole
        one = StoredFile("m.safetensors", size, size, (), parts.digests())
        assert parts.size_bytes == size
        for number in range(-(-size // 1000)):
            content = bytearray(whole[number * 1000 : number * 1000 + 1000])
            assert files.is_part(one, number, memoryview(content))
            assert not files.is_part(one, number, memoryview(content)[:-1])
            content[len(content) // 2] ^= 1
            assert not files.is_part(one, number, memoryview(content))


def test_what_passes_by_may_be_written_over():
    buffer, parts = bytearray(b"first"), Parts()
    passing = parts.passing([memoryview(buffer)])
    piece = next(passing)
    buffer[:] = b"other"
    assert piece == b"first"


def test_a_dtype_without_a_name_is_stored_as_bytes():
    found = files.storable({"c": (torch.complex128, torch.Size([2, 3])), "w": (torch.int8, (2,))})
    assert found == {"c": (torch.uint8, (96,)), "w": (torch.int8, (2,))}
