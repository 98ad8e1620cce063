"""Memory that stays mapped after use, and the mailboxes and copies that lie in it."""

import ctypes
import gc

import numpy as np
import pytest
import torch

from torch_ros.errors import ClosedError
from torch_ros.features.huge_pages.pages import HugePages
from torch_ros.features.retention.host_copies import HostCopy
from torch_ros.memory.transport import MemoryTransport
from torch_ros.p2p.lasting import LastingMemory
from torch_ros.protocol.records import Kept, VersionRef
from torch_ros.transfer.card import ALL_BLOCKS
from torch_ros.transfer.mailbox import Digests, Mailbox
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.local import build, local_chunks

MIB = 1 << 20


_libc = ctypes.CDLL(None, use_errno=True)


def resident_bytes(address, size_bytes=1 << 20):
    """How much of the pages from this address on lies in memory. They have to be mapped."""
    start = address // 4096 * 4096
    pages = (ctypes.c_ubyte * (size_bytes // 4096))()
    if _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size_bytes), pages):
        pytest.fail(f"{address:#x} is not mapped")
    return sum(page & 1 for page in pages) * 4096


def test_addresses_stay_and_pages_go():
    memory = LastingMemory(8 * MIB)
    memory.bytes.fill(7)
    address = memory.bytes.ctypes.data
    assert resident_bytes(address, 8 * MIB) >= 8 * MIB
    memory.close()
    memory.close()
    del memory
    gc.collect()
    assert resident_bytes(address, 8 * MIB) < MIB
    assert ctypes.string_at(address, 16) == bytes(16)


def test_the_smallest_that_fits_is_used_again():
    large, small = LastingMemory(9 * MIB), LastingMemory(5 * MIB)
    where = small.bytes.ctypes.data
    large.close()
    small.close()
    again = LastingMemory(4 * MIB + 1)
    assert again.bytes.ctypes.data == where
    assert again.bytes.nbytes == 4 * MIB + 1
    assert not again.bytes.any()
    again.close()


def test_a_closed_mailbox_leaves_its_successor_alone():
    transport = MemoryTransport()
    old = Mailbox(transport)
    old.close()
    new = Mailbox(transport)
    new.serve(5, ALL_BLOCKS)
    shown = new._word.copy()
    old.void()
    old.serve(6, ALL_BLOCKS)
    old.close()
    assert np.array_equal(new._word, shown)
    new.close()
    transport.close()


def test_a_closed_mailbox_and_its_manifest_stay_mapped_for_who_asks_late():
    transport = MemoryTransport()
    mailbox = Mailbox(transport)
    tensors = {f"layer.{n}.weight": torch.ones(3) for n in range(500)}
    registered = LocalState(local_chunks(tensors), {}, {})
    mailbox.show(registered.layout, registered.addresses, registered.devices, registered.regions)
    buffers = [mailbox._memory, mailbox._manifests[0].memory.bytes]
    places = [(buffer.ctypes.data, buffer.nbytes) for buffer in buffers]
    for address, size_bytes in places:
        assert resident_bytes(address, size_bytes)
    mailbox.close()
    del mailbox, buffers
    gc.collect()
    for address, size_bytes in places:
        assert resident_bytes(address, size_bytes) == 0
        assert ctypes.string_at(address, size_bytes) == bytes(size_bytes)
    transport.close()


def copied(transport, tensors, pages):
    layout, memory = build(local_chunks(tensors), {})
    kept = Kept(VersionRef("run", 1, "0" * 16, 1), 1, layout.digest, is_original=True)
    return HostCopy(transport, layout, memory, kept, 1, Digests(), pages), memory


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("pages", "failure"),
    [
        pytest.param(HugePages(call=interrupted), KeyboardInterrupt, id="before its mailbox"),
        pytest.param(HugePages("no"), ClosedError, id="at its mailbox"),
    ],
)
def test_a_copy_that_fails_gives_its_memory_back(pages, failure):
    transport, size_bytes = MemoryTransport(), 7 * MIB + 5 * 4096
    transport.close()
    spare = LastingMemory(size_bytes)
    address = spare.bytes.ctypes.data
    spare.close()
    with pytest.raises(failure):
        copied(transport, {"a": torch.ones(size_bytes, dtype=torch.uint8)}, pages)
    assert resident_bytes(address, size_bytes) < MIB
    again = LastingMemory(size_bytes)
    assert again.bytes.ctypes.data == address
    again.close()


def test_a_copy_that_is_let_go_stays_mapped_for_who_asks_late():
    """Readers that are not waited for ask UCX at the source for it, which would end there."""
    tensors = {
        "a": torch.arange(300_000.0),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "c": torch.tensor(True),
        "d": torch.zeros(0, 4),
    }
    transport = MemoryTransport()
    copy, memory = copied(transport, tensors, HugePages("no"))
    manifest = copy.mailbox.manifest
    for chunk, tensor in zip(copy._chunks, memory, strict=True):
        assert torch.equal(chunk, tensor)
    assert [chunk.data_ptr() for chunk in copy._chunks if chunk.numel()] == [
        address
        for address, chunk in zip(manifest.addresses, copy._chunks, strict=True)
        if chunk.numel()
    ]
    copy.close()
    for address in manifest.addresses:
        assert ctypes.string_at(address, 1) == bytes(1)
    assert resident_bytes(min(a for a in manifest.addresses if a)) < MIB // 2
    transport.close()
