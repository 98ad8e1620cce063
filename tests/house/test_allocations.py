"""Tensors of the library's own do not follow torch's default device, nor its default dtype."""

import ast
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors
from trees import nodes

pytestmark = pytest.mark.xdist_group("trees")

ROOT = Path(__file__).parents[2]
CONSTRUCTORS = {function.__name__ for function in _device_constructors()}


OF_ONE_DTYPE = {"arange"}  # of the numbers that it is given


def undetermined(folder):
    """The calls that leave the device of a new tensor, or its dtype, to the program's defaults."""
    for path in sorted(folder.rglob("*.py")):
        for call in nodes(path.read_text()):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            name, given = call.func.attr, {keyword.arg for keyword in call.keywords}
            if name not in CONSTRUCTORS:
                continue
            if ast.unparse(call.func.value) not in {"torch", "torch.fft"}:
                continue
            wanted = {"device"} if name in OF_ONE_DTYPE else {"device", "dtype"}
            for each in sorted(wanted - given):
                yield f"{path.relative_to(folder)}:{call.lineno}: torch.{name} names no {each}"


def renamed(folder):
    """Constructors under names that `undetermined` does not see."""
    for path in sorted(folder.rglob("*.py")):
        for node in nodes(path.read_text()):
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                for alias in node.names:
                    if alias.name in CONSTRUCTORS:
                        yield f"{path.relative_to(folder)} imports {alias.name}"


def test_every_allocation_names_its_device_and_its_dtype():
    assert list(undetermined(ROOT / "torch_ros")) == []
    assert list(renamed(ROOT / "torch_ros")) == []


def test_an_allocation_that_names_none_is_seen(tmp_path):
    lines = ["import torch", "from torch import zeros, Tensor", "torch.empty(3, dtype=torch.uint8)"]
    lines += ['torch.full((3,), 1.0, device="cpu")', "torch.arange(3)", "torch.stack([])"]
    (tmp_path / "a.py").write_text("\n".join(lines))
    assert list(undetermined(tmp_path)) == [
        "a.py:3: torch.empty names no device",
        "a.py:4: torch.full names no dtype",
        "a.py:5: torch.arange names no device",
    ]
    assert list(renamed(tmp_path)) == ["a.py imports zeros"]
