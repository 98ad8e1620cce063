"""vLLM's workers load adapters out of folders; classes with its names stand for its own."""

import json
import sys
import uuid
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from lora import Adapted, config
from safetensors.torch import load_file

import torch_ros
from torch_ros.errors import (
    ManifestMismatch,
    NotSupported,
    StoreUnavailable,
    UsageError,
    VersionNotFound,
)
from torch_ros.integrations import shared_folders
from torch_ros.integrations.adapters import adapter_tensors, publish_adapter
from torch_ros.integrations.vllm import worker_adapters
from torch_ros.integrations.vllm.told import hear
from torch_ros.integrations.vllm.worker_adapters import (
    PINS,
    AdapterPath,
    _Load,
    let_go_of,
    require_fit,
)
from torch_ros.memory.store import named
from torch_ros.protocol.keys import EVERY_MODEL
from torch_ros.store.txn import Read


class Manager:
    """vLLM's manager of adapters: it loads what a path has, and keeps it by its number."""

    def __init__(self):
        self.loaded, self.fails = {}, ""
        self.lora_config = SimpleNamespace(max_lora_rank=8)
        self._adapter_manager = layers(proj=linear(6, 4))

    def _load_adapter(self, request):
        if self.fails:
            raise ValueError(self.fails)
        folder = Path(request.lora_path)
        tensors = load_file(folder / "adapter_model.safetensors")
        asked = json.loads((folder / "adapter_config.json").read_text())
        a, b = (tensors[f"base_model.model.proj.lora_{one}.weight"] for one in "AB")
        matrices = SimpleNamespace(lora_a=a, lora_b=b)
        return SimpleNamespace(loras={"proj": matrices}, tensors=tensors, rank=asked["r"])

    def remove_adapter(self, number):
        return self.loaded.pop(number, None) is not None


@dataclass
class PEFTHelper:
    """By vLLM's name: what it refuses by the configuration alone."""

    r: int

    @classmethod
    def from_dict(cls, config):
        return cls(config["r"])

    def validate_legal(self, lora_config):
        if self.r > lora_config.max_lora_rank:
            raise ValueError(f"LoRA rank {self.r} is greater than max_lora_rank")


def parse_fine_tuned_lora_name(name, mapper):
    name = name.removeprefix("base_model.model.")
    name = mapper._map_name(name) if mapper else name
    module, _, which = name.removesuffix(".weight").rpartition(".")
    return module, which == "lora_A"


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    found = {"vllm": {}, "vllm.lora": {}, "vllm.lora.peft_helper": {"PEFTHelper": PEFTHelper}}
    found["vllm.lora.utils"] = {"parse_fine_tuned_lora_name": parse_fine_tuned_lora_name}
    for name, values in found.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)


def worker(endpoint):
    manager = Manager()

    def add_lora(request):
        if request.lora_int_id not in manager.loaded:
            manager.loaded[request.lora_int_id] = manager._load_adapter(request)
        return True

    return SimpleNamespace(
        model_runner=SimpleNamespace(lora_manager=manager),
        weight_transfer_engine=SimpleNamespace(reading_options={"endpoint": endpoint}),
        add_lora=add_lora,
        manager=manager,
    )


def asked(version=1, number=1, **more):
    found = {"lora_path": f"torch-ros://code@{version}", "lora_int_id": number}
    return SimpleNamespace(**{**found, "load_inplace": False, **more})


def load(worker, request, rank=0, uid=None, let_go=(), active=""):
    """As `load_adapter` does, which takes vLLM's groups of workers."""
    one = _Load(worker, request, rank, active)
    try:
        found = one.look()
        loaded = one.bring(uid or found)
    except BaseException:
        one.undo()
        raise
    finally:
        one.close()
    one.settle(let_go)
    return loaded


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_folders, "MEMORY", tmp_path)
    return tmp_path


def folders(memory):
    return {path.parent for path in memory.rglob("adapter_model.safetensors")}


