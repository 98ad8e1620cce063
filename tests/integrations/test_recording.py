"""Where loaders put things, compared element by element with what they do."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import OLD, Toy, contents_of, proven, weights_of

from torch_ros.errors import UsageError
from torch_ros.integrations.recorder import Recorder
from torch_ros.integrations.recording import PASSES_MAX, record


def reasons(recording):
    return " ".join(recording.staged.values())


# -- what lands


def test_fused_qkv_lands_by_its_shards():
    begins = {"q": 0, "k": 4, "v": 6}

    def load(toy, fqn, weight):
        toy.qkv.data.narrow(0, begins[fqn], weight.shape[0]).copy_(weight)

    recording = proven(Toy(load, {"qkv": (8, 3)}), weights_of(q=(4, 3), k=(2, 3), v=(2, 3)))
    assert not recording.unwritten
    assert not recording.staged
    assert recording.landings["v"].boxes[0].at == (6, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_of_tensor_parallelism_lands_its_part(rank):
    """Loaders on the parameters, as vLLM has them: rows of gate and up, columns of down."""

    def rows(param, weight, shard):
        begin = {"gate": 0, "up": 4}[shard]
        param.data.narrow(0, begin, 4).copy_(weight.narrow(0, 4 * rank, 4))

    def columns(param, weight, shard):
        param.data.copy_(weight.narrow(dim=1, start=4 * rank, length=4))

    def load(toy, fqn, weight):
        param = toy.down if fqn == "down" else toy.gate_up
        param.weight_loader(param, weight, fqn)

    toy = Toy(load, {"gate_up": (8, 5), "down": (5, 4)})
    toy.gate_up.weight_loader, toy.down.weight_loader = rows, columns
    recording = proven(toy, weights_of(gate=(8, 5), up=(8, 5), down=(5, 8)))
    assert not recording.unwritten
    assert [box.offsets for box in recording.landings["down"].boxes] == [(0, 4 * rank)]
    assert sum(each.size_bytes for each in recording.landings.values()) == 4 * 60


def test_experts_land_in_their_stacks_and_those_of_other_ranks_are_unused():
    local = {2: 0, 3: 1}

    def load(toy, fqn, weight):
        expert, kind = int(fqn[-1]), fqn[:2]
        if expert not in local:
            return
        if kind == "w2":
            toy.w2.data[local[expert]].copy_(weight)
        else:
            half = toy.w13.data[local[expert]].narrow(0, 0 if kind == "w1" else 4, 4)
            half.copy_(weight)

    shapes = {f"w1_{e}": (4, 3) for e in range(4)} | {f"w3_{e}": (4, 3) for e in range(4)}
    shapes |= {f"w2_{e}": (3, 4) for e in range(4)}
    recording = proven(Toy(load, {"w13": (2, 8, 3), "w2": (2, 3, 4)}), weights_of(**shapes))
    assert not recording.unwritten
    assert len(recording.landings) == len(recording.unused) == 6


def test_a_stack_of_experts_is_taken_apart():
    def load(toy, fqn, weight):
        for expert, part in enumerate(weight.unbind(0)):
            gate, up = part.t().chunk(2, 0)
            toy.w13.data[expert][:2].copy_(gate)
            toy.w13.data[expert][2:].copy_(up)

    recording = proven(Toy(load, {"w13": (3, 4, 5)}), weights_of(w=(3, 5, 4)))
    assert not recording.unwritten


def test_the_views_and_copies_of_experts_are_not_dispatched(monkeypatch):
    """As vLLM 0.32 loads them: each expert is made a stack of one, and taken out of it."""

    def load(toy, fqn, weight):
        for part in weight.unsqueeze(0).unbind():
            toy.w.data[int(fqn)].narrow(0, 0, 4).copy_(part.narrow(0, 0, 4))

    def refuse(*args):
        raise AssertionError(f"dispatched: {args[1]}")

    monkeypatch.setattr(Recorder, "__torch_dispatch__", refuse)
    toy = Toy(load, {"w": (2, 4, 5)}, device="meta")
    assert not record(toy, contents_of(weights_of(**{"0": (4, 5), "1": (4, 5)}))).unwritten


def test_a_padded_vocabulary_lands_and_its_padding_is_told():
    def load(toy, fqn, weight):
        toy.embed[:5].data.copy_(weight)
        toy.embed[5:].data.fill_(0)

    recording = proven(Toy(load, {"embed": (8, 2)}), weights_of(embed=(5, 2)))
    assert not recording.unwritten
    assert recording.filled == {"embed": 6}


def test_padding_below_what_lands_is_what_is_left_of_it():
    def load(toy, fqn, weight):
        toy.embed.data.zero_()
        toy.embed.data[:5].copy_(weight)

    assert proven(Toy(load, {"embed": (8, 2)}), weights_of(embed=(5, 2))).filled == {"embed": 6}


@pytest.mark.parametrize(
    "turned",
    [
        lambda w: w.t(),
        lambda w: w.t().contiguous(),
        lambda w: w.t().contiguous().to("cpu", torch.float32).clone(),
        lambda w: torch.stack([w[:, i] for i in range(w.shape[1])]),
        lambda w: torch.cat(w.t().split([1, 3, 2])),
        lambda w: w.permute(1, 0).reshape(-1).view(6, 4),
    ],
)
def test_a_transposed_tensor_lands_as_views(turned):
    def load(toy, fqn, weight):
        toy.c.data.copy_(turned(weight))

    recording = proven(Toy(load, {"c": (6, 4)}), weights_of(c=(4, 6)))
    assert not recording.unwritten


def test_transposed_storage_is_written_where_it_lies():
    toy = Toy(lambda toy, fqn, weight: toy.c.data.copy_(weight), {})
    toy.c = nn.Parameter(torch.full((6, 4), OLD).t())
    assert not proven(toy, weights_of(c=(4, 6))).unwritten


def test_interleaved_heads_land_in_several_boxes():
    """As in Falcon and Phi: heads of q and of kv in turn, put apart by a reshape that copies."""

    def load(toy, fqn, weight):
        q, kv = weight.view(2, 3, 2, 5).split([2, 1], dim=1)
        toy.q.copy_(q.permute(1, 0, 2, 3).reshape(8, 5))
        toy.kv.view(2, 1, 2, 5).copy_(kv)

    recording = proven(Toy(load, {"q": (8, 5), "kv": (4, 5)}), weights_of(w=(12, 5)))
    assert not recording.unwritten
    assert len(recording.landings["w"].boxes) == 6


def test_two_tensors_that_are_joined_first_land_apart():
    """As SGLang joins q_a_proj and kv_a_proj of DeepSeek."""

    def load_weights(weights):
        held = dict(weights)
        toy.a.data.copy_(torch.cat([held["q_a"], held["kv_a"]], dim=0))

    toy = Toy(None, {"a": (5, 3)})
    recording = proven(toy, weights_of(q_a=(3, 3), kv_a=(2, 3)), load_weights)
    assert not recording.unwritten
    assert recording.landings["kv_a"].boxes[0].at == (3, 0)


def test_what_goes_through_memory_of_the_loader_lands():
    def load(toy, fqn, weight):
        padded = torch.zeros(6, 3)
        padded[: weight.shape[0]] = weight
        toy.x.data.copy_(padded)

    recording = proven(Toy(load, {"x": (6, 3)}), weights_of(x=(4, 3)))
    assert recording.filled == {"x": 6}
    assert recording.landings


def test_tied_embeddings_are_one_memory():
    toy = Toy(lambda toy, fqn, weight: getattr(toy, fqn).data.copy_(weight), {"embed": (4, 2)})
    toy.lm_head = toy.embed
    assert not proven(toy, weights_of(embed=(4, 2))).unwritten
    recording = proven(toy, dict(weights_of(embed=(4, 2)), lm_head=torch.ones(4, 2)))
    assert recording.unused == ("embed",)  # the one that is loaded last counts
    assert list(recording.landings) == ["lm_head"]


def test_parameters_that_are_views_of_one_flat_buffer_are_part_of_it():
    toy = Toy(lambda toy, fqn, weight: getattr(toy, fqn).data.copy_(weight), {})
    flat = torch.full((10,), OLD)
    toy.a, toy.b = nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[6:])
    toy.register_buffer("flat", flat)
    recording = record(toy, contents_of(weights_of(a=(2, 3), b=(4,))))
    assert not recording.unwritten
    assert recording.landings["b"].boxes[0].parameter == "flat"
    assert recording.landings["b"].boxes[0].at == (6,)
    assert record(toy, contents_of(weights_of(a=(2, 3)))).unwritten == {"flat": 4}


def test_parameters_that_are_columns_of_one_memory_land_apart():
    toy = Toy(lambda toy, fqn, weight: getattr(toy, fqn).data.copy_(weight), {})
    both = torch.full((4, 4), OLD)
    toy.a, toy.b = nn.Parameter(both[:, ::2]), nn.Parameter(both[:, 1::2])
    assert not proven(toy, weights_of(a=(4, 2), b=(4, 2))).unwritten
    assert record(toy, contents_of(weights_of(a=(4, 2)))).unwritten == {"b": 8}


def test_many_copies_at_once_land():
    def load_weights(weights):
        held = dict(weights)
        torch._foreach_copy_([toy.a.data, toy.b.data], [held["a"], held["b"]])

    toy = Toy(None, {"a": (5, 3), "b": (2,)})
    assert not proven(toy, weights_of(a=(5, 3), b=(2,)), load_weights).unwritten


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_loader_in_inference_mode_is_seen(mode):
    def load(toy, fqn, weight):
        with mode():
            toy.c.data.copy_(weight.t().reshape(-1).to(torch.float32).chunk(2)[0].flatten())

    assert not proven(Toy(load, {"c": (12,)}), weights_of(c=(4, 6))).staged


def test_a_copy_of_each_row_at_once_lands():
    def load(toy, fqn, weight):
        torch.vmap(lambda row, part: row.copy_(part))(toy.c.data, weight)

    assert not proven(Toy(load, {"c": (6, 4)}), weights_of(c=(6, 4))).unwritten


def test_parameters_on_meta_are_recorded_like_others():
    toy = Toy(lambda toy, fqn, w: toy.c.data.copy_(w.t()), {"c": (6, 4)}, device="meta")
    recording = record(toy, {"c": (torch.float32, (4, 6))})
    live = {"c": torch.zeros(6, 4)}
    weight = torch.randn(4, 6)
    [(offsets, view)] = recording.landings["c"].chunks(live)
    assert offsets == (0, 0)
    view.copy_(weight)
    assert torch.equal(live["c"], weight.t())


def test_a_parameter_that_is_another_one_now_is_not_landed_in():
    """As engines that pack their weights after loading have."""
    toy = Toy(lambda toy, fqn, w: toy.c.data.copy_(w.t()), {"c": (6, 4)}, device="meta")
    landing = record(toy, {"c": (torch.float32, (4, 6))}).landings["c"]
    for packed in (torch.zeros(0), torch.zeros(4, 6), torch.zeros(6, 4, dtype=torch.bfloat16)):
        with pytest.raises(UsageError, match=r"expected torch.float32 of shape \[6, 4\]"):
            landing.chunks({"c": packed})


def test_a_scalar_and_an_empty_tensor_land():
    def load(toy, fqn, weight):
        getattr(toy, fqn).data.copy_(weight)

    recording = proven(Toy(load, {"s": (), "e": (0, 3)}), weights_of(s=(), e=(0, 3)))
    assert list(recording.landings) == ["s"]
    assert recording.unused == ("e",)  # there is nothing of it


def test_a_map_of_the_engine_may_be_read():
    """vLLM looks up in a buffer which of its experts is which."""

    def load(toy, fqn, weight):
        toy.w.data[toy.expert_map[int(fqn)].item()].copy_(weight)

    toy = Toy(load, {"w": (2, 3)})
    toy.register_buffer("expert_map", torch.tensor([1, 0]))
    recording = proven(toy, {"0": torch.randn(3), "1": torch.randn(3)})
    assert not recording.unwritten
    assert recording.buffers == ("expert_map",)


# -- what is staged


def computed(toy, fqn, weight):
    toy.x.data.copy_(weight + 1)


def cast(toy, fqn, weight):
    toy.x.data.copy_(weight.to(torch.bfloat16).to(torch.float32))


def shuffled(toy, fqn, weight):
    toy.x.data.copy_(weight[torch.tensor([2, 0, 1])])


def in_place(toy, fqn, weight):
    weight.mul_(2)
    toy.x.data.copy_(weight)


def afterwards(toy, fqn, weight):
    """As composed_weight_loader of vLLM does for Mamba."""
    toy.x.data.copy_(weight)
    toy.x.data.copy_(-torch.exp(toy.x.data.float()))


def afterwards_in_place(toy, fqn, weight):
    toy.x.data.copy_(weight)
    toy.x.data.neg_()


def accumulated(toy, fqn, weight):
    torch._foreach_add_([toy.x.data], [weight])


def out(toy, fqn, weight):
    torch.mul(weight, 3, out=toy.x.data)


def reinterpreted(toy, fqn, weight):
    toy.x.data.view(torch.int32).copy_(weight.view(torch.int32))


def broadcast(toy, fqn, weight):
    toy.x.data.copy_(weight[:1])


def twice(toy, fqn, weight):
    toy.x.data.copy_(weight)
    toy.y.data.copy_(weight)


def by_index(toy, fqn, weight):
    toy.x.data[torch.tensor([2, 0, 1])] = weight


def by_value(toy, fqn, weight):
    toy.x.data.fill_(weight[0].item())


def by_padding(toy, fqn, weight):
    toy.y.data.fill_(1)
    try:
        is_padded = toy.y.data.sum().item() == 3
    except Exception:
        is_padded = False
    toy.x.data.copy_(weight if is_padded else weight[:1])


def by_condition(toy, fqn, weight):
    if torch.equal(weight, weight):
        toy.x.data.copy_(weight)


def by_selection(toy, fqn, weight):
    toy.x.data.copy_(weight[weight.isfinite()])


def swallowed(toy, fqn, weight):
    try:
        factor = weight[0].item()
    except Exception:
        factor = 1
    toy.x.data.copy_(weight) if factor == 1 else toy.x.data.fill_(factor)


def replaced(toy, fqn, weight):
    toy.x = nn.Parameter(weight.clone())


def left_behind(toy, fqn, weight):
    toy.x.data.copy_(weight)
    toy.x = nn.Parameter(torch.zeros(3))


def exchanged(toy, fqn, weight):
    toy.x.data.copy_(weight)
    toy.x.data, toy.y.data = toy.y.data, toy.x.data


def kept(toy, fqn, weight):
    toy.x.data.copy_(weight)
    toy.derived = weight.abs()


def elsewhere(toy, fqn, weight):
    toy.x.data.copy_(weight)
    toy.plain["x"].copy_(weight)


def as_numpy(toy, fqn, weight):
    toy.x.data.copy_(torch.from_numpy(weight.numpy()))


def as_list(toy, fqn, weight):
    try:
        factor = weight.tolist()[0]
    except Exception:
        factor = 1
    toy.x.data.copy_(weight if factor == 1 else weight * factor)


def through_numpy(toy, fqn, weight):
    toy.x.data.numpy().fill(0)  # memory of the engine, which no recorder would keep from it
    toy.x.data.copy_(weight)


def by_place(toy, fqn, weight):
    try:
        toy.x.data.narrow(0, weight.long()[0], 1).fill_(1)
    except Exception:
        toy.x.data.copy_(weight)


class Doubled(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_copy = func is torch.ops.aten.copy_.default
        return func(args[0], args[1] * 2) if is_copy else func(*args, **kwargs or {})


def in_a_mode(toy, fqn, weight):
    with Doubled():
        toy.x.data.copy_(weight)


class Halved(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        is_copy = func is torch.Tensor.copy_
        args = (args[0], args[1] / 2) if is_copy else args
        return super().__torch_function__(func, types, args, kwargs)


def of_a_subclass(toy, fqn, weight):
    toy.x.data.copy_(weight.as_subclass(Halved))


def to_a_subclass(toy, fqn, weight):
    toy.x.data.as_subclass(Halved).copy_(weight)


STAGED = {
    computed: "computed by aten.add.Tensor",
    cast: "cast from torch.float32 to torch.bfloat16",
    shuffled: "computed by aten.index.Tensor",
    in_place: "written by aten.mul_.Tensor",
    afterwards: "computed by aten.exp.default",
    afterwards_in_place: "written by aten.neg_.default",
    accumulated: "written by aten._foreach_add_.List",
    out: "written by aten.mul.out",
    reinterpreted: "its bytes are taken for another dtype",
    broadcast: "one element goes to several places",
    twice: "an element lands in several places",
    by_index: "written by aten.index_put_",
    by_value: "the loader looks at its values",
    by_padding: "the loader looks at its values",
    by_condition: "the loader looks at its values",
    by_selection: "the loader looks at its values",
    swallowed: "the loader looks at its values",
    replaced: "the engine keeps other memory",
    left_behind: "the loader gives x other memory",
    exchanged: "the loader gives x other memory",
    kept: "the engine keeps other memory",
    elsewhere: "neither a parameter nor a buffer",
    by_place: "the loader looks at its values",
    in_a_mode: "computed by aten.mul.Tensor",
    of_a_subclass: "computed by aten.div.Tensor",
    to_a_subclass: "computed by aten.div.Tensor",
    as_numpy: "the loader looks at its values (numpy)",
    as_list: "the loader looks at its values (tolist)",
    through_numpy: "the loader looks at its values (numpy)",
}


@pytest.mark.parametrize("load", STAGED, ids=lambda load: load.__name__)
def test_anything_but_a_copy_is_staged_and_says_why(load):
    toy = Toy(load, {"x": (3,), "y": (3,)})
    toy.plain = {"x": torch.zeros(3)}
    recording = proven(toy, weights_of(x=(3,)))
    assert recording.staged.keys() == {"x"}
    assert STAGED[load] in recording.staged["x"], recording.staged["x"]
    assert torch.equal(toy.plain["x"], torch.zeros(3)) or load is elsewhere


@pytest.mark.parametrize("word", [torch.int32, torch.int8])
def test_parts_that_are_taken_for_other_words_do_not_hide_each_other(word):
    """As loaders of packed and of 8-bit weights put their shards into fused parameters."""
    begins = {"a": 0, "b": 3}

    def load(toy, fqn, weight):
        part = toy.x.data.narrow(0, begins[fqn], 3)
        part.view(word).copy_(weight.view(word))

    recording = proven(Toy(load, {"x": (6,)}), weights_of(a=(3,), b=(3,)))
    assert recording.staged.keys() == {"a", "b"}
    assert not recording.unused


def test_bytes_of_a_parameter_beside_another_one_are_its_own():
    def load(toy, fqn, weight):
        getattr(toy, fqn).data.copy_(weight)
        toy.b.data.view(torch.int8)[:4] = 0

    toy, flat = Toy(load, {}), torch.full((10,), OLD)
    toy.a, toy.b = nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[6:])
    assert "b" in proven(toy, weights_of(a=(2, 3), b=(4,))).staged


def test_a_view_across_parameters_is_a_view_of_all_of_them():
    def load(toy, fqn, weight):
        getattr(toy, fqn).data.copy_(weight)
        toy.a.data.as_strided((10,), (1,), 0).mul_(2)

    toy, flat = Toy(load, {}), torch.full((10,), OLD)
    toy.a, toy.b = nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[6:])
    assert proven(toy, weights_of(a=(2, 3), b=(4,))).staged.keys() == {"a", "b"}


def test_a_cast_into_the_parameter_is_staged():
    toy = Toy(lambda toy, fqn, w: toy.x.data.copy_(w), {"x": (3,)}, dtype=torch.bfloat16)
    assert "cast from torch.float32 to torch.bfloat16" in reasons(proven(toy, weights_of(x=(3,))))


def test_a_conjugate_is_staged():
    toy = Toy(lambda toy, fqn, w: toy.x.data.copy_(w.conj()), {"x": (3,)}, dtype=torch.complex64)
    weights = {"x": torch.randn(3, dtype=torch.complex64)}
    assert "conjugated" in reasons(proven(toy, weights))


def test_a_parameter_whose_elements_share_memory_is_staged():
    toy = Toy(lambda toy, fqn, weight: toy.x.data[0].copy_(weight), {})
    toy.x = nn.Parameter(torch.full((4,), OLD).unfold(0, 3, 1))
    assert "share memory" in reasons(proven(toy, weights_of(x=(3,))))


def test_a_value_may_decide_over_every_tensor():
    """Landed, the weight would never be multiplied."""

    def load_weights(weights):
        factor = 1.0
        for fqn, weight in weights:
            if fqn == "factor":
                factor = weight.item()
            else:
                toy.x.data.copy_(weight if factor == 1 else weight * factor)

    toy = Toy(None, {"x": (3,)})
    recording = proven(toy, weights_of(factor=(), w=(3,)), load_weights)
    assert not recording.landings
    assert "values of 'factor', which may decide" in recording.staged["w"]


def test_a_look_past_torch_when_all_is_loaded_stages_every_tensor():
    def load_weights(weights):
        for _, weight in weights:
            toy.x.data.copy_(weight)
        toy.first = float(toy.x.detach().numpy()[0])

    toy = Toy(None, {"x": (3,)})
    recording = proven(toy, weights_of(w=(3,)), load_weights)
    assert "looks at its values (numpy)" in recording.staged["w"]


def test_a_scale_that_is_made_of_two_weights_stages_both():
    """As fp8 loaders take the larger of two scales; the weights beside them land."""

    def load_weights(weights):
        held = dict(weights)
        toy.scale.data.copy_(torch.maximum(held["a_scale"], held["b_scale"]))
        toy.w.data[:2].copy_(held["a"])
        toy.w.data[2:].copy_(held["b"])

    toy = Toy(None, {"w": (4, 3), "scale": (2,)})
    shapes = {"a": (2, 3), "b": (2, 3), "a_scale": (2,), "b_scale": (2,)}
    recording = proven(toy, weights_of(**shapes), load_weights)
    assert recording.staged.keys() == {"a_scale", "b_scale"}
    assert recording.landings.keys() == {"a", "b"}


def test_a_tensor_that_lies_over_a_staged_one_is_staged_after_it():
    """Landings are written first: the staged one would be loaded over it."""

    def load(toy, fqn, weight):
        if fqn == "below":
            toy.x.data.copy_(weight + 1)
        else:
            toy.x.data[:2].copy_(weight)

    recording = proven(Toy(load, {"x": (3,)}), weights_of(below=(3,), above=(2,)))
    assert recording.staged.keys() == {"below", "above"}
    assert "lies over" in recording.staged["above"]


def test_what_a_staged_loader_fills_on_its_way_counts_as_below():
    def load(toy, fqn, weight):
        if fqn == "first":
            toy.x.data.zero_()
            toy.y.data.copy_(weight * 2)
        else:
            toy.x.data.copy_(weight)

    recording = proven(Toy(load, {"x": (3,), "y": (3,)}), weights_of(first=(3,), second=(3,)))
    assert recording.staged.keys() == {"first", "second"}


def test_what_a_loader_derives_is_put_back_and_what_it_is_derived_from_is_staged():
    """As the halves of `kv_b_proj` that DeepSeek's attention multiplies by."""

    def load_weights(weights):
        toy.load_weights(weights)
        toy.half = toy.a.data[:1].clone()
        toy.again.copy_(toy.b.data)
        toy.scale = toy.c.data * 2

    toy = Toy(lambda toy, fqn, w: getattr(toy, fqn).data.copy_(w), dict.fromkeys("abcd", (2,)))
    toy.half, toy.again = None, (again := torch.ones(2))
    weights = weights_of(**dict.fromkeys("abcd", (2,)))
    recording = record(toy, contents_of(weights), load_weights)
    assert recording.staged.keys() == {"a", "b", "c"}
    assert recording.landings.keys() == {"d"}
    assert toy.half is None
    assert toy.again is again
    assert torch.equal(again, torch.ones(2))
    assert not hasattr(toy, "scale")


