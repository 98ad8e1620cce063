"""What all share that quantise: which tensors they take, in which pieces, and what they refuse."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Protocol

import torch

from torch_ros import arguments
from torch_ros.copies.transforms import MadeTensor, Shape, pieces
from torch_ros.errors import UsageError

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
CACHE_BYTES = 2 << 20  # at a time on a host: with 16 MiB it took up to ten times as long
DEVICE_BYTES = 32 << 20  # elsewhere: a piece of a copy, of which float32 takes twice as much


class Quantising(Protocol):
    """Has the names of the tensors to quantise, and of those among them to keep."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def keep(self) -> Sequence[str]: ...


def matches(fqn: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(fqn, pattern) for pattern in patterns)


def settle_names(transform: Quantising) -> None:
    """Check the patterns of a frozen transform, and keep them as tuples: it is equal by repr.

    Raises: UsageError: One is no list of texts.
    """
    for name in ("names", "keep"):
        given = getattr(transform, name)
        arguments.texts(f"{type(transform).__name__}: {name}", given)
        object.__setattr__(transform, name, tuple(given))


def takes(transform: Quantising, fqn: str, dtype: torch.dtype, shape: Shape) -> bool:
    """Whether it quantises that one: a matrix, or a stack, of 16 bits or more, by its name."""
    is_matrix = len(shape) in (2, 3) and dtype.is_floating_point and dtype.itemsize > 1
    return is_matrix and matches(fqn, transform.names) and not matches(fqn, transform.keep)


def require_whole_blocks(transform: Quantising, fqn: str, shape: Shape, size: int) -> None:
    """Raises: UsageError: The last block of a row would be smaller than the others."""
    if shape[-1] % size:
        raise UsageError(
            f"tensor {fqn!r} of shape {list(shape)}: expected rows of a multiple of {size} "
            f"elements, which {type(transform).__name__} has a scale for; name it in keep, and "
            "in the ignore list of the engine's quantization_config"
        )


def in_pieces(
    box: torch.Tensor,
    outputs: Mapping[str, MadeTensor],
    made: Mapping[str, torch.Tensor],
    *,
    copies: int = 1,
) -> Iterator[tuple[torch.Tensor, Mapping[str, torch.Tensor]]]:
    """The box and what is made of it, cut into pieces that are fast to work on.

    Args:
        copies: Of which so many are in the cache at a time.
    """
    return pieces(outputs, box, made, CACHE_BYTES // copies if box.is_cpu else DEVICE_BYTES)


def in_float32(box: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, to compute with."""
    return box.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def require_finite(fqn: str, largest: torch.Tensor) -> None:
    """Raises: UsageError: Some of the largest elements are not finite. Waits for a GPU."""
    if not bool(torch.isfinite(largest).all()):
        raise UsageError(
            f"tensor {fqn!r} has elements that are not finite as float32; expected finite "
            "ones, to quantise; look where they come from, or name it in keep"
        )
