"""Counts sentences that begin with a clause where a noun should stand.

python tests/house/sentences.py [FILE...]    every such sentence; all documents and the package
"""

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from trees import nodes

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MODULES = sorted((ROOT / "torch_ros").rglob("*.py"))
HEADLESS = {"What", "Who", "Whoever", "Of", "That", "Else"}

# Code, comments and tables are left out; headings, items and quotes begin a paragraph of their own.
BLOCKS = re.compile(r"^(```|~~~).*?^\1|<!--.*?-->", re.MULTILINE | re.DOTALL)
STARTS = re.compile(r"^\s*(?:#+|[-*+]|\d+\.|>)\s+", re.MULTILINE)
ENDS = re.compile(r"(?<=[.!?:])[\"'*_)]*\s+(?=[\"'*_(`\[]*[A-Z`\d])")
WORD = re.compile(r"[A-Za-z`\d][\w'`-]*")


@dataclass(frozen=True)
class Count:
    sentences: int
    headless: tuple[str, ...]

    @property
    def percent(self):
        return 100 * len(self.headless) / max(1, self.sentences)


def sentences(text):
    """Those of Markdown, which docstrings are near enough."""
    prose = BLOCKS.sub("\n\n", text)
    prose = "\n".join("" if line.lstrip().startswith("|") else line for line in prose.split("\n"))
    for paragraph in re.split(r"\n\s*\n", STARTS.sub("\n\n", prose)):
        if paragraph.startswith(("    ", "\t")):
            continue
        for sentence in ENDS.split(" ".join(paragraph.split())):
            if WORD.search(sentence):
                yield sentence


def docstrings(source):
    for node in nodes(source):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def texts(path):
    source = path.read_text()
    return docstrings(source) if path.suffix == ".py" else [source]


def is_headless(sentence):
    return WORD.search(sentence).group().split("'")[0] in HEADLESS


def count(paths):
    said = [one for path in paths for text in texts(path) for one in sentences(text)]
    return Count(len(said), tuple(filter(is_headless, said)))


def main(paths):
    for path in paths:
        found = count([path])
        print(f"{path}: {len(found.headless)} of {found.sentences}, {found.percent:.1f} %")
        for sentence in found.headless:
            print(f"    {sentence[:120]}")
    found = count(paths)
    print(f"{len(found.headless)} of {found.sentences} sentences, {found.percent:.1f} %")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or [*DOCUMENTS, *MODULES])
