"""The records of torch_ros in etcd, and `EtcdStore`, the same for torch.distributed.

Importing this package does not import torch; naming `EtcdStore` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_ros.store.distributed.store import EtcdStore
    from torch_ros.store.distributed.torchrun import RosRendezvousHandler

__all__ = ["EtcdStore"]


def __getattr__(name: str) -> Any:
    if name == "EtcdStore":
        from torch_ros.store.distributed.store import EtcdStore  # noqa: PLC0415

        return EtcdStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def torchrun_handler() -> Callable[[Any], RosRendezvousHandler]:
    """The target of torchrun's entry point.

    Every torchrun where torch_ros is installed calls it, whatever its backend: so it is light, and
    only the handler itself imports what it needs.
    """

    def create(parameters: Any) -> RosRendezvousHandler:
        from torch_ros.store.distributed.torchrun import create_handler  # noqa: PLC0415

        return create_handler(parameters)

    return create
