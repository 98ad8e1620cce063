"""ROSReader: dcp.load that reads from the processes that hold the version."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from torch.serialization import get_unsafe_globals_in_checkpoint

from torch_ros.beginnings import Beginning
from torch_ros.dcp.default import check_group, default_handle
from torch_ros.dcp.memo import ATOMS, Memo, memos
from torch_ros.dcp.outline import Outline, outline
from torch_ros.dcp.planner import ROSLoadPlanner, values_of
from torch_ros.errors import ManifestMismatch, TorchRosError, UntrustedObject
from torch_ros.handle import Fit, Found, ShardHandle, unanimous
from torch_ros.registered import LocalState
from torch_ros.weights.local import LocalChunk, LocalTensor, is_strided, local_chunks
from torch_ros.weights.manifest import (
    OBJECT,
    Layout,
    Logical,
    LogicalTensor,
    dtype_name,
    dtype_named,
    logical,
)

log = logging.getLogger(__name__)


class ROSReader(StorageReader):
    """Reads a version into a state dict, in place. One reader per load.

    dcp.load(state_dict, storage_reader=ROSReader("latest")) means, on all ranks: find the version
    (waiting for one if there is none yet), check that the state dict fits, unpublish what the
    handle holds, register the state dict's tensors, replicate. Bytes land in the state dict's own
    tensors, and this replica is a source of the version from then on, until the handle's next
    load or `unpublish`: do not write to the tensors before.

    A version that this handle already holds in these very tensors is not read again.

    If the state dict is only a part of the version (the model out of model and optimizer), that
    part is read and nothing is served. dcp's files cast silently; this does not: other dtypes are
    an error. A key that the version lacks is a ManifestMismatch (a ValueError), where dcp's files
    say RuntimeError. Enums, numpy scalars and the like need `trust_objects`.

    What fails before the old version is given up changes nothing; afterwards the handle holds
    nothing, and says so.

    A job that loads into the same tensors again and again passes `planner()` too: dcp's own
    planner may take longer than all the rest.

    Args:
        version: A number, "latest" or "latest-k"; see `ShardHandle.replicate`.
        handle: Whose ranks are those of dcp's process group. None: `default_handle("load")`.
        serve: Whether to become a source of a version that was read whole.
        trust_objects: Whether non-tensor objects may use all of pickle. It runs code that the
            publisher chose; only for peers you trust. Without it, what torch's weights_only
            unpickler refuses is an UntrustedObject error.
        timeout_s: For finding the version, and again for reading it. None: the handle's.

    Raises (inside torch's CheckpointException, which `except Exception` does not catch):
        UsageError, ManifestMismatch, VersionNotFound, DeadlineExceeded, SourceLost,
        UntrustedObject, CallAborted, SelfFenced, StoreUnavailable
    """

    def __init__(
        self,
        version: int | str = "latest",
        *,
        handle: ShardHandle | None = None,
        serve: bool = True,
        trust_objects: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        self._asked, self._given = version, handle
        self._serve, self._trust_objects, self._timeout_s = serve, trust_objects, timeout_s
        self._handle: ShardHandle | None = None
        self._begun: Beginning | None = None
        self._plan = LoadPlan([])
        self._contents = logical(())
        self._found: Found | None = None
        self._error: TorchRosError | None = None
        self._own: ROSLoadPlanner | None = None
        self._load: _Load | None = None
        self._fit: Fit | None = None
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
        """What the version contains. An error is kept for `set_up_storage_reader`: dcp turns
        every exception raised here into an AssertionError, and its type would be lost.

        The first that dcp asks for: the call begins, and is one of the group's from here on.
        """
        self._load = self._fit = self._error = None
        try:
            self._handle = handle = self._given or default_handle("load")
            self._begun = handle._begin_dcp(f"load {self._asked}", self)
            with self._begun.hook():
                self._found = handle._inspect(self._asked, self._timeout_s)
                self._contents = logical(self._found.layouts)
        except TorchRosError as error:
            self._error = error
        return _metadata(self._contents)

    # dcp looks for a parameter of this name before it passes the rank.
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self._error is not None:
            raise self._error
        assert self._handle is not None
        check_group(self._handle, kwargs.get("rank"), None)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keep the plan here: no rank needs to know what another one wants.

        With our planner, also check that all of it fits: dcp asks all ranks here, and that saves
        the handle asking them.
        """
        if self._begun is not None:
            self._begun.touch()
        self._plan = plan
        if self._own is None or self._own.plan is not plan:
            return dataclasses.replace(plan, items=[])
        assert self._handle is not None
        assert self._found is not None
        self._own.is_kept = True
        self._load = load = _Load(self, self._own)
        assert self._begun is not None
        with self._begun.hook():
            self._fit = self._handle._check_load(
                self._asked,
                self._found,
                load.fill,
                is_served=self._serve,
                timeout_s=self._timeout_s,
            )
        return LoadPlan([], storage_data=self._fit.said)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        assert self._handle is not None
        check_group(self._handle, None, len(plans))
        if self._fit is None:
            return plans
        said = unanimous(plan.storage_data for plan in plans)
        return [LoadPlan([], storage_data=said)] * len(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._handle is not None
        assert self._found is not None
        load = self._load or _Load(self, planner)
        fit = None if self._fit is None else Fit(self._fit.state, plan.storage_data)
        report = self._handle._load(  # dcp stands on the handle
            self._asked,
            self._found,
            load.fill,
            load.vet,
            is_served=self._serve,
            timeout_s=self._timeout_s,
            fit=fit,
            begun=self._begun,
        )
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


class _Load:
    """One state dict being filled: between dcp's read items and local chunks."""

    def __init__(self, reader: ROSReader, planner: LoadPlanner) -> None:
        assert reader._handle is not None
        self._handle, self._trust_objects = reader._handle, reader._trust_objects
        self._plan, self._planner, self._contents = reader._plan, planner, reader._contents
        self._own = planner if isinstance(planner, ROSLoadPlanner) else None
        self._seen: Outline | None = None
        self._targets: list[tuple[ReadItem, torch.Tensor]] = []
        self._buffers: Mapping[str, torch.Tensor] = {}
        self._vetted: dict[str, tuple[bytes, Any]] = {}
        self.wanted = 0
        """How many tensors and objects are to be filled."""

    def fill(self, layouts: Sequence[Layout]) -> LocalState:
        """What to read from a source with these layouts.

        Raises: ManifestMismatch: They are of other tensors than those that dcp has planned for.
        """
        planner, contents = self._planner, logical(layouts)
        if contents.digest != self._contents.digest:
            self._require_the_same(contents)
        if values_of(planner) is None:
            return self._planned(layouts)  # whatever it makes of the state dict
        assert isinstance(planner, DefaultLoadPlanner)
        kept = memos(self._handle)
        source = (
            "nested" if self._own else "flat",
            "partial" if planner.allow_partial_load else "whole",
            *(layout.digest for layout in layouts),
        )
        before = planner.original_state_dict if self._own else planner.state_dict
        seen, memo = outline(before), kept.get("load")
        if memo is None or not memo.fits(seen, source):
            if self._own:
                self._plan = self._own.plan_now()
                seen = outline(before)  # what was on no device is there now
            state = self._planned(layouts)
            memo = kept["load"] = Memo.of(seen, planner.state_dict, state, source)
            if memo is not None:
                memo.mappings = planner.mappings
        else:
            known = self._handle._registered
            if known is None or known.layout is not memo.layout:
                known = None
            contents = logical(layouts)
            self._buffers = known.objects if known else _buffers(contents, dict(memo.objects))
            self.wanted = len(memo.tensors) + len(memo.objects)
            if self._own:
                planner.mappings = dict(memo.mappings)
            state = memo.state(seen, self._buffers, known)
        self._seen = seen
        return state

    def _require_the_same(self, contents: Logical) -> None:
        """Of what is in the state dict: another version may have come since it was planned."""
        if values_of(self._planner) is not None:
            assert isinstance(self._planner, DefaultLoadPlanner)
            names = list(flatten_state_dict(self._planner.original_state_dict)[0])
        else:
            names = [item.storage_index.fqn for item in self._plan.items]
        for fqn in names:
            now, before = contents.get(fqn), self._contents.get(fqn)
            if now != before and not (now and before and now.dtype == before.dtype == OBJECT):
                raise ManifestMismatch(
                    f"{fqn!r}",
                    f"{_described(before)}, as when the load began",
                    f"{_described(now)} in a version that has come since",
                    "load again",
                )

    def _planned(self, layouts: Sequence[Layout]) -> LocalState:
        contents, items = logical(layouts), self._plan.items
        wanted = [item for item in items if item.type == LoadItemType.TENSOR]
        self._targets = [(item, self._planner.resolve_tensor(item)) for item in wanted]
        objects = [item.storage_index.fqn for item in items if item.type == LoadItemType.BYTE_IO]
        self._buffers = _buffers(contents, objects)
        tensors: dict[str, LocalTensor] = {}
        values = values_of(self._planner) or {}
        for item, target in self._targets:
            fqn = item.storage_index.fqn
            if is_strided(value := values.get(fqn)):
                (tensors[fqn],) = local_chunks({fqn: value})
            else:
                _add(tensors, item, target, contents)
        self.wanted = len(tensors) + len(objects)
        for fqn, (dtype, shape) in contents.items():
            # dcp does not ask for what has no elements; the version is whole with it.
            if dtype != OBJECT and 0 in shape:
                tensors[fqn] = LocalTensor(fqn, dtype_named(dtype), shape, (), spread=True)
        paths = {
            fqn: path
            for fqn, path in contents.paths.items()
            if fqn in tensors or fqn in self._buffers
        }
        return LocalState(list(tensors.values()), self._buffers, paths)

    def vet(self) -> None:
        """Nothing that came from a peer reaches pickle before weights_only has accepted it."""
        if self._trust_objects:
            return
        for fqn, buffer in self._buffers.items():
            content = buffer.numpy().tobytes()
            if fqn in self._vetted and self._vetted[fqn][0] == content:
                continue
            try:
                value = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
            except Exception as error:  # whatever a hostile stream makes it raise
                raise UntrustedObject(fqn, _what_was_refused(buffer, error)) from error
            self._vetted[fqn] = (content, value)

    def commit(self) -> None:
        memo = memos(self._handle).get("load")
        if memo is not None and self._seen is not None:
            memo.learn(self._seen, self._handle._registered)
        for fqn, buffer in self._buffers.items() if self._own else ():
            assert self._own is not None
            self._own.put(fqn, self._value(fqn, buffer))
        for item in self._plan.items if not self._own else ():
            if item.type == LoadItemType.BYTE_IO:
                self._planner.load_bytes(item, _stream(self._buffers[item.storage_index.fqn]))
        for item, target in self._targets:
            self._planner.commit_tensor(item, target)

    def _value(self, fqn: str, buffer: torch.Tensor) -> Any:
        value = self._vetted[fqn][1] if fqn in self._vetted else None
        if fqn in self._vetted and type(value) in ATOMS:
            return value
        try:
            return torch.load(_stream(buffer), weights_only=False)
        except RuntimeError:  # on a device that is not there
            if fqn not in self._vetted:
                raise
            return value  # on the CPU


def _described(found: LogicalTensor | None) -> str:
    if found is None:
        return "nothing of that name"
    return "an object" if found.dtype == OBJECT else f"{found.dtype} {list(found.shape)}"


def _buffers(
    contents: Mapping[str, LogicalTensor], objects: Iterable[str]
) -> dict[str, torch.Tensor]:
    return {
        fqn: torch.empty(contents[fqn].shape, dtype=torch.uint8) for fqn in dict.fromkeys(objects)
    }


def _what_was_refused(buffer: torch.Tensor, error: Exception) -> str:
    try:
        names = get_unsafe_globals_in_checkpoint(_stream(buffer))
    except Exception:  # noqa: BLE001  # not even the list can be made of it
        names = []
    return f"it needs {', '.join(names)}" if names else type(error).__name__


def _stream(buffer: torch.Tensor) -> io.BytesIO:
    return io.BytesIO(buffer.numpy().tobytes())


def _add(
    tensors: dict[str, LocalTensor],
    item: ReadItem,
    target: torch.Tensor,
    contents: Mapping[str, LogicalTensor],
) -> None:
    """The metadata shows every tensor as one chunk, so `storage_offsets` are global offsets."""
    fqn = item.storage_index.fqn
    (local,) = local_chunks({fqn: target})  # checks it
    chunks = tuple(LocalChunk(tuple(item.storage_offsets), c.tensor) for c in local.chunks)
    known = tensors.get(fqn)
    tensors[fqn] = LocalTensor(
        fqn,
        target.dtype,
        contents[fqn].shape,
        (*known.chunks, *chunks) if known else chunks,
        spread=True,
    )


def _metadata(contents: Logical) -> Metadata:
    """A version as dcp's planners want it. A tensor is one chunk, whoever holds parts of it:
    so dcp asks once for each local chunk, and where its bytes come from is decided later.
    """
    return Metadata(_Contents(contents), planner_data=contents.paths)  # type: ignore[arg-type]  # read only


class _Contents(Mapping[str, STORAGE_TYPES]):
    """What is in the version, with errors that name what was found and what was expected.

    dcp's default planner looks up every wanted name here, and raises a RuntimeError or ValueError
    of its own for a missing tensor or another shape. To tell more, and with our types, the lookup
    looks at what that function holds. Elsewhere, and should that function change, this is a dict.

    Entries are made when they are looked up: who does not plan does not pay for them.
    """

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

    def __contains__(self, fqn: object) -> bool:
        caller = sys._getframe(1)
        if caller.f_code is create_default_local_load_plan.__code__:
            self._check(str(fqn), caller.f_locals.get("obj"), caller.f_locals.get("strict") is True)
        return fqn in self._contents

    def _check(self, fqn: str, target: object, is_strict: bool) -> None:
        found = self._contents.get(fqn)
        if found is None and is_strict:
            raise ManifestMismatch(
                f"{fqn!r}",
                "every key of the state dict to be in the version",
                f"a version of {len(self)} tensors and objects without it",
                "leave it out, or pass planner=DefaultLoadPlanner(allow_partial_load=True)",
            )
        if found is not None and found.dtype != OBJECT and isinstance(target, torch.Tensor):
            there = _described(found)
            here = f"{dtype_name(target.dtype)} {list(target.shape)}"
            if here != there:
                raise ManifestMismatch(
                    f"tensor {fqn!r}",
                    f"{there} as in the version",
                    f"{here} in the state dict",
                    "load into the same shape and dtype: unlike dcp's files, this does not cast",
                )


def _entry(found: LogicalTensor) -> STORAGE_TYPES:
    if found.dtype == OBJECT:
        return BytesStorageMetadata()
    size = torch.Size(found.shape)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_named(found.dtype)),
        size=size,
        chunks=[ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
    )
