"""SGLang's custom weight loader, on a module with loaders like SGLang's own."""

import ctypes
import importlib
import json
import sys
import types
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from lora import Adapted, config
from printed import printed
from workers import HIDDEN, OLD, Worker, shapes

import torch_ros
from torch_ros.errors import DeadlineExceeded, ManifestMismatch, UsageError
from torch_ros.integrations import sglang
from torch_ros.integrations.adapters import adapter_tensors, publish_adapter

EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"


def follower():
    """The follower of this process; None: it has none."""
    return sglang._follower


class Fp8LinearMethod:
    """By SGLang's name."""


class UnquantizedFusedMoEMethod:
    """By SGLang's name."""


class Deriving(Worker):
    """Keeps what it makes of a parameter."""

    derived = None

    def load_weights(self, weights):
        super().load_weights(weights)
        self.post_load_weights()

    def post_load_weights(self):
        derived = self.model.norm.weight.data[:2].clone()
        self.derived = derived if self.derived is None else self.derived.copy_(derived)


class DerivingUnseen(Deriving):
    """By operations that torch does not see."""

    def post_load_weights(self):
        begin = self.model.norm.weight.data_ptr()
        self.derived = torch.frombuffer(bytearray(ctypes.string_at(begin, 8)), dtype=torch.float32)


def report(worker):
    return follower().installers[worker, True].report


def expected(worker, weights):
    """Its state dict, had it loaded these itself."""
    made = Worker(worker.tp_rank, worker.tp_size)
    made.load_weights(weights.items())
    return made.state_dict()


def is_loaded(worker, weights):
    wanted = expected(worker, weights)
    return all(torch.equal(wanted[name], now) for name, now in worker.state_dict().items())


def is_untouched(worker):
    return all((tensor == OLD).all() for tensor in worker.state_dict().values())


@pytest.fixture
def trainer():
    options = {"endpoint": f"memory://{uuid.uuid4().hex}", "timeout_s": 20}
    with torch_ros.open("policy", **options) as handle:
        handle.options = options
        yield handle
        sglang.close()


def publish(trainer, version, **more):
    weights = {name: torch.randn(shape) for name, shape in (shapes() | more).items()}
    trainer.publish_copy(version, weights)
    return weights


def request(trainer, version, **named):
    return sglang.request(version, "policy", options=trainer.options, **named)


@pytest.mark.parametrize("is_threaded", [False, True])
@pytest.mark.parametrize("buffer_bytes", [1, 2000, 1 << 20])
def test_each_worker_has_its_part_of_each_version_in_place(trainer, is_threaded, buffer_bytes):
    workers = [Worker(rank, 2, is_threaded=is_threaded) for rank in range(2)]
    for version in (1, 2):
        weights = publish(trainer, version)
        asked = request(trainer, version, buffer_bytes=buffer_bytes)
        for worker in workers:
            sglang.load(worker, asked)
            assert is_loaded(worker, weights)
            # Nobody knows, at first, whether anything was ever in its padding.
            assert worker.took == ([EMBED] if version == 1 else [])
            worker.took.clear()


@pytest.mark.parametrize("is_threaded", [False, True])
def test_a_loader_that_gets_all_may_keep_tensors_until_the_end(trainer, is_threaded):
    worker = Worker(0, 2, is_threaded=is_threaded)
    weights = publish(trainer, 1)
    sglang.load(worker, request(trainer, 1, buffer_bytes=1, is_complete=False))
    assert is_loaded(worker, weights)
    assert sorted(worker.took) == sorted(weights)


def test_what_others_may_make_of_a_parameter_goes_through_its_loader(trainer):
    worker = Worker(0, 2)
    worker.model.norm.quant_method = Fp8LinearMethod()
    for version in (1, 2):
        weights = publish(trainer, version)
        sglang.load(worker, request(trainer, version))
        assert is_loaded(worker, weights)
    assert set(worker.took) == {EMBED, NORM}
    assert report(worker).staged == {NORM: "Fp8LinearMethod may make something else of it"}


def test_experts_go_through_their_loader_while_eplb_moves_them(trainer, monkeypatch):
    worker = Worker(0, 1)
    worker.model.norm.quant_method = UnquantizedFusedMoEMethod()
    arguments = types.SimpleNamespace(enable_eplb=True)
    context = types.SimpleNamespace(get_server_args=lambda: arguments)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    for version in (1, 2, 3):
        weights = publish(trainer, version)
        sglang.load(worker, request(trainer, version))
        assert is_loaded(worker, weights)
        assert (NORM in report(worker).staged) == (version < 3)
        arguments.enable_eplb = version < 2


