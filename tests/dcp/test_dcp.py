"""ROSWriter and ROSReader in one process; tests/processes has the groups."""

import copy
import pickle
import re
import uuid
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp.compared import assert_same
from kit import inside, read_only
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import torch_ros
from torch_ros import errors
from torch_ros.dcp import ROSReader, ROSWriter, default_handle
from torch_ros.protocol import calls


@dataclass
class Settings:
    width: int = 3


def save(handle, version, state_dict, **options):
    dcp.save(state_dict, storage_writer=ROSWriter(version, handle=handle), **options)


def load(handle, state_dict, version="latest", *, planner=None, **options):
    reader = ROSReader(version, handle=handle, **options)
    dcp.load(state_dict, storage_reader=reader, planner=planner)
    return reader.version


def failure(call):
    with pytest.raises(CheckpointException) as caught:
        call()
    ((error, _),) = caught.value.failures.values()
    return error


def state():
    return {
        "model": {"w": torch.randn(10, 3), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4)},
        "optimizer": {"step": 5, "lr": [1e-3, 2.0], "m": torch.randn(7)},
        "tuple": (1, "a"),
    }


def blank():
    return {
        "model": {"w": torch.zeros(10, 3), "scalar": torch.tensor(0.0), "empty": torch.empty(0, 4)},
        "optimizer": {"step": 0, "lr": [0.0, 0.0], "m": torch.zeros(7)},
        "tuple": None,
    }


def test_a_whole_state_dict_comes_back_and_is_served_on(handles):
    trainer, rollout = handles
    saved, got = state(), blank()
    w = got["model"]["w"]
    save(trainer, 3, saved)
    assert load(rollout, got) == 3
    assert_same(saved, got)
    assert got["model"]["w"] is w, "loaded in place"
    assert (trainer.version, rollout.version) == (3, 3)
    trainer.close()
    with torch_ros.open("m", endpoint=inside(rollout).group.kv.endpoint, replica="late") as late:
        again = blank()
        assert load(late, again) == 3
        assert_same(saved, again)


def test_each_save_takes_the_place_of_the_last(handles):
    trainer, rollout = handles
    saved = state()
    for version in (1, 2, 3):
        trainer.unpublish()
        saved["model"]["w"].add_(1)
        saved["optimizer"]["step"] = version
        save(trainer, version, saved)
        got = blank()
        assert load(rollout, got) == version
        assert_same(saved, got)
    assert trainer.list() == {3: {"trainer", "rollout"}}


def test_an_unchanged_state_dict_is_not_registered_again(handles):
    trainer, _ = handles
    saved = {"w": torch.randn(10)}
    save(trainer, 1, saved)
    before = inside(trainer).mailbox._tensors
    save(trainer, 2, saved)
    assert inside(trainer).mailbox._tensors is before


def test_a_part_is_taken_without_serving_it(handles, caplog):
    trainer, rollout = handles
    saved = state()
    save(trainer, 3, saved)
    caplog.set_level("INFO", logger="torch_ros.dcp")
    part = {"model": blank()["model"]}
    assert load(rollout, part) == 3
    assert_same(saved["model"], part["model"])
    assert rollout.version is None
    assert "does not serve it" in caplog.text
    assert trainer.list() == {3: {"trainer"}}


def test_serve_false_reads_without_serving(handles):
    trainer, rollout = handles
    save(trainer, 3, state())
    assert load(rollout, blank(), serve=False) == 3
    assert rollout.version is None


