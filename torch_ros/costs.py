"""Estimated times of reads and copies, by which short strided runs are planned."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torch_ros.errors import UsageError

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of reads and copies. They decide which short strided runs are read by whole rows.

    The defaults are for two processes of one host, as ``benchmarks/costs.py`` measured them; run it
    between your hosts for yours.

    Raises:
        UsageError: A time is negative, or a speed is not positive.
    """

    descriptor_s: float = 0.4e-6  # per span of a read
    read_bytes_per_s: float = 6e9  # spans as long as staging: 5 to 10 GB/s
    copy_bytes_per_s: float = 4e9  # strided rows of about a KiB: 4 to 6 GB/s
    copy_s: float = 1e-5  # per staged copy, however small: Python and torch

    def __post_init__(self) -> None:
        if not (self.descriptor_s >= 0 and self.copy_s >= 0):  # nan is not
            raise UsageError(f"{self}: expected times of at least 0 seconds")
        if not (self.read_bytes_per_s > 0 and self.copy_bytes_per_s > 0):
            raise UsageError(f"{self}: expected speeds above 0 bytes/s")

    def direct_s(self, spans: _Ints, useful_bytes: _Ints) -> _Floats:
        """Estimate, for each piece, the time to read its runs straight into the target."""
        return spans * self.descriptor_s + useful_bytes / self.read_bytes_per_s

    def staged_s(self, spans: _Ints, read_bytes: _Ints, useful_bytes: _Ints) -> _Floats:
        """Estimate, for each piece, the time to read it with gaps, and copy it from staging."""
        reading = spans * self.descriptor_s + read_bytes / self.read_bytes_per_s
        return reading + spans * self.copy_s + useful_bytes / self.copy_bytes_per_s


HOST_COSTS = Costs()
NIXL_COSTS = Costs(descriptor_s=2e-6)
# For a network of 10 Gbit/s: bytes that are read in vain are traffic that others wait for. Over
# loopback, where they are not, both ways take about the same (0.7 to 1.9 times were measured).
TCP_COSTS = Costs(descriptor_s=2e-6, read_bytes_per_s=1.2e9)
