"""How much memory an update takes, in place and through an engine's own loader."""

import pytest
import torch

import torch_ros

MIB = 1 << 20
TENSOR_BYTES, COUNT = 4 * MIB, 32
IN_PLACE_BYTES = 12 * MIB
SLACK_BYTES = 16 * MIB  # Python, a connection, what the recording leaves

ENGINE = """
import re
import sys
from pathlib import Path

import torch
from torch import nn

import torch_ros
from torch_ros.integrations.installation import Installer, InstallOptions
from torch_ros.integrations.landing_plan import state_of
from torch_ros.integrations.recording import record

endpoint, model, direct, buffer_bytes = *sys.argv[1:4], int(sys.argv[4])


class Engine(nn.Module):
    def __init__(self, contents):
        super().__init__()
        for fqn, (dtype, shape) in contents.items():
            part = nn.Module()
            part.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            self.add_module(fqn, part)

    def state(self):
        return state_of(self)

    def record(self, contents):
        return record(self, contents, lambda weights: self.load((), weights))

    def obstacles(self, recording):
        return {}

    def load(self, modules, weights):
        for fqn, weight in weights:
            self.get_submodule(fqn).weight.data.copy_(weight)


def bytes_now(name):
    return int(re.search(rf"{name}:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) << 10


torch.set_num_threads(1)
with torch_ros.open(model, endpoint=endpoint, linger_s=0) as handle:
    engine = Engine(handle.contents("latest").tensors)
    options = InstallOptions(direct=direct, buffer_bytes=buffer_bytes)
    installer = Installer(handle, engine, options)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = bytes_now("VmRSS")
    report = installer.install("latest", 60)
    came = {"never": report.staged, "auto": report.direct}[direct]
    assert len(came) == len(list(engine.parameters()))
    for number, parameter in enumerate(engine.parameters()):
        assert parameter[0] == number == parameter[-1]
    print(bytes_now("VmHWM") - before, flush=True)
"""


@pytest.fixture
def grown(etcd_endpoint, started, tmp_path):
    """By how many bytes a process grows at most that installs a version."""

    def grown(direct, buffer_bytes):
        model = f"memory-{tmp_path.name}"
        tensors = {f"t{n:02d}": torch.full((TENSOR_BYTES // 4,), float(n)) for n in range(COUNT)}
        place = {"endpoint": etcd_endpoint, "linger_s": 0}
        with torch_ros.open(model, replica="trainer", **place) as trainer:
            trainer.register(tensors)
            trainer.publish(1)
            engine = started.start(ENGINE, etcd_endpoint, model, direct, buffer_bytes, talks=True)
            said = int(engine.hear())
            engine.finish()
        print(f"{direct}, buffers of {buffer_bytes / MIB:.0f} MiB: {said / MIB:.1f} MiB")
        return said

    return grown


@pytest.mark.long
def test_what_is_read_in_place_takes_no_memory(grown):
    assert grown("auto", COUNT * TENSOR_BYTES) <= IN_PLACE_BYTES


@pytest.mark.parametrize("buffer_bytes", [8 * MIB, 1 * MIB, COUNT * TENSOR_BYTES])
@pytest.mark.long
def test_staged_tensors_take_two_buffers_or_the_largest_ones(grown, buffer_bytes):
    """With buffers as large as the model, all of it: so the bound of the others is a bound."""
    bound = 2 * max(buffer_bytes, TENSOR_BYTES) + SLACK_BYTES
    if buffer_bytes < COUNT * TENSOR_BYTES:
        assert grown("never", buffer_bytes) <= bound
    else:
        assert grown("never", buffer_bytes) > COUNT * TENSOR_BYTES
