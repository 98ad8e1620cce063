"""A storage and planners for DCP that do nothing: what is left is DCP's own."""

import dataclasses
import os
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future


def _done(value: Any) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(value)
    return done


class IdleWriter(StorageWriter):
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As ROSWriter's: plans stay on their rank."""
        return dataclasses.replace(plan, items=[], planner_data={})

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        return _done([])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass


class IdleReader(StorageReader):
    """
    Args:
        metadata: Of what would be read.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def read_metadata(self) -> Metadata:
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, items=[])

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        return _done(None)


class IdleSavePlanner(DefaultSavePlanner):
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT002  # dcp's signature
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan


class IdleLoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT002  # dcp's signature
    ) -> None:
        pass

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return new_plan


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