@pytest.fixture
def endpoint():
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def trainer(endpoint):
    """Publishes the adapter of a seed, and says what it has: `trainer(version, seed)`."""
    model = Adapted(torch.nn.ModuleDict({"proj": torch.nn.Linear(6, 4, bias=False)}))
    model.add("default", config(["proj"], rank=2))
    handles = []

    def publish(version, seed, base=None, **options):
        if options or not handles:
            handles.append(torch_ros.open("code", endpoint=endpoint, linger_s=0, **options))
        model.step("default", seed)
        publish_adapter(handles[-1], version, model, base=base)
        return {name: one.clone() for name, one in adapter_tensors(model).items()}

    yield publish
    for handle in handles:
        handle.close()


def has(worker, number, tensors):
    found = worker.manager.loaded[number].tensors
    return found.keys() == tensors.keys() and all(
        torch.equal(found[name], one) for name, one in tensors.items()
    )


def test_workers_of_a_host_load_one_folder(trainer, endpoint, memory):
    tensors = trainer(1, 1)
    first, second = worker(endpoint), worker(endpoint)
    loaded = load(first, asked())
    assert loaded.base is None
    load(second, asked(), rank=1, uid=loaded.uid)
    assert len(folders(memory)) == 1
    assert has(first, 1, tensors)
    assert has(second, 1, tensors)
    assert first.manager.loaded[1].rank == 2


def test_an_adapter_that_comes_again_in_a_step_is_read_from_its_folder(trainer, endpoint):
    tensors = trainer(1, 1)
    one = worker(endpoint)
    load(one, asked())
    trainer(2, 2)  # the first one is gone
    one.manager.loaded.clear()  # as after an update of the base
    one.add_lora(asked())
    assert has(one, 1, tensors)


def test_a_folder_goes_when_nobody_needs_it(trainer, endpoint, memory):
    one = worker(endpoint)
    for version in (1, 2):
        trainer(version, version)
        load(one, asked(version, version))
    assert len(folders(memory)) == 2
    trainer(3, 3)
    load(one, asked(3, 3), let_go=[asked(1).lora_path])
    assert len(folders(memory)) == 2


def test_a_load_that_fails_leaves_what_was_there(trainer, endpoint, memory):
    tensors = trainer(1, 1)
    one = worker(endpoint)
    one.manager.fails = "rank 2 is too large"
    with pytest.raises(ValueError, match="too large"):
        load(one, asked())
    assert not vars(one.manager)[PINS]
    assert not folders(memory)
    one.manager.fails = ""
    load(one, asked())
    one.manager.fails = "rank 2 is too large"
    with pytest.raises(UsageError, match="torch-ros://code@1: vLLM refuses it: rank 2"):
        load(one, asked(number=2))
    one.manager.fails = ""
    one.manager.loaded.clear()
    one.add_lora(asked())
    assert has(one, 1, tensors)
    assert len(folders(memory)) == 1


def test_a_number_with_another_content_is_refused(trainer, endpoint, memory):
    """Requests that run have the first one; both can be there by their contents."""
    first = trainer(1, 1)
    one = worker(endpoint)
    load(one, asked())
    second = trainer(1, 2, run="new")
    with pytest.raises(UsageError, match="load torch-ros://code@1#") as caught:
        load(one, asked(number=2))
    exact = str(caught.value).split("load ")[1].split(",")[0]
    load(one, asked(number=2, lora_path=exact))
    assert has(one, 1, first)
    assert has(one, 2, second)
    assert len(folders(memory)) == 2


def test_a_path_that_was_let_go_is_read_anew(trainer, endpoint):
    """Though vLLM may have the number still."""
    trainer(1, 1)
    one = worker(endpoint)
    load(one, asked())
    let_go_of(one.manager, [asked().lora_path])
    tensors = trainer(1, 2, run="new")
    load(one, asked())
    assert has(one, 1, tensors)


def test_a_content_that_is_asked_for_is_no_other(trainer, endpoint):
    trainer(1, 1)
    one = worker(endpoint)
    uid = load(one, asked()).uid
    exact = asked(lora_path=f"torch-ros://code@1#{uid}")
    load(one, exact)
    trainer(1, 2, run="new")
    load(one, exact)  # which is there
    with pytest.raises(VersionNotFound, match="published again"):
        load(worker(endpoint), exact)


def test_a_version_that_is_not_there_is_not_waited_for(trainer, endpoint):
    trainer(3, 1)
    with pytest.raises(VersionNotFound, match=r"there are \[3\]"):
        load(worker(endpoint), asked(4))


