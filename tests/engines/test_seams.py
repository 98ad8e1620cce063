"""Seams of projects that are not installed here, read from the source in their wheels."""

import ast
import inspect
import zipfile
from pathlib import Path

import pytest

from torch_ros.integrations import trl

WHEELS = Path(__file__).parents[2] / ".venv-verl" / "wheels"


def tree(project, path):
    """The source of a module, from the one wheel of that project."""
    (wheel,) = WHEELS.glob(f"{project}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return ast.parse(archive.read(path))


def named(parsed, name):
    """The one class or function of that name."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    (found,) = (n for n in ast.walk(parsed) if isinstance(n, kinds) and n.name == name)
    return found


def parameters(function):
    arguments = function.args
    return [one.arg for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]


TRAINER = "trl/experimental/async_grpo/async_grpo_trainer.py"


def test_trl_asks_a_weight_transfer_for_what_ours_has():
    protocol = named(tree("trl", TRAINER), "WeightTransferProtocol")
    methods = [each for each in protocol.body if isinstance(each, ast.FunctionDef)]
    assert [each.name for each in methods] == [
        "init_weight_transfer",
        "pause",
        "send_weights",
        "resume",
        "destroy",
    ]
    for each in methods:
        ours = inspect.signature(getattr(trl.ROSWeightTransfer, each.name))
        assert list(ours.parameters) == parameters(each), each.name


def test_trl_takes_a_weight_transfer_of_ones_own():
    trainer = named(tree("trl", TRAINER), "AsyncGRPOTrainer")
    assert "weight_transfer" in parameters(named(trainer, "__init__"))


def test_trl_hands_over_gathered_tensors_between_pause_and_resume():
    sync = named(tree("trl", TRAINER), "_sync_weight_merged")
    calls = [ast.unparse(each.func) for each in ast.walk(sync) if isinstance(each, ast.Call)]
    order = [name for name in calls if name.startswith("self.weight_transfer.")]
    assert sorted(order) == [
        f"self.weight_transfer.{n}" for n in ("pause", "resume", "send_weights")
    ]
    lines = {
        ast.unparse(each.func): each.lineno for each in ast.walk(sync) if isinstance(each, ast.Call)
    }
    pause, send, resume = (
        lines[f"self.weight_transfer.{n}"] for n in ("pause", "send_weights", "resume")
    )
    assert pause < send < resume


@pytest.mark.parametrize(
    "path", ["pause", "resume", "start_weight_update", "update_weights", "finish_weight_update"]
)
def test_trl_asks_vllm_at_the_same_endpoints(path):
    text = ast.unparse(tree("trl", "trl/experimental/async_grpo/vllm_client.py"))
    assert f"}}/{path}'" in text
