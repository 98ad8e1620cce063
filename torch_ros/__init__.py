"""Reference-Oriented Storage for model weights, worn as torch.distributed.checkpoint.

    handle = torch_ros.open("my-model")        # one process's part of one replica
    handle.register(model)                     # a module; or named tensors
    handle.publish(7)                          # or: handle.replicate("latest")

`torch_ros.dcp` has `ROSWriter` and `ROSReader`, which do the same behind `dcp.save` and `dcp.load`.
Importing this package imports neither torch nor nixl; the first use of `open` does. It loads the
host's libibverbs, if there is one, because NIXL must not be first (`torch_ros/p2p/rdma.py`).
"""

import importlib
from typing import TYPE_CHECKING, Any

from torch_ros import errors
from torch_ros.p2p import rdma
from torch_ros.release import RELEASE

if TYPE_CHECKING:
    from torch_ros.copies.transforms import MadeTensor, Transform
    from torch_ros.costs import Costs
    from torch_ros.face.aio import AsyncHandle
    from torch_ros.face.handle import ShardHandle
    from torch_ros.face.opening import open  # noqa: A004
    from torch_ros.features.following.chosen import UpdatePolicy  # feature following
    from torch_ros.features.huge_pages.pages import HugePageReport  # feature huge_pages
    from torch_ros.features.installs.records import Install  # feature installs
    from torch_ros.features.installs.waiting import Installed  # feature installs
    from torch_ros.features.lending.borrowing import Borrowed  # feature lending
    from torch_ros.features.streams.stream import Stream  # feature streams
    from torch_ros.features.transforms.casting import Cast, Float8  # feature transforms
    from torch_ros.features.transforms.mxfp8 import MXFP8  # feature transforms
    from torch_ros.features.transforms.nvfp4 import NVFP4  # feature transforms
    from torch_ros.fleet.fleet import Fleet, Held, Published, Replica
    from torch_ros.fleet.ready_page import ready_page  # feature installs
    from torch_ros.shard.finding import Contents
    from torch_ros.shard.report import DrainReport, PublishReport, ReadReport, Report
    from torch_ros.weights.chunked import Chunked

rdma.load_first()

__version__ = RELEASE
__all__ = [
    "MXFP8",  # feature transforms
    "NVFP4",  # feature transforms
    "AsyncHandle",
    "Borrowed",  # feature lending
    "Cast",  # feature transforms
    "Chunked",
    "Contents",
    "Costs",
    "DrainReport",
    "Fleet",
    "Float8",  # feature transforms
    "Held",
    "HugePageReport",  # feature huge_pages
    "Install",  # feature installs
    "Installed",  # feature installs
    "MadeTensor",
    "PublishReport",
    "Published",
    "ReadReport",
    "Replica",
    "Report",
    "ShardHandle",
    "Stream",  # feature streams
    "Transform",
    "UpdatePolicy",  # feature following
    "errors",
    "open",
    "ready_page",  # feature installs
]

_HOMES = {  # imported at their first use
    "MXFP8": "torch_ros.features.transforms.mxfp8",  # feature transforms
    "NVFP4": "torch_ros.features.transforms.nvfp4",  # feature transforms
    "AsyncHandle": "torch_ros.face.aio",
    "Borrowed": "torch_ros.features.lending.borrowing",  # feature lending
    "Cast": "torch_ros.features.transforms.casting",  # feature transforms
    "Chunked": "torch_ros.weights.chunked",
    "Contents": "torch_ros.shard.finding",
    "Costs": "torch_ros.costs",
    "DrainReport": "torch_ros.shard.report",
    "Fleet": "torch_ros.fleet.fleet",
    "Float8": "torch_ros.features.transforms.casting",  # feature transforms
    "Held": "torch_ros.fleet.fleet",
    "HugePageReport": "torch_ros.features.huge_pages.pages",  # feature huge_pages
    "Install": "torch_ros.features.installs.records",  # feature installs
    "Installed": "torch_ros.features.installs.waiting",  # feature installs
    "MadeTensor": "torch_ros.copies.transforms",
    "PublishReport": "torch_ros.shard.report",
    "Published": "torch_ros.fleet.fleet",
    "ReadReport": "torch_ros.shard.report",
    "Replica": "torch_ros.fleet.fleet",
    "Report": "torch_ros.shard.report",
    "ShardHandle": "torch_ros.face.handle",
    "Stream": "torch_ros.features.streams.stream",  # feature streams
    "Transform": "torch_ros.copies.transforms",
    "UpdatePolicy": "torch_ros.features.following.chosen",  # feature following
    "open": "torch_ros.face.opening",
    "ready_page": "torch_ros.fleet.ready_page",  # feature installs
}


def __getattr__(name: str) -> Any:
    # The supervisor of the local etcd lives without torch's 200 MB.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)  # Tab finds the late imports too
