"""Megatron's fused parameters under the names of a checkpoint, as views:

    python examples/megatron_names.py

`linear_qkv` has each query group's queries, key and value side by side, `linear_fc1` has gate and
up. Tensor parallelism cuts both, and the vocabulary is padded.
"""

import torch

import torch_ros
from torch_ros import Chunked

Named = dict[str, Chunked]
Boxes = dict[tuple[int, ...], torch.Tensor]  # by their offsets


def attention(
    prefix: str,
    qkv: torch.Tensor,
    proj: torch.Tensor,
    *,
    heads: int,
    groups: int,
    tp_rank: int,
    tp_size: int,
) -> Named:
    """Names of a checkpoint for `linear_qkv.weight` and `linear_proj.weight` of one rank."""
    queries, mine, hidden = heads // groups, groups // tp_size, qkv.shape[1]
    split = qkv.view(mine, queries + 2, -1, hidden)  # of each group: queries, a key, a value
    size = split.shape[2]
    q: Boxes = {}
    k: Boxes = {}
    v: Boxes = {}
    for group, own in enumerate(split, start=tp_rank * mine):
        q[group * queries * size, 0] = own[:queries].flatten(0, 1)
        k[group * size, 0], v[group * size, 0] = own[queries], own[queries + 1]
    whole = {"q": (heads, q), "k": (groups, k), "v": (groups, v)}
    return {
        f"{prefix}.{name}_proj.weight": Chunked((count * size, hidden), qkv.dtype, boxes)
        for name, (count, boxes) in whole.items()
    } | {f"{prefix}.o_proj.weight": columns(proj, tp_rank, tp_size)}


def mlp(prefix: str, fc1: torch.Tensor, fc2: torch.Tensor, *, tp_rank: int, tp_size: int) -> Named:
    """The same for `linear_fc1.weight` and `linear_fc2.weight`; of an expert, with tp_size=1."""
    gate, up = (rows(half, tp_rank, tp_size) for half in fc1.chunk(2))
    down = columns(fc2, tp_rank, tp_size)
    named = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    return {f"{prefix}.{name}.weight": tensor for name, tensor in named.items()}


def vocabulary(weight: torch.Tensor, vocab: int, *, tp_rank: int) -> Chunked:
    """The same for `word_embeddings.weight` and `output_layer.weight`, without their padding."""
    first = tp_rank * len(weight)
    real = weight[: max(0, vocab - first)]
    boxes: Boxes = {(first, 0): real} if len(real) else {}
    return Chunked((vocab, weight.shape[1]), weight.dtype, boxes)


def rows(weight: torch.Tensor, tp_rank: int, tp_size: int) -> Chunked:
    count, width = weight.shape
    return Chunked((count * tp_size, width), weight.dtype, {(tp_rank * count, 0): weight})


def columns(weight: torch.Tensor, tp_rank: int, tp_size: int) -> Chunked:
    height, count = weight.shape
    return Chunked((height, count * tp_size), weight.dtype, {(0, tp_rank * count): weight})


def main() -> None:
    qkv = torch.randn(2 * (2 + 2) * 8, 16)  # two groups of two queries, a key, a value, each 8 x 16
    proj = torch.randn(16, 4 * 8)
    prefix = "model.layers.0.self_attn"
    names = attention(prefix, qkv, proj, heads=4, groups=2, tp_rank=0, tp_size=1)
    endpoint = "memory://megatron"
    with (
        torch_ros.open("m", endpoint=endpoint) as trainer,
        torch_ros.open("m", endpoint=endpoint) as reader,
    ):
        trainer.register(names)  # each rank of the job: what it has
        trainer.publish(1)
        keys = torch.zeros(2 * 8, 16)
        reader.read(1, {f"{prefix}.k_proj.weight": keys}, partial=True)
        assert torch.equal(keys, qkv.view(2, 4, 8, 16)[:, 2].flatten(0, 1))
    print("the keys were read out of linear_qkv's memory")


if __name__ == "__main__":
    main()