def test_a_name_that_nobody_has_leaves_no_record(endpoint):
    """It may be mistyped, by whoever may send a request."""
    for model in ("cod", "code"):
        with pytest.raises(VersionNotFound, match="there are none"):
            load(worker(endpoint), asked(lora_path=f"torch-ros://{model}@1"))
    store = named(endpoint.partition("://")[2])
    assert not store.read(Read((EVERY_MODEL,)), timeout_s=5).entries


def test_no_etcd_is_started_for_a_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_ROS_LOCAL_DIR", str(tmp_path / "etcd"))
    with pytest.raises(StoreUnavailable, match="no etcd of this user runs on this host"):
        load(worker("local"), asked())
    assert not (tmp_path / "etcd").exists()


def of_another_base(one, trainer):
    trainer(1, 1, base=torch_ros.Contents(7, {}, run="run", uid="seven"))
    return ManifestMismatch, r"expected version 7 of run 'run'"


def of_a_large_rank(one, trainer):
    trainer(1, 1)
    one.manager.lora_config.max_lora_rank = 1
    return UsageError, "torch-ros://code@1: vLLM refuses it: LoRA rank 2 is greater"


def of_another_size(one, trainer):
    trainer(1, 1)
    one.manager._adapter_manager = layers(proj=linear(6, 5))
    return ManifestMismatch, r"expected a linear layer of \(6, 5\), found A and B of"


def of_another_model(one, trainer):
    trainer(1, 1)
    one.manager._adapter_manager = layers(other=linear(6, 4))
    return ManifestMismatch, "'proj' of torch-ros://code@1: expected a layer of that name"


@pytest.mark.parametrize(
    "spoil", [of_another_base, of_a_large_rank, of_another_size, of_another_model]
)
def test_an_adapter_that_does_not_fit_is_refused_before_it_is_read(
    trainer, endpoint, memory, monkeypatch, spoil
):
    def never(*args):
        raise AssertionError("it is read")

    one = worker(endpoint)
    kind, said = spoil(one, trainer)
    monkeypatch.setattr(worker_adapters, "read_adapter", never)
    with pytest.raises(kind, match=said):
        load(one, asked(), active="eight")
    assert not folders(memory)
    assert not one.manager.loaded


def test_an_adapter_that_is_there_is_loaded_beside_its_base_alone(trainer, endpoint):
    """Without its source, by a path that names the content."""
    trainer(1, 1, base=torch_ros.Contents(7, {}, run="run", uid="seven"))
    one = worker(endpoint)
    uid = load(one, asked(), active="seven").uid
    exact = asked(lora_path=f"torch-ros://code@1#{uid}")
    load(one, exact, active="seven")
    trainer(2, 2)
    load(one, exact, active="seven")
    with pytest.raises(ManifestMismatch, match="another version in this engine"):
        load(one, exact, active="eight")
    assert [*one.manager.loaded] == [1]


def looked_at(worker):
    with closing(_Load(worker, asked(), 0, "")) as load:
        load.look()


def test_names_are_compared_as_vllm_maps_them(trainer, endpoint):
    """But for those that its model leaves out."""
    trainer(1, 1)
    one = worker(endpoint)
    inner = one.manager._adapter_manager = layers(inner=linear(6, 4))
    renamed = SimpleNamespace(_map_name=lambda name: name.replace("proj", "inner"))
    inner.model.hf_to_vllm_mapper = SimpleNamespace(get_rename_mapper=lambda: renamed)
    looked_at(one)
    inner.model = SimpleNamespace(lora_skip_prefixes=["proj."], modules=tuple)
    looked_at(one)


def test_workers_without_a_group_raise_once(monkeypatch):
    """vLLM reads their answers up to the first that failed."""

    def ranks(parallel_config):
        raise NotSupported("torch_ros with 2 workers per engine", "use one")

    engine = SimpleNamespace(Ranks=ranks)
    monkeypatch.setitem(sys.modules, "torch_ros.integrations.vllm.engine", engine)
    workers = [
        SimpleNamespace(rank=rank, parallel_config=SimpleNamespace(world_size=2)) for rank in (0, 1)
    ]
    assert worker_adapters.load_adapter(workers[0], asked(), (), "") is None
    with pytest.raises(RuntimeError) as caught:
        worker_adapters.load_adapter(workers[1], asked(), (), "")
    assert type(hear(caught.value)[0]) is NotSupported


