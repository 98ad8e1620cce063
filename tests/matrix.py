"""`make test-matrix`: the tests closest to torch, under the Pythons and torches that are claimed.

Each row is a Python and a torch, as in "3.11:2.13.0". "lowest" stands for the lower bounds of
pyproject.toml, of torch and of every other dependency; "newest" for the newest torch that pip has.
A row has a venv of its own, which is removed before the next one begins: with CUDA it takes 6 GB.
What no row chooses has the versions of constraints.txt.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# They start no torchrun, and take minutes.
TESTS = (
    "weights",
    "contract",
    "p2p",
    "dcp",
    "face/test_handle.py",
    "shard/test_chunked.py",
    "transfer/test_registered.py",
)
FREE = {"torch", "numpy"}  # of constraints.txt: one numpy is not there for every Python and torch
VERSIONS = """
import sys, importlib.metadata as m
print("row: Python", sys.version.split()[0],
      *(f"{name} {m.version(name)}" for name in sys.argv[1:]), flush=True)
"""


def main(rows: list[str]) -> int:
    results = {row: run(*row.split(":")) for row in rows}
    for row, result in results.items():
        print(f"{row:14} {result}")
    return int(any(result != "passed" for result in results.values()))


def run(python: str, torch: str) -> str:
    interpreter = find_python(python)
    if interpreter is None:
        return f"not run: no python{python} on PATH or under pyenv"
    with tempfile.TemporaryDirectory(prefix="torch-ros-matrix-") as name:
        venv = Path(name, "venv")
        constraints = Path(name, "constraints.txt")
        constraints.write_text("\n".join(constrained(torch)))
        subprocess.run([interpreter, "-m", "venv", venv], check=True)
        # From a copy, so that nothing is left in the tree that another row could take.
        tree = Path(name, "tree")
        for part in ("torch_ros", "tests", "examples", "docs"):
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        for part in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / part, tree)
        install = [venv / "bin/pip", "install", "--disable-pip-version-check"]
        install += ["--progress-bar", "off", "--constraint", constraints]
        if subprocess.run([*install, "--editable", ".[local,test]"], cwd=tree).returncode:
            return "not installed"
        subprocess.run([venv / "bin/python", "-c", VERSIONS, *dependencies()], check=True)
        tests = [f"tests/{test}" for test in TESTS]
        tested = subprocess.run([venv / "bin/python", "-m", "pytest", "-q", *tests], cwd=tree)
        return "passed" if tested.returncode == 0 else "failed"


def find_python(version: str) -> str | None:
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for found in (f"python{version}", *map(str, pyenv)):
        path = shutil.which(found)
        # A shim of pyenv is there for versions that are not switched on, too.
        if path and subprocess.run([path, "-m", "venv", "-h"], capture_output=True).returncode == 0:
            return path
    return None


def constrained(torch: str) -> list[str]:
    lines = (ROOT / "constraints.txt").read_text()
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", lines, re.MULTILINE))
    chosen: dict[str, str] = {name: pin for name, pin in pinned.items() if name not in FREE}
    match torch:
        case "lowest":
            chosen |= dependencies()
        case "newest":
            pass
        case _:
            chosen["torch"] = torch
    return [f"{name}=={version}" for name, version in chosen.items()]


def dependencies() -> dict[str, str]:
    """Of the package itself: the lower bounds, by their names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return dict(line.split(">=") for line in project["dependencies"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
