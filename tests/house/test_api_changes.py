"""A break of the public API is in CHANGELOG.md."""

import subprocess

import pytest
from api_changes import main

FACE = 'from torch_ros.inner import work\n__all__ = ["errors", "work"]\n'
INNER = "def work(a, b=1): ...\ndef inside(a): ...\n"
ERRORS = "class Lost(Exception):\n    def __init__(self, who): ...\n"


@pytest.fixture
def repository(tmp_path):
    def write(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_md", ".md")
            path.parent.mkdir(exist_ok=True)
            path.with_suffix(path.suffix or ".py").write_text(text)

    def commit():
        for command in (
            ["init", "--quiet"],
            ["add", "."],
            ["-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "-m", "m"],
        ):
            subprocess.run(["git", *command], cwd=tmp_path, check=True)

    write(torch_ros__inner=INNER, torch_ros__errors=ERRORS, CHANGELOG_md="first\n")
    (tmp_path / "torch_ros" / "__init__.py").write_text(FACE)
    commit()
    return tmp_path, write


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, 0),
        ({"torch_ros__inner": INNER + "def more(): ...\n"}, 0),
        ({"torch_ros__inner": INNER.replace("inside(a)", "inside()")}, 0),
        ({"torch_ros__inner": INNER.replace("b=1", "b=1, c=2")}, 0),
        ({"torch_ros__inner": INNER.replace(", b=1", "")}, 1),
        ({"torch_ros__inner": INNER.replace("b=1", "b")}, 1),
        ({"torch_ros__errors": ERRORS.replace("who", "whom")}, 1),
        ({"torch_ros__errors": ""}, 1),
    ],
)
def test_what_users_must_change_is_told(repository, capsys, changed, status):
    root, write = repository
    write(**changed)
    assert main(root, "HEAD") == status
    assert bool(capsys.readouterr().out) == bool(status)
    write(CHANGELOG_md="first\nsecond\n")
    assert main(root, "HEAD") == 0


def test_where_there_is_nothing_to_compare_with_it_says_so(repository, capsys):
    root, _ = repository
    assert main(root) == 0  # no tag, and no commit before this one
    assert "is not compared" in capsys.readouterr().out