def test_a_parameter_that_has_changed_since_goes_through_its_loader(trainer):
    worker = Worker(0, 1)
    for version in (1, 2, 3):
        weights = publish(trainer, version)
        sglang.load(worker, request(trainer, version))
        assert is_loaded(worker, weights)
        assert (NORM in report(worker).staged) == (version == 3)
        if version == 2:
            worker.model.norm.weight = torch.nn.Parameter(torch.zeros(2 * HIDDEN)[::2])
            worker.model.norm.weight.weight_loader = worker.load_sharded
    assert "strides [2]" in report(worker).staged[NORM]


@pytest.mark.parametrize("kind", [Deriving, DerivingUnseen])
def test_what_a_model_derives_from_its_weights_follows_them(trainer, kind):
    worker = kind(0, 1)
    for version in (1, 2):
        weights = publish(trainer, version)
        sglang.load(worker, request(trainer, version))
        assert is_loaded(worker, weights)
        assert torch.equal(worker.derived, weights[NORM][:2])
    assert list(report(worker).staged) == ([NORM] if kind is Deriving else [])


def test_the_engine_keeps_nothing_registered_between_versions(trainer):
    """SGLang may unmap its weights then, or put others in their place."""
    worker = Worker(0, 1)
    for version in (1, 2):
        publish(trainer, version)
        sglang.load(worker, request(trainer, version))
    assert report(worker).direct_share == 1
    with pytest.raises(UsageError):
        follower().handle.serve()


def test_the_handle_stays_for_the_next_version_and_another_model_has_another(trainer):
    worker = Worker(0, 1)
    publish(trainer, 1)
    sglang.load(worker, request(trainer, 1))
    handle = follower().handle
    publish(trainer, 2)
    sglang.load(worker, request(trainer, 2))
    assert follower().handle is handle
    with torch_ros.open("other", **trainer.options) as other:
        other.publish_copy(1, {name: torch.ones(shape) for name, shape in shapes().items()})
        sglang.load(worker, sglang.request(1, "other", options=trainer.options))
        assert handle.is_closed
        assert (worker.state_dict()["model.norm.weight"] == 1).all()
    handle = follower().handle
    sglang.close()
    sglang.close()
    assert handle.is_closed


def test_a_worker_says_which_version_it_uses(trainer):
    worker = Worker(0, 1)
    for version in (1, 2):
        weights = publish(trainer, version)
        sglang.load(worker, request(trainer, version))
        replica = follower().handle.replica
        assert trainer.wait_installed(version).active.keys() == {replica}
    trainer.publish_copy(3, {NORM: torch.ones(HIDDEN)})
    with pytest.raises(ManifestMismatch):
        sglang.load(worker, request(trainer, 3))
    told = trainer.installs()[replica]
    assert (told.active.version, told.rejected.ref.version) == (2, 3)
    assert is_loaded(worker, weights)


def test_a_model_that_refuses_other_weights_is_asked_before_anything_is_opened(trainer):
    worker = Worker(0, 1)
    worker.model.layers._derived_weight_cache_error = "the fused indexer keeps a copy"
    publish(trainer, 1)
    with pytest.raises(UsageError, match=r"model\.layers refuses .* keeps a copy"):
        sglang.load(worker, request(trainer, 1))
    assert follower() is None
    assert is_untouched(worker)


def test_a_version_that_would_leave_parameters_as_they_were_is_refused(trainer):
    worker = Worker(0, 1)
    weights = {name: torch.randn(shape) for name, shape in shapes().items()}
    weights.pop("model.layers.1.mlp.up_proj.weight")
    trainer.publish_copy(1, weights)
    with pytest.raises(ManifestMismatch, match=r"nothing for model.layers.1.mlp.gate_up"):
        sglang.load(worker, request(trainer, 1))
    assert is_untouched(worker)
    sglang.load(worker, request(trainer, 1, is_complete=False))
    assert (worker.state_dict()["model.layers.1.mlp.gate_up_proj.weight"] == OLD).any()
    assert not is_untouched(worker)