@pytest.mark.parametrize(
    ("change", "kind", "found"),
    [
        # DCP's own planner looks at names and shapes.
        (lambda sd: sd["model"].update(extra=torch.zeros(1)), RuntimeError, r"model\.extra"),
        (lambda sd: sd["model"].update(w=torch.zeros(9, 3)), ValueError, r"\[9, 3\]"),
        (
            lambda sd: sd["model"].update(w=torch.zeros(10, 3).double()),
            errors.ManifestMismatch,
            r"float64 \[10, 3\]",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(handles, change, kind, found):
    trainer, rollout = handles
    save(trainer, 3, state())
    kept = blank()
    load(rollout, kept)
    bad = blank()
    change(bad)
    error = failure(lambda: load(rollout, bad))
    assert isinstance(error, kind)
    assert re.search(found, str(error))
    assert rollout.version == 3
    assert load(rollout, kept) == 3


@pytest.mark.parametrize("is_own", [False, True])
def test_memory_that_may_only_be_read_is_named_and_nothing_is_given_up(handles, tmp_path, is_own):
    trainer, rollout = handles
    save(trainer, 3, state())
    load(rollout, kept := blank())
    bad = blank()
    bad["model"]["w"] = read_only(tmp_path / "w", 10, 3)
    reader = ROSReader(3, handle=rollout)
    planner = reader.planner() if is_own else None
    error = failure(lambda: dcp.load(bad, storage_reader=reader, planner=planner))
    assert isinstance(error, errors.UsageError)
    assert "load 3: tensor 'model.w' lies in memory that this process may only read" in str(error)
    assert rollout.version == 3
    assert load(rollout, kept) == 3


def test_a_missing_key_is_fine_for_a_planner_that_allows_it(handles):
    trainer, rollout = handles
    saved = state()
    save(trainer, 3, saved)
    got = {"model": {**blank()["model"], "extra": torch.full((2,), 7.0)}}
    load(rollout, got, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(got["model"]["w"], saved["model"]["w"])
    assert torch.equal(got["model"]["extra"], torch.full((2,), 7.0))


def test_except_exception_does_not_catch_what_dcp_raises(handles):
    _, rollout = handles
    error = failure(lambda: load(rollout, blank(), timeout_s=0.2))
    assert isinstance(error, errors.DeadlineExceeded)
    assert not issubclass(CheckpointException, Exception)


@pytest.mark.parametrize("version", ["7", -1, None, 1.5])
def test_bad_versions_are_named(handles, version):
    trainer, rollout = handles
    save(trainer, 1, {"w": torch.ones(3)})
    assert isinstance(
        failure(lambda: save(trainer, version, {"w": torch.ones(3)})), errors.UsageError
    )
    assert trainer.version == 1
    error = failure(lambda: load(rollout, {"w": torch.ones(3)}, version))
    assert isinstance(error, errors.UsageError)


def test_an_old_version_costs_nothing(handles):
    trainer, _ = handles
    save(trainer, 5, state())
    assert isinstance(failure(lambda: save(trainer, 4, state())), errors.VersionConflict)
    assert trainer.version == 5


@pytest.mark.parametrize("thing", [np.arange(3), Settings(4)], ids=["ndarray", "dataclass"])
def test_what_weights_only_refuses_needs_trust(handles, thing):
    trainer, rollout = handles
    save(trainer, 1, {"thing": thing, "w": torch.ones(4)})
    got = {"thing": copy.deepcopy(thing), "w": torch.zeros(4)}
    error = failure(lambda: load(rollout, got))
    assert isinstance(error, errors.UntrustedObject)
    assert error.fqn == "thing"
    assert ("numpy" if isinstance(thing, np.ndarray) else "Settings") in str(error)
    assert "trust_objects=True" in str(error)
    assert torch.equal(got["w"], torch.zeros(4)), "no tensor was written"
    assert rollout.version is None
    load(rollout, got, trust_objects=True)
    assert torch.equal(got["w"], torch.ones(4))
    assert np.array_equal(got["thing"], thing) if isinstance(thing, np.ndarray) else True


def test_a_pickle_that_runs_code_is_not_run(handles, tmp_path):
    trainer, rollout = handles
    mark = tmp_path / "ran"

    class Touch:
        def __reduce__(self):
            return (exec, (f"open({str(mark)!r}, 'w').close()",))

    save(trainer, 1, {"thing": Touch()})
    error = failure(lambda: load(rollout, {"thing": 3}))
    assert isinstance(error, errors.UntrustedObject)
    assert not mark.exists()


def test_a_caching_planner_publishes_everything_each_time(handles):
    trainer, rollout = handles
    saved = {"w": torch.zeros(5), "step": 0}
    for version in (1, 2, 3):
        trainer.unpublish()
        saved["w"].fill_(version)
        save(trainer, version, saved, planner=DefaultSavePlanner(enable_plan_caching=True))
        got = {"w": torch.zeros(5), "step": 0}
        load(rollout, got)
        assert torch.equal(got["w"], saved["w"])
    for cache in ("_cached_save_plan", "_cached_all_plans", "_cached_global_plan"):
        getattr(SavePlanner, cache).clear()
    SavePlanner._cached_metadata.clear()
    SavePlanner._cached_final_save_plan.clear()


def test_a_writer_does_not_go_to_another_process():
    with pytest.raises(errors.UsageError, match="THREAD"):
        pickle.dumps(ROSWriter(1))


def test_bad_input_to_save_is_named_and_changes_nothing(handles):
    trainer, _ = handles
    save(trainer, 1, {"w": torch.ones(3)})
    error = failure(lambda: save(trainer, 2, {"w": torch.eye(3).to_sparse()}))
    assert isinstance(error, errors.UsageError)
    assert "'w'" in str(error)
    assert trainer.version == 1


def test_options_of_another_kind_are_named_at_once(handles):
    trainer, _ = handles
    for make in (ROSWriter, ROSReader):
        with pytest.raises(errors.UsageError, match="handle='m': expected a .*ShardHandle"):
            make(1, handle="m")
    for name in ("serve", "trust_objects", "partial"):  # "False" is true
        with pytest.raises(errors.UsageError, match=f"{name}='False': expected True or False"):
            ROSReader(1, handle=trainer, **{name: "False"})


def test_the_environment_names_the_replica_of_the_default_handles(monkeypatch):
    monkeypatch.setenv("TORCH_ROS_ENDPOINT", f"memory://{uuid.uuid4().hex}")
    monkeypatch.setenv("TORCH_ROS_REPLICA", "trainer")
    handles = [default_handle(purpose) for purpose in ("save", "load")]
    assert [handle.replica for handle in handles] == ["trainer-save", "trainer-load"]
    for handle in handles:
        handle.close()


def test_the_default_handles_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("TORCH_ROS_ENDPOINT", f"memory://{uuid.uuid4().hex}")
    monkeypatch.setenv("TORCH_ROS_MODEL", "from-environment")
    dcp.save({"w": torch.ones(3)}, storage_writer=ROSWriter(1))
    got = {"w": torch.zeros(3)}
    dcp.load(got, storage_reader=ROSReader("latest"))
    assert torch.equal(got["w"], torch.ones(3))
    save_handle, load_handle = default_handle("save"), default_handle("load")
    assert save_handle.model == load_handle.model == "from-environment"
    assert save_handle is default_handle("save")
    with pytest.raises(errors.UsageError, match="'save' or 'load'"):
        default_handle("both")
    # A trainer that resumed from its rollouts publishes next.
    dcp.save(got, storage_writer=ROSWriter(2))
    assert load_handle.list() == {1: {load_handle.replica}, 2: {save_handle.replica}}
    for handle in (save_handle, load_handle):
        handle.close()
    assert default_handle("save") is not save_handle
    default_handle("save").close()


def test_saving_a_number_that_readers_hold_costs_nothing(handles):
    trainer, rollout = handles
    save(trainer, 5, state())
    load(rollout, blank())
    assert isinstance(failure(lambda: save(trainer, 5, state())), errors.VersionConflict)
    assert trainer.version == 5


def test_what_is_already_here_is_not_read_again(handles):
    trainer, rollout = handles
    saved, got = state(), blank()
    save(trainer, 5, saved)
    assert load(rollout, got) == 5
    trainer.close()
    got["optimizer"]["step"] = 0
    got["tuple"] = None
    assert load(rollout, got) == 5  # nobody else holds it
    assert rollout.last_read.bytes_read == 0
    assert_same(saved, got)
    assert rollout.list() == {5: {"rollout"}}


def test_the_only_copy_is_not_given_up_for_another_place(handles):
    trainer, rollout = handles
    save(trainer, 5, state())
    load(rollout, blank())
    trainer.close()
    error = failure(lambda: load(rollout, blank()))
    assert isinstance(error, errors.UsageError)
    assert "only one that holds version 5" in str(error)
    assert rollout.version == 5


# feature transforms {
def test_a_copy_is_cast_and_the_trainer_goes_on_at_once(handles):
    trainer, rollout = handles
    saved = {"model": {"w": torch.randn(10, 3), "norm": torch.randn(3)}, "step": 5}
    cast = torch_ros.Cast(torch.bfloat16, keep=("*norm",))
    writer = ROSWriter(1, handle=trainer, mode="copy", transform=cast)
    dcp.save(saved, storage_writer=writer)
    expected = saved["model"]["w"].bfloat16()
    norm = saved["model"]["norm"].clone()
    saved["model"]["w"].fill_(-1)
    got = {
        "model": {"w": torch.zeros(10, 3, dtype=torch.bfloat16), "norm": torch.zeros(3)},
        "step": 0,
    }
    load(rollout, got)
    assert torch.equal(got["model"]["w"], expected)
    assert torch.equal(got["model"]["norm"], norm)
    assert got["step"] == 5


# } transforms


# feature transforms {
@pytest.mark.parametrize("own", [False, True])
def test_a_quantised_copy_has_its_scales_beside_its_tensors_in_the_state_dict(handles, own):
    trainer, rollout = handles
    recipe = torch_ros.Float8(["*.w"])
    for version in range(1, 4):  # the third time, our planner knows it
        saved = {"model": {"w": torch.randn(10, 3), "b": torch.randn(3)}, "step": version}
        writer = ROSWriter(version, handle=trainer, mode="copy", transform=recipe, to="cpu")
        planner = writer.planner() if own else None
        dcp.save(saved, storage_writer=writer, planner=planner)
        got = {
            "model": {
                "w": torch.zeros(10, 3, dtype=torch.float8_e4m3fn),
                "w_scale": torch.zeros(10, 1),
                "b": torch.zeros(3),
            },
            "step": 0,
        }
        reader = ROSReader("latest", handle=rollout)
        dcp.load(got, storage_reader=reader, planner=reader.planner() if own else None)
        scale = saved["model"]["w"].abs().amax(1, keepdim=True) / 448
        quantised = (saved["model"]["w"] / scale).to(torch.float8_e4m3fn)
        assert torch.equal(got["model"]["w_scale"], scale)
        assert torch.equal(got["model"]["w"].float(), quantised.float())
        assert torch.equal(got["model"]["b"], saved["model"]["b"])
        assert got["step"] == version
    found = _load_state_dict_from_keys(storage_reader=ROSReader("latest", handle=rollout))
    assert found["model"].keys() == {"w", "w_scale", "b"}
    assert torch.equal(found["model"]["w_scale"], got["model"]["w_scale"])


# } transforms


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"mode": "fast"}, "mode='fast'"),
        # feature transforms {
        ({"transform": torch_ros.Cast(torch.bfloat16)}, "mode='copy'"),
        # } transforms
        ({"to": "cpu"}, "mode='copy'"),
        ({"copy_bytes": 0}, "mode='copy'"),
    ],
)
def test_options_of_a_copy_are_checked_at_once(options, found):
    with pytest.raises(errors.UsageError, match=found):
        ROSWriter(1, **options)


def test_who_loads_all_of_a_version_passes_on_what_it_has_already(handles, monkeypatch):
    trainer, rollout = handles
    save(trainer, 1, state())
    relayed = []
    replicate = calls.announce_filling

    def look(*arguments, is_relay, **options):
        relayed.append(is_relay)
        return replicate(*arguments, is_relay=is_relay, **options)

    monkeypatch.setattr(calls, "announce_filling", look)
    load(rollout, blank())
    save(trainer, 2, state())
    part = blank()
    del part["optimizer"]
    load(rollout, part)
    assert relayed == [True, False]
