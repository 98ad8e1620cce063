"""Memory by its addresses, as `weights` plans and `p2p` copies it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

HOST = -1  # the device of host memory, as in torch; CUDA devices count from 0

# A row per span: source address, target address, bytes; uint64.
Spans = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Region:
    """Contiguous memory of this process. The code that registers it keeps it allocated."""

    address: int
    size_bytes: int  # > 0
    device: int = HOST
