"""The state dict that a dcp.load fills."""

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from torch_ros.dcp.memo import Memo, Memos
from torch_ros.dcp.objects import Refused, Spent, unpickled
from torch_ros.dcp.outline import Outline, outline
from torch_ros.dcp.planner import ROSLoadPlanner, add_chunks, chunked_tensors, described, values_of
from torch_ros.errors import ManifestMismatch, UntrustedObject
from torch_ros.shard.checkpoint import Checkpoints
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.local import LocalTensor, is_strided, local_chunks
from torch_ros.weights.manifest import OBJECT, Layout, Logical, dtype_named, logical


class StateDict:
    """One state dict that is loaded into: between dcp's read items and local chunks.

    Args:
        contents: The version's, as it was when dcp began to plan.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        kept: Memos,
        planner: LoadPlanner,
        plan: LoadPlan,
        contents: Logical,
        *,
        trust_objects: bool,
    ) -> None:
        self._checkpoints, self._kept, self._trust_objects = checkpoints, kept, trust_objects
        self._plan, self._planner, self._contents = plan, planner, contents
        self._own = planner if isinstance(planner, ROSLoadPlanner) else None
        self._seen: Outline | None = None
        self._targets: list[tuple[ReadItem, torch.Tensor]] = []
        self._buffers: Mapping[str, torch.Tensor] = {}
        self._vetted: dict[str, tuple[bytes, Any]] = {}
        self.wanted: int = 0
        """How many tensors and objects are to be filled."""

    def fill(self, layouts: Sequence[Layout]) -> LocalState:
        """The tensors and objects to read from a source with these layouts.

        A state dict with the structure of the last one is not planned again.

        Raises: ManifestMismatch: They are of other tensors than those that dcp has planned for.
        """
        planner, contents = self._planner, logical(layouts)
        if contents.digest != self._contents.digest:
            self._require_the_same(contents)
        if values_of(planner) is None:
            return self._planned(layouts)  # whatever it makes of the state dict
        assert isinstance(planner, DefaultLoadPlanner)
        source = (
            "nested" if self._own else "flat",
            "partial" if planner.allow_partial_load else "whole",
            *(layout.digest for layout in layouts),
        )
        given = planner.original_state_dict if self._own else planner.state_dict
        self._seen, memo = outline(given), self._kept.get("load")
        if memo is not None and memo.fits(self._seen, source):
            return self._as_before(memo, self._seen, contents)
        if self._own:
            self._plan = self._own.plan_now(contents)
            self._seen = outline(given)  # `plan_now` has put meta tensors on a device
        state = self._planned(layouts)
        memo = self._kept["load"] = Memo.of(self._seen, planner.state_dict, state, source)
        if memo is not None:
            memo.mappings = planner.mappings
        return state

    def _as_before(self, memo: Memo, seen: Outline, contents: Logical) -> LocalState:
        """The state by the memo of the last load; the registered one, if it is of that load."""
        registered = self._checkpoints.registered
        if registered is not None and registered.layout is memo.layout:
            self._buffers = registered.objects
        else:
            registered, self._buffers = None, self._room(contents, dict(memo.objects))
        self.wanted = len(memo.tensors) + len(memo.objects)
        if self._own:
            self._own.mappings = dict(memo.mappings)
        return memo.state(seen, self._buffers, registered)

    def _require_the_same(self, contents: Logical) -> None:
        """Raise if a newer version has other tensors than those that DCP planned for."""
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
                    f"{described(before)}, as when the load began",
                    f"{described(now)} in a version that has come since",
                    "load again",
                )

    def _planned(self, layouts: Sequence[Layout]) -> LocalState:
        """The state, the long way: the memory of each tensor that dcp's plan names, item by item.

        dcp's planners name this rank's own tensors; those of others may hand out something else.
        """
        contents, items = logical(layouts), self._plan.items
        wanted = [item for item in items if item.type == LoadItemType.TENSOR]
        self._targets = [(item, self._planner.resolve_tensor(item)) for item in wanted]
        objects = [item.storage_index.fqn for item in items if item.type == LoadItemType.BYTE_IO]
        self._buffers = self._room(contents, objects)
        values = values_of(self._planner) or {}
        chunked = chunked_tensors({fqn: value for fqn, value in values.items() if fqn in contents})
        tensors = dict(chunked)
        for item, target in self._targets:
            fqn = item.storage_index.fqn
            if fqn in chunked:
                continue
            if is_strided(value := values.get(fqn)):
                (tensors[fqn],) = local_chunks({fqn: value})
            else:
                # The metadata shows every tensor as one chunk: these are global offsets.
                offsets, shape = item.storage_offsets, contents[fqn].shape
                add_chunks(tensors, fqn, target, offsets, shape, spread=True)
        self.wanted = len(tensors) + len(objects)
        for fqn, (dtype, shape) in contents.items():
            # dcp does not ask for what has no elements; the version is whole with it.
            if dtype != OBJECT and 0 in shape:
                tensors[fqn] = LocalTensor(fqn, dtype_named(dtype), shape, (), spread=True)
        named = tensors.keys() | self._buffers.keys()
        paths = {fqn: path for fqn, path in contents.paths.items() if fqn in named}
        return LocalState(list(tensors.values()), self._buffers, paths)

    def _room(self, contents: Logical, objects: Iterable[str]) -> dict[str, torch.Tensor]:
        """Memory for these objects: as much as the publisher says, within limits."""
        names, spent = [*dict.fromkeys(objects)], Spent()
        for fqn in names if not self._trust_objects else ():
            with _vetting(fqn):
                spent.add_bytes(math.prod(contents[fqn].shape))
        empty = partial(torch.empty, dtype=torch.uint8, device="cpu")
        return {fqn: empty(contents[fqn].shape) for fqn in names}

    def vet(self) -> None:
        """Unpickle the objects, as a list of our own allows: no other reaches pickle."""
        if self._trust_objects:
            return
        spent = Spent()
        for fqn, buffer in self._buffers.items():
            content = buffer.numpy().tobytes()
            if fqn in self._vetted and self._vetted[fqn][0] == content:
                continue
            with _vetting(fqn):
                self._vetted[fqn] = (content, unpickled(content, spent))

    def commit(self) -> None:
        """Give the planner the objects, and tell it that its tensors, in place, are filled."""
        memo = self._kept.get("load")
        if memo is not None and self._seen is not None:
            memo.learn(self._seen, self._checkpoints.registered)
        for fqn in self._buffers if self._own else ():
            assert self._own is not None
            self._own.put(fqn, self._value(fqn))
        for item in self._plan.items if not self._own else ():
            if item.type == LoadItemType.BYTE_IO:
                self._planner.load_bytes(item, self._stream(item.storage_index.fqn))
        for item, target in self._targets:
            self._planner.commit_tensor(item, target)

    def _stream(self, fqn: str) -> io.BytesIO:
        """An object for planners of others, which unpickle it: a vetted one as we pickle it."""
        if fqn not in self._vetted:
            return io.BytesIO(self._buffers[fqn].numpy().tobytes())
        stream = io.BytesIO()
        torch.save(self._vetted[fqn][1], stream)
        stream.seek(0)
        return stream

    def _value(self, fqn: str) -> Any:
        if fqn in self._vetted:
            return self._vetted[fqn][1]
        return torch.load(self._stream(fqn), weights_only=False)


@contextmanager
def _vetting(fqn: str) -> Iterator[None]:
    """Raises: UntrustedObject: Something goes wrong with the object of that name."""
    try:
        yield
    except Refused as error:
        raise UntrustedObject(fqn, str(error)) from error
    except Exception as error:  # whatever a hostile stream leads to
        raise UntrustedObject(fqn, type(error).__name__) from error
