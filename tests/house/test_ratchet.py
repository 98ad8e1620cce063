"""How large a file, a class or a function may be, and how many parameters one may have.

Docstrings, comments and blank lines do not count. Who is larger today is listed by name, with the
reason to leave it so; the list may only shrink.
"""

import ast
from pathlib import Path

import pytest
from trees import nodes

pytestmark = pytest.mark.xdist_group("trees")

PACKAGE = Path(__file__).parents[2] / "torch_ros"
LIMITS = {"file": 450, "class": 300, "function": 40, "parameters": 6}
OFFENDERS = {
    # The public face: each option has a name.
    "parameters face/handle.py:ShardHandle.publish_copy": 9
}


def code_lines(source):
    """The numbers of the lines that hold code."""
    numbered = enumerate(source.splitlines(), 1)
    lines = {number for number, line in numbered if line.strip() and line.lstrip()[0] != "#"}
    for node in nodes(source):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            text = node.body[0]
            lines -= set(range(text.lineno, text.end_lineno + 1))
    return lines


def parameters(function, *, is_method):
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args][is_method:]
    return len(named) + len(arguments.kwonlyargs)


def sizes(name, source):
    """The file and all that is in it, each with its size: (kind, dotted name, size)."""
    lines = code_lines(source)
    yield "file", name, len(lines)

    def inside(node, prefix, *, is_class):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                dotted = f"{prefix}:{child.name}" if prefix == name else f"{prefix}.{child.name}"
                here = len(lines & set(range(child.lineno, child.end_lineno + 1)))
                if isinstance(child, ast.ClassDef):
                    yield "class", dotted, here
                else:
                    signature = set(range(child.lineno, child.body[0].lineno))
                    yield "function", dotted, here - len(lines & signature)
                    is_free = child.name in {"open", "__init__"}
                    if not is_free:
                        yield "parameters", dotted, parameters(child, is_method=is_class)
                yield from inside(child, dotted, is_class=isinstance(child, ast.ClassDef))
            else:
                yield from inside(child, prefix, is_class=is_class)

    yield from inside(nodes(source)[0], name, is_class=False)


def too_large(package):
    for path in sorted(package.rglob("*.py")):
        for kind, name, size in sizes(str(path.relative_to(package)), path.read_text()):
            if size > LIMITS[kind]:
                yield f"{kind} {name}", size


def test_nothing_is_larger_than_it_may_be_and_the_list_of_offenders_only_shrinks():
    assert dict(too_large(PACKAGE)) == OFFENDERS


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("file", "x = 1\n" * 451),
        ("class", "class A:\n" + "    x = 1\n" * 300),
        ("function", "def f():\n" + "    x = 1\n" * 41),
        ("parameters", "def f(a, b, c, d, e, *, f, g): ...\n"),
        ("parameters", "class A:\n    def f(self, a, b, c, d, e, *, f, g): ...\n"),
    ],
)
def test_what_is_too_large_is_seen(tmp_path, kind, source):
    (tmp_path / "a.py").write_text('"""Says what it is."""\n# why\n\n' + source)
    assert [name.split()[0] for name, _ in too_large(tmp_path)] == [kind]


def test_what_is_said_does_not_count(tmp_path):
    (tmp_path / "a.py").write_text("def f(a):\n" + '    """\n' + "    said\n" * 99 + '    """\n')
    assert not list(too_large(tmp_path))
