"""The calls of `attach`, on a stand-in for `vllm.LLM` with a real handle behind it."""

import inspect
import uuid
from types import SimpleNamespace

import pytest
import torch
from toys import Toy

import torch_ros
from torch_ros import errors
from torch_ros.errors import (
    ManifestMismatch,
    NotAvailable,
    SourceLost,
    TorchRosError,
    UsageError,
    VersionNotFound,
)
from torch_ros.integrations.from_bucket import BucketVersions
from torch_ros.integrations.installation import Installer, InstallOptions
from torch_ros.integrations.landing_plan import state_of
from torch_ros.integrations.recording import record
from torch_ros.integrations.vllm import attach
from torch_ros.integrations.vllm.told import hear, tell


class Model:
    """The weights of its only worker."""

    def __init__(self):
        copied = lambda toy, fqn, weight: getattr(toy, fqn).data.copy_(weight)
        self.module = Toy(copied, {"x": (3,)})

    def state(self):
        return state_of(self.module)

    def record(self, contents):
        return record(self.module, contents)

    def obstacles(self, recording):
        return {}

    def may_lack(self, fqn):
        return False


class LLM:
    """vLLM's calls, and its way with errors: their text in one of its own."""

    def __init__(self):
        self.model, self.installer, self.asked = Model(), None, []
        config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
        self.llm_engine = SimpleNamespace(vllm_config=config, reset_encoder_cache=lambda: None)

    def init_weight_transfer_engine(self, request):
        info = request["init_info"]
        handle = torch_ros.open(info["model"], **info["options"], replica=info["replica"])
        self.installer = Installer(handle, self.model, InstallOptions())

    def update_weights(self, request):
        try:
            self.installer.install(request["update_info"]["version"], 20)
        except Exception as error:
            told = tell(error, self.installer.active)
            raise Exception(f"Call to collective_rpc method failed: {told}") from None

    def shutdown_weight_transfer_engine(self):
        self.installer.handle.close(linger_s=0)

    def __getattr__(self, name):
        return lambda *args, **named: self.asked.append(name)


@pytest.fixture
def options():
    return {"endpoint": f"memory://{uuid.uuid4().hex}", "timeout_s": 20, "linger_s": 0}


def publish(options, version, *, model="m", **named):
    """A trainer that has published a version; and the version."""
    trainer = torch_ros.open(model, **options, **named)
    weights = {"x": torch.randn(3)}
    trainer.publish_copy(version, weights)
    return trainer, weights["x"]


def test_the_newest_version_of_a_newer_run_is_gone_to_though_its_number_is_lower(options):
    llm = LLM()
    first, _ = publish(options, 5)
    with attach(llm, model="m", options=options) as policy:
        assert policy.update()
        first.close()
        for version in (3, 5):
            second, weights = publish(options, version, run="new")
            assert policy.update()
            assert not policy.update()
            assert policy.version == version
            assert torch.equal(llm.model.module.x, weights)
            second.close()


@pytest.mark.parametrize("label", ["7", "none"])
def test_an_engine_that_was_born_with_a_version_is_not_brought_it_again(label, options):
    """Unless it answers nobody with it, as while a cache of older weights is left."""
    llm, (trainer, _) = LLM(), publish(options, 7)
    handle = torch_ros.open("m", **options, replica="r", installs=True)
    llm.installer = Installer(handle, llm.model, InstallOptions(), teller=handle)
    llm.installer.install(7, 20)
    llm.init_weight_transfer_engine = lambda request: None  # it follows that already
    llm.get_weight_version = lambda: label
    with attach(llm, model="m", replica="r", options=options) as policy:
        assert policy.version == (7 if label == "7" else None)
        assert policy.update() == (label == "none")
        trainer.publish_copy(8, {"x": torch.ones(3)})
        assert policy.update()
        assert (policy.version, llm.model.module.x.tolist()) == (8, [1.0] * 3)
    trainer.close()


@pytest.mark.parametrize(
    "lost",
    [VersionNotFound("m", "2", "nobody has it"), SourceLost("trainer", "it left", 0, 12)],
    ids=lambda lost: type(lost).__name__,
)
def test_the_newest_version_that_is_taken_back_gives_way_to_the_next(options, lost):
    llm = LLM()
    trainer, _ = publish(options, 1)

    def take_back(request):
        del llm.update_weights
        following = request["update_info"]["version"] + 1
        trainer.publish_copy(following, {"x": torch.full((3,), float(following))})
        raise Exception(f"Call to collective_rpc method failed: {tell(lost, None)}")

    with trainer, attach(llm, model="m", options=options) as policy:
        policy.update()
        trainer.publish_copy(2, {"x": torch.zeros(3)})
        llm.update_weights = take_back
        assert policy.update()
        assert policy.version == 3
        assert torch.equal(llm.model.module.x, torch.full((3,), 3.0))
        trainer.publish_copy(4, {"x": torch.zeros(3)})
        llm.update_weights = take_back
        with pytest.raises(type(lost)):
            policy.update(4)  # no other will do


