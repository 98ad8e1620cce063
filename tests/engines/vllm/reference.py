"""What compressed-tensors makes of matrices: the bits, and the values that an engine gets."""

import torch
from compressed_tensors.compressors.mxfp8 import MXFP8QuantizationCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor, unpack_fp4_from_uint8
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

COMPRESSORS = {"MXFP8": MXFP8QuantizationCompressor, "NVFP4A16": NVFP4PackedCompressor}


def global_scale(*matrices):
    """One for all of these."""
    least = torch.stack([matrix.detach().float().amin() for matrix in matrices]).amin()
    most = torch.stack([matrix.detach().float().amax() for matrix in matrices]).amax()
    return generate_gparam(least, most)


def compressed(kind, matrix, scale=None):
    """The tensors of a layer with this weight, by their names; computed in float32.

    `scale`: NVFP4's for the whole of it; None: its own.
    """
    scheme = preset_name_to_scheme(kind, ["Linear"])
    weight, size = matrix.detach().float(), scheme.weights.group_size
    blocks = weight.unflatten(-1, (weight.shape[-1] // size, size))
    state = {"weight": weight}
    if kind == "NVFP4A16":
        scale = global_scale(matrix) if scale is None else scale
        state["weight_global_scale"] = scale
    state["weight_scale"], _ = calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), scheme.weights, scale
    )
    with torch.compiler.set_stance("force_eager"):  # it would compile for each shape
        return COMPRESSORS[kind].compress(state, scheme)


def values(kind, matrix, scale=None):
    """Those in the float32 of an engine; compressed-tensors' own are rounded to bfloat16."""
    made = compressed(kind, matrix, scale)
    if kind == "MXFP8":
        numbers, scales = made["weight"], torch.exp2(made["weight_scale"].float() - 127)
    else:
        numbers = unpack_fp4_from_uint8(made["weight_packed"], *matrix.shape, torch.float32)
        scales = made["weight_scale"].float() / made["weight_global_scale"]
    size = matrix.shape[-1] // scales.shape[-1]
    return numbers.float() * scales.repeat_interleave(size, -1)
