"""A feature is a folder: without it, and the lines that bear its mark, the rest stands."""

import re
import subprocess
import sys

import pytest
from without import FEATURES, PACKAGE, stripped, transports, undefined

MARK = re.compile(r"# (?:feature (\w+)|\} (\w+))")


def marks(package):
    for path in sorted(package.rglob("*.py")):
        for one in MARK.finditer(path.read_text()):
            yield str(path.relative_to(package)), one[1] or one[2]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        pytest.param((), FEATURES, marks=pytest.mark.long, id="any one"),
        pytest.param(("--together",), ["all"], id="all"),
    ],
)
def test_without_features_the_rest_imports_publishes_replicates_and_updates(arguments, told):
    command = [sys.executable, PACKAGE.parent / "tests/house/without.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380)
    assert (done.returncode, done.stdout.split("\n")[:-1]) == (
        0,
        [f"{each}: stands" for each in told],
    ), done.stderr


def test_without_any_one_feature_no_function_uses_a_name_that_went_with_it(tmp_path):
    for path, text in [(path, path.read_text()) for path in PACKAGE.rglob("*.py")]:
        for feature in [each for each in FEATURES if f"# feature {each}" in text]:
            file = tmp_path / feature / path.relative_to(PACKAGE)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(stripped(text, feature))
    assert {path.name for path in tmp_path.iterdir()} == set(FEATURES)
    assert undefined(tmp_path) == ""


def test_a_name_that_goes_with_a_feature_is_seen_where_no_call_comes_to_it(tmp_path):
    (tmp_path / "a.py").write_text("def f():\n    return gone\n\n\ndef g():\n    return f\n")
    assert undefined(tmp_path).count("gone") == 1


def test_nixl_is_tried_without_the_features_that_stand_around_it():
    assert [each for each in FEATURES if "ucx" in transports(each)] == [
        "fabrics",
        "shortcuts",
        "tcp",
    ]


def test_marks_name_features_and_stand_above_the_core():
    found = list(marks(PACKAGE))
    assert {feature for _, feature in found} == set(FEATURES)
    above = ("__init__.py", "__main__.py", "face/", "fleet/", "cli/", "metrics/", "dcp/")
    assert [file for file, _ in found if not file.startswith(above)] == []


def test_marked_lines_are_left_out():
    text = "a\nb  # feature x\n    # feature x {\n    c\n\n    # } x\nd  # feature y\n"
    assert stripped(text, "x") == "a\nd  # feature y\n"
