"""Tab after `torch-ros`, as a shell asks for it."""

import os
import shlex
import subprocess
import sys
import uuid
from contextlib import closing
from pathlib import Path

import pytest
from crowd import Crowd

from torch_ros.cli import completing
from torch_ros.store.endpoint import connect

SCRIPTS = Path(sys.executable).parent


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if name != "TORCH_ROS_ENDPOINT"}
    return {**kept, "PATH": f"{SCRIPTS}:{os.environ['PATH']}", **more}


@pytest.fixture
def tabbed(tmp_path):
    """The words that may come next in a line."""

    def ask(line, **more):
        out = tmp_path / "candidates"
        told = {
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(out),
            "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            **more,
        }
        command = [sys.executable, "-m", "torch_ros"]
        subprocess.run(command, env=environment(**told), cwd=tmp_path, check=True, timeout=60)
        return set(filter(None, out.read_text().split("\v")))

    return ask


def test_bash_completes_commands():
    script = f"""
        eval "$(register-python-argcomplete torch-ros)"
        torch-ros() {{ {shlex.quote(sys.executable)} -m torch_ros "$@"; }}
        COMP_LINE='torch-ros do' COMP_POINT=12 COMP_WORDS=(torch-ros do) COMP_CWORD=1
        _python_argcomplete torch-ros
        echo "${{COMPREPLY[@]}}"
    """
    ran = subprocess.run(
        ["bash", "-c", script], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (ran.stdout.strip(), ran.stderr) == ("doctor", "")


@pytest.mark.parametrize(
    "line, found",
    [
        ("torch-ros w", {"web", "why"}),
        ("torch-ros archive policy s3://b --en", {"--encoding"}),
        ("torch-ros pull policy 7 out --format ", {"safetensors", "dcp"}),
        ("torch-ros verify policy 7 --against f", {"folder/"}),
        ("torch-ros ls po", set()),  # no etcd, and none is started
    ],
)
def test_a_line_is_completed(tabbed, tmp_path, line, found):
    (tmp_path / "folder").mkdir()
    assert tabbed(line, TORCH_ROS_LOCAL_DIR=str(tmp_path)) == found


def test_names_come_from_etcd(tabbed, etcd_endpoint):
    model = "m-" + uuid.uuid4().hex[:8]
    with closing(connect(etcd_endpoint, timeout_s=10)) as kv:
        for name in (model, f"{model}-\x1b[2J"):
            crowd = Crowd(kv, name)
            crowd.join("trainer")
            crowd.commit()
    asked = f"torch-ros --endpoint {etcd_endpoint}"
    assert tabbed(f"{asked} ls {model}") == {model}
    assert tabbed(f"{asked} doctor --links {model[:5]}") >= {model}
    assert tabbed(f"{asked} why {model} tr") == {"trainer"}


def test_nothing_is_completed_where_argcomplete_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert completing.complete() == completing.NOT_INSTALLED


def test_a_command_does_without_argcomplete():
    code = """if True:
        import sys
        from torch_ros.__main__ import main
        sys.argv[1:] = ["--version"]
        try:
            main()
        finally:
            assert "argcomplete" not in sys.modules
        """
    ran = subprocess.run([sys.executable, "-c", code], env=environment(), timeout=60)
    assert ran.returncode == 0