# -- what fails, and what is missing


def test_a_name_that_the_loader_does_not_know_fails_alone():
    def load(toy, fqn, weight):
        getattr(toy, fqn).data.copy_(weight)

    toy = Toy(load, {"a": (2,), "b": (3,)})
    shapes = {"a": (2,), "no": (2,), "b": (3,), "nor": (1,)}
    recording = proven(toy, weights_of(**shapes))
    assert recording.landings.keys() == {"a", "b"}
    assert recording.failed == recording.staged.keys() == {"no", "nor"}
    assert "AttributeError: 'Toy' object has no attribute 'no'" in recording.staged["no"]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_copy_that_torch_refuses_fails(mode):
    """To a parameter with a gradient, and to memory of inference mode outside of it."""

    def load(toy, fqn, weight):
        with torch.set_grad_enabled(mode is torch.enable_grad):
            toy.x.copy_(weight)

    toy = Toy(load, {})
    with mode():
        toy.x = nn.Parameter(torch.full((3,), OLD), requires_grad=mode is torch.enable_grad)
    assert record(toy, contents_of(weights_of(x=(3,)))).failed == {"x"}


def test_a_loader_that_collects_first_loses_the_tensor_that_it_works_on():
    def load_weights(weights):
        for fqn, weight in dict(weights).items():
            getattr(toy, fqn).data.copy_(weight)

    toy = Toy(None, {"a": (2,), "b": (3,), "c": (1,)})
    recording = record(toy, contents_of(weights_of(a=(2,), b=(4,), c=(1,))), load_weights)
    assert recording.failed == {"b"}
    assert recording.landings.keys() == {"a", "c"}
    assert recording.unwritten == {"b": 3}


