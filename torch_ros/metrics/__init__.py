"""Figures for Prometheus, read when it scrapes: `HandleCollector` and `serve` of this process.

They take prometheus-client, which the extra `metrics` installs.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_ros.metrics.handles import HandleCollector
    from torch_ros.metrics.process import serve

__all__ = ["HandleCollector", "serve"]

_HOMES = {"HandleCollector": "torch_ros.metrics.handles", "serve": "torch_ros.metrics.process"}


def __getattr__(name: str) -> Any:
    # Fleets are drawn without torch, which handles take.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
