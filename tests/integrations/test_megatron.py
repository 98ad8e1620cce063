"""Megatron's parameters under the names of a checkpoint, by the functions of the example."""

import runpy
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import torch_ros

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_names.py"
TP, PP, EXPERTS = 2, 2, 4
HEADS, GROUPS, SIZE, HIDDEN, INNER = 8, 4, 4, 12, 10
VOCAB, PADDED = 11, 16  # on the second rank, three of eight rows are real
LAYERS = 2  # one for each stage


@pytest.fixture(scope="module")
def shown():
    """The example's functions."""
    return runpy.run_path(str(EXAMPLE))


def checkpoint():
    """A whole model, as Hugging Face would save it."""
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{prefix}.self_attn.q_proj.weight"] = (HEADS * SIZE, HIDDEN)
        shapes[f"{prefix}.self_attn.k_proj.weight"] = (GROUPS * SIZE, HIDDEN)
        shapes[f"{prefix}.self_attn.v_proj.weight"] = (GROUPS * SIZE, HIDDEN)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * SIZE)
        for mlp in ("mlp", *(f"mlp.experts.{e}" for e in range(EXPERTS))):
            shapes[f"{prefix}.{mlp}.gate_proj.weight"] = (INNER, HIDDEN)
            shapes[f"{prefix}.{mlp}.up_proj.weight"] = (INNER, HIDDEN)
            shapes[f"{prefix}.{mlp}.down_proj.weight"] = (HIDDEN, INNER)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def part(tensor, dim, rank, count):
    return tensor.chunk(count, dim)[rank]


def megatron(weights, tp, pp):
    """Megatron's part of it on one rank: fused, cut, padded, in memory of its own."""
    found = {}
    for layer in range(LAYERS):
        if layer % PP != pp:
            continue
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        q = weights[f"{attention}.q_proj.weight"].view(GROUPS, HEADS // GROUPS, SIZE, HIDDEN)
        k = weights[f"{attention}.k_proj.weight"].view(GROUPS, 1, SIZE, HIDDEN)
        v = weights[f"{attention}.v_proj.weight"].view(GROUPS, 1, SIZE, HIDDEN)
        fused = part(torch.cat([q, k, v], dim=1), 0, tp, TP)
        found[f"{layer}.linear_qkv"] = fused.reshape(-1, HIDDEN).clone()
        found[f"{layer}.linear_proj"] = part(
            weights[f"{attention}.o_proj.weight"], 1, tp, TP
        ).clone()
        found[f"{layer}.norm"] = weights[f"{prefix}.input_layernorm.weight"].clone()
        experts = range(tp * EXPERTS // TP, (tp + 1) * EXPERTS // TP)  # expert parallel
        for mlp, cut in (("mlp", TP), *((f"mlp.experts.{e}", 1) for e in experts)):
            gate, up, down = (
                weights[f"{prefix}.{mlp}.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            rank = tp if cut == TP else 0
            halves = [part(gate, 0, rank, cut), part(up, 0, rank, cut)]
            found[f"{layer}.{mlp}.linear_fc1"] = torch.cat(halves)
            found[f"{layer}.{mlp}.linear_fc2"] = part(down, 1, rank, cut).clone()
    end = {0: "model.embed_tokens.weight", PP - 1: "lm_head.weight"}[pp]
    padded = torch.cat([weights[end], torch.full((PADDED - VOCAB, HIDDEN), torch.nan)])
    found[end] = part(padded, 0, tp, TP).clone()
    return found


def named(own, shown, tp):
    """The same memory under the names of the checkpoint."""
    cut = {"tp_rank": tp, "tp_size": TP}
    found = {}
    for name, tensor in own.items():
        layer, _, rest = name.partition(".")
        prefix = f"model.layers.{layer}"
        if rest == "linear_qkv":
            proj = own[f"{layer}.linear_proj"]
            found |= shown["attention"](
                f"{prefix}.self_attn", tensor, proj, heads=HEADS, groups=GROUPS, **cut
            )
        elif rest == "norm":
            found[f"{prefix}.input_layernorm.weight"] = tensor
        elif rest.endswith(".linear_fc1"):
            mlp = rest.removesuffix(".linear_fc1")
            alone = {"tp_rank": 0, "tp_size": 1}
            fc2 = own[f"{layer}.{mlp}.linear_fc2"]
            found |= shown["mlp"](
                f"{prefix}.{mlp}", tensor, fc2, **(cut if mlp == "mlp" else alone)
            )
        elif name.endswith(".weight"):
            found[name] = shown["vocabulary"](tensor, VOCAB, tp_rank=tp)
    return found


@pytest.fixture
def job():
    """The handles of the ranks, opened at once, and a rollout's."""
    endpoint = f"memory://{uuid.uuid4().hex}"
    with ThreadPoolExecutor(TP * PP) as pool:

        def each(call):
            return list(pool.map(call, range(TP * PP)))

        def open_(rank):
            return torch_ros.open(
                "m", endpoint=endpoint, replica="t", rank=rank, world_size=TP * PP, timeout_s=20
            )

        ranks = each(open_)
        with torch_ros.open("m", endpoint=endpoint, timeout_s=20) as rollout:
            yield ranks, rollout, each
        each(lambda rank: ranks[rank].close())


def test_a_rollout_reads_a_checkpoint_out_of_megatrons_memory(job, shown):
    ranks, rollout, each = job
    weights, memories = checkpoint(), {}

    def publish(rank):
        memories[rank] = megatron(weights, rank % TP, rank // TP)
        ranks[rank].register(named(memories[rank], shown, rank % TP))
        ranks[rank].publish(1)

    def step(rank):
        ranks[rank].unpublish()
        for name, tensor in megatron(later, rank % TP, rank // TP).items():
            memories[rank][name].copy_(tensor)
        ranks[rank].publish(2)

    each(publish)
    target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    rollout.register(target)
    rollout.replicate(1)
    assert all(torch.equal(target[name], weights[name]) for name in weights)
    later = checkpoint()
    each(step)
    assert rollout.update() is True
    assert all(torch.equal(target[name], later[name]) for name in later)


def test_nothing_is_copied(shown):
    weights = checkpoint()
    own = megatron(weights, 1, 0)
    memory = {tensor.untyped_storage().data_ptr() for tensor in own.values()}
    for name, tensor in named(own, shown, 1).items():
        boxes = tensor.chunks.values() if isinstance(tensor, torch_ros.Chunked) else [tensor]
        assert {box.untyped_storage().data_ptr() for box in boxes} <= memory, name


def test_the_example_reads_keys_out_of_fused_memory(capsys, shown):
    shown["main"]()
    assert "the keys were read" in capsys.readouterr().out
