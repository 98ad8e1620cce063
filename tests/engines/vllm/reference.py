"""What compressed-tensors makes of matrices: the bits, and the values that an engine gets."""

import torch
from compressed_tensors.compressors.mxfp8 import MXFP8QuantizationCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams


def compressed(kind, matrix):
    """Its tensors of a layer with this weight, by their names; computed in float32."""
    scheme = preset_name_to_scheme(kind, ["Linear"])
    weight, size = matrix.detach().float(), scheme.weights.group_size
    blocks = weight.unflatten(-1, (weight.shape[-1] // size, size))
    scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
    return MXFP8QuantizationCompressor.compress({"weight": weight, "weight_scale": scales}, scheme)


def values(kind, matrix):
    made = compressed(kind, matrix)
    scales = torch.exp2(made["weight_scale"].float() - 127)
    return made["weight"].float() * scales.repeat_interleave(32, -1)
