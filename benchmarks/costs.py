"""What reading and copying take here: by this, reads of short strided runs are planned.

Two processes, host memory. Prints what was measured, and the `torch_ros.Costs` for
`open(costs=...)` that says the same. Between two hosts: `--serve` on one of them, `--from` with
what that printed on the other.
"""

import argparse
import base64
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np
import torch
from harness import Actors, started

from torch_ros import Costs
from torch_ros.face.choose import TransportName, choose_transport
from torch_ros.p2p.transport import Peer
from torch_ros.spans import Region
from torch_ros.weights.staging import StagedCopy, copy_staged

SIZE_BYTES = 64 << 20
TINY_BYTES, TINY_SPANS = 64, 20_000
LONG_BYTES = 4 << 20  # what fits into staging, and is read one after the other
ROW_BYTES, ROWS = 1024, 4096  # of a staged copy: half of each row
COPIES = 32


class Place(msgspec.Struct):
    """Memory that can be read, and how to reach it."""

    connection: bytes
    descriptor: bytes
    address: int


class Source:
    def __init__(self, way: TransportName) -> None:
        self._transport = choose_transport(
            way, replica="costs", rank=0, in_process=False, reason="measured"
        )
        self._memory = torch.ones(SIZE_BYTES, dtype=torch.uint8)
        region = Region(self._memory.data_ptr(), SIZE_BYTES)
        self._registration = self._transport.register([region])

    def place(self) -> Place:
        return Place(
            self._transport.connection, self._registration.descriptor, self._memory.data_ptr()
        )

    def close(self) -> None:
        self._transport.close()


def source(way: TransportName) -> Actors:
    return {"source": Source(way)}


def usual_s(repeat: int, do: Callable[[], object]) -> float:
    """The median; the first time warms up."""
    taken_s = []
    for _ in range(repeat + 1):
        started_s = time.perf_counter()
        do()
        taken_s.append(time.perf_counter() - started_s)
    return statistics.median(taken_s[1:])


def read_s(peer: Peer, place: Place, target: torch.Tensor, size: int, count: int, n: int) -> float:
    """Seconds to read `count` spans of `size` bytes that lie apart at both ends."""
    at = np.arange(count, dtype=np.uint64) * np.uint64(SIZE_BYTES // count)
    spans = np.stack([at + place.address, at + target.data_ptr(), np.full_like(at, size)], axis=1)
    read = peer.prepare(spans.astype(np.uint64))

    def once() -> None:
        read.post()
        while not read.is_done():
            pass

    try:
        return usual_s(n, once)
    finally:
        read.close()


def copy_s(rows: int, n: int) -> float:
    """Seconds to copy half of each row out of staging, which is in the cache, to what is not."""
    half = ROW_BYTES // 2
    staging = torch.ones(rows * ROW_BYTES, dtype=torch.uint8)
    target = torch.zeros(SIZE_BYTES // half, half, dtype=torch.uint8)
    copies = [
        StagedCopy(0, 0, 0, len(staging), 0, at, (rows, half), (ROW_BYTES, 1), (half, 1))
        for at in range(0, SIZE_BYTES, rows * half)[:COPIES]
    ]

    def once() -> None:
        for copy in copies:
            copy_staged(staging, copy, target)

    return usual_s(n, once) / len(copies)


def measured(place: Place, way: TransportName, repeat: int) -> Costs:
    ours = choose_transport(way, replica="costs", rank=0, in_process=False, reason="measured")
    target = torch.zeros(SIZE_BYTES, dtype=torch.uint8)
    ours.register([Region(target.data_ptr(), SIZE_BYTES)])
    peer = ours.connect(place.connection)
    try:
        peer.attach(place.descriptor)
        long_s = read_s(peer, place, target, LONG_BYTES, 1, 10 * repeat)
        tiny_s = read_s(peer, place, target, TINY_BYTES, TINY_SPANS, repeat)
    finally:
        peer.close()
        ours.close()
    start_s = copy_s(1, repeat)
    return Costs(
        descriptor_s=tiny_s / TINY_SPANS,
        read_bytes_per_s=LONG_BYTES / long_s,
        copy_bytes_per_s=ROWS * ROW_BYTES / 2 / (copy_s(ROWS, repeat) - start_s),
        copy_s=start_s,
    )


@contextlib.contextmanager
def place_of(given: argparse.Namespace) -> Iterator[Place]:
    if given.origin:
        yield msgspec.msgpack.decode(base64.b64decode(given.origin), type=Place)
        return
    with started({"source": partial(source, given.transport)}) as (child,):
        yield child.ask("source", "place")


def serve(way: TransportName) -> None:
    served = Source(way)
    print(base64.b64encode(msgspec.msgpack.encode(served.place())).decode(), flush=True)
    print("Ends with Ctrl-C.", file=sys.stderr)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(60)
    served.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--transport", choices=("auto", "tcp", "nixl", "ucx", "ucx-tcp"), default="auto"
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help="be what another process reads from")
    parser.add_argument("--from", dest="origin", help="what --serve printed")
    given = parser.parse_args()
    if given.repeat < 1:
        sys.exit("--repeat: expected at least 1")
    torch.set_num_threads(1)
    if given.serve:
        serve(given.transport)
        return
    with place_of(given) as place:
        costs = measured(place, given.transport, given.repeat)
    print(f"a span of a read  {costs.descriptor_s * 1e6:8.2f} us")
    print(f"long spans        {costs.read_bytes_per_s / 1e9:8.2f} GB/s")
    print(f"a copy            {costs.copy_s * 1e6:8.2f} us")
    print(f"copied rows       {costs.copy_bytes_per_s / 1e9:8.2f} GB/s")
    print(
        f"torch_ros.Costs(descriptor_s={costs.descriptor_s:.2g}, "
        f"read_bytes_per_s={costs.read_bytes_per_s:.2g}, "
        f"copy_bytes_per_s={costs.copy_bytes_per_s:.2g}, copy_s={costs.copy_s:.2g})"
    )


if __name__ == "__main__":
    main()
