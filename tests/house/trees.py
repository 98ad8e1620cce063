"""Modules as trees, each of which is made once for all tests of a process."""

import ast
from functools import cache


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """The module itself, and all that is in it. Nobody changes them."""
    return tuple(ast.walk(ast.parse(source)))
