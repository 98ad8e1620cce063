"""Names that others chose, in logs and errors: a line stays a line, and no terminal obeys."""

import ast
import io
import logging
import pickle
from pathlib import Path

import pytest
from trees import nodes

from torch_ros.errors import SourceLost, StoreUnavailable, UsageError
from torch_ros.printable import log_of, printable

PACKAGE = Path(__file__).parents[1] / "torch_ros"
OF_TREES = pytest.mark.xdist_group("trees")
EVIL = "a\n2026-11-27 CRITICAL forged\x1b[2J\x9b0m\u202e"


def test_a_text_that_can_be_read_stays_as_it_is():
    assert printable("Größe 7 模型") == "Größe 7 模型"
    assert printable("a\x1b[2J\r\n\x9b\u202e\udcff") == r"a\x1b[2J\r\n\x9b\u202e\udcff"


@pytest.mark.parametrize(
    "error",
    [SourceLost(EVIL, EVIL, 1, 2), UsageError(EVIL), StoreUnavailable(EVIL, 1.0, EVIL)],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_one_line_and_keeps_its_fields(error):
    assert str(error).isprintable()
    assert "CRITICAL forged" in str(error)
    assert pickle.loads(pickle.dumps(error)).args == error.args


def test_a_name_makes_no_line_of_its_own_in_a_log():
    log, out = log_of("torch_ros.tests.printable"), io.StringIO()
    assert log_of(log.name) is log
    handler = logging.StreamHandler(out)
    log.addHandler(handler)
    try:
        log.warning("reads from %s, %d bytes: %s", EVIL, 7, UsageError(EVIL))
        log.warning("fine: %r", "x")
    finally:
        log.removeHandler(handler)
    first, second = out.getvalue().splitlines()
    assert first.isprintable()
    assert first.startswith(r"reads from a\n2026-11-27 CRITICAL")
    assert second == "fine: 'x'"


@OF_TREES
def test_every_module_logs_lines_that_no_name_can_break():
    alone = {"printable.py", "local/etcd.py"}  # the supervisor is run without the package
    for path in PACKAGE.rglob("*.py"):
        called = {each.func for each in nodes(path.read_text()) if isinstance(each, ast.Call)}
        made = {each for each in called if isinstance(each, ast.Attribute)}
        names = {ast.unparse(each) for each in made if each.attr == "getLogger"}
        assert "logging.getLogger" not in names or str(path.relative_to(PACKAGE)) in alone, path


@OF_TREES
def test_commands_write_through_one_door():
    for path in (PACKAGE / "cli").glob("*.py"):
        if path.name in {"output.py", "trial.py"}:  # the door; a child that answers its parent
            continue
        for each in nodes(path.read_text()):
            if isinstance(each, ast.Call):
                name = ast.unparse(each.func)
                is_text = name.endswith((".write", ".writelines")) or name == "print"
                assert not is_text or ast.unparse(each) == "out.write(CLEAR)", (path, name)
