"""Whether processes of this host may read each other: a stranger shows memory, and it is read.

As a program this is the stranger. It is no child of the process that reads, because a kernel with
`yama.ptrace_scope` 1 lets parents read their children, and nobody else. Copies are as short as
those that begin each connection; no NIXL takes part.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from torch_ros.errors import TransferFailed
from torch_ros.p2p import cma, mapped
from torch_ros.p2p.copying import copy
from torch_ros.p2p.near import process_of
from torch_ros.p2p.voucher import Neighbour, Process, Unproven, Voucher
from torch_ros.p2p.ways import part_of

AGENT = "torch_ros trial"
SHOWN_BYTES = 4096
SHOWN = 0x5A  # each byte of it


def ways(*more: str) -> Mapping[str, str]:
    """The ways by which processes of this host and user read each other, and what closes each.

    "" is said of one that is open. The first one is the condition of all others.

    Args:
        more: The names of modules that each have another way: `WAY`, its name; `show`, by which the
            stranger, an agent, shows something; `is_open`, whether that is seen.
    """
    try:
        with _stranger(*more) as said:
            return _tried(said, more)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"voucher": f"no process could be asked ({error})"}


def closed_to(agent: str, descriptor: bytes, address: int) -> str | None:
    """The reason for which this process cannot copy out of another one of this host; "": it can.

    None: it is on another host, or copies nothing.

    Args:
        descriptor, address: Memory of that process, as it has told its peers.
    """
    try:
        host, process = process_of(agent, part_of(agent, descriptor, 0))
        if host != mapped.host():
            return None
        with contextlib.closing(Neighbour(agent, process)) as neighbour:
            neighbour.vouched()
        return _closed_by(lambda: _read(process.pid, address, 1).size == 1)
    except TransferFailed:
        return None
    except Unproven as error:
        return str(error)


def _read(pid: int, address: int, count: int) -> np.ndarray:
    here = np.zeros(count, np.uint8)
    cma.read(pid, np.array([(address, here.ctypes.data, count)], np.uint64))
    return here


def _tried(said: Mapping[str, Any], more: Sequence[str]) -> Mapping[str, str]:
    if "problem" in said:
        return {"voucher": said["problem"]}
    process = Process(said["pid"], said["namespace"], said["voucher"])
    try:
        stranger = Neighbour(AGENT, process)
    except Unproven as error:
        return {"voucher": str(error)}
    with contextlib.closing(stranger):
        tried: dict[str, Callable[[], bool]] = {
            "voucher": lambda: bool(stranger.vouched()),
            "cma": lambda: _is_shown(_read(process.pid, said["address"], SHOWN_BYTES)),
            "mapped": lambda: _is_mapped(stranger, said["shared"]),
        }
        for module in map(importlib.import_module, more):
            tried[module.WAY] = partial(module.is_open, stranger)
        return {way: _closed_by(is_open) for way, is_open in tried.items()}


def _closed_by(is_open: Callable[[], bool]) -> str:
    try:
        return "" if is_open() else "other bytes came than were shown"
    except (OSError, Unproven) as error:
        return str(error)


def _is_shown(here: np.ndarray) -> bool:
    return bool((here == SHOWN).all())


def _is_mapped(stranger: Neighbour, address: int) -> bool:
    bounds = np.array([address], np.uint64)
    [stretch] = mapped.find(stranger, bounds, bounds + np.uint64(SHOWN_BYTES))
    with contextlib.closing(mapped.Mapping(stretch)) as mapping:
        here = np.zeros(SHOWN_BYTES, np.uint8)
        copy(np.array([(mapping.address, here.ctypes.data, SHOWN_BYTES)], np.uint64))
        return _is_shown(here)


@contextlib.contextmanager
def _stranger(*more: str) -> Iterator[Mapping[str, Any]]:
    """A process that shows memory until the block ends."""
    command = [sys.executable, "-m", "torch_ros.cli.trial", *more]
    with subprocess.Popen(  # noqa: S603  # this very program
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout
        line = parent.stdout.readline()  # empty if it has ended
        yield json.loads(line)


def main() -> None:
    """Show memory to whoever started this, until he closes our input or is gone."""
    if os.fork():
        os._exit(0)  # so that nobody is the parent of what follows
    try:
        said, shown = _shown(sys.argv[1:])
    except OSError as error:
        said, shown = {"problem": str(error)}, ()
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    del shown


def _shown(more: Sequence[str]) -> tuple[Mapping[str, Any], object]:
    """The places of what is shown, for as long as the second answer is kept."""
    voucher = Voucher(AGENT)
    voucher.show([b"trial"])
    private, shared = np.full(SHOWN_BYTES, SHOWN, np.uint8), mapped.allocate(SHOWN_BYTES)
    shared.write(bytes([SHOWN]) * SHOWN_BYTES)
    view = np.frombuffer(shared, np.uint8)
    others = [importlib.import_module(name).show(AGENT) for name in more]
    process = voucher.process
    said = {"pid": process.pid, "namespace": process.namespace, "voucher": process.voucher}
    said |= {"address": private.ctypes.data, "shared": view.ctypes.data}
    return said, (voucher, private, view, others)


if __name__ == "__main__":
    main()
