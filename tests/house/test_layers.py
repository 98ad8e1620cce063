"""The arrows of the house, and one door per vendor, read from the source."""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "torch_ros"
BELOW = {"arguments", "errors", "store", "weights", "p2p"}
HANDLE = {
    *("identity", "exchange", "reading", "registered", "staged", "copies", "beginnings"),
    *("closing", "filling", "handle"),
}
ARROWS = {  # part -> what it may import besides itself and the standard library
    "errors": set(),
    "arguments": {"errors"},
    "store": {"errors", "msgspec"},
    "weights": {"errors", "torch", "numpy", "msgspec"},
    "p2p": {"errors", "numpy", "msgspec"},
    "identity": {"errors", "torch"},
    "exchange": {*BELOW, "numpy", "msgspec"},
    "reading": {*BELOW, "exchange", "registered", "torch", "numpy"},
    "registered": {*BELOW, "torch", "numpy"},
    "staged": {*BELOW, "registered", "torch"},
    "copies": {*BELOW, "exchange", "registered", "torch"},
    "closing": {"errors", "store"},
    "progress": set(),
    "beginnings": {"errors", "store"},
    "filling": {*BELOW, "exchange", "reading", "registered", "progress", "torch"},
    "handle": {*BELOW, *HANDLE, "torch"},
    "dcp": {"errors", "weights", "registered", "staged", "beginnings", "handle", "torch"},
    "integrations": {"errors", "handle", "dcp", "torch"},
    "cli": {"errors", "handle"},
}
# The records know no tensors; what torch.distributed keeps in etcd is the exception.
TORCH_IN_STORE = {"store/torch_store.py", "store/rendezvous.py", "store/torchrun.py"}
DOORS = {"pyetcd": "store/etcd.py", "grpc": "store/etcd.py", "nixl": "p2p/nixl.py"}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "torch_ros":
            yield from (f"torch_ros.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def broken_arrows(package):
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package)
        part = file.parts[0].removesuffix(".py")
        if part == "__init__":
            continue  # the public face may name everything
        for name in imported(path):
            top, *rest = name.split(".")
            target = rest[0] if top == "torch_ros" else top
            if top in DOORS:
                if str(file) != DOORS[top]:
                    yield f"{file} imports {name}; only {DOORS[top]} may"
            elif target == "torch" and str(file) in TORCH_IN_STORE:
                continue
            elif target not in {part, *ARROWS[part], *sys.stdlib_module_names}:
                yield f"{file} imports {name}"


def test_imports_follow_the_arrows():
    assert not list(broken_arrows(PACKAGE))


def test_a_broken_arrow_is_seen(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "keys.py").write_text("import torch\nfrom nixl import nixl_agent\n")
    (tmp_path / "store" / "rendezvous.py").write_text("import torch, numpy\n")
    assert list(broken_arrows(tmp_path)) == [
        "store/keys.py imports torch",
        "store/keys.py imports nixl; only p2p/nixl.py may",
        "store/rendezvous.py imports numpy",
    ]
