"""Reference-Oriented Storage for model weights, worn as torch.distributed.checkpoint.

    handle = torch_ros.open("my-model")        # one process's part of one replica
    handle.register(model.state_dict())
    handle.publish(7)                          # or: handle.replicate("latest")

`torch_ros.dcp` has `ROSWriter` and `ROSReader`, which do the same behind `dcp.save` and `dcp.load`.
Importing this package imports neither torch nor nixl; the first use of `open` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_ros import errors

if TYPE_CHECKING:
    from torch_ros.filling import ReadReport
    from torch_ros.handle import ShardHandle, open  # noqa: A004
    from torch_ros.weights.plan import Costs

__version__ = "0.1.0"
__all__ = ["Costs", "ReadReport", "ShardHandle", "errors", "open"]


def __getattr__(name: str) -> Any:
    # The embedded etcd's supervisor and the command line live without torch's 200 MB.
    if name in ("ShardHandle", "open"):
        from torch_ros import handle  # noqa: PLC0415

        return getattr(handle, name)
    if name == "Costs":
        from torch_ros.weights.plan import Costs  # noqa: PLC0415

        return Costs
    if name == "ReadReport":
        from torch_ros.filling import ReadReport  # noqa: PLC0415

        return ReadReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)  # what is imported late is found by Tab too
