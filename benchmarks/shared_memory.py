"""Reads from shared memory of the same host: copied out of a mapping, or by NIXL. No etcd.

Two processes. The source has tensors in shared memory; the reader reads all of them by NIXL, then
by copying, then by copying by hand, which shows what the transport costs; and so on, with one
thread, into memory that was touched before. Ratios are medians of the rounds', so that what else
runs on the machine touches both sides. *Cold* is the first read, which finds the mapping's pages.
Prints a row of JSON per result.
"""

import argparse
import ctypes
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch

from torch_ros.deadline import Deadline
from torch_ros.p2p.near import NearPeer, NearTransfer, NearTransport
from torch_ros.p2p.nixl import NixlTransport
from torch_ros.p2p.transport import Transfer
from torch_ros.spans import Region, Spans
from torch_ros.transfer.posting import TRANSFER_BYTES, perform

COUNTS = (100, 2000)
ALIGNMENT_BYTES = 4096


def serve(count: int, size_bytes: int) -> None:
    """The source: says where its tensors are, and waits for the end of its input."""
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    tensors = [
        torch.full((size_bytes,), number % 251, dtype=torch.uint8).share_memory_()
        for number in range(count)
    ]
    transport = NearTransport(NixlTransport())
    registration = transport.register(regions_of(tensors))
    addresses = ",".join(str(tensor.data_ptr()) for tensor in tensors)
    print(transport.connection.hex(), registration.descriptor.hex(), addresses, flush=True)
    sys.stdin.read()
    transport.close()


def regions_of(tensors: list[torch.Tensor]) -> list[Region]:
    return [Region(tensor.data_ptr(), tensor.numel()) for tensor in tensors]


def reads_of(peer: NearPeer, spans: Spans) -> list[Transfer]:
    """As torch_ros cuts them."""
    ends = np.cumsum(spans[:, 2])
    cuts = np.searchsorted(ends, np.arange(TRANSFER_BYTES, int(ends[-1]), TRANSFER_BYTES)) + 1
    return [peer.prepare(part) for part in np.split(spans, np.unique(cuts)) if len(part)]


def timed(call: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and how many of them on a core."""
    cpu_s, started_s = time.process_time(), time.perf_counter()
    call()
    return time.perf_counter() - started_s, time.process_time() - cpu_s


class Reader:
    """A transport of this process that reads all that the source has."""

    def __init__(self, shown: Sequence[str], targets: list[torch.Tensor], *, copies: bool) -> None:
        connection, descriptor, addresses = shown
        self.transport = NearTransport(NixlTransport(), is_used=copies)
        self.transport.register(regions_of(targets))
        self.peer = self.transport.connect(bytes.fromhex(connection))
        self.peer.attach(bytes.fromhex(descriptor))
        self.rows = [
            (int(address), target.data_ptr(), target.numel())
            for address, target in zip(addresses.split(","), targets, strict=True)
        ]
        self.reads = reads_of(self.peer, np.array(self.rows, np.uint64))

    def read(self) -> None:
        perform(self.reads, Deadline("a round", 60.0))

    def move(self) -> None:
        """The same copies by hand, with the mappings that are there."""
        ours = {there.address: here.address for there, here in self.peer.mapped.mappings.items()}
        for source, target, size in self.rows:
            ctypes.memmove(target, ours[source], size)

    def close(self) -> None:
        for read in self.reads:
            read.close()
        self.transport.close()


def measure(count: int, size_bytes: int, rounds: int) -> dict[str, object]:
    command = [sys.executable, __file__, "--serve", str(count), str(size_bytes)]
    source = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert source.stdout is not None
    shown = source.stdout.readline().split()
    targets = [torch.zeros(size_bytes, dtype=torch.uint8) for _ in range(count)]
    reader = Reader(shown, targets, copies=True)
    cold_s, _ = timed(reader.read)
    assert all(bool((each == number % 251).all()) for number, each in enumerate(targets))
    assert all(isinstance(read, NearTransfer) for read in reader.reads)
    other = Reader(shown, targets, copies=False)
    ways = {"nixl": other.read, "shared": reader.read, "memmove": reader.move}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            found[name].append(timed(call))
    for each in (reader, other):
        each.close()
    source.communicate()
    total = count * size_bytes
    seconds = {name: [wall_s for wall_s, _ in samples] for name, samples in found.items()}
    cpu_s = {name: [cpu_s for _, cpu_s in samples] for name, samples in found.items()}
    return {
        "kind": "shared_memory",
        "tensors": count,
        "bytes": total,
        "gb_per_s": {name: total / median(those) / 1e9 for name, those in seconds.items()},
        "cold_gb_per_s": total / cold_s / 1e9,
        "of_nixl": {name: ratio(seconds["nixl"], those) for name, those in seconds.items()},
        "of_nixl_cpu": {name: ratio(cpu_s["nixl"], those) for name, those in cpu_s.items()},
        "load": os.getloadavg()[0],
        "rounds": seconds,
    }


def ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    return median(one / other for one, other in zip(ones, others, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--serve", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.serve:
        serve(*given.serve)
        return
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    machine = {
        "kind": "machine",
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "libc": " ".join(platform.libc_ver()),
        "tunables": os.environ.get("GLIBC_TUNABLES", ""),
    }
    print(json.dumps(machine))
    for count in COUNTS:
        size = (given.mib << 20) // count // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        print(json.dumps(measure(count, size, given.rounds)), flush=True)


if __name__ == "__main__":
    main()
