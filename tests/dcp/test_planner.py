"""`planner()` leaves planning out, and nothing else; tests/processes has ranks."""

import gc
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp.compared import assert_same, flat
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kit import inside
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from torch_ros.dcp import ROSReader, ROSWriter
from torch_ros.dcp.memo import memos
from torch_ros.dcp.outline import outline
from torch_ros.errors import ManifestMismatch, UsageError, reason


def save(handle, version, state_dict):
    handle.unpublish()
    writer = ROSWriter(version, handle=handle)
    dcp.save(state_dict, storage_writer=writer, planner=writer.planner())


def load(handle, state_dict, **options):
    reader = ROSReader("latest", handle=handle)
    dcp.load(state_dict, storage_reader=reader, planner=reader.planner(**options))


def state(fill=1.0):
    return {
        "model": {"w": torch.full((10, 3), fill), "b": torch.full((3,), fill + 1)},
        "layers": [{"w": torch.full((4,), fill + 2)}, {"w": torch.full((5,), fill + 3)}],
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(fill),
        "step": int(fill),
        "rate": 0.5,
        "names": ("a", "b"),
    }


def renewed(tree):
    """The same tensors as new objects, as each `state_dict()` makes them."""
    if isinstance(tree, dict):
        return {key: renewed(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [renewed(value) for value in tree]
    return tree.detach() if isinstance(tree, torch.Tensor) else tree


def test_an_unchanged_state_dict_is_planned_and_registered_once(handles):
    trainer, rollout = handles
    saved, got = state(1.0), state(0.0)
    seen = []
    for version in (1, 2, 3):
        trainer.unpublish()
        for _, tensor in flat(saved):
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(version)
        saved |= {"step": 1000 * version, "rate": float(version)}
        save(trainer, version, renewed(saved))
        loaded = renewed(got)
        load(rollout, loaded)
        assert_same(saved, loaded)
        seen.append(
            [(memos(h), h.checkpoints.registered, inside(h).mailbox._tensors) for h in handles]
        )
        seen[-1] = [(dict(memo), *rest) for memo, *rest in seen[-1]]
    for before, after in zip(seen[0] + seen[1], seen[1] + seen[2], strict=True):
        assert before[0].keys() == after[0].keys()
        assert all(before[0][kind] is after[0][kind] for kind in before[0]), "planned again"
        assert before[1] is after[1], "registered again"
        assert before[2] is after[2]
    assert trainer.list() == {3: {"trainer", "rollout"}}


def zeroed(tree):
    """As much room, elsewhere and contiguous."""
    if isinstance(tree, dict):
        return {key: zeroed(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [zeroed(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        return torch.zeros(tree.shape, dtype=tree.dtype)
    return tree


CHANGES = {
    "shape": lambda sd: sd["model"].update(w=torch.full((3, 10), 7.0)),
    "dtype": lambda sd: sd["model"].update(w=torch.full((10, 3), 7, dtype=torch.int32)),
    "strides": lambda sd: sd["model"].update(w=torch.rand(3, 10).t()),
    "address": lambda sd: sd["model"].update(w=torch.full((10, 3), 7.0)),
    "offset": lambda sd: sd["model"].update(w=torch.rand(12, 3)[2:]),
    "new tensor": lambda sd: sd["model"].update(more=torch.full((2,), 7.0)),
    "new object": lambda sd: sd.update(more="x"),
    "tensor gone": lambda sd: sd["model"].pop("b"),
    "other name": lambda sd: sd["model"].update(c=sd["model"].pop("b")),
    "another layer": lambda sd: sd["layers"].append({"w": torch.ones(2)}),
    "tensor to object": lambda sd: sd["model"].update(b="gone"),
    "object to tensor": lambda sd: sd.update(step=torch.tensor(9)),
    "object to list with a tensor": lambda sd: sd.update(names=[torch.ones(1)]),
    "larger object": lambda sd: sd.update(names=("a" * 1000, "b")),
    "equal object of another type": lambda sd: sd.update(step=1.0),
    "minus zero": lambda sd: sd.update(rate=-0.0),
    "level": lambda sd: sd["model"].update(w={"x": sd["model"]["w"]}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changed_is_noticed(handles, change):
    trainer, rollout = handles
    saved, got = state(1.0) | {"rate": 0.0}, state(0.0)
    for version in (1, 2):
        save(trainer, version, renewed(saved))
        load(rollout, renewed(got))
    trainer.unpublish()
    change(saved)
    save(trainer, 3, renewed(saved))
    blank = zeroed(saved)
    load(rollout, blank)
    assert_same(blank, saved)
    assert [type(v) for _, v in flat(blank)] == [type(v) for _, v in flat(saved)]
    assert str(blank["rate"]) == str(saved["rate"])
    mine = {t.data_ptr() for _, t in flat(saved) if isinstance(t, torch.Tensor) and t.numel()}
    shown = set(inside(trainer).mailbox.manifest.addresses)
    assert mine <= shown, "published somewhere else than in place"


@pytest.mark.parametrize("change", ["strides", "address", "offset", "tensor gone"])
def test_what_changed_in_the_target_is_noticed(handles, change):
    trainer, rollout = handles
    saved, got = state(1.0), state(0.0)
    saved["model"]["w"] = torch.rand(10, 3)
    save(trainer, 1, saved)
    for _ in range(2):
        rollout.unpublish()
        load(rollout, renewed(got))
    rollout.unpublish()
    CHANGES[change](got)
    load(rollout, got)
    assert torch.equal(got["model"]["w"], saved["model"]["w"])
    got["model"].setdefault("b", saved["model"]["b"])
    assert_same(got, saved)


def test_what_does_not_fit_is_named_and_changes_nothing(handles):
    trainer, rollout = handles
    save(trainer, 1, state(1.0))
    got = state(0.0)
    load(rollout, got)
    for change in ("shape", "dtype", "new tensor"):
        bad = renewed(got)
        CHANGES[change](bad)
        with pytest.raises(CheckpointException) as caught:
            load(rollout, bad)
        assert isinstance(caught.value.failures[0][0], ManifestMismatch), change
        assert rollout.version == 1
    load(rollout, got)
    assert rollout.last_read.bytes_read == 0, "what is here already was read again"


def test_a_version_with_another_content_is_noticed(handles):
    trainer, rollout = handles
    save(trainer, 1, state(1.0))
    part = {"model": state(0.0)["model"]}
    for version in (2, 3):
        saved = state(float(version))
        if version == 3:
            saved["model"]["b"] = torch.zeros(4)
            part["model"].pop("b")
        save(trainer, version, saved)
        load(rollout, renewed(part))
        assert torch.equal(part["model"]["w"], saved["model"]["w"])
    part["model"]["b"] = torch.zeros(3)
    with pytest.raises(CheckpointException):
        load(rollout, part)


def test_the_same_is_published_as_with_dcps_own_planner(handles):
    trainer, rollout = handles
    saved = state(1.0)
    save(trainer, 1, saved)
    ours = inside(trainer).mailbox.manifest.layout
    dcp.save(saved, storage_writer=ROSWriter(2, handle=trainer), planner=DefaultSavePlanner())
    assert inside(trainer).mailbox.manifest.layout == ours
    got = state(0.0)
    reader = ROSReader("latest", handle=rollout)
    dcp.load(got, storage_reader=reader, planner=DefaultLoadPlanner())
    assert_same(saved, got)


@pytest.mark.parametrize(
    "ours", [(), (1, 2, 3), (2,)], ids=["dcp's planner", "ours", "dcp's, ours, dcp's"]
)
def test_names_that_flatten_alike_are_told_apart(handles, ours):
    trainer, _ = handles
    w = torch.ones(3)
    for version, (saved, path) in enumerate(
        [({"a": {"b": w}}, ("a", "b")), ({"a.b": w}, ("a.b",)), ({"a": {"b": w}}, ("a", "b"))], 1
    ):
        trainer.unpublish()
        writer = ROSWriter(version, handle=trainer)
        planner = writer.planner() if version in ours else None
        dcp.save(saved, storage_writer=writer, planner=planner)
        (record,) = inside(trainer).mailbox.manifest.layout.tensors
        assert record.path == path


@pytest.mark.parametrize("ours", [False, True], ids=["dcp's planner", "ours"])
def test_objects_are_put_where_this_state_dict_has_them(handles, ours):
    trainer, rollout = handles
    save(trainer, 1, {"a": {"w": torch.ones(3), "step": 5}})
    for got in (
        {"a": {"w": torch.zeros(3), "step": 0}},
        {"a.w": torch.zeros(3), "a.step": 0},
        {"a": {"w": torch.zeros(3), "step": 0}},
    ):
        rollout.unpublish()
        reader = ROSReader("latest", handle=rollout)
        expected = {**got, "a.step": 5} if "a.step" in got else {"a": {**got["a"], "step": 5}}
        dcp.load(got, storage_reader=reader, planner=reader.planner() if ours else None)
        assert_same(got, expected)


def test_what_another_thread_registered_is_not_taken_for_ours(handles):
    trainer, _ = handles
    first, second = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
    save(trainer, 1, first)
    save(trainer, 2, second)
    memos(trainer)["save"].learn(outline(first), trainer.checkpoints.registered)
    save(trainer, 3, first)
    assert inside(trainer).mailbox.manifest.addresses == (first["w"].data_ptr(),)


def test_memory_that_was_freed_is_not_taken_for_what_lies_there_now(handles):
    trainer, _ = handles
    place = np.ones(100)
    for version in (1, 2):
        save(trainer, version, {"w": torch.from_numpy(place)})
    trainer.unpublish()
    known = trainer.checkpoints.registered
    known.memory[0].set_()  # what becomes of it when its storage is freed, as FSDP1 does
    save(trainer, 3, {"w": torch.from_numpy(place)})
    assert trainer.checkpoints.registered is not known


def test_what_a_rank_sends_to_the_coordinator_does_not_grow():
    sent = []
    for count in (1, 1000):
        writer = ROSWriter(1)
        planner = writer.planner()
        planner.set_up_planner({f"t{n}": torch.ones(2) for n in range(count)})
        plan = planner.create_local_plan()
        assert not plan.items, "planned before anything was asked for"
        sent.append(pickle.dumps(writer.prepare_local_plan(plan)))
    assert sent[0] == sent[1]
    plans, metadata = planner.create_global_plan([SavePlan([])] * 64)
    assert plans == [SavePlan([])] * 64
    assert metadata.state_dict_metadata == {}


def test_without_its_writer_or_reader_a_planner_refuses(handles, tmp_path):
    saved = {"w": torch.ones(3)}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(saved, checkpoint_id=tmp_path / "a", planner=ROSWriter(1).planner())
    assert isinstance(caught.value.failures[0][0], UsageError)
    dcp.save(saved, checkpoint_id=tmp_path / "b")
    with pytest.raises(CheckpointException) as caught:
        dcp.load(saved, checkpoint_id=tmp_path / "b", planner=ROSReader().planner())
    assert isinstance(caught.value.failures[0][0], UsageError)


def failure(call):
    with pytest.raises(CheckpointException) as caught:
        call()
    error = reason(caught.value)
    assert isinstance(error, UsageError), error
    return str(error)


def lazy():
    return {"model": {"w": torch.nn.LazyLinear(3).weight}}


def test_a_tensor_that_dcp_cannot_plan_is_named(handles):
    trainer, rollout = handles
    save(trainer, 1, {"model": {"w": torch.ones(2, 3)}})
    said = "tensor 'model.w' is not initialised yet"
    assert said in failure(lambda: load(rollout, lazy()))
    on_meta = {"model": {"w": torch.empty(2, 3, device="meta")}}
    its_device = "tensor 'model.w' is on the meta device, and dcp takes its device from the default"
    assert its_device in failure(lambda: load(rollout, on_meta))
    load(rollout, {"model": {"w": torch.zeros(2, 3)}})
    assert rollout.version == 1
    assert said in failure(lambda: save(trainer, 2, lazy()))
    assert trainer.version is None


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("value", [threading.Lock(), lambda: 3, (each for each in "ab")])
def test_an_object_that_cannot_be_pickled_is_named(handles, value, is_own):
    trainer, _ = handles
    state = {"w": torch.ones(3), "more": {"hook": 1}}
    save(trainer, 1, state)  # an outline of it is known
    state["more"]["hook"] = value
    trainer.unpublish()
    writer = ROSWriter(2, handle=trainer)
    planner = writer.planner() if is_own else None
    said = failure(lambda: dcp.save(state, storage_writer=writer, planner=planner))
    assert "object 'more.hook' cannot be pickled (" in said
    assert "leave it out of the state dict" in said


def test_the_planner_of_the_other_one_is_refused(handles):
    trainer, rollout = handles
    state = {"w": torch.ones(3)}
    save(trainer, 1, state)
    writer, reader = ROSWriter(2, handle=trainer), ROSReader(1, handle=rollout)
    said = failure(lambda: dcp.load(state, storage_reader=reader, planner=writer.planner()))
    assert "pass ROSReader(...).planner()" in said
    said = failure(lambda: dcp.save(state, storage_writer=writer, planner=reader.planner()))
    assert "pass ROSWriter(...).planner()" in said
    save(trainer, 3, state)
    load(rollout, state)


def test_what_a_version_does_not_have_is_left_as_it_is(handles):
    trainer, rollout = handles
    thing = object()
    save(trainer, 1, {"w": torch.ones(3), "step": 5})
    for _ in range(2):
        got = {"w": torch.zeros(3), "step": 0, "more": torch.full((2,), 7.0), "thing": thing}
        load(rollout, got, allow_partial_load=True)
        assert torch.equal(got["w"], torch.ones(3))
        assert torch.equal(got["more"], torch.full((2,), 7.0))
        assert got["step"] == 5
        assert got["thing"] is thing
    with pytest.raises(CheckpointException):
        load(rollout, got)


def test_an_empty_tensor_that_nobody_asked_for_does_not_keep_a_load_from_being_remembered(handles):
    trainer, rollout = handles
    save(trainer, 1, {"w": torch.ones(3), "empty": torch.empty(0)})
    dcp.load({"w": torch.zeros(3)}, storage_reader=ROSReader(1, handle=rollout, partial=True))
    assert memos(rollout)["load"] is not None


def test_what_is_remembered_keeps_no_tensor(handles):
    trainer, _ = handles
    memory = np.ones(3)
    gone = weakref.ref(memory)
    saved = {"w": torch.from_numpy(memory), "step": 5}
    del memory
    save(trainer, 1, saved)
    trainer.unpublish()
    trainer.unregister()
    assert memos(trainer)["save"] is not None
    del saved
    gc.collect()
    assert gone() is None


# torch's first tensors take a while.
PATIENT = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
LEAVES = st.one_of(
    st.integers(),
    st.text(max_size=2),
    st.builds(tuple, st.just([1, 2])),
    st.builds(torch.ones, st.integers(0, 3)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(PATIENT)
@given(st.dictionaries(st.sampled_from("abc"), TREES, max_size=3))
@pytest.mark.long
def test_an_outline_has_the_leaves_that_dcp_flattens_to(tree):
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    flattened, _ = flatten_state_dict(tree)
    found = outline(tree)
    assert len(found.leaves) == len(flattened)
    assert all(a is b for a, b in zip(found.leaves, flattened.values(), strict=True))
    assert outline(renewed(tree)).tokens == found.tokens


@settings(PATIENT)
@example({"a": {"b": 1}, "c": 2}, {"a": {"b": 1, "c": 2}})
@example({"a": [[torch.ones(1)], torch.ones(1)]}, {"a": [[torch.ones(1), torch.ones(1)]]})
@example({"a": [{"b": 1}], "c": [{"b": 2}]}, {"a": [{"b": 1, "c": [{"b": 2}]}]})
@given(
    st.dictionaries(st.sampled_from("abc"), TREES, max_size=3),
    st.dictionaries(st.sampled_from("abc"), TREES, max_size=3),
)
def test_equal_outlines_flatten_to_the_same_names(left, right):
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    if outline(left).tokens == outline(right).tokens:
        (a, paths), (b, others) = flatten_state_dict(left), flatten_state_dict(right)
        assert paths == others
        for one, other in zip(a.values(), b.values(), strict=True):
            assert isinstance(one, torch.Tensor) == isinstance(other, torch.Tensor)
            if isinstance(one, torch.Tensor):
                assert one.shape == other.shape


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
    ],
    ids=["sparse", "nested", "conjugate"],
)
def test_what_is_not_plain_memory_is_never_recognised(make):
    assert not outline({"w": make()}).is_known


def test_bad_input_is_named(handles):
    trainer, _ = handles
    save(trainer, 1, {"w": torch.ones(3)})
    with pytest.raises(CheckpointException) as caught:
        save(trainer, 2, {"w": torch.eye(3).to_sparse()})
    error = caught.value.failures[0][0]
    assert isinstance(error, UsageError)
    assert "'w'" in str(error)


def test_a_state_dict_with_an_empty_and_a_sparse_tensor_is_left_to_dcp():
    """The visit ends at the sparse one, whose place in memory nobody knows."""
    assert not outline({"empty": torch.empty(0), "sparse": torch.zeros(3).to_sparse()}).is_known
