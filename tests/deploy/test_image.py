"""The image: what a linter says of its file, and what its commands make."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_ros.release import RELEASE

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "image" / "Dockerfile"
LIBRARIES = Path(torch.__file__).parents[1]
INSTRUCTION = re.compile(r"^([A-Z]+) (.+)$", re.MULTILINE)


def stages():
    """The instructions of each stage: name and rest, on one line."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [
        INSTRUCTION.findall(stage) for stage in re.split(r"^FROM .+$", text, flags=re.MULTILINE)[1:]
    ]


def of(stage, name):
    return [rest for each, rest in stage if each == name]


def lint(path):
    program = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed: extra `deploy`")
    return subprocess.run([program, path], capture_output=True, text=True, timeout=60)


def test_a_linter_finds_no_fault():
    done = lint(FILE)
    assert done.returncode == 0, done.stdout


def test_the_linter_would_find_one(tmp_path):
    (tmp_path / "Dockerfile").write_text(FILE.read_text().replace("# hadolint ignore=DL3008\n", ""))
    assert "DL3008" in lint(tmp_path / "Dockerfile").stdout


def test_it_runs_as_a_user_who_is_not_root():
    _, last = stages()
    assert of(last, "USER") == ["1000"]
    [made] = of(last, "RUN")
    assert "useradd --uid 1000 " in made


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_its_commands_install_the_package_with_all_tools(tmp_path):
    """From the files that it copies, with what is installed here in the place of downloads."""
    build, last = stages()
    context, home = tmp_path / "src", tmp_path / "venv"
    context.mkdir()

    def run(*command, cwd=context):
        bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            command, cwd=cwd, env=bare, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for name, rest in build:
        if name == "COPY":
            *files, _ = rest.split()
            for each in files:
                copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copy2
                copy(ROOT / each, context / each)
        elif name == "RUN":
            if not home.exists():
                run(sys.executable, "-m", "venv", home)
                [libraries] = home.glob("lib/python3.*/site-packages")
                # A path alone: the editable install of this clone is not seen.
                (libraries / "below.pth").write_text(f"{LIBRARIES}\n")
            run(
                "sh",
                "-ec",
                rest.replace("python3 -m venv /opt/venv", "true").replace("/opt/venv", str(home)),
            )
    [command] = of(last, "CMD")
    assert command == '["torch-ros", "--help"]'
    assert "push" in run(home / "bin" / "torch-ros", "--help")
    assert run(home / "bin" / "torch-ros", "--version") == f"torch-ros {RELEASE}\n"
    where = run(
        home / "bin" / "python", "-c", "import torch_ros; print(torch_ros.__file__)", cwd=home
    )
    assert where.startswith(str(home))
    copied = " ".join(of(last, "COPY"))
    assert all(f"examples/{name}.py" in copied for name in ("follow", "probed"))