def test_what_was_closed_leaves_the_engine_to_the_next(options):
    llm = LLM()
    first = attach(llm, model="m", options=options)
    first.close()
    trainer, weights = publish(options, 1, model="other")
    with trainer, attach(llm, model="other", options=options) as policy:
        first.close()
        assert policy.update()
        assert torch.equal(llm.model.module.x, weights)


def test_an_engine_that_keeps_its_version_goes_on(options):
    llm = LLM()
    trainer, _ = publish(options, 1)
    with trainer, attach(llm, model="m", options=options) as policy:
        policy.update()
        trainer.publish_copy(2, {"x": torch.ones(4)})
        with pytest.raises(ManifestMismatch, match="nothing for x"):
            policy.update()
        assert policy.version == 1
        assert llm.asked[-1] == "wake_up"


@pytest.mark.parametrize("is_kept", [True, False], ids=["after a failure", "after an update"])
def test_an_engine_that_does_not_resume_has_no_version(options, is_kept):
    llm = LLM()
    trainer, _ = publish(options, 1)
    with trainer, attach(llm, model="m", options=options) as policy:
        policy.update()
        trainer.publish_copy(2, {"x": torch.ones(4 if is_kept else 3)})

        def wake_up(tags):
            del llm.wake_up
            raise Exception(f"Call to wake_up failed: {tell(NotAvailable('beside it'), None)}")

        llm.wake_up = wake_up
        with pytest.raises(NotAvailable, match="beside it"):
            policy.update()
        assert policy.version is None
        trainer.unpublish()
        trainer.publish_copy(3, {"x": torch.ones(3)})
        assert policy.update(3)
        assert policy.version == 3


def test_an_engine_that_is_too_far_behind_is_updated_before_requests_are_handed_out(options):
    llm = LLM()
    trainer, _ = publish(options, 1)
    with trainer, attach(llm, model="m", options=options, behind_max=1) as policy:
        for published, version in [(1, 1), (2, 1), (3, 3), (4, 3), (9, 9)]:
            if published > 1:
                trainer.publish_copy(published, {"x": torch.full((3,), float(published))})
            llm.generate("prompts")
            assert (policy.version, llm.asked[-1]) == (version, "generate")
        trainer.unpublish()
        llm.chat("prompts")  # it waits for no version
        assert (policy.version, llm.asked[-1]) == (9, "chat")
        second, _ = publish(options, 2, run="new")
        llm.enqueue("prompts")
        assert policy.version == 2
        second.close()
    assert vars(llm).keys().isdisjoint(["generate", "chat", "enqueue", "enqueue_chat"])


def test_requests_wait_for_a_version_that_fits(options):
    llm = LLM()
    trainer, _ = publish(options, 1)
    with trainer, attach(llm, model="m", options=options, behind_max=0) as policy:
        llm.generate("prompts")
        trainer.publish_copy(2, {"x": torch.ones(4)})
        with pytest.raises(ManifestMismatch, match="nothing for x"):
            llm.generate("prompts")
        assert llm.asked.count("generate") == 1
        assert policy.version == 1


def test_without_a_bound_vllms_calls_are_its_own(options):
    llm = LLM()
    trainer, _ = publish(options, 1)
    with trainer, attach(llm, model="m", options=options) as policy:
        llm.generate("prompts")
        assert policy.version is None


@pytest.mark.parametrize("most", [-1, True, "1", 1.5])
def test_a_bound_is_a_whole_number(options, most):
    llm = LLM()
    with pytest.raises(UsageError, match="behind_max"):
        attach(llm, model="m", options=options, behind_max=most)
    assert llm.asked == []


def test_a_bound_holds_for_versions_in_a_bucket(options, tmp_path, monkeypatch):
    """Where a number may come again, and a lower one be newer."""
    llm, url = LLM(), str(tmp_path / "bucket")
    found = SimpleNamespace(version=1, uid="a", run="")
    monkeypatch.setattr(BucketVersions, "contents", lambda *_, **__: found)
    brought = []
    llm.init_weight_transfer_engine = llm.shutdown_weight_transfer_engine = lambda *_: None
    llm.update_weights = lambda request: brought.append(request["update_info"]["version"])
    with attach(llm, model="m", bucket=url, behind_max=1):
        for found.version, found.uid in [
            (1, "a"),
            (1, "a"),
            (2, "b"),
            (3, "c"),
            (3, "d"),
            (2, "e"),
        ]:
            llm.generate("prompts")
    assert brought == [1, 3, 3, 2]


KINDS = [kind for kind in vars(errors).values() if inspect.isclass(kind)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_heard_as_it_was_told(kind):
    _, *named = inspect.signature(kind.__init__).parameters.values()
    names = [one.name for one in named if one.name not in {"args", "kwargs"}]
    numbers = {"version": 7, "timeout_s": 1.5, "is_orderly": True, "rank": 1, "behind": 2}
    error = kind(*(numbers.get(name, f"'{name}'\n") for name in names or ["reason"]))
    assert issubclass(kind, TorchRosError)
    heard, active = hear(Exception(f"Worker failed with error '{tell(error, 3)}', see above"))
    assert (type(heard), heard.args, str(heard), active) == (kind, error.args, str(error), 3)
