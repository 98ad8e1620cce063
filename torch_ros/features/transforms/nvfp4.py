"""NVFP4: four bits an element, a float8 for each 16 of a row, and a float32 for the tensor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Self

import torch
import torch.distributed as dist
from torch.nn.functional import max_pool1d

from torch_ros import arguments
from torch_ros.copies.transforms import MadeTensor, Shape
from torch_ros.errors import UsageError
from torch_ros.features.transforms import matrices
from torch_ros.features.transforms.fitting import largest_of, largest_of_all
from torch_ros.weights.local import LocalTensor, local_chunks

SIZE = 16  # of a block
# Of all models of vLLM 0.32. Where only some of a row are fused, sharing costs precision alone.
FUSED = (
    ("q_proj", "k_proj", "v_proj", "b_proj", "g_proj", "f_a_proj", "g_a_proj"),
    ("q_proj", "index_q_proj", "index_k_proj", "indexer.index_qk_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
    ("key_proj", "value_proj"),
    ("q", "k", "v"),
    ("query", "key", "value"),
    ("query_net", "key_net", "value_net"),
    ("wq", "wk", "wv"),
    ("wk", "weights_proj"),
    ("wq_a", "wkv", "wkv_a_with_mqa"),
    ("wkv", "wgate"),
    ("wq_du", "wk_dv", "wv_dv", "wr_du"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("gate_proj", "up_proj", "dense_h_to_4h"),
    ("w1", "w3"),
    ("fc1", "fc3"),
    ("c_fc_0", "c_fc_1"),
    ("input_mix_weight_down", "block_inject_weight"),
)
FP4_MAX = 6.0  # of 0, 0.5, 1, 1.5, 2, 3, 4 and 6
SCALE_OF_NOTHING = 0.125  # of a block too small beside the largest: compressed-tensors' choice
TINY, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclass(frozen=True)
class NVFP4:
    """Quantises matrices to NVFP4: four bits an element, a scale for each 16 and for the tensor.

    In the place of "w.weight" of shape (N, K) there are, as with the schemes "NVFP4" and "NVFP4A16"
    of compressed-tensors:

    - "w.weight_packed", (N, K / 2) of uint8: two elements in each, the first in the low bits.
    - "w.weight_scale", (N, K / 16) of torch.float8_e4m3fn.
    - "w.weight_global_scale", (1,) of float32: 448 * 6 / the largest absolute value.

    An element is nearly its four bits times its block's scale divided by the global scale. The bits
    are those that compressed-tensors makes of the matrix as float32.

    A global scale is made of a whole tensor: without `global_scales`, a copy from a GPU `to="cpu"`
    makes each tensor in one piece. Shards have to be told theirs, by `global_scales`. So have
    matrices that an engine fuses: vLLM uses one for queries, keys and values, and one for gate
    and up; where theirs differ, as after a plain `NVFP4(names)`, it computes with other weights,
    and only warns. `NVFP4.fitted` finds all of them.

    As with `Float8`, a tensor of three dimensions is taken for so many matrices, here with one
    global scale, and with blocks along the last dimension; those of fewer or more, or not of 16
    floating-point bits or more, are left as they are; so are empty ones. The edges of shards lie
    between blocks. A matrix whose K is no multiple of 16 is an error, as it is there.

    Args:
        names: Names of the tensors to quantise, as patterns ("*_proj.weight").
        keep: Those among them that are left as they are ("*.mlp.gate.*").
        global_scales: By names of tensors: of all that are quantised. Elements that are too large
            for theirs become the largest that there is. None: each tensor has its own.
    """

    names: Sequence[str]
    keep: Sequence[str] = ()
    global_scales: Mapping[str, float] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        matrices.settle_names(self)
        given = self.global_scales
        if given is None:
            return
        if not isinstance(given, Mapping):
            raise UsageError(f"NVFP4: global_scales={given!r}: expected a number for each name")
        for fqn, scale in given.items():
            is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
            if not isinstance(fqn, str) or not is_number or not TINY <= scale <= HUGE:
                raise UsageError(
                    f"NVFP4: global_scales: {fqn!r}: {scale!r}: expected names, and for each a "
                    "positive number that is finite and normal as float32"
                )
        plain = {fqn: float(scale) for fqn, scale in sorted(given.items())}  # equal by repr
        object.__setattr__(self, "global_scales", plain)

    @classmethod
    def fitted(
        cls,
        named_tensors: Mapping[str, torch.Tensor],
        names: Sequence[str],
        keep: Sequence[str] = (),
        *,
        fused: Sequence[Sequence[str]] = FUSED,
        group: dist.ProcessGroup | None = None,
    ) -> Self:
        """Find the global scales of these tensors, for one version.

        Collective on all ranks of a DTensor's mesh over which it is sharded, and of `group`, with
        names in one order: an error on one is raised on all. Else called by any rank.

        Args:
            named_tensors: What is published then. Values that are not finite are refused there.
            names: As for `NVFP4`; and so `keep`.
            fused: Modules that an engine fuses into one, by the last parts of their names: in each
                layer, those in a row have the global scale of the largest element of all. Those of
                vLLM's models, unless others are given.
            group: All ranks of the replica, for a `Chunked` of which each has a part, and for a
                pipeline of which each has some layers. All of them call this.

        Raises:
            UsageError: As `publish_copy` of these tensors; or there is no `group`, and a `Chunked`
                of which this rank has only a part; or another rank has failed.
        """

        def taken() -> Sequence[LocalTensor]:
            arguments.instance(Sequence)("NVFP4.fitted: fused", fused)
            for row in fused:
                arguments.texts("NVFP4.fitted: fused", row)
            plain = cls(names, keep)
            there = local_chunks(named_tensors)
            return [one for one in there if plain.outputs(one.fqn, one.dtype, one.shape)]

        largest = largest_of_all(named_tensors, taken, group)
        heads, shared = _heads(fused), dict[str, float]()
        for fqn, value in largest.items():
            key = _fused(fqn, heads)
            shared[key] = max(shared.get(key, 0.0), value if math.isfinite(value) else 0.0)
        values = torch.tensor(list(shared.values()), dtype=torch.float32, device="cpu")
        scales = dict(zip(shared, global_scale_of(values).tolist(), strict=True))
        return cls(names, keep, {fqn: scales[_fused(fqn, heads)] for fqn in largest})

    def __repr__(self) -> str:
        """By which ranks compare theirs; errors show it, so it is short."""
        scales = None
        if self.global_scales is not None:
            digest = blake2b(repr(self.global_scales).encode(), digest_size=8).hexdigest()
            scales = f"<{len(self.global_scales)}, of digest {digest}>"
        return f"NVFP4(names={self.names!r}, keep={self.keep!r}, global_scales={scales})"

    def outputs(self, fqn: str, dtype: torch.dtype, shape: Shape) -> Mapping[str, MadeTensor]:
        """Its elements, packed, its scales, and its global scale.

        Raises:
            UsageError: Its rows are no whole blocks, or its global scale is not among those that
                were given.
        """
        if not matrices.takes(self, fqn, dtype, shape) or not math.prod(shape):
            return {}
        matrices.require_whole_blocks(self, fqn, shape, SIZE)
        told = self.global_scales
        if told is not None and fqn not in told:
            raise UsageError(
                f"tensor {fqn!r} has none of the {len(told)} global_scales of NVFP4: "
                "expected one for each tensor to quantise; call NVFP4.fitted with what is "
                "published, or name it in keep"
            )
        made_of = shape if told is None else (1,) * len(shape)
        single = MadeTensor(torch.float32, made_of, is_single=True)
        return {**_blocks(fqn, len(shape)), f"{fqn}_global_scale": single}

    def fill(self, fqn: str, box: torch.Tensor, made: Mapping[str, torch.Tensor]) -> None:
        """Computed in float32.

        Raises: UsageError: An element is not finite.
        """
        global_scale = made[f"{fqn}_global_scale"]
        told = None if self.global_scales is None else self.global_scales[fqn]
        if told is None:
            largest = largest_of(box)
            matrices.require_finite(fqn, largest)
            global_scale.copy_(global_scale_of(largest))
        else:
            global_scale.fill_(told)
        outputs = _blocks(fqn, box.ndim)
        for piece, parts in matrices.in_pieces(box, outputs, made, copies=8):
            values = matrices.in_float32(piece)
            blocks = values.view(*values.shape[:-1], values.shape[-1] // SIZE, SIZE)
            # On a host, amax of 16 takes three times as long.
            largest = max_pool1d(values.abs().view(1, -1), SIZE).view(blocks.shape[:-1])
            if told is not None:
                matrices.require_finite(fqn, largest)
            # A GPU multiplies by the inverse of a plain number, which rounds otherwise than a host.
            scales = global_scale * (largest / torch.full_like(largest, FP4_MAX))
            scales = scales.clamp_(max=matrices.FP8_MAX).to(matrices.FP8).float()
            scales.masked_fill_(scales == 0, SCALE_OF_NOTHING)
            parts[f"{fqn}_scale"].copy_(scales)
            blocks.div_((scales / global_scale)[..., None])
            parts[f"{fqn}_packed"].copy_(packed(values))


def _heads(rows: Sequence[Sequence[str]]) -> Mapping[str, str]:
    """One module for all that are fused; rows that have a module in common are one row."""
    heads: dict[str, str] = {}
    for row in filter(None, rows):
        joined = {heads.get(module, module) for module in row}
        heads |= dict.fromkeys(row, min(joined))
        heads = {module: min(joined) if at in joined else at for module, at in heads.items()}
    return heads


def _fused(fqn: str, heads: Mapping[str, str]) -> str:
    """The name that all matrices have in common of which an engine makes one."""
    *outer, leaf = fqn.split(".")
    for parts in (2, 1):
        if (module := ".".join(outer[-parts:])) in heads:
            return ".".join([*outer[:-parts], heads[module], leaf])
    return fqn


def _blocks(fqn: str, dims: int) -> Mapping[str, MadeTensor]:
    rows = (1,) * (dims - 1)
    return {
        f"{fqn}_scale": MadeTensor(matrices.FP8, (*rows, SIZE)),  # an error tells the larger block
        f"{fqn}_packed": MadeTensor(torch.uint8, (*rows, 2)),
    }


def global_scale_of(largest: torch.Tensor) -> torch.Tensor:
    """1 where there is no finite one: a tensor is all zeros, or nearly, or has none to look at."""
    inverse = largest.clamp(min=TINY).reciprocal()  # as compressed-tensors rounds
    scale = inverse * (matrices.FP8_MAX * FP4_MAX)
    return torch.nan_to_num(scale, nan=1.0, posinf=1.0)


def packed(values: torch.Tensor) -> torch.Tensor:
    """Two numbers in each byte, rounded to the nearest ones of four bits, ties to even."""
    sizes = values.abs().clamp_(max=FP4_MAX)
    # The numbers below 2 lie 0.5 apart, those below 4 lie 1 apart, and the others 2.
    codes, other = sizes.mul(2).round_(), sizes.round().add_(2)
    torch.minimum(codes, other, out=codes)
    torch.mul(sizes, 0.5, out=other).round_().add_(4)
    torch.minimum(codes, other, out=codes)
    codes.add_(torch.lt(values, 0, out=other), alpha=8)  # the sign
    pairs = codes.to(torch.int32).view(torch.int64)  # the first in the low half
    return (pairs | pairs >> 28).to(torch.uint8)