def test_memory_that_a_loader_keeps_from_an_earlier_pass_is_not_taken_for_the_engines():
    kept = {}

    def load(toy, fqn, weight):
        target = getattr(toy, fqn)
        target.data.copy_(kept.setdefault(fqn, weight) if weight.is_meta else weight)

    recording = proven(Toy(load, {"a": (2,), "b": (3,)}), weights_of(a=(2,), no=(1,), b=(3,)))
    assert recording.failed == {"no"}
    assert not recording.unused
    assert "that it kept from another call" in recording.staged["a"]


@pytest.mark.parametrize("is_value", [True, False])
def test_a_loader_that_fails_again_and_again_stages_everything(is_value):
    fqns = [str(number) for number in range(PASSES_MAX + 1)]

    def load_weights(weights):
        weight = list(weights)[-1][1]
        weight.item() if is_value else weight.no_such_method()

    recording = record(
        Toy(None, {"x": (1,)}), dict.fromkeys(fqns, (torch.float32, ())), load_weights
    )
    assert recording.staged.keys() == set(fqns)
    assert not recording.failed  # it gets all of them
    assert recording.unwritten == {"x": 1}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_loader_with_threads_loses_its_tensors_but_says_so(device):
    def load_weights(weights):
        with ThreadPoolExecutor() as pool:
            for fqn, weight in weights:
                pool.submit(getattr(toy, fqn).data.copy_, weight).result()

    toy = Toy(None, {"a": (2,), "b": (3,)}, device=device)
    recording = record(toy, contents_of(weights_of(a=(2,), b=(3,))), load_weights)
    assert not recording.landings
    assert recording.unwritten == {"a": 2, "b": 3}
    assert recording.failed == ({"a", "b"} if device == "cpu" else set())


