"""The documents say what is there, and their code runs as printed."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torch_ros
import torch_ros.dcp
import torch_ros.store

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_readmes_code_runs_as_printed():
    code = "\n".join(FENCE.findall((ROOT / "README.md").read_text()))
    assert "ROSReader" in code
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module", [torch_ros, torch_ros.dcp, torch_ros.store], ids=lambda m: m.__name__
)
def test_what_is_exported_is_documented_and_mentioned_in_the_readme(module):
    readme = (ROOT / "README.md").read_text()
    for name in module.__all__:
        thing = getattr(module, name)
        assert inspect.getdoc(thing), name
        assert name in readme or name == "ShardHandle", name
        if inspect.isclass(thing):
            for attribute, value in vars(thing).items():
                is_public = not attribute.startswith("_") and callable(value)
                assert not is_public or value.__doc__ or attribute in vars(thing.__base__), (
                    f"{name}.{attribute}"
                )


def test_importing_the_package_is_light():
    code = "import sys, torch_ros, torch_ros.store.local; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_the_readme_has_the_two_commands_and_the_makefile_has_them():
    makefile = (ROOT / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command}" in (ROOT / "README.md").read_text()
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_every_module_imports_and_says_what_it_is():
    for path in sorted((ROOT / "torch_ros").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if path.stat().st_size:
            assert importlib.import_module(name).__doc__, name