def test_a_loader_that_cannot_be_followed_gets_all_of_it_if_asked(trainer):
    class Unseen(Worker):
        def load_weights(self, weights):
            with ThreadPoolExecutor(1) as pool:
                for name, loaded in weights:
                    pool.submit(super().load_weights, [(name, loaded)]).result()

    worker = Unseen(0, 1)
    weights = publish(trainer, 1)
    with pytest.raises(ManifestMismatch, match="the loader raised NotImplementedError: Cannot"):
        sglang.load(worker, request(trainer, 1))
    assert is_untouched(worker)
    sglang.load(worker, request(trainer, 1, is_complete=False))
    assert is_loaded(worker, weights)
    assert sorted(worker.took) == sorted(weights)


def test_a_version_that_never_comes_leaves_the_engine_as_it_was(trainer):
    worker = Worker(0, 1)
    with pytest.raises(DeadlineExceeded, match="version 4 is not published yet"):
        sglang.load(worker, request(trainer, 4, timeout_s=0.5))
    assert is_untouched(worker)


def test_weights_of_somebody_else_are_no_request():
    with pytest.raises(UsageError, match=r"\['lm_head'\]: this loader takes"):
        sglang.load(Worker(0, 1), [("lm_head", torch.zeros(3))])


@pytest.mark.parametrize("version", ["latest", -1, None, True])
def test_a_request_names_a_number(version):
    with pytest.raises(UsageError, match="version"):
        sglang.request(version, "policy")


def test_a_request_is_one_small_tensor():
    ((name, tensor),) = sglang.request(7, "policy", options={"endpoint": "etcd://host:1"})
    assert name == "torch_ros"
    assert json.loads(bytes(tensor.tolist()))["version"] == 7


def test_the_lines_in_the_documents_update_an_engine(trainer, monkeypatch):
    class Engine:
        """Its signatures are those that `tests/engines` finds in SGLang's wheel."""

        def __init__(self, model_path, load_format, custom_weight_loader):
            self.loaders, self.worker, self.is_open = custom_weight_loader, Worker(0, 1), False

        def begin_weight_update(self):
            self.is_open = True

        def end_weight_update(self):
            self.is_open = False

        def update_weights_from_tensor(self, named_tensors, load_format=None):
            assert self.is_open
            assert load_format in self.loaders
            module, _, name = load_format.rpartition(".")
            getattr(importlib.import_module(module), name)(self.worker, named_tensors)
            return True, "Success"

        def generate(self, prompts):
            assert not self.is_open
            return [is_loaded(self.worker, weights)]

    monkeypatch.setitem(sys.modules, "sglang", types.SimpleNamespace(Engine=Engine))
    weights = publish(trainer, 1)
    code = printed("sglang", "python").replace("etcd://etcd-host:2379", trainer.options["endpoint"])
    names = {"versions": [1, 1], "prompts": []}
    exec(code, names)
    assert names["outputs"] == [True]


class AdaptedEngine:
    """An `sglang.Engine` that takes adapters, by its method's names, or refuses them."""

    def __init__(self, error=None):
        self.error, self.loaded = error, {}

    def load_lora_adapter_from_tensors(self, lora_name, tensors, config_dict, load_format=None):
        self.loaded[lora_name] = tensors, config_dict
        return types.SimpleNamespace(success=self.error is None, error_message=self.error)


@pytest.fixture
def adapter():
    """The options of an adapter's handles, and what it has: version 7 of "code"."""
    options = {"endpoint": f"memory://{uuid.uuid4().hex}", "timeout_s": 20}
    made = Adapted(torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False)))
    made.add("default", config(["0"], rank=2))
    with torch_ros.open("code", linger_s=0, **options) as trainer:
        publish_adapter(trainer, 7, made)
        yield options, adapter_tensors(made)


def test_an_adapter_is_given_to_the_engine_under_a_name_of_its_version(adapter):
    options, tensors = adapter
    engine = AdaptedEngine()
    assert sglang.load_adapter(engine, "code", 7, options=options) == "code@7"
    found, asked = engine.loaded["code@7"]
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert (asked["r"], asked["lora_alpha"]) == (2, 8)


def test_an_adapter_that_the_engine_refuses_is_an_error(adapter):
    options, _ = adapter
    with pytest.raises(UsageError, match="code@7: SGLang refuses it: no LoRA"):
        sglang.load_adapter(AdaptedEngine("no LoRA"), "code", 7, options=options)
