"""The records of torch_ros in etcd, and `EtcdStore`, the same for torch.distributed.

Importing this package does not import torch; naming `EtcdStore` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_ros.store.torch_store import EtcdStore

__all__ = ["EtcdStore"]


def __getattr__(name: str) -> Any:
    if name == "EtcdStore":
        from torch_ros.store.torch_store import EtcdStore  # noqa: PLC0415

        return EtcdStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
