"""ROSWriter and ROSReader without what they do: dcp.save and dcp.load with them are DCP's own."""

from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torch_ros.dcp import ROSReader, ROSWriter


def _done(value: Any) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(value)
    return done


class IdleWriter(ROSWriter):
    """Publishes nothing. Plans stay on their rank, as with a ROSWriter."""

    def storage_meta(self) -> None:
        """Begins no call of the group, which nothing would end."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        return _done([])


class IdleReader(ROSReader):
    """Reads nothing.

    Args:
        metadata: Of what would be read.
    """

    def __init__(self, metadata: Metadata) -> None:
        super().__init__()
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        if self._own is not None:
            self._own.is_kept = True
        return LoadPlan([])

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        return _done(None)


def metadata_of(state_dict: dict[str, Any]) -> Metadata:
    """Of a version like this one, in which each tensor is one chunk."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state_dict, None, is_coordinator=True)
    entries = {fqn: _entry(value) for fqn, value in planner.state_dict.items()}
    return Metadata(entries, planner_data=planner.mappings)


def _entry(value: object) -> STORAGE_TYPES:
    if not isinstance(value, torch.Tensor):
        return BytesStorageMetadata()
    whole = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, [whole])
