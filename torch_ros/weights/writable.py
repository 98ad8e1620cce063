"""Whether tensors may be read into: a write to memory mapped with PROT_READ ends the process."""

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from torch_ros.errors import UsageError
from torch_ros.weights.local import span_of

Uint64s = npt.NDArray[np.uint64]

_OWN_MAPS = Path("/proc/self/maps")
_UNWRITABLE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) .-", re.MULTILINE)


def unwritable(chunks: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The fqn of the first one in host memory that this process may only read; None: there is none.

    A write to it would end the process, and the kernel refuses to copy there.
    """
    own = [(fqn, span_of(memory)) for fqn, memory in chunks if memory.is_cpu]
    starts, sizes = np.array([span for _, span in own], np.uint64).reshape(-1, 2).T
    number = first_unwritable(starts, starts + sizes)
    return None if number is None else own[number][0]


def require_none(call: str, fqn: str | None) -> None:
    """Raises: UsageError: `unwritable` has found that one."""
    if fqn is not None:
        raise UsageError(
            f"{call}: tensor {fqn!r} lies in memory that this process may only read (a file "
            "mapped with PROT_READ, or a loan), expected memory to read into; register a copy "
            "(tensor.clone())"
        )


def first_unwritable(starts: Uint64s, ends: Uint64s) -> int | None:
    """The number of the first of these spans that this process may not write to everywhere. A file
    that was mapped with PROT_READ, say. Takes 2 ms per thousand mappings. None also without /proc.
    """
    try:
        found = _UNWRITABLE.findall(_OWN_MAPS.read_bytes())
    except OSError:
        return None
    bounds = [(int(start, 16), int(end, 16)) for start, end in found]
    areas = np.array([*bounds, (2**64 - 1, 2**64 - 1)], np.uint64)  # in order; one behind all
    after = np.searchsorted(areas[:, 1], starts, side="right")
    [numbers] = np.nonzero((ends > starts) & (areas[after, 0] < ends))
    return int(numbers[0]) if len(numbers) else None
