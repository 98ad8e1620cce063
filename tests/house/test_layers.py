"""The arrows of the house, and one door per vendor, read from the source."""

import ast
import sys
from pathlib import Path

import pytest
from trees import nodes

pytestmark = pytest.mark.xdist_group("trees")

PACKAGE = Path(__file__).parents[2] / "torch_ros"
GROUND = {
    "allocation",
    "boxes",
    "digests",
    "errors",
    "printable",
    "deadline",
    "spans",
    "environment",
    "arguments",
    "costs",
    "release",
}
ARROWS = {  # folder -> what it may import besides itself, the ground and the standard library
    "local": set(),
    "memory": {"store", "p2p", "msgspec"},
    "store": {"local", "msgspec"},
    "store/distributed": {"local", "store", "torch"},
    "protocol": {"store", "msgspec"},
    "weights": {"torch", "numpy", "msgspec"},
    "codec": {"weights", "torch", "numpy", "msgspec"},
    "p2p": {"numpy", "msgspec"},
    "channels": {"p2p", "numpy", "msgspec"},
    "transfer": {"weights", "p2p", "torch", "numpy", "msgspec"},
    "shard": {"store", "protocol", "weights", "p2p", "transfer", "torch"},
    "features": set(),
    "copies": {"weights", "p2p", "transfer", "torch"},
    "face": {
        "copies",
        "features",
        "fleet",
        "memory",
        "store",
        "protocol",
        "weights",
        "p2p",
        "transfer",
        "shard",
        "torch",
        "tqdm",
    },
    "checkpoints": {"public", "weights", "torch"},
    "bucket": {"checkpoints", "codec", "public", "weights", "torch", "numpy", "msgspec"},
    "fleet": {"features", "p2p", "protocol", "store"},
    "metrics": {"bucket", "features", "fleet", "protocol", "shard"},
    "demo": {"public", "torch"},
    "cli": {
        "demo",
        "bucket",
        "checkpoints",
        "face",
        "features",
        "fleet",
        "public",
        "metrics",
        "p2p",
        "protocol",
        "store",
        "transfer",
        "msgspec",
        "numpy",
        "rich",
    },
    "dcp": {"copies", "face", "features", "shard", "transfer", "weights", "torch"},
    "integrations": {"bucket", "checkpoints", "public", "torch"},
    "integrations/vllm": {"public", "integrations", "torch"},
}
ON_THE_GROUND = {"errors", "printable", "numpy"}  # what the ground's modules may import
FEATURE = {
    "channels",
    "store",
    "protocol",
    "weights",
    "codec",
    "copies",
    "p2p",
    "transfer",
    "shard",
    "torch",
    "numpy",
    "msgspec",
}
ROOT = {"__init__", "__main__"}  # may name everything; "public" in an arrow is `import torch_ros`
LAZY = {  # what a file starts when it is asked to, and does not stand on
    "store/__init__.py": ("torch_ros.store.distributed",),
    "face/opening.py": ("torch_ros.metrics",),
    "features/fallback/stored.py": ("torch_ros.bucket",),
    "store/endpoint.py": ("torch_ros.memory",),
}
DOORS = {
    "argcomplete": "cli/completing.py",
    "cryptography": "channels/meeting.py",
    "pyetcd": "store/member.py",
    "grpc": "store/etcd.py",
    "huggingface_hub": "bucket/hub.py",
    "nixl": "p2p/nixl.py",
    "obstore": "bucket/objects.py",
    "opentelemetry": "features/tracing/spans.py",
    "prometheus_client": "metrics",
    "safetensors": "checkpoints",
    "starlette": "cli/web.py",
    "textual": "cli/top.py",
    "transformers": "integrations/names.py",
    "uvicorn": "cli/web.py",
    "verl": "integrations/verl.py",
    "vllm": "integrations/vllm",
}


def imported(path):
    for node in nodes(path.read_text()):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def allowed_in(folder):
    """The imports that a folder may have. A feature knows the core, and no other feature."""
    if folder.startswith("features/"):
        return {folder, *FEATURE, *GROUND}
    return {folder, *ARROWS[folder], *GROUND}


def folder_of(name):
    """The folder that a name of ours comes from; "" for the root."""
    parts = name.split(".")[1:]
    if parts[0] == "features" and len(parts) > 2:
        return "/".join(parts[:2])
    paths = ("/".join(parts[:depth]) for depth in (2, 1))
    return next((path for path in paths if path in ARROWS), "")


