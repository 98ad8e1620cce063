"""Whether this process may copy out of others of this host: a part of `cli.trial`."""

import contextlib
import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from torch_ros.features.shortcuts import cma
from torch_ros.features.shortcuts.copying import copy
from torch_ros.features.shortcuts.mapped import Mapping as Mapped
from torch_ros.features.shortcuts.mapped import find
from torch_ros.features.shortcuts.peer import ShortcutDescriptor
from torch_ros.p2p import shared
from torch_ros.p2p.voucher import Neighbour, Unproven

BYTES = bytes([0x5A]) * 4096  # the content of what is shown


def show(agent: str) -> tuple[Mapping[str, int], object]:  # noqa: ARG001  # the voucher names it
    """Have memory for each of `WAYS`, and say where; it lasts as long as the second answer."""
    private, file = ctypes.create_string_buffer(BYTES), shared.allocate(len(BYTES))
    file.write(BYTES)
    view = np.frombuffer(file, np.uint8)
    said = {"cma": ctypes.addressof(private), "mapped": view.ctypes.data}
    return said, (private, view)


def _is_read(stranger: Neighbour, said: Mapping[str, int]) -> bool:
    """Whether the kernel reads the private memory that the process has shown."""
    return _read(stranger, said["cma"], len(BYTES)) == BYTES


def _read(process: Neighbour, address: int, count: int) -> bytes:
    here = np.zeros(count, np.uint8)
    cma.read(process.process.pid, np.array([(address, here.ctypes.data, count)], np.uint64))
    return here.tobytes()


def _is_mapped(stranger: Neighbour, said: Mapping[str, int]) -> bool:
    """Whether the file that the process has shown can be found and mapped, with its bytes."""
    bounds = np.array([said["mapped"]], np.uint64)
    [stretch] = find(stranger, bounds, bounds + np.uint64(len(BYTES)))
    here = np.zeros(len(BYTES), np.uint8)
    with contextlib.closing(Mapped(stretch)) as mapping:
        copy(np.array([(mapping.address, here.ctypes.data, len(BYTES))], np.uint64))
    return here.tobytes() == BYTES


WAYS: Mapping[str, Callable[[Neighbour, Any], bool]] = {"cma": _is_read, "mapped": _is_mapped}


def closed_to(agent: str, descriptor: bytes, address: int) -> str | None:
    """The reason for which this process cannot copy out of another one of this host; "": it can.

    None: it is on another host, or copies nothing. It has told its peers of `address`.

    Raises: TransferFailed: These bytes are not a descriptor.
    """
    said = ShortcutDescriptor.decode(agent, descriptor)
    if said.host != shared.host():
        return None
    try:
        with contextlib.closing(Neighbour(agent, said.process)) as neighbour:
            neighbour.vouched()
            _read(neighbour, address, 1)
    except (OSError, Unproven) as error:
        return str(error)
    return ""
