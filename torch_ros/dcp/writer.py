"""ROSWriter: dcp.save that publishes instead of writing."""

from __future__ import annotations

import dataclasses
import io
import os
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal, NoReturn

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from torch_ros.copies.buffers import Copying
from torch_ros.copies.transforms import Transform
from torch_ros.dcp.default import check_group, default_handle, require_handle
from torch_ros.dcp.memo import Memo, as_bytes, memos, pickling
from torch_ros.dcp.outline import Outline, outline
from torch_ros.dcp.planner import ROSSavePlanner, add_chunks, chunked_tensors, values_of
from torch_ros.errors import UsageError
from torch_ros.face.handle import ShardHandle
from torch_ros.features.deltas.copies import DeltaOptions  # feature deltas
from torch_ros.shard.beginnings import Beginning
from torch_ros.shard.checkpoint import SaveRequest
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.local import is_strided, local_chunks


class ROSWriter(StorageWriter):
    """Publishes a state dict as a version. One writer per save.

    dcp.save(state_dict, storage_writer=ROSWriter(7)) means, on all ranks: unpublish what the
    handle holds (waits for its readers), register the state dict's tensors, publish. Tensors are
    published in place: do not write to them until `handle.unpublish()` has returned, or the next
    save. A trainer that goes on training calls it before its optimizer's step.

    A failure before the old version is given up changes nothing; afterwards the handle holds
    nothing. With dcp.async_save, dcp's staged copy is published, and kept until unpublished. A
    stager that keeps its buffers writes the next copy over what is published: call
    `handle.unpublish()` before each async_save then. One call of DCP at a time on a handle.

    dcp calls all keys of a dict strings: what is saved under 7 is loaded with dcp's own planner as
    "7", beside a 7 that is left alone; with `ROSReader.planner()` it is set where it was.

    A job that saves the same tensors at every step passes `planner()` too: dcp's own planner then
    takes longer than all the rest.

    Args:
        version: Not below the newest of the handle's run.
        handle: Whose ranks are those of dcp's process group. None: `default_handle("save")`.
        timeout_s: For the whole save. None: the handle's.
        mode: "copy": publish a copy, so that the tensors may be written to at once; see
            `ShardHandle.publish_copy`.
        transform: Makes the copy's tensors of these (torch_ros.Cast, torch_ros.Float8); see
            `ShardHandle.publish_copy`. Tensors that it adds lie beside theirs in the state dict.
        to: Where the copy is; see `ShardHandle.publish_copy`.
        copy_bytes: Bound on the copy's memory; see `ShardHandle.publish_copy`.
        deltas: How many changes between copies are kept for replicas that `update`; see
            `ShardHandle.publish_copy`. The state dict has tensors only.
        delta_bytes: Bound on their memory; see `ShardHandle.publish_copy`.
        store_wait_s: How long the save waits for etcd when that is away; see
            `ShardHandle.publish`. 0: not at all; what is saved is offered when etcd is back.

    Raises (inside torch's CheckpointException, which `except Exception` does not catch):
        UsageError, VersionConflict, ManifestMismatch, DeadlineExceeded, CallAborted, SeatLost,
        StoreUnavailable
    """

    _handle: ShardHandle  # since `storage_meta`

    def __init__(
        self,
        version: int,
        *,
        handle: ShardHandle | None = None,
        timeout_s: float | None = None,
        mode: Literal["in_place", "copy"] = "in_place",
        transform: Transform | Sequence[Transform] | None = None,
        to: Literal["cpu"] | None = None,
        copy_bytes: int | None = None,
        deltas: int = 0,  # feature deltas
        delta_bytes: int | None = None,  # feature deltas
        store_wait_s: float | None = 0.0,
    ) -> None:
        if mode not in ("in_place", "copy"):
            raise UsageError(f"mode={mode!r}: expected 'in_place' or 'copy'")
        require_handle(handle)
        copying = Copying.asked(transform, to, copy_bytes)
        copying = copying.along(DeltaOptions.asked(deltas, delta_bytes))  # feature deltas
        if mode == "in_place" and copying != Copying():
            names = "transform, to, copy_bytes, deltas and delta_bytes"
            raise UsageError(f"{names} are of mode='copy'")
        self._copying = copying if mode == "copy" else None
        self._version, self._given, self._timeout_s = version, handle, timeout_s
        self._store_wait_s = store_wait_s
        self._begun: Beginning | None = None
        self._plan = SavePlan([])
        self._is_collective = True
        self._own: ROSSavePlanner | None = None
        self._seen: Outline | None = None

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a ROSWriter cannot be sent to another process: what is published is this process's "
            "memory; use dcp.async_save with AsyncCheckpointerType.THREAD"
        )

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: dcp only calls this with a checkpoint_id, which means nothing here."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a path never selects this writer

    def storage_meta(self) -> StorageMeta | None:
        """The first that dcp asks for: the call begins, and is one of the group's from here on."""
        self._handle = self._given or default_handle("save")
        self._begun = self._handle.checkpoints.begin("save", self._version, self)
        return None

    # dcp looks for a parameter of this name before it passes rank and use_collectives.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._begun is None or self._begun.state != "begun":  # who wraps this left it out
            self.storage_meta()
        self._is_collective = kwargs.get("use_collectives", True)
        check_group(self._handle, kwargs.get("rank"), None)

    def planner(self) -> ROSSavePlanner:
        """A planner for the one dcp.save that this writer is for.

        dcp.save(state_dict, storage_writer=w, planner=w.planner()): the same is published as with
        dcp's own planner, and a state dict with the structure of the last one is not planned again.
        """
        self._own = self._own or ROSSavePlanner()
        return self._own

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keep the plan here: no rank needs to know what another one holds.

        This also keeps what dcp would leave to one rank of several (HSDP copies): each can serve.
        """
        if self._begun is not None:
            self._begun.touch()
        self._plan = plan
        if self._own is not None:
            self._own.is_kept = plan is self._own.plan
        return dataclasses.replace(plan, items=[], planner_data={})

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self._is_collective:
            check_group(self._handle, None, len(plans))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Make the save: of the tensors, of dcp's staged copy, or of a copy of ours."""
        checkpoints, copying = self._handle.checkpoints, self._copying
        # The name that dcp gives its thread is all that tells a staged copy from live tensors.
        from_stager = threading.current_thread().name.startswith("AsyncCheckpointExecutor")
        in_place = not from_stager and copying is None
        state = self._collected(planner, may_be_known=in_place)
        checkpoints.save(
            SaveRequest(
                self._version,
                state,
                from_stager=from_stager and copying is None,
                copier=self._handle.copies.copier(copying) if copying is not None else None,
                timeout_s=self._timeout_s,
                store_wait_s=self._store_wait_s,
                begun=self._begun,
            )
        )
        memo = memos(self._handle).get("save")
        if memo is not None and self._seen is not None and in_place:
            memo.learn(self._seen, checkpoints.registered)
        self._seen = None
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def _collected(self, planner: SavePlanner, *, may_be_known: bool) -> LocalState | BaseException:
        """Collect the state. An error is returned: the save raises it, on all ranks."""
        with self._begun.hook() if self._begun else nullcontext():
            try:
                return self._collect(planner, may_be_known=may_be_known)
            except BaseException as error:  # noqa: BLE001  # Ctrl-C too
                return error

    def _collect(self, planner: SavePlanner, *, may_be_known: bool) -> LocalState:
        """The tensors and objects that the planner has planned for this rank, or would plan.

        The memo tells them where the state dict has the structure of the last one. `may_be_known`:
        the registered state may be the answer; not if a copy is published in place of it.
        """
        if values_of(planner) is None:
            return self._planned(self._plan, planner)  # whatever it makes of the state dict
        assert isinstance(planner, DefaultSavePlanner)
        kept, is_own = memos(self._handle), isinstance(planner, ROSSavePlanner)
        kind = ("nested",) if is_own else ("flat",)
        self._seen = seen = outline(planner.state_dict)
        memo = kept.get("save")
        if memo is not None and memo.fits(seen, kind, None if is_own else planner.mappings):
            known = self._handle.checkpoints.registered if may_be_known else None
            state = memo.state(seen, memo.pickled(seen), known)
        else:
            plan = planner.plan_now() if isinstance(planner, ROSSavePlanner) else self._plan
            state = self._planned(plan, planner)
            kept["save"] = Memo.of(seen, planner.state_dict, state, kind)
        state.sharded = seen.sharded
        return state

    def _planned(self, local: SavePlan, planner: SavePlanner) -> LocalState:
        """The state, the long way: what the items of the plan name, as the planner finds it.

        But not a `Chunked`, which has no item where this rank has no box, nor a strided DTensor,
        whose item names one box of several.
        """
        if not local.usable:  # a caching planner says: as last time
            key = planner._cached_plans_key  # type: ignore[attr-defined]  # noqa: SLF001  # no public one
            local = SavePlanner._cached_save_plan[key]  # noqa: SLF001  # no public one
        objects: dict[str, torch.Tensor] = {}
        values = values_of(planner) or {}
        chunked = chunked_tensors(values)
        tensors = dict(chunked)
        for item in local.items:
            if item.index.fqn in chunked:
                continue
            fqn, is_object = item.index.fqn, item.type == WriteItemType.BYTE_IO
            if is_strided(value := values.get(fqn)):
                (tensors[fqn],) = local_chunks({fqn: value})
                continue
            with pickling(fqn) if is_object else nullcontext():
                found = planner.resolve_data(item)
            if is_object:
                assert isinstance(found, io.BytesIO)
                objects[fqn] = as_bytes(found)
                continue
            assert isinstance(found, torch.Tensor)
            assert item.tensor_data is not None
            offsets, shape = item.tensor_data.chunk.offsets, item.tensor_data.size
            is_spread = item.type == WriteItemType.SHARD  # a DTensor's: any copy may be read
            add_chunks(tensors, fqn, found, offsets, shape, spread=is_spread)
        paths = {fqn: tuple(path) for fqn, path in (local.planner_data or {}).items()}
        return LocalState(list(tensors.values()), objects, paths)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing to do: the version is there since `write_data`; readers ask its holders."""
