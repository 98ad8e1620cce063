"""A trainer that is killed while an engine reads from it: real processes, and etcd."""

import inspect

import pytest
import torch
from torch import nn

import torch_ros
from torch_ros.errors import TorchRosError
from torch_ros.integrations.installation import Installer, InstallOptions
from torch_ros.integrations.landing_plan import Obstacle, state_of
from torch_ros.integrations.recording import record
from torch_ros.transfer.reading import ReadPass

PROMPTS, TOKENS = [[3, 1, 4], [15, 9, 2, 6]], 12
OPTIONS = {"ttl_s": 2, "timeout_s": 20, "linger_s": 0}


def weights_of(version):
    made = torch.Generator().manual_seed(version)
    shapes = {"embed": (32, 16), **{f"mix{n}": (16, 16) for n in range(6)}, "head": (32, 16)}
    return {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}


TRAINER = f"""
import sys
import torch
import torch_ros

{inspect.getsource(weights_of)}
options = {{"replica": "trainer", "ttl_s": 2, "timeout_s": 20}}
handle = torch_ros.open(sys.argv[2], endpoint=sys.argv[1], **options)
for line in sys.stdin:
    handle.unpublish()
    handle.unregister()
    handle.register(weights_of(int(line)))
    handle.publish(int(line))
    print("published", flush=True)
"""


def answers(weights):
    """The tokens that a model says greedily: each of them depends on all before."""
    found = []
    for prompt in PROMPTS:
        said = list(prompt)
        for _ in range(TOKENS):
            state = torch.zeros(16)
            for token in said:
                state = state + weights["embed"][token]
                for n in range(6):
                    state = torch.tanh(weights[f"mix{n}"] @ state)
            said.append(int((weights["head"] @ state).argmax()))
        found.append(said[len(prompt) :])
    return found


class Engine(nn.Module):
    """It calls `loading` when its own loader has loaded a tensor."""

    def __init__(self, staged):
        super().__init__()
        for name, one in weights_of(0).items():
            part = nn.Module()
            part.weight = nn.Parameter(torch.zeros_like(one), requires_grad=False)
            self.add_module(name, part)
        self.staged, self.loading = staged, lambda: None

    def load_weights(self, weights):
        for fqn, weight in weights:
            self.get_submodule(fqn).weight.data.copy_(weight)
            if not weight.is_meta:
                self.loading()

    def state(self):
        return state_of(self)

    def record(self, contents):
        return record(self, contents)

    def obstacles(self, recording):
        return {f"{name}.weight": Obstacle("packed") for name in self.staged}

    def load(self, modules, weights):
        self.load_weights(weights)

    def answers(self):
        return answers({name: self.get_submodule(name).weight for name in weights_of(0)})


def publish(trainer, version):
    trainer.tell(version)
    assert trainer.hear() == "published"


@pytest.fixture
def kill(monkeypatch):
    """Have a process killed in the middle of the next read, when `first` is done.

    Its bytes have landed in place, and nobody has said yet that they count; or they do, and of
    those that the engine loads itself the first is loaded.
    """
    left, end = [], ReadPass._count_if_served

    def strike():
        while left:
            trainer, engine, first = left.pop()
            assert engine.answers() != answers(weights_of(1)), "nothing was written yet"
            first()
            trainer.kill()

    def ended(self, batch):
        strike()
        return end(self, batch)

    def arm(trainer, engine, first):
        left.append((trainer, engine, first))
        if engine.staged:
            engine.loading = strike
        else:
            monkeypatch.setattr(ReadPass, "_count_if_served", ended)

    yield arm
    assert not left, "nobody was killed"


# Two tensors, one in each buffer, have landed by the time that the first of them is loaded.
@pytest.mark.parametrize("staged", [[], [f"mix{n}" for n in range(6)]], ids=["in place", "staged"])
@pytest.mark.parametrize("others_have", [1, 2])
def test_an_engine_answers_with_the_last_version_or_goes_on_from_another_source(
    etcd_endpoint, started, request, kill, caplog, staged, others_have
):
    place = {"endpoint": etcd_endpoint, **OPTIONS}
    model, engine = request.node.name, Engine(staged)
    trainer = started.start(TRAINER, etcd_endpoint, model, talks=True)
    with (
        torch_ros.open(model, replica="peer", **place) as peer,
        torch_ros.open(model, replica="engine", installs=True, **place) as handle,
    ):
        options = InstallOptions(buffer_bytes=1)  # each tensor that is staged is a buffer
        installer = Installer(handle, engine, options, teller=handle)
        peer.register({fqn: torch.zeros_like(one) for fqn, one in weights_of(0).items()})
        publish(trainer, 1)
        peer.replicate(1)
        installer.install(1, 20)
        assert engine.answers() == answers(weights_of(1))
        publish(trainer, 2)
        if others_have == 2 and not staged:
            peer.update()
        # Streams might begin at the peer, if that had it before.
        kill(trainer, engine, peer.update if others_have == 2 and staged else lambda: None)
        if others_have == 2:
            installer.install(2, 20)
        else:
            with pytest.raises(TorchRosError, match="'trainer'|version 2"):
                installer.install(2, 20)
        assert "lost 'trainer'" in caplog.text
        assert engine.answers() == answers(weights_of(others_have))
        assert installer.active == others_have
        told = peer.installs()["engine"]
        assert told.active.version == others_have
        assert (told.rejected and told.rejected.ref.version) == (2 if others_have == 1 else None)
        publish(started.start(TRAINER, etcd_endpoint, model, talks=True), 3)
        installer.install("latest", 20)
        assert engine.answers() == answers(weights_of(3))
