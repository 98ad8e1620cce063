"""Casting and quantising the tensors of a published copy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from torch_ros import arguments
from torch_ros.copies.transforms import MadeTensor, Shape, cut, elementwise, part
from torch_ros.errors import UsageError


def _matches(fqn: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(fqn, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class Cast:
    """Casts floating-point tensors to another dtype.

    Args:
        dtype: Such as torch.bfloat16.
        keep: Names of tensors that are left as they are, as patterns ("*.norm.*").
    """

    dtype: torch.dtype
    keep: Sequence[str] = ()

    def __post_init__(self) -> None:
        arguments.instance(torch.dtype)("Cast: dtype", self.dtype)
        if not self.dtype.is_floating_point:
            raise UsageError(f"Cast: dtype={self.dtype}: expected a floating-point dtype")
        arguments.texts("Cast: keep", self.keep)
        object.__setattr__(self, "keep", tuple(self.keep))  # equal by repr

    def outputs(self, fqn: str, dtype: torch.dtype, shape: Shape) -> Mapping[str, MadeTensor]:
        """It itself, of the other dtype."""
        if not dtype.is_floating_point or _matches(fqn, self.keep):
            return {}
        return {fqn: elementwise(self.dtype, len(shape))}

    def fill(self, fqn: str, box: torch.Tensor, made: Mapping[str, torch.Tensor]) -> None:
        """As torch casts."""
        made[fqn].copy_(box)


FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
SCALE_MIN = torch.finfo(torch.float32).tiny  # a smaller one has few bits: quotients overflow
CACHE_BYTES = 2 << 20  # at a time on a host: with 16 MiB it took up to ten times as long


@dataclass(frozen=True, slots=True)
class Float8:
    """Quantises matrices to torch.float8_e4m3fn, with float32 scales in tensors of their own.

    A scale is the largest absolute value of its row, or its block, divided by 448, and 1 if all of
    them are zero. An element divided by its scale is rounded to the nearest float8; that times the
    scale is nearly the element. A tensor of more than two dimensions, such as a stack of experts,
    is taken for so many matrices. Tensors of fewer dimensions, and all that are not floating-point
    ones of 16 bits or more, are left as they are.

    By rows, "w.weight" of shape (N, K) gets a "w.weight_scale" of shape (N, 1), as with the
    "channel" strategy of compressed-tensors; a shard has whole rows. With `block=(128, 128)` it
    gets a "w.weight_scale_inv" of shape (N / 128, K / 128), rounded up, as in DeepSeek-V3's
    checkpoints (`weight_block_size`); the edges of shards lie between blocks.

    Args:
        names: Names of the tensors to quantise, as patterns ("*_proj.weight").
        keep: Those among them that are left as they are ("*.mlp.gate.*").
        block: Rows and columns that have a scale together; None: each row has its own.
        suffix: By which the name of the scales is longer than the tensor's. None: "_scale", with
            blocks "_scale_inv", although engines multiply by both.
    """

    names: Sequence[str]
    keep: Sequence[str] = ()
    block: tuple[int, int] | None = None
    suffix: str | None = None

    def __post_init__(self) -> None:
        for name in ("names", "keep"):
            arguments.texts(f"Float8: {name}", getattr(self, name))
            object.__setattr__(self, name, tuple(getattr(self, name)))  # equal by repr
        if self.block is not None:
            if not isinstance(self.block, Sequence) or len(self.block) != 2:
                raise UsageError(f"Float8: block={self.block!r}: expected rows and columns")
            for size in self.block:
                arguments.whole(1, 1 << 31)("Float8: block", size)
            object.__setattr__(self, "block", tuple(self.block))
        if self.suffix is None:
            object.__setattr__(self, "suffix", "_scale_inv" if self.block else "_scale")
        arguments.text("Float8: suffix", self.suffix)

    def outputs(self, fqn: str, dtype: torch.dtype, shape: Shape) -> Mapping[str, MadeTensor]:
        """It itself, quantised, and its scales."""
        is_matrix = len(shape) > 1 and dtype.is_floating_point and dtype.itemsize > 1
        if not is_matrix or not _matches(fqn, self.names) or _matches(fqn, self.keep):
            return {}
        per = self._per(shape)
        return {
            fqn: elementwise(FP8, len(shape)),
            f"{fqn}{self.suffix}": MadeTensor(torch.float32, per),
        }

    def _per(self, shape: Shape) -> Shape:
        return (*(1,) * (len(shape) - 2), *(self.block or (1, max(1, shape[-1]))))

    def fill(self, fqn: str, box: torch.Tensor, made: Mapping[str, torch.Tensor]) -> None:
        """Computed in float32.

        Raises: UsageError: An element is not finite.
        """
        quantised, scales = made[fqn], made[f"{fqn}{self.suffix}"]
        per = self._per(tuple(box.shape))
        most = CACHE_BYTES // box.itemsize if box.is_cpu else box.numel()
        for offsets, sizes in cut(tuple(box.shape), per, most):
            place = MadeTensor(torch.float32, per).made_of(offsets, sizes)
            values = part(box, offsets, sizes)
            self._quantise(fqn, values, part(quantised, offsets, sizes), part(scales, *place))

    def _quantise(
        self, fqn: str, box: torch.Tensor, quantised: torch.Tensor, scales: torch.Tensor
    ) -> None:
        rows, columns = box.shape[-2:]
        high, wide = self.block or (1, columns)
        values = box.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if rows % high or columns % wide:
            values = torch.nn.functional.pad(values, (0, -columns % wide, 0, -rows % high))
        *others, down, across = values.shape
        blocks = values.view(*others, down // high, high, across // wide, wide)
        largest = blocks.abs().amax((-3, -1))
        if not bool(torch.isfinite(largest).all()):
            raise UsageError(
                f"tensor {fqn!r} has elements that are not finite as float32; expected finite "
                "ones, to quantise; look where they come from, or name it in keep"
            )
        # A GPU multiplies by the inverse of a plain number, which rounds otherwise than a host.
        scale = largest / torch.full_like(largest, FP8_MAX)
        scale.clamp_(min=SCALE_MIN).masked_fill_(largest == 0, 1)
        blocks.div_(scale[..., :, None, :, None])
        quantised.copy_(values[..., :rows, :columns])
        scales.copy_(scale)
