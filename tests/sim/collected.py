"""The scenes and planted faults that lie with the tests of a feature."""

import importlib
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def collect(name: str) -> None:
    """Import the file of that name of each feature that has one."""
    if str(TESTS) not in sys.path:  # as pytest has it
        sys.path.append(str(TESTS))
    for path in sorted(TESTS.glob(f"features/*/{name}.py")):
        importlib.import_module(f"features.{path.parent.name}.{name}")
