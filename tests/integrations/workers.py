"""A worker of an engine as SGLang makes them: fused and sharded parameters with loaders."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

HIDDEN, HEAD, HEADS, KV_HEADS, INNER, VOCAB, PADDED = 16, 4, 4, 2, 12, 10, 12
STACKED = (
    ("qkv_proj", "q_proj", "q"),
    ("qkv_proj", "k_proj", "k"),
    ("qkv_proj", "v_proj", "v"),
    ("gate_up_proj", "gate_proj", 0),
    ("gate_up_proj", "up_proj", 1),
)
LAYERS = 2
OLD = 7.0


def shapes():
    found = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for n in range(LAYERS):
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found[f"model.layers.{n}.self_attn.{name}_proj.weight"] = (rows * HEAD, HIDDEN)
        found[f"model.layers.{n}.mlp.gate_proj.weight"] = (INNER, HIDDEN)
        found[f"model.layers.{n}.mlp.up_proj.weight"] = (INNER, HIDDEN)
        found[f"model.layers.{n}.mlp.down_proj.weight"] = (HIDDEN, INNER)
    return found


class UnquantizedLinearMethod:
    """By SGLang's name."""


class UnquantizedEmbeddingMethod:
    """By SGLang's name."""


class Worker(nn.Module):
    """One of `tp_size` workers: fused and sharded parameters, each with a `weight_loader`.

    Args:
        is_threaded: It loads tensors in host memory in threads, as SGLang's DeepSeek family does.
    """

    def __init__(self, tp_rank, tp_size, *, is_threaded=False):
        super().__init__()
        self.tp_rank, self.tp_size, self.is_threaded = tp_rank, tp_size, is_threaded
        self.took = []  # by the loader, since it was asked last
        own = {"model.embed_tokens.weight": (PADDED, HIDDEN), "model.norm.weight": (HIDDEN,)}
        for n in range(LAYERS):
            rows = (HEADS + 2 * KV_HEADS) * HEAD // tp_size
            own[f"model.layers.{n}.self_attn.qkv_proj.weight"] = (rows, HIDDEN)
            own[f"model.layers.{n}.mlp.gate_up_proj.weight"] = (2 * INNER // tp_size, HIDDEN)
            own[f"model.layers.{n}.mlp.down_proj.weight"] = (HIDDEN, INNER // tp_size)
        for name, shape in own.items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            parameter = nn.Parameter(torch.full(shape, OLD), requires_grad=False)
            setattr(module, last, parameter)
            if "norm" not in name:
                method = UnquantizedEmbeddingMethod if "embed" in name else UnquantizedLinearMethod
                module.quant_method = method()
            loaders = {"embed": self.load_padded, "qkv": self.load_qkv, "gate_up": self.load_merged}
            own_loader = (loader for part, loader in loaders.items() if part in name)
            parameter.weight_loader = next(own_loader, self.load_sharded)

    def load_padded(self, param, loaded):
        param.data[:VOCAB].copy_(loaded)
        param.data[VOCAB:].fill_(0)

    def load_qkv(self, param, loaded, shard_id):
        sizes = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
        size = sizes[shard_id] // self.tp_size
        begin = sum(sizes[name] // self.tp_size for name in "qkv"["qkv".index(shard_id) :: -1][1:])
        mine = loaded.narrow(0, self.tp_rank * size, size)
        param.data.narrow(0, begin, size).copy_(mine)

    def load_merged(self, param, loaded, shard_id):
        size = INNER // self.tp_size
        mine = loaded.narrow(0, self.tp_rank * size, size)
        param.data.narrow(0, shard_id * size, size).copy_(mine)

    def load_sharded(self, param, loaded):
        if param.shape != loaded.shape:
            loaded = loaded.narrow(1, self.tp_rank * param.shape[1], param.shape[1])
        param.data.copy_(loaded)

    def load_weights(self, weights):
        params, later = dict(self.named_parameters()), []
        for name, loaded in weights:
            self.took += [] if loaded.is_meta else [name]
            for param_name, weight_name, shard_id in STACKED:
                if weight_name in name:
                    param = params[name.replace(weight_name, param_name)]
                    later.append((param.weight_loader, (param, loaded, shard_id)))
                    break
            else:
                later.append((params[name].weight_loader, (params[name], loaded)))
            if not self.is_threaded or loaded.device.type != "cpu":
                loader, arguments = later.pop()
                loader(*arguments)
        with ThreadPoolExecutor(2) as pool:  # as those of the DeepSeek family, at the very end
            list(pool.map(lambda one: one[0](*one[1]), later))