def broken_arrows(package):
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package)
        folder = str(file.parent)
        if folder == "." and file.stem in ROOT:
            continue
        if folder == "." and file.stem not in GROUND:
            yield f"{file} lies in the root; only the package's own and the ground may"
            continue
        allowed = ON_THE_GROUND if folder == "." else allowed_in(folder)
        for name in imported(path):
            top, *rest = name.split(".")
            if top in DOORS and DOORS[top] not in {str(file), folder}:
                yield f"{file} imports {name}; only {DOORS[top]} may"
            elif top in DOORS or name.startswith(LAZY.get(str(file), (" ",))):
                continue
            elif top == "torch_ros":
                is_ground = bool(rest) and rest[0] in GROUND
                target = rest[0] if is_ground else folder_of(name) if rest else "public"
                is_feature = target.startswith("features/") and "features" in allowed
                if target not in allowed and not is_feature:
                    yield f"{file} imports {name}"
            elif top not in {*allowed, *sys.stdlib_module_names}:
                yield f"{file} imports {name}"


def files_that_write_words():
    """The files that call `serve` or `void` of a mailbox."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in nodes(path.read_text()):
            is_write = isinstance(node, ast.Attribute) and node.attr in {"serve", "void"}
            if is_write and ast.unparse(node.value).endswith("mailbox"):
                yield str(path.relative_to(PACKAGE))


def test_one_file_decides_when_the_word_is_set_and_cleared():
    told = {"transfer/feed.py"}  # the blocks of a read, as they come
    copies = {"features/retention/host_copies.py"}  # each has a mailbox, with one content
    assert set(files_that_write_words()) == {"shard/word.py", *told, *copies}


def test_imports_follow_the_arrows():
    assert not list(broken_arrows(PACKAGE))


def test_a_broken_arrow_is_seen(tmp_path):
    for folder in ("store/distributed", "protocol", "transfer"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "loose.py").write_text("")
    (tmp_path / "spans.py").write_text("import numpy, torch\n")
    (tmp_path / "protocol/keys.py").write_text("import torch\nfrom nixl import nixl_agent\n")
    (tmp_path / "store/distributed/lease.py").write_text("import torch, numpy\n")
    (tmp_path / "store/kv.py").write_text("from torch_ros.protocol.keys import Keys\n")
    (tmp_path / "transfer/card.py").write_text("import torch_ros\nimport torch_ros.store.kv\n")
    assert list(broken_arrows(tmp_path)) == [
        "loose.py lies in the root; only the package's own and the ground may",
        "protocol/keys.py imports torch",
        "protocol/keys.py imports nixl.nixl_agent; only p2p/nixl.py may",
        "spans.py imports torch",
        "store/distributed/lease.py imports numpy",
        "store/kv.py imports torch_ros.protocol.keys.Keys",
        "transfer/card.py imports torch_ros",
        "transfer/card.py imports torch_ros.store.kv",
    ]


def private_imports(package):
    """Names with an underscore that one folder takes from another."""
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package)
        for name in imported(path):
            *_, last = name.split(".")
            is_private = last.startswith("_") and not last.startswith("__")
            if name.startswith("torch_ros") and is_private and folder_of(name) != str(file.parent):
                yield f"{file} imports {name}"


def public_classes(package):
    for path in sorted(package.rglob("*.py")):
        for node in nodes(path.read_text())[0].body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, str(path.relative_to(package))


def twins(package):
    """Names of public classes, each with the files that have one."""
    files = {}
    for name, file in public_classes(package):
        files.setdefault(name, []).append(file)
    return {name: homes for name, homes in files.items() if len(homes) > 1}


def test_what_is_private_stays_in_its_folder(tmp_path):
    assert not list(private_imports(PACKAGE))
    (tmp_path / "shard").mkdir()
    (tmp_path / "shard/core.py").write_text("from torch_ros.protocol.calls import _end, __doc__\n")
    assert list(private_imports(tmp_path)) == [
        "shard/core.py imports torch_ros.protocol.calls._end"
    ]


def test_a_name_of_a_class_means_one_thing(tmp_path):
    assert twins(PACKAGE) == {}
    (tmp_path / "a.py").write_text("class Group: ...\nclass _Own: ...\n")
    (tmp_path / "b.py").write_text("class Group: ...\nclass _Own: ...\n")
    assert twins(tmp_path) == {"Group": ["a.py", "b.py"]}