def test_a_loader_that_asks_for_nothing_raises_its_own_error():
    def load_weights(weights):
        raise RuntimeError("no model")

    with pytest.raises(RuntimeError, match="no model"):
        record(Toy(None, {"x": (1,)}), contents_of(weights_of(x=(1,))), load_weights)


def test_no_parameter_stays_stale_without_a_word():
    def load(toy, fqn, weight):
        toy.a.data[:2].copy_(weight)

    toy = Toy(load, {"a": (3, 2), "b": (4,)})
    toy.register_buffer("inv_freq", torch.ones(2))
    recording = proven(toy, weights_of(w=(2, 2), extra=(2, 2)) | {})
    assert recording.unused == ("w",)  # `extra` lies over it
    assert recording.unwritten == {"a": 2, "b": 4}
    assert recording.unwritten
    assert recording.buffers == ("inv_freq",)


def test_an_engine_that_was_changed_is_put_back_after_an_error():
    def load_weights(weights):
        toy.x = nn.Parameter(torch.zeros(1))
        toy.y.data = torch.zeros(5)
        raise KeyboardInterrupt

    toy = Toy(None, {"x": (1,), "y": (2,)})
    x, y = toy.x, toy.y
    with pytest.raises(KeyboardInterrupt):
        record(toy, contents_of(weights_of(x=(1,))), load_weights)
    assert toy.x is x
    assert toy.y is y
    assert torch.equal(y, torch.full((2,), OLD))


def test_attributes_that_a_loader_makes_or_sets_are_put_back():
    """A tensor on meta would stay in the place of a real one; copies to it do nothing."""

    def load(toy, fqn, weight):
        toy.count += 1
        toy.x.data.copy_(weight)
        toy.derived = weight.abs()
        toy.scale = nn.Parameter(weight.clone())
        toy.part = nn.Linear(1, 1)

    toy = Toy(load, {"x": (3,)})
    toy.count, toy.derived = 5, torch.ones(3)
    record(toy, contents_of(weights_of(x=(3,))))
    assert toy.count == 5
    assert torch.equal(toy.derived, torch.ones(3))
    assert not hasattr(toy, "scale")
    assert list(toy.modules()) == [toy]


def test_a_parameter_that_is_not_plain_memory_is_refused():
    toy = Toy(None, {})
    toy.lazy = nn.UninitializedParameter()
    with pytest.raises(UsageError, match="'lazy' is not initialised"):
        record(toy, {}, lambda weights: None)
    toy = Toy(None, {})
    toy.sparse = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(UsageError, match="'sparse' is a Parameter of layout torch.sparse_coo"):
        record(toy, {}, lambda weights: None)
