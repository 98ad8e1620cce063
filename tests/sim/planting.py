"""The rules of the package, by their names alone: who plants a fault need not know where one is.

`"complete"` is a function or a constant of a module, `"Keys.ready"` a method of a class. Where the
package has several of one name, a module or a feature that knows the one that is meant goes before
it: `"membership:leave"`.
"""

import functools
import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

FOLDERS = (
    "bucket",
    "channels",
    "cli",
    "codec",
    "copies",
    "face",
    "features",
    "fleet",
    "local",
    "memory",
    "p2p",
    "protocol",
    "shard",
    "store",
    "transfer",
    "weights",
)


@functools.cache
def _places() -> dict[str, list[ModuleType]]:
    """The modules that know a name, by name."""
    found = defaultdict(list)
    for folder in FOLDERS:
        package = importlib.import_module(f"torch_ros.{folder}")
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(info.name)
            for name in vars(module):
                found[name].append(module)
    return found


def owners(rule: str) -> list[tuple[Any, str]]:
    """Where the rule is looked up, by all who know it: each an object and its attribute."""
    known_by, _, path = rule.rpartition(":")
    name, _, method = path.partition(".")
    known = {module: getattr(module, name) for module in _places()[name]}
    meant = [
        value for module, value in known.items() if known_by in ("", *module.__name__.split("."))
    ]
    if not meant or any(value is not meant[0] for value in meant):
        found = ", ".join(module.__name__ for module in known)
        raise LookupError(f"the rule {rule!r} must be one, and is known by: {found or 'none'}")
    if method:
        return [(meant[0], method)]
    return [(module, name) for module, value in known.items() if value is meant[0]]


@contextmanager
def changed(rule: str, change: Any) -> Iterator[None]:
    """Within it, the rule is what `change` makes of it."""
    with ExitStack() as stack:
        for owner, name in owners(rule):
            stack.enter_context(patch.object(owner, name, change(getattr(owner, name))))
        yield


@contextmanager
def others(made: dict[tuple[ModuleType, str], object]):
    """Within it, these names are others. `patch.object` takes a hundred times as long for each."""
    before = {(module, name): getattr(module, name) for module, name in made}
    try:
        for (module, name), value in made.items():
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)
