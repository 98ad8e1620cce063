"""Whether small tensors are better read one by one, or packed into one buffer at both ends.

A span of a read costs a few microseconds however short it is. Packed, the tensors of a step would
be one span; but then they are copied into the source's buffer at every publish, and out of the
reader's after every read. Tensors that lie side by side at both ends are one span without that:
their column is "read". Two processes on one host, rounds interleaved, medians. Before each
measurement both write more than a cache holds, as the rest of a step does.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
import torch

from torch_ros.p2p.nixl import NixlTransport
from torch_ros.p2p.transport import Transfer
from torch_ros.spans import Region

SIZES = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768)
EVICT_BYTES = 64 << 20
LIMIT_S = 120.0

T = TypeVar("T")


class Tensors:
    """Scattered ones, and a buffer with a place for each."""

    # Sizes are multiples of what tensors are aligned to in memory, so no room is left between them.
    def __init__(self, count: int, size_bytes: int) -> None:
        self.apart = [torch.zeros(size_bytes // 2, dtype=torch.bfloat16) for _ in range(count)]
        self.pack = torch.zeros(count * size_bytes // 2, dtype=torch.bfloat16)
        self.places = list(self.pack.view(count, -1).unbind())
        self._evict = torch.zeros(EVICT_BYTES, dtype=torch.uint8)

    def forget(self) -> None:
        self._evict.add_(1)

    def regions(self) -> list[Region]:
        return [Region(t.data_ptr(), t.nbytes) for t in (*self.apart, self.pack)]


def source(pipe: Connection, count: int) -> None:
    torch.set_num_threads(1)
    transport = NixlTransport()
    pipe.send(transport.connection)
    for size_bytes in SIZES:
        tensors = Tensors(count, size_bytes)
        registration = transport.register(tensors.regions())
        addresses = [tensor.data_ptr() for tensor in (*tensors.apart, tensors.pack)]
        pipe.send((registration.descriptor, addresses))
        while how := pipe.recv():
            for number, tensor in enumerate(tensors.apart):
                tensor.fill_((how[1] + number) % 251)
            tensors.forget()
            pipe.send(seconds(pack, tensors) if how[0] == "packed" else 0.0)
        registration.close()
    transport.close()


def pack(tensors: Tensors) -> None:
    torch.cat(tensors.apart, out=tensors.pack)  # on hosts a quarter of what _foreach_copy_ takes


def unpack(tensors: Tensors) -> None:
    torch._foreach_copy_(tensors.apart, tensors.places)


def through(read: Transfer) -> None:
    read.post()
    while not read.is_done():
        pass


def seconds(call: Callable[[T], None], argument: T) -> float:
    began_s = time.perf_counter()
    call(argument)
    return time.perf_counter() - began_s


def measure(pipe: Connection, count: int, round_count: int) -> None:
    torch.set_num_threads(1)
    transport = NixlTransport()
    peer = transport.connect(heard(pipe))
    print(f"{count} tensors of     apart   packed   (pack    read  unpack)   apart / packed")
    for size_bytes in SIZES:
        tensors = Tensors(count, size_bytes)
        registration = transport.register(tensors.regions())
        descriptor, addresses = heard(pipe)
        peer.attach(descriptor)
        here = [tensor.data_ptr() for tensor in (*tensors.apart, tensors.pack)]
        sizes = [size_bytes] * count + [tensors.pack.nbytes]
        spans = np.array([addresses, here, sizes], np.uint64).T
        reads = {"apart": peer.prepare(spans[:-1]), "packed": peer.prepare(spans[-1:])}
        taken: dict[str, list[float]] = defaultdict(list)
        for number in range(round_count + 1):
            for how in ("apart", "packed") if number % 2 else ("packed", "apart"):
                pipe.send((how, number))
                row = {"pack": heard(pipe)}
                tensors.forget()
                row["read"] = seconds(through, reads[how])
                row["unpack"] = 0.0
                if how == "packed":
                    row["unpack"] = seconds(unpack, tensors)
                for place, tensor in enumerate(tensors.apart):
                    assert tensor[-1] == (number + place) % 251
                if number:  # the first round warms up
                    taken[how].append(sum(row.values()))
                    for part, part_s in row.items():
                        taken[f"{how} {part}"].append(part_s)
        show(size_bytes, taken)
        for read in reads.values():
            read.close()
        registration.close()
        pipe.send(None)
    peer.close()
    transport.close()


def show(size_bytes: int, taken: dict[str, list[float]]) -> None:
    columns = ("apart", "packed", "packed pack", "packed read", "packed unpack")
    apart, packed, *parts = (1e3 * statistics.median(taken[column]) for column in columns)
    print(
        f"{size_bytes:>9} B {apart:>10.2f} {packed:>8.2f}   ("
        + " ".join(f"{part:>6.2f}" for part in parts)
        + f")   {apart / packed:>8.2f}",
        flush=True,
    )


def heard(pipe: Connection) -> Any:
    if not pipe.poll(LIMIT_S):
        sys.exit(f"the source has not answered for {LIMIT_S:.0f} s")
    return pipe.recv()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=source, args=(theirs, options.tensors), daemon=True)
    process.start()
    theirs.close()
    measure(pipe, options.tensors, options.rounds)
    process.join(LIMIT_S)


if __name__ == "__main__":
    main()