def test_an_engine_that_follows_nobody_needs_an_endpoint(trainer, endpoint, monkeypatch):
    """No etcd is started for it."""
    monkeypatch.delenv("TORCH_ROS_ENDPOINT", raising=False)
    trainer(1, 1)
    one = worker(endpoint)
    one.weight_transfer_engine = None
    with pytest.raises(UsageError, match="no endpoint to find adapter 'code' at"):
        load(one, asked())
    monkeypatch.setenv("TORCH_ROS_ENDPOINT", endpoint)
    load(one, asked())


def test_an_engine_without_adapters_says_how_to_have_some():
    bare = SimpleNamespace(model_runner=SimpleNamespace())
    with pytest.raises(UsageError, match="enable_lora=True"):
        _Load(bare, asked(), 0, "").look()


def test_a_load_in_place_is_refused(endpoint):
    with pytest.raises(UsageError, match="in each step"):
        _Load(worker(endpoint), asked(load_inplace=True), 0, "").look()


@pytest.mark.parametrize("path", ["torch-ros://code", "torch-ros://code@latest", "torch-ros://@1"])
def test_a_path_that_names_no_version_is_refused(path):
    with pytest.raises(UsageError, match="expected torch-ros://MODEL@VERSION"):
        AdapterPath.of(path)


def test_a_path_is_read_as_it_is_written():
    for path in ("torch-ros://team/code@7", "torch-ros://a@b@7#uid"):
        assert str(AdapterPath.of(path)) == path
    assert AdapterPath.of("torch-ros://a@b@7#uid") == AdapterPath("a@b", 7, "uid")


# The sizes of vLLM's layers


def linear(inner, outer, **more):
    return SimpleNamespace(base_layer=SimpleNamespace(input_size=inner, output_size=outer, **more))


def layers(packed=None, target_modules=None, others=(), **modules):
    model = SimpleNamespace(modules=lambda: others)
    only = SimpleNamespace(target_modules=target_modules)
    return SimpleNamespace(
        modules=modules, packed_modules=packed or {}, lora_config=only, model=model
    )


def matrices(inner, outer):
    return (2, inner), (outer, 2)


QKV = {"total_num_heads": 4, "total_num_kv_heads": 1, "head_size": 2, "output_sizes": [8, 4, 4]}
FUSED = layers(
    {"qkv": ["q", "k", "v"], "gate_up": ["gate", "up"]},
    qkv=linear(6, 16, **QKV),  # by two workers, each of which has the only key and value
    gate_up=linear(6, 14, output_sizes=[7, 7]),
    down=linear(7, 6),
    head=SimpleNamespace(base_layer=SimpleNamespace()),
)
FITTING = {"q": (6, 8), "k": (6, 2), "v": (6, 2), "gate": (6, 7), "down": (7, 6), "head": (1, 1)}


@pytest.mark.parametrize("name", FITTING)
def test_matrices_of_a_layers_size_fit(name):
    require_fit("it", FUSED, {name: matrices(*FITTING[name])})


@pytest.mark.parametrize("name", [*FITTING][:-1])
@pytest.mark.parametrize("change", [(-1, 0), (0, -1), (0, 1)])
def test_matrices_of_another_size_are_refused(name, change):
    inner, outer = (one + more for one, more in zip(FITTING[name], change, strict=True))
    with pytest.raises(ManifestMismatch, match=f"'{name}' of it: expected a linear layer of"):
        require_fit("it", FUSED, {name: matrices(inner, outer)})


class PPMissingLayer:
    """By vLLM's name: another worker has it."""


def test_a_layer_that_no_worker_has_is_refused():
    other = {"other": matrices(6, 4)}
    with pytest.raises(ManifestMismatch, match="expected a layer of that name"):
        require_fit("it", FUSED, other)
    require_fit("it", layers(others=[PPMissingLayer()]), other)
    require_fit("it", layers(target_modules=["proj"]), other)
    require_fit("it", FUSED, {"mlp.experts.0.w1": matrices(6, 4)})
