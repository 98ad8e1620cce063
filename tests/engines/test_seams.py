"""Seams of projects that are not installed here, read from the source in their wheels."""

import __future__

import ast
import importlib
import inspect
import logging
import re
import types
import uuid
import zipfile
from pathlib import Path

import pytest
import torch
from workers import Worker, shapes

import torch_ros
from torch_ros.integrations import sglang, trl

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


MODELS = "sglang/srt/models"
UPDATER = "sglang/srt/model_executor/model_runner_components/weight_updater.py"
LOAD = "torch_ros.integrations.sglang.load"


def compiled(parsed, name, **names):
    """A function of SGLang's, with these names in the place of what its module imports."""
    function = named(parsed, name)
    function.decorator_list = []
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module([function], []), name, "exec", flags, dont_inherit=True), names)
    return names[name]


def sglang_loader():
    """`load_weights` of SGLang's Qwen3."""
    return compiled(
        tree("sglang", f"{MODELS}/qwen3.py"),
        "load_weights",
        add_prefix=compiled(tree("sglang", "sglang/srt/utils/common.py"), "add_prefix"),
        default_weight_loader=compiled(
            tree("sglang", "sglang/srt/model_loader/weight_utils.py"),
            "default_weight_loader",
            torch=torch,
        ),
        get_layer_id=compiled(
            tree("sglang", "sglang/srt/layers/utils/common.py"), "get_layer_id", re=re
        ),
        logger=logging.getLogger("sglang"),
        maybe_remap_kv_scale_name=None,  # for quantised caches
    )


def sglang_update(named_tensors, model):
    """SGLang's `update_weights_from_tensor`, as each of its workers runs it."""
    parsed = tree("sglang", UPDATER)
    update = compiled(
        parsed,
        "update_weights_from_tensor",
        torch=torch,
        _unsupported_derived_weight_cache_error=lambda _: None,  # asks CUDA kernels, too
        monkey_patch_torch_reductions=lambda: None,
        get_parallel=lambda: types.SimpleNamespace(tp_rank=0),
        _unwrap_tensor=compiled(parsed, "_unwrap_tensor", LocalSerializedTensor=type(None)),
        dynamic_import=compiled(
            tree("sglang", "sglang/srt/utils/common.py"), "dynamic_import", importlib=importlib
        ),
    )
    updater = types.SimpleNamespace(
        device="cpu",
        custom_weight_loaders=[LOAD],  # --custom-weight-loader
        get_model=lambda: model,
        _assert_weight_cache_inactive=lambda _: None,
    )
    return update(updater, named_tensors, load_format=LOAD)


class Qwen3(Worker):
    """With SGLang's own loader for a checkpoint."""

    load_weights = sglang_loader()
    pp_group = types.SimpleNamespace(is_last_rank=True)
    config = types.SimpleNamespace(tie_word_embeddings=False)


def test_sglang_calls_our_loader_which_calls_sglangs():
    options = {"endpoint": f"memory://{uuid.uuid4().hex}", "timeout_s": 20}
    weights = {name: torch.randn(shape) for name, shape in shapes().items()}
    workers = [Qwen3(rank, 2) for rank in range(2)]
    with torch_ros.open("policy", **options) as trainer:
        trainer.publish_copy(7, weights)
        for worker in workers:
            done = sglang_update(sglang.request(7, "policy", options=options), worker)
            assert done == (True, "Success")
            staged = sglang._follower.installers[worker, True].report.staged
            assert list(staged) == ["model.embed_tokens.weight"]  # padding is loaded once
        sglang.close()
    for worker in workers:
        itself = Worker(worker.tp_rank, 2)
        itself.load_weights(weights.items())
        wanted = itself.state_dict()
        assert all(torch.equal(wanted[name], now) for name, now in worker.state_dict().items())


def test_sglangs_models_say_that_they_cannot_be_updated_by_the_name_that_we_ask():
    asks = named(tree("sglang", UPDATER), "_unsupported_derived_weight_cache_error")
    assert "getattr(module, '_derived_weight_cache_error', None)" in ast.unparse(asks)


def test_sglang_calls_what_loads_by_copying_as_we_do():
    unquantised = tree("sglang", "sglang/srt/layers/quantization/unquant.py")
    for name in (*sglang.PLAIN, sglang.PLAIN_EXPERTS):
        assert named(unquantised, name)


def test_sglang_tells_whether_it_moves_experts_where_we_ask():
    context = tree("sglang", "sglang/srt/runtime_context.py")
    assert parameters(named(context, "get_server_args")) == []
    arguments = tree("sglang", "sglang/srt/arg_groups/field_order.py")
    assert "'enable_eplb'" in ast.unparse(arguments)


def test_sglangs_threads_take_tensors_in_host_memory_only():
    """A recording, whose tensors lie on meta, sees all that its loaders do."""
    asks = compiled(
        tree("sglang", "sglang/srt/model_loader/utils.py"), "should_async_load", torch=torch
    )
    assert [asks(torch.empty(1, device=where)) for where in ("cpu", "meta")] == [True, False]


def test_sglang_loaders_that_leave_load_weights_out_call_post_load_weights():
    after = named(tree("sglang", "sglang/srt/model_loader/loader.py"), "post_load_weights")
    assert "model.post_load_weights()" in ast.unparse(after)


def test_sglang_updates_weights_between_begin_and_end_and_ends_if_a_loader_raises():
    manager = "sglang/srt/managers/scheduler_components/weight_updater.py"
    update = named(tree("sglang", manager), "update_weights_from_tensor")
    assert "self._session is None" in ast.unparse(update)
    assert not [each for each in ast.walk(update) if isinstance(each, ast.Try)]
    own = named(tree("sglang", UPDATER), "update_weights_from_tensor")
    assert not [each for each in ast.walk(own) if isinstance(each, ast.Try)]
    engine = named(tree("sglang", "sglang/srt/entrypoints/engine.py"), "update_weights_from_tensor")
    assert parameters(engine) == ["self", "named_tensors", "load_format", "flush_cache"]


def test_sglang_takes_an_adapter_as_tensors_and_says_whether_it_did():
    """As `load_adapter` calls it; its only replica reads no file."""
    load = named(
        tree("sglang", "sglang/srt/entrypoints/engine.py"), "load_lora_adapter_from_tensors"
    )
    assert parameters(load)[:4] == ["self", "lora_name", "tensors", "config_dict"]
    output = named(tree("sglang", "sglang/srt/managers/io_struct.py"), "LoRAUpdateOutput")
    fields = [each.target.id for each in output.body if isinstance(each, ast.AnnAssign)]
    assert {"success", "error_message"} <= {*fields}
