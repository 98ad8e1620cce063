"""`torch-ros doctor --links`: how fast each replica can be read from here, and on which way.

A probe is a stream like any other: it has a reader's record, a source that drains is not asked, and
an `unpublish` waits for it no longer than for other readers.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch_ros
from torch_ros.cli.links import Link
from torch_ros.cli.moving import opened
from torch_ros.errors import NotAvailable, SourceLost

PROBE_BYTES = 64 << 20
TIMES = 3  # of which the best counts: a new connection begins slowly
PROBE_S = 60.0  # for one of them
TURN_S, LOOK_S = 60.0, 0.2  # for another doctor's probe to end; between two looks
PREFIX = "doctor"


def probe(asked: argparse.Namespace, hosts: Mapping[str, str]) -> Sequence[Link]:
    """Read 64 MiB of each replica that holds the newest version whole, one after the other.

    Args:
        hosts: By replica.
    """
    with opened(asked, None, PREFIX, spot=True) as handle:
        contents = handle.contents(timeout_s=PROBE_S)
        names = _names(contents)
        links = []
        for replica in _holders(handle, contents):
            _await_turn(handle)
            links.append(_link(handle, contents.version, names, replica, hosts.get(replica, "?")))
    return links


def _names(contents: torch_ros.Contents) -> Sequence[str]:
    """The largest tensors that are 64 MiB together; at least one."""
    tensors = contents.tensors
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in tensors.items()}
    found, left = [], PROBE_BYTES
    for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
        if 0 < sizes[name] <= left:
            found.append(name)
            left -= sizes[name]
    return found or [min(filter(sizes.get, sizes), key=lambda name: sizes[name])]


def _holders(handle: torch_ros.ShardHandle, contents: torch_ros.Contents) -> Sequence[str]:
    found = (
        each.replica
        for each in handle.fleet().held
        if (each.ref.run, each.ref.version) == (contents.run, contents.version) and each.is_offered
    )
    return sorted(set(found))


def _await_turn(handle: torch_ros.ShardHandle) -> None:
    """Let the probes of other doctors end, as far as this one sees them."""
    until_s = time.monotonic() + TURN_S
    while time.monotonic() < until_s:
        readers = {name for each in handle.fleet().held for name in each.readers}
        if not any(name.startswith(f"{PREFIX}-") for name in readers - {handle.replica}):
            return
        time.sleep(LOOK_S)


def _link(
    handle: torch_ros.ShardHandle, version: int, names: Sequence[str], replica: str, host: str
) -> Link:
    best = Link(replica, host)
    for _ in range(TIMES):
        before = _received()
        try:
            with handle.stream(
                version, names, buffer_bytes=PROBE_BYTES, timeout_s=PROBE_S, source=replica
            ) as stream:
                for _ in stream:
                    pass
        except (SourceLost, NotAvailable) as error:
            return best if best.bytes_per_s else Link(replica, host, problem=str(error))
        rate = stream.bytes_read / stream.read_s
        if rate > best.bytes_per_s:
            best = Link(replica, host, _way(before, _received(), stream.bytes_read), rate)
    return best


def _way(before: Mapping[str, int], after: Mapping[str, int], read_bytes: int) -> str:
    """The device on which most of what was read has come; "copied": on none."""
    came = {name: count - before.get(name, 0) for name, count in after.items()}
    name = max(came, key=lambda name: came[name], default="")
    return name if name and came[name] >= read_bytes / 2 else "copied"


def _received() -> Mapping[str, int]:
    """The bytes that each device of this host has received, as the kernel has counted."""
    found = {}
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, counts = line.partition(":")
        found[f"TCP {name.strip()}"] = int(counts.split()[0])
    for port in Path("/sys/class/infiniband").glob("*/ports/*/counters/port_rcv_data"):
        with suppress(OSError, ValueError):
            words = int(port.read_text())  # of four bytes
            found[f"RDMA {port.parts[4]}:{port.parts[6]}"] = 4 * words
    return found
