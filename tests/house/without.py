"""The package without one of its features: what is left imports, publishes, replicates and updates.

python tests/house/without.py [FEATURE...]            each of them, in a process of its own; all
python tests/house/without.py --together              all of them at once
python tests/house/without.py --tests [FEATURE...]    runs the fast tests of the rest; minutes each

A feature is a folder of torch_ros/features, one of tests/features, and the lines elsewhere that
bear its mark: one that ends in `# feature NAME`, and those from `# feature NAME {` to
`# } NAME`. A file of the tests that makes no sense without it says so in a line
`# needs features NAME, NAME`.
"""

import gc
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "torch_ros"
FEATURES = sorted(path.parent.name for path in PACKAGE.glob("features/*/__init__.py"))
NEEDS = re.compile(r"^# needs features (.*)$", re.MULTILINE)
# Trees of the whole, documents, engines, and tests that take the cores for themselves.
TRIED_WITH_ALL = ("house", "engines", "processes", "history", "wan", "gpu")
SLOW = (  # to import
    *("torch.distributed.checkpoint", "safetensors.torch", "pyetcd", "cryptography.x509"),
    *(
        "cryptography.hazmat.primitives.ciphers.aead",
        "cryptography.hazmat.primitives.asymmetric.ec",
    ),
    *("textual.app", "textual.widgets", "starlette.applications", "uvicorn", "prometheus_client"),
)
EXTRAS = {"verl", "vllm"}  # which no environment of the tests has


def stripped(text: str, feature: str) -> str:
    """The text without the lines that bear the feature's mark."""
    within = rf"^[ ]*# feature {feature} \{{\n.*?^[ ]*# \}} {feature}\n"
    text = re.sub(within, "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(rf"^.*# feature {feature}\n", "", text, flags=re.MULTILINE)


def remove(feature: str, package: Path) -> None:
    """Remove a feature from a copy of the package."""
    shutil.rmtree(package / "features" / feature)
    for path in package.rglob("*.py"):
        before = path.read_text()
        if (after := stripped(before, feature)) != before:
            path.write_text(after)


def remove_tests(feature: str, tests: Path) -> None:
    """Remove a feature from a copy of the tests."""
    shutil.rmtree(tests / "features" / feature, ignore_errors=True)
    for path in tests.rglob("*.py"):
        text = path.read_text()
        needs = NEEDS.search(text)
        if needs and feature in needs[1].split(", "):
            path.unlink()
        elif (after := stripped(text, feature)) != text:
            path.write_text(after)


def run_tests(feature: str) -> int:
    """The exit status of the fast tests, in a copy of the repository without the feature."""
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".git", ".venv*", "site", "__pycache__", "build")
        copy = shutil.copytree(PACKAGE.parent, Path(folder) / "torch_ros", ignore=ignored)
        remove(feature, copy / "torch_ros")
        remove_tests(feature, copy / "tests")
        ignores = [f"--ignore=tests/{name}" for name in TRIED_WITH_ALL]
        command = [sys.executable, "-m", "pytest", "-q", *ignores]
        surroundings = {**os.environ, "PYTHONPATH": str(copy)}
        return subprocess.run(
            [*command, "-m", "not long and not nightly"], cwd=copy, env=surroundings
        ).returncode


def modules(name: str) -> Iterator[str]:
    package = importlib.import_module(name)
    for info in pkgutil.walk_packages(package.__path__, f"{name}."):
        if not EXTRAS & set(info.name.split(".")):
            yield info.name


def transports(*features: str) -> tuple[str, ...]:
    """To use without them: NIXL, which takes a second, only if one stands around that."""
    chosen = (PACKAGE / "face/choose.py").read_text()
    is_around = any(f"# feature {feature}" in chosen for feature in features)
    return ("memory", "ucx") if is_around else ("memory",)


def use(transport: str) -> None:
    """Import all there is, publish, replicate and update."""
    import torch

    for name in modules("torch_ros"):
        if not name.endswith("__main__"):
            importlib.import_module(name)
    import torch_ros

    source, target = torch.arange(5.0), torch.zeros(5)
    where = f"memory://without-{transport}"
    trainer = torch_ros.open("m", endpoint=where, replica="t", transport=transport)
    rollout = torch_ros.open("m", endpoint=where, replica="r", transport=transport)
    trainer.register({"w": source})
    rollout.register({"w": target})
    trainer.publish(1)
    assert rollout.replicate() == 1
    trainer.unpublish()
    source += 1
    trainer.publish(2)
    assert rollout.update()
    assert torch.equal(source, target)
    rollout.close()
    trainer.close(linger_s=0)


def undefined(package: Path) -> str:
    """Names that functions use and nothing defines: a mark is missing. No call may come to them."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--quiet"]
    rule = ["--select", "F821", "--output-format", "concise", package]
    return subprocess.run([*command, *rule], capture_output=True, text=True).stdout


def try_without(*features: str) -> int:
    """The exit status of a child that uses the package without these features."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "torch_ros"
        shutil.copytree(PACKAGE, copy)  # with what is compiled already
        for feature in features:
            remove(feature, copy)
        if found := undefined(copy):
            print(found, file=sys.stderr)
            return 1
        if (child := os.fork()) == 0:
            status = 1
            try:
                sys.path.insert(0, folder)
                for transport in transports(*features):
                    use(transport)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)  # the parent's cleanup is not the child's
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(features: list[str]) -> int:
    if features[:1] == ["--tests"]:
        failed = [feature for feature in features[1:] or FEATURES if run_tests(feature)]
        print(f"fail without: {failed or 'none'}")
        return len(failed)
    for name in SLOW:
        importlib.import_module(name)  # once for all children
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_ros"]:
        del sys.modules[name]  # torch loads what is installed as a rendezvous of its own
    sys.path[:] = [path for path in sys.path if not (Path(path or ".") / "torch_ros").exists()]
    sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in repr(each).lower()]
    gc.freeze()  # or each child looks at all of it, and has it written anew
    if features == ["--together"]:
        status = try_without(*FEATURES)
        print(f"all: {'fails' if status else 'stands'}")
        return status
    failed = [feature for feature in features if try_without(feature)]
    for feature in features:
        print(f"{feature}: {'fails' if feature in failed else 'stands'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or FEATURES))
