"""`make package`: the sdist and its wheel, tried in an environment that has nothing else of ours.

The sdist is made from the files that git knows, and the wheel from the sdist. The environment sees
the libraries of this one, but not the clone. Usage: python tests/package.py [DIRECTORY]
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
LIBRARIES = Path(torch.__file__).parents[1]
BACKEND = "import sys; from setuptools.build_meta import *; globals()[sys.argv[1]](sys.argv[2])"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{command} in {cwd} fails:\n{done.stdout}{done.stderr}")
    return done.stdout


def tracked() -> list[str]:
    listed = run("git", "ls-files", cwd=ROOT).splitlines()
    return [path for path in listed if (ROOT / path).is_file()]


def build(directory: Path) -> tuple[Path, Path]:
    """An sdist, and a wheel that is made from it."""
    clone, made = directory / "clone", directory / "dist"
    for path in tracked():
        (clone / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, clone / path)
    run(sys.executable, "-c", BACKEND, "build_sdist", made, cwd=clone)
    [sdist] = made.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(directory / "unpacked")  # 3.11.2 has no `filter`; it is our own
    [unpacked] = (directory / "unpacked").iterdir()
    run(sys.executable, "-c", BACKEND, "build_wheel", made, cwd=unpacked)
    [wheel] = made.glob("*.whl")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """The wheel has the package and nothing else; the sdist also all that README.md leads to."""
    package = {path for path in tracked() if path.startswith("torch_ros/")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        described = Parser().parsestr(archive.read(metadata).decode())
    found = {name for name in names if ".dist-info/" not in name}
    assert found == package, f"the wheel has {found ^ package} too much, or too little"
    assert described["License-File"] == "LICENSE"
    assert described["Description-Content-Type"] == "text/markdown"
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    links = set(re.findall(r"\]\(([\w./-]+)[)#]", described.get_payload()))
    assert package | links <= inside, f"the sdist lacks {sorted((package | links) - inside)}"


def installed(wheel: Path, directory: Path) -> Path:
    """The Python of an environment with the wheel."""
    home = directory / "environment"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    [libraries] = home.glob("lib/python3.*/site-packages")
    # A path alone: files there that end in .pth, as that of an editable install, are not read.
    (libraries / "below.pth").write_text(f"{LIBRARIES}\n")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=directory)
    return python


def try_it(python: Path, directory: Path) -> None:
    empty = directory / "empty"
    empty.mkdir()
    where = run(python, "-c", "import torch_ros; print(torch_ros.__file__)", cwd=empty)
    assert where.startswith(str(directory)), where
    code = "\n".join(FENCE.findall((ROOT / "README.md").read_text()))
    run(python, "-W", "ignore", "-c", code, cwd=empty)
    command = python.parent / "torch-ros"
    assert "push" in run(command, "--help", cwd=empty)
    # The etcd of the demo ends with its directory.
    demo = ("env", f"TORCH_ROS_LOCAL_DIR={directory / 'etcd'}", python, "-m", "torch_ros", "demo")
    assert "goes on from version" in run(*demo, cwd=empty)


def main(directory: Path) -> None:
    sdist, wheel = build(directory)
    check_contents(sdist, wheel)
    try_it(installed(wheel, directory), directory)
    print(f"{sdist.name} and {wheel.name} ({wheel.stat().st_size:,} bytes): installed and tried")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
