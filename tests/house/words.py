"""The words of which the package's names are made.

python tests/house/words.py           the words that stand in neither list, each with a name
python tests/house/words.py --write   takes them into the list of plain ones
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from trees import nodes

ROOT = Path(__file__).parents[2]
PLAIN = Path(__file__).with_name("plain_words.txt")
TABLE = ROOT / "docs" / "STYLE.md"

PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def names(package: Path) -> Iterator[str]:
    """The names of files, and of classes, functions and methods."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for path in sorted(package.rglob("*.py")):
        yield path.stem
        for node in nodes(path.read_text())[0].body:
            if not isinstance(node, kinds):
                continue
            yield node.name
            inside = node.body if isinstance(node, ast.ClassDef) else []
            yield from (each.name for each in inside if isinstance(each, kinds))


def words(name: str) -> list[str]:
    return [part.lower() for part in PART.findall(name)]


def used(package: Path = ROOT / "torch_ros") -> dict[str, str]:
    """Each word, with a public name that it is in."""
    public = (name for name in names(package) if not name.startswith("_"))
    return {word: name for name in public for word in words(name) if not word.isdigit()}


def defined(text: str) -> set[str]:
    """The words of the table: the first column, of which each word counts."""
    rows = re.findall(r"^\| ([^|]+) \|", text.partition("## Shape")[0], re.MULTILINE)
    return {word for row in rows for word in re.findall(r"[a-z]+", row.lower())}


def is_form_of(word: str, table: set[str]) -> bool:
    """Whether it is a word of the table, or its plural."""
    return word in table or word.removesuffix("s") in table


def plain() -> set[str]:
    return set(PLAIN.read_text().split())


def main(arguments: list[str]) -> int:
    there, table = used(), defined(TABLE.read_text())
    known = plain()
    coined = {word for word in there if is_form_of(word, table)}
    unknown = {word: name for word, name in there.items() if word not in coined | known}
    if arguments == ["--write"]:
        kept = sorted((known | unknown.keys()) & there.keys() - coined)
        PLAIN.write_text("\n".join(kept) + "\n")
        return 0
    for word, name in sorted(unknown.items()):
        print(f"{word:20}{name}")
    return len(unknown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
