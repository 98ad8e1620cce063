"""Casting and quantising the tensors of a published copy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_ros import arguments
from torch_ros.copies.transforms import MadeTensor, Shape, elementwise
from torch_ros.errors import UsageError
from torch_ros.features.transforms import matrices
from torch_ros.features.transforms.matrices import FP8, FP8_MAX


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
        if not dtype.is_floating_point or matrices.matches(fqn, self.keep):
            return {}
        return {fqn: elementwise(self.dtype, len(shape))}

    def fill(self, fqn: str, box: torch.Tensor, made: Mapping[str, torch.Tensor]) -> None:
        """As torch casts."""
        made[fqn].copy_(box)


SCALE_MIN = torch.finfo(torch.float32).tiny  # a smaller one has few bits: quotients overflow


@dataclass(frozen=True, slots=True)
class Float8:
    """Quantises matrices to torch.float8_e4m3fn, with float32 scales in tensors of their own.

    A scale is the largest absolute value of its row, or its block, divided by 448, and 1 if all of
    them are zero. An element divided by its scale is rounded to the nearest float8; that times the
    scale is nearly the element. A tensor of three dimensions, such as a stack of experts, is taken
    for so many matrices, whose rows lie along the last one; most engines want one matrix for each
    expert, as `checkpoint_names` gives. Tensors of fewer dimensions, or of more (convolutions), and
    all that are not floating-point ones of 16 bits or more, are left as they are.

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
        matrices.settle_names(self)
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
        return self._made(fqn, shape) if matrices.takes(self, fqn, dtype, shape) else {}

    def _made(self, fqn: str, shape: Shape) -> Mapping[str, MadeTensor]:
        per = (*(1,) * (len(shape) - 2), *(self.block or (1, max(1, shape[-1]))))
        return {
            fqn: elementwise(FP8, len(shape)),
            f"{fqn}{self.suffix}": MadeTensor(torch.float32, per),
        }

    def fill(self, fqn: str, box: torch.Tensor, made: Mapping[str, torch.Tensor]) -> None:
        """Computed in float32.

        Raises: UsageError: An element is not finite.
        """
        outputs = self._made(fqn, tuple(box.shape))
        for piece, parts in matrices.in_pieces(box, outputs, made):
            self._quantise(fqn, piece, parts[fqn], parts[f"{fqn}{self.suffix}"])

    def _quantise(
        self, fqn: str, box: torch.Tensor, quantised: torch.Tensor, scales: torch.Tensor
    ) -> None:
        rows, columns = box.shape[-2:]
        high, wide = self.block or (1, columns)
        values = matrices.in_float32(box)
        if rows % high or columns % wide:
            values = torch.nn.functional.pad(values, (0, -columns % wide, 0, -rows % high))
        *others, down, across = values.shape
        blocks = values.view(*others, down // high, high, across // wide, wide)
        largest = blocks.abs().amax((-3, -1))
        matrices.require_finite(fqn, largest)
        # A GPU multiplies by the inverse of a plain number, which rounds otherwise than a host.
        scale = largest / torch.full_like(largest, FP8_MAX)
        scale.clamp_(min=SCALE_MIN).masked_fill_(largest == 0, 1)
        blocks.div_(scale[..., :, None, :, None])
        quantised.copy_(values[..., :rows, :columns])
        scales.copy_(scale)
