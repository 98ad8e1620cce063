"""`torch-ros doctor --links`: how fast each replica can be read from here, and on which way.

A probe is a stream like any other: it has a reader's record, a source that drains is not asked, and
an `unpublish` waits for it no longer than for other readers.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch_ros
from torch_ros.checkpoints.written import require_same
from torch_ros.cli.links import Link
from torch_ros.cli.moving import opened
from torch_ros.errors import ManifestMismatch, NotAvailable, SourceLost

FIRST_BYTES, PROBE_BYTES = 8 << 20, 16 << 20  # in all 4 % of a GiB that is read beside it
QUICK_S = 0.1  # a link on which the first bytes take longer is measured with as few again
TIMES = 3  # of which the best counts: a new connection begins slowly
PROBE_S = 60.0  # for one of them
TURN_S, LOOK_S = 60.0, 0.2  # for another doctor's probe to end; between two looks
PREFIX = "doctor"


def probe(asked: argparse.Namespace, hosts: Mapping[str, str]) -> Sequence[Link]:
    with opened(asked, None, PREFIX, spot=True, waits=False) as handle:
        return links(handle, hosts)


def links(handle: torch_ros.ShardHandle, hosts: Mapping[str, str]) -> Sequence[Link]:
    """Read some MiB of each replica that holds the newest version whole, one after the other.

    Args:
        hosts: By replica.
    """
    contents = handle.contents(timeout_s=PROBE_S)
    some, more = _names(contents, FIRST_BYTES), _names(contents, PROBE_BYTES)
    found = []
    for replica in _holders(handle, contents):
        _await_turn(handle)
        read = partial(_read, handle, contents, source=replica)
        found.append(_link(read, some, more, Link(replica, hosts.get(replica, "?"))))
    return found


def _names(contents: torch_ros.Contents, bytes_max: int) -> Sequence[str]:
    """The largest tensors that are no more together; at least one."""
    tensors = contents.tensors
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in tensors.items()}
    found, left = [], bytes_max
    for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
        if 0 < sizes[name] <= left:
            found.append(name)
            left -= sizes[name]
    return found or [min(filter(sizes.get, sizes), key=lambda name: sizes[name])]


def _holders(handle: torch_ros.ShardHandle, contents: torch_ros.Contents) -> Sequence[str]:
    found = (
        each.replica
        for each in handle.fleet().held
        if each.ref.uid == contents.uid and each.is_offered
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
    read: Callable[[Sequence[str]], tuple[int, float]],
    some: Sequence[str],
    more: Sequence[str],
    link: Link,
) -> Link:
    """The best of some reads, which disturb a slow link for seconds only."""
    names, best = some, link
    for _ in range(TIMES):
        before = _received()
        try:
            read_bytes, read_s = read(names)
        except (SourceLost, NotAvailable, ManifestMismatch) as error:
            return best if best.way else replace(link, problem=str(error))
        if names is more or read_s > QUICK_S:
            rate, way = read_bytes / read_s, _way(before, _received(), read_bytes)
            best = replace(link, way=way, bytes_per_s=rate) if rate > best.bytes_per_s else best
        else:
            names = more
    return best


def _read(
    handle: torch_ros.ShardHandle,
    contents: torch_ros.Contents,
    names: Sequence[str],
    *,
    source: str,
) -> tuple[int, float]:
    """The bytes that were read, and the seconds that they took.

    Raises: VersionNotFound, ManifestMismatch: The number stands for another content by now.
    """
    with handle.stream(
        contents.version, names, buffer_bytes=PROBE_BYTES, timeout_s=PROBE_S, source=source
    ) as stream:
        require_same(handle.model, contents, stream.uid)
        for _ in stream:
            pass
    return stream.bytes_read, stream.read_s


def _way(before: Mapping[str, int], after: Mapping[str, int], read_bytes: int) -> str:
    """The device on which most of what was read has come; "copied": on none."""
    came = {name: count - before.get(name, 0) for name, count in after.items()}
    name = max(came, key=lambda name: came[name], default="")
    return name if name and came[name] >= read_bytes / 2 else "copied"


def _received() -> Mapping[str, int]:
    """The bytes that each device of this host has received, as the kernel has counted."""
    found = {}
    for line in Path("/proc/self/net/dev").read_text(errors="replace").splitlines()[2:]:
        name, _, counts = line.partition(":")
        found[f"TCP {name.strip()}"] = int(counts.split()[0])
    for port in Path("/sys/class/infiniband").glob("*/ports/*/counters/port_rcv_data"):
        with suppress(OSError, ValueError):
            words = int(port.read_text())  # of four bytes
            found[f"RDMA {port.parts[4]}:{port.parts[6]}"] = 4 * words
    return found
