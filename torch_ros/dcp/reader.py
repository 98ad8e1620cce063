"""ROSReader: dcp.load that reads from the processes that hold the version."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torch_ros import arguments
from torch_ros.dcp.default import check_group, default_handle, require_handle
from torch_ros.dcp.destination import StateDict
from torch_ros.dcp.memo import memos
from torch_ros.dcp.planner import ROSLoadPlanner
from torch_ros.errors import TorchRosError
from torch_ros.face.handle import ShardHandle
from torch_ros.printable import log_of
from torch_ros.shard.beginnings import Beginning
from torch_ros.shard.checkpoint import LoadRequest, LoadTarget, unanimous
from torch_ros.shard.finding import PinnedVersion
from torch_ros.weights.manifest import OBJECT, LogicalTensor, dtype_named, logical

log: logging.Logger = log_of(__name__)


class ROSReader(StorageReader):
    """Reads a version into a state dict, in place. One reader per load.

    dcp.load(state_dict, storage_reader=ROSReader("latest")) means, on all ranks: find the version
    (waiting for one if there is none yet), check that the state dict fits, unpublish what the
    handle holds, register the state dict's tensors, replicate. Bytes land in the state dict's own
    tensors, and this replica is a source of the version from then on, until the handle's next
    load or `unpublish`: do not write to the tensors before.

    A version that this handle already holds in these very tensors is not read again.

    If the state dict is only a part of the version (the model out of model and optimizer), that
    part is read and nothing is served. A warning, once in a handle, names tensors that it lacks of
    a dict that it has, such as buffers; with several ranks, of a module. dcp's files cast silently;
    this does not: other dtypes are a ManifestMismatch. A missing key or another shape is the error
    that DCP's own planner raises; with `planner()` it is a ManifestMismatch that says what was
    found and expected. Enums, numpy scalars and the like need `trust_objects`.

    A failure before the old version is given up changes nothing; afterwards the handle holds
    nothing, and says so.

    A job that loads into the same tensors again and again passes `planner()` too: dcp's own
    planner may take longer than all the rest.

    Args:
        version: A number, "latest" or "latest-k"; see `ShardHandle.replicate`.
        handle: Whose ranks are those of dcp's process group. None: `default_handle("load")`.
        serve: Whether to become a source of a version that was read whole.
        trust_objects: Whether non-tensor objects may use all of pickle. It runs code that the
            publisher chose; only for peers you trust. Without it, what is more than plain values
            and tensors, or costs too much, is an UntrustedObject error; `add_safe_globals` of
            torch.serialization adds classes of your own.
        timeout_s: For finding the version, and again for reading it. None: the handle's.
        partial: Whether a part of a dict is meant; then there is no warning.

    Raises (inside torch's CheckpointException, which `except Exception` does not catch):
        UsageError, ManifestMismatch, VersionNotFound, DeadlineExceeded, SourceLost,
        UntrustedObject, CallAborted, SeatLost, StoreUnavailable
    """

    # Since `read_metadata`, which dcp calls first:
    _handle: ShardHandle
    _begun: Beginning
    _found: PinnedVersion

    def __init__(
        self,
        version: int | str = "latest",
        *,
        handle: ShardHandle | None = None,
        serve: bool = True,
        trust_objects: bool = False,
        timeout_s: float | None = None,
        partial: bool = False,
    ) -> None:
        require_handle(handle)
        asked = {"serve": serve, "trust_objects": trust_objects, "partial": partial}
        arguments.check(asked, dict.fromkeys(asked, arguments.yes_or_no))
        self._asked, self._given, self._is_partial = version, handle, partial
        self._serve, self._trust_objects, self._timeout_s = serve, trust_objects, timeout_s
        self._plan = LoadPlan([])
        self._contents = logical(())
        self._error: TorchRosError | None = None
        self._own: ROSLoadPlanner | None = None
        self._load: StateDict | None = None
        self._target: LoadTarget | None = None
        self.version: int | None = None
        """The version that was read, once dcp.load has returned."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: dcp only calls this with a checkpoint_id, which means nothing here."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a path never selects this reader

    def planner(self, *, allow_partial_load: bool = False) -> ROSLoadPlanner:
        """A planner for the one dcp.load that this reader is for.

        dcp.load(state_dict, storage_reader=r, planner=r.planner()): the same is read as with dcp's
        own planner, and a state dict with the structure of the last one is not planned again.

        Args:
            allow_partial_load: As of dcp's DefaultLoadPlanner: what the version does not have is
                left as it is.
        """
        self._own = ROSLoadPlanner(allow_partial_load=allow_partial_load)
        return self._own

    # No parameter called kwargs here: dcp would call it, and wait for a version, twice.
    def read_metadata(self) -> Metadata:
        """Describe the version. An error is kept for `set_up_storage_reader`: dcp turns
        every exception raised here into an AssertionError, and its type would be lost.

        The first that dcp asks for: the call begins, and is one of the group's from here on.
        """
        self._load = self._target = self._error = None
        try:
            self._handle = handle = self._given or default_handle("load")
            self._begun = handle.checkpoints.begin("load", self._asked, self)
            with self._begun.hook():
                self._found = handle.checkpoints.inspect(self._asked, self._timeout_s)
                self._contents = logical(self._found.layouts)
        except TorchRosError as error:
            self._error = error
        # Each tensor as one chunk, whoever holds parts of it: dcp then asks once for each local
        # chunk, and the handle decides where its bytes come from.
        contents, paths = _Contents(self._contents), self._contents.paths
        return Metadata(contents, planner_data=paths)  # type: ignore[arg-type]  # read only

    # dcp looks for a parameter of this name before it passes the rank.
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self._error is not None:  # of `read_metadata`
            raise self._error
        check_group(self._handle, kwargs.get("rank"), None)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keep the plan here: no rank needs to know what another one wants.

        With our planner, also check that all of it fits: dcp asks all ranks here, and that saves
        the handle asking them.
        """
        self._begun.touch()
        self._plan = plan
        if self._own is None or self._own.plan is not plan:
            return dataclasses.replace(plan, items=[])
        self._own.is_kept = True
        self._load = load = self._destination(self._own)
        with self._begun.hook():
            self._target = self._handle.checkpoints.check(self._request(load))
        return LoadPlan([], storage_data=self._target.answer)

    def _destination(self, planner: LoadPlanner) -> StateDict:
        """The state dict of this load, for which `planner` has made the plan."""
        return StateDict(
            self._handle.checkpoints,
            memos(self._handle),
            planner,
            self._plan,
            self._contents,
            trust_objects=self._trust_objects,
        )

    def _request(self, load: StateDict) -> LoadRequest:
        return LoadRequest(
            self._asked,
            self._found,
            load,
            is_served=self._serve,
            timeout_s=self._timeout_s,
            target=self._target,
            begun=self._begun,
            is_partial=self._is_partial,
        )

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: tell each rank what all have answered to `check`."""
        check_group(self._handle, None, len(plans))
        if self._target is None:
            return plans
        answer = unanimous(plan.storage_data for plan in plans)
        return [LoadPlan([], storage_data=answer)] * len(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Make the load, as it was checked if that was done on all ranks."""
        load = self._load or self._destination(planner)
        if self._target is not None:  # checked on this rank; now with the answer of all ranks
            self._target = LoadTarget(self._target.state, plan.storage_data)
        report = self._handle.checkpoints.load(self._request(load))
        self.version = report.version
        load.commit()
        if self._serve and self._handle.version is None:
            log.info(
                "a part of version %d was read (%d tensors and objects on this rank, the version "
                "has %d); this process does not serve it",
                report.version,
                load.wanted,
                len(self._contents),
            )
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _Contents(Mapping[str, STORAGE_TYPES]):
    """The contents of a version. An entry is made at its first use: our planner needs none."""

    def __init__(self, contents: Mapping[str, LogicalTensor]) -> None:
        self._contents = contents
        self._entries: dict[str, STORAGE_TYPES] = {}

    def __getitem__(self, fqn: str) -> STORAGE_TYPES:
        if fqn not in self._entries:
            self._entries[fqn] = _entry(self._contents[fqn])
        return self._entries[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self._contents)

    def __len__(self) -> int:
        return len(self._contents)


def _entry(found: LogicalTensor) -> STORAGE_TYPES:
    """A tensor or object as dcp's metadata show it: a tensor as one chunk, whoever has parts."""
    if found.dtype == OBJECT:
        return BytesStorageMetadata()
    size = torch.Size(found.shape)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_named(found.dtype)),
        size=size,
        chunks=[ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
    )
