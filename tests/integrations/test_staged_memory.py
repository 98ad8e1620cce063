"""How much memory an update takes that goes through an engine's own loader."""

import subprocess
import sys

import pytest
import torch

import torch_ros

MIB = 1 << 20
TENSOR_BYTES, COUNT = 4 * MIB, 32
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

endpoint, model, buffer_bytes = *sys.argv[1:3], int(sys.argv[3])


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
    options = InstallOptions(direct="never", buffer_bytes=buffer_bytes)
    installer = Installer(handle, engine, options)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = bytes_now("VmRSS")
    report = installer.install("latest", 60)
    assert len(report.staged) == len(list(engine.parameters()))
    for number, parameter in enumerate(engine.parameters()):
        assert parameter[0] == number == parameter[-1]
    print(bytes_now("VmHWM") - before)
"""


@pytest.mark.parametrize("buffer_bytes", [8 * MIB, 1 * MIB, COUNT * TENSOR_BYTES])
def test_staged_tensors_take_two_buffers_or_the_largest_ones(etcd_endpoint, tmp_path, buffer_bytes):
    """With buffers as large as the model, all of it: so the bound of the others is a bound."""
    model = f"staged-{tmp_path.name}-{buffer_bytes}"
    tensors = {f"t{n:02d}": torch.full((TENSOR_BYTES // 4,), float(n)) for n in range(COUNT)}
    with torch_ros.open(model, endpoint=etcd_endpoint, replica="trainer", linger_s=0) as trainer:
        trainer.register(tensors)
        trainer.publish(1)
        program = [sys.executable, "-c", ENGINE, etcd_endpoint, model, str(buffer_bytes)]
        said = subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    grown = int(said.stdout)
    print(f"buffers of {buffer_bytes / MIB:.0f} MiB: {grown / MIB:.1f} MiB")
    bound = 2 * max(buffer_bytes, TENSOR_BYTES) + SLACK_BYTES
    if buffer_bytes < COUNT * TENSOR_BYTES:
        assert grown <= bound
    else:
        assert grown > COUNT * TENSOR_BYTES
