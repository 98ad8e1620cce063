"""MXFP8: float8 elements, and a power of two for each 32 of a row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_ros import arguments
from torch_ros.copies.transforms import MadeTensor, Shape, elementwise
from torch_ros.features.transforms import matrices

SIZE = 32  # of a block
FLOAT8_EXPONENT = 8  # of 448, the largest float8, which is 1.75 * 2**8
UP_AT_1_75 = 1 << 21  # added to the bits of a float32: from 1.75 on, they get the next exponent


@dataclass(frozen=True, slots=True)
class MXFP8:
    """Quantises matrices to MXFP8: torch.float8_e4m3fn, and a scale for each 32 of a row.

    "w.weight" of shape (N, K) gets a "w.weight_scale" of shape (N, K / 32), in which a uint8 of n
    stands for 2 ** (n - 127). An element divided by its scale is rounded to the nearest float8. The
    bits are those that compressed-tensors makes of the matrix as float32, by its schemes "MXFP8"
    and "MXFP8A16"; a block of zeros has the scale 0, which stands for the smallest. With a largest
    element of m * 2 ** e, a scale is 2 ** (e - 8) below m = 1.75, and twice that from there on; by
    the rule of OCP's specification it never is, and elements beyond 448 become 448.

    As with `Float8`, a tensor of three dimensions is taken for so many matrices, with blocks along
    the last one; those of fewer or more, or not of 16 floating-point bits or more, are left as they
    are. The edges of shards lie between blocks. A matrix whose K is no multiple of 32 is an error,
    as it is there.

    Args:
        names: Names of the tensors to quantise, as patterns ("*_proj.weight").
        keep: Those among them that are left as they are ("*.mlp.gate.*").
        suffix: By which the name of the scales is longer than the tensor's.
    """

    names: Sequence[str]
    keep: Sequence[str] = ()
    suffix: str = "_scale"

    def __post_init__(self) -> None:
        matrices.settle_names(self)
        arguments.text("MXFP8: suffix", self.suffix)

    def outputs(self, fqn: str, dtype: torch.dtype, shape: Shape) -> Mapping[str, MadeTensor]:
        """It itself, quantised, and its scales.

        Raises: UsageError: Its rows are no whole blocks.
        """
        if not matrices.takes(self, fqn, dtype, shape):
            return {}
        matrices.require_whole_blocks(self, fqn, shape, SIZE)
        return self._made(fqn, len(shape))

    def _made(self, fqn: str, dims: int) -> Mapping[str, MadeTensor]:
        per = (*(1,) * (dims - 1), SIZE)
        return {
            fqn: elementwise(matrices.FP8, dims),
            f"{fqn}{self.suffix}": MadeTensor(torch.uint8, per),
        }

    def fill(self, fqn: str, box: torch.Tensor, made: Mapping[str, torch.Tensor]) -> None:
        """Computed in float32.

        Raises: UsageError: An element is not finite.
        """
        outputs = self._made(fqn, box.ndim)
        for piece, parts in matrices.in_pieces(box, outputs, made):
            values = matrices.in_float32(piece)
            blocks = values.view(*values.shape[:-1], values.shape[-1] // SIZE, SIZE)
            largest = blocks.abs().amax(-1)
            matrices.require_finite(fqn, largest)
            exponents = largest.view(torch.int32).add_(UP_AT_1_75).bitwise_right_shift_(23)
            exponents.sub_(FLOAT8_EXPONENT).clamp_(min=0)
            parts[f"{fqn}{self.suffix}"].copy_(exponents)
            # A product with a power of two is exact, and that of the smallest scale a normal one.
            inverse = (254 - exponents).bitwise_left_shift_(23).view(torch.float32)
            blocks.mul_(inverse[..., None])
            parts[fqn].copy_(values)
