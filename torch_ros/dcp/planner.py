"""The planners that `ROSWriter.planner` and `ROSReader.planner` make: planning is left for later.

dcp's own planners look at every tensor in every save and load, before the storage is asked for
anything. These only keep the state dict; the storage recognises an unchanged one by its outline
(memo.py), and has it planned, by dcp's own rules, where it is not.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from torch_ros.errors import ManifestMismatch, UsageError
from torch_ros.weights.chunked import Chunked
from torch_ros.weights.local import LocalChunk, LocalTensor, local_chunks
from torch_ros.weights.manifest import OBJECT, LogicalTensor, dtype_name

_TENSORS = (torch.Tensor, ShardedTensor)
_Path = tuple[str | int, ...]


class ROSSavePlanner(DefaultSavePlanner):
    """For one dcp.save with the ROSWriter that made it. Plans as DefaultSavePlanner does."""

    state_dict: dict[str, Any]
    is_coordinator: bool

    def __init__(self) -> None:
        super().__init__()
        self._nested: dict[str, Any] = {}
        self.plan: SavePlan = SavePlan([])
        self.is_kept: bool = False
        """Set by the ROSWriter that took the (empty) plan. If nobody did, `finish_plan` raises."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT002  # dcp's signature
    ) -> None:
        """Keep the state dict as it is: `plan_now` flattens and plans it, if that is needed."""
        if isinstance(storage_meta, Metadata):  # which a load has
            raise UsageError(_OTHER.format("load", "ROSReader"))
        self._nested, self.is_kept = state_dict, False
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([])
        return self.plan

    def plan_now(self) -> SavePlan:
        """dcp's plan for this rank; from then on `state_dict` is flat.

        Raises: UsageError: A tensor that dcp cannot plan.
        """
        _require_plannable(_nodes(self._nested))
        super().set_up_planner(self._nested, None, self.is_coordinator)
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if not self.is_kept:
            raise UsageError(_ELSEWHERE.format("storage_writer", "ROSWriter"))
        return new_plan


class ROSLoadPlanner(DefaultLoadPlanner):
    """For one dcp.load with the ROSReader that made it. Plans as DefaultLoadPlanner does."""

    original_state_dict: dict[str, Any]
    state_dict: dict[str, Any]
    mappings: dict[str, _Path]
    metadata: Metadata | None
    is_coordinator: bool

    def __init__(self, *, allow_partial_load: bool = False) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self.plan: LoadPlan = LoadPlan([])
        self.is_kept: bool = False
        """Set by the ROSReader that took the (empty) plan. If nobody did, `finish_plan` raises."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT002  # dcp's signature
    ) -> None:
        """Keep the state dict as it is: `plan_now` flattens and plans it, if that is needed."""
        if isinstance(metadata, bool):  # a save has no metadata, and passes `is_coordinator` there
            raise UsageError(_OTHER.format("save", "ROSWriter"))
        self.original_state_dict, self.state_dict, self.mappings = state_dict, state_dict, {}
        self.metadata, self.is_coordinator, self.is_kept = metadata, is_coordinator, False

    def create_local_plan(self) -> LoadPlan:
        self.plan = LoadPlan([])
        return self.plan

    def plan_now(self, contents: Mapping[str, LogicalTensor]) -> LoadPlan:
        """Plan for this rank as dcp does; from then on `state_dict` is flat.

        Raises:
            UsageError: A tensor that dcp cannot plan.
            ManifestMismatch: It does not fit the version's contents.
        """
        before = dict(_nodes(self.original_state_dict))
        _require_plannable(before.items())
        _require_device(before)
        super().set_up_planner(self.original_state_dict, self.metadata, self.is_coordinator)
        # dcp puts None for objects of types that it does not know, within containers made anew: put
        # back what was there. A meta tensor, which dcp replaces by one on a device, stays replaced.
        for fqn, is_now in list(self.state_dict.items()):
            was = before.get(self.mappings.get(fqn, (fqn,)), is_now)
            if was is not is_now and not isinstance(was, _TENSORS):
                self.state_dict[fqn] = was
                self.put(fqn, was)
        for fqn, value in self.state_dict.items():
            _require_fit(fqn, value, contents, is_strict=not self.allow_partial_load)
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        if not self.is_kept:
            raise UsageError(_ELSEWHERE.format("storage_reader", "ROSReader"))
        return new_plan

    def put(self, fqn: str, value: Any) -> None:
        """Set `value` in the nested state dict that dcp.load was given, where `fqn` lies in it."""
        inner: Any = self.original_state_dict
        *path, last = self.mappings[fqn]
        for key in path:
            inner = inner[_own_key(inner, key)]
        inner[_own_key(inner, last)] = value


def values_of(planner: SavePlanner | LoadPlanner) -> Mapping[str, Any] | None:
    """The state dict by fqn. None: a planner of others, which may make something else of it."""
    known = (DefaultSavePlanner, ROSSavePlanner, DefaultLoadPlanner, ROSLoadPlanner)
    if type(planner) not in known:
        return None
    assert isinstance(planner, DefaultSavePlanner | DefaultLoadPlanner)
    return planner.state_dict


def add_chunks(
    tensors: dict[str, LocalTensor],
    fqn: str,
    found: torch.Tensor,
    offsets: Sequence[int],
    shape: Sequence[int],
    *,
    spread: bool,
) -> None:
    """Add to `tensors` the chunk that a planner has found for one item of its plan."""
    (local,) = local_chunks({fqn: found})  # raises for what cannot be published or filled
    chunks = tuple(LocalChunk(tuple(offsets), chunk.tensor) for chunk in local.chunks)
    before = tensors[fqn].chunks if fqn in tensors else ()
    tensors[fqn] = LocalTensor(fqn, found.dtype, tuple(shape), (*before, *chunks), spread)


def chunked_tensors(values: Mapping[str, Any]) -> dict[str, LocalTensor]:
    """Each `Chunked` of a flat state dict, also one of which this rank has no box."""
    chunked = {fqn: value for fqn, value in values.items() if isinstance(value, Chunked)}
    return {tensor.fqn: tensor for tensor in local_chunks(chunked)}


def described(found: LogicalTensor | None) -> str:
    if found is None:
        return "nothing of that name"
    return "an object" if found.dtype == OBJECT else f"{found.dtype} {list(found.shape)}"


def _require_fit(
    fqn: str, value: object, contents: Mapping[str, LogicalTensor], *, is_strict: bool
) -> None:
    """Raises: ManifestMismatch: The version lacks it, or has another dtype or shape."""
    found = contents.get(fqn)
    if found is None and is_strict:
        raise ManifestMismatch(
            f"{fqn!r}",
            "every key of the state dict to be in the version",
            f"a version of {len(contents)} tensors and objects without it",
            "leave it out, or pass planner=reader.planner(allow_partial_load=True)",
        )
    if found is None or found.dtype == OBJECT or not isinstance(value, torch.Tensor):
        return
    there, here = described(found), f"{dtype_name(value.dtype)} {list(value.shape)}"
    if here != there:
        raise ManifestMismatch(
            f"tensor {fqn!r}",
            f"{there} as in the version",
            f"{here} in the state dict",
            "load into the same shape and dtype: unlike dcp's files, this does not cast",
        )


def _require_plannable(nodes: Iterable[tuple[_Path, Any]]) -> None:
    """Raises: UsageError: A tensor of which dcp would tell neither the name nor what to do."""
    for path, value in nodes:
        if isinstance(value, torch.Tensor) and (is_lazy(value) or _is_partial(value)):
            local_chunks({_fqn(path): value})


def _is_partial(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(each.is_partial() for each in tensor.placements)


def _require_device(nodes: Mapping[_Path, Any]) -> None:
    """Raises: UsageError: dcp would put a tensor of no device where the process group works."""
    if dist.is_available() and dist.is_initialized():
        return
    for path, value in nodes.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise UsageError(
                f"tensor {_fqn(path)!r} is on the meta device, and dcp takes its device from the "
                "default process group, which there is not; pass torch.empty_like(tensor, "
                "device=...), or call init_process_group first"
            )


def _fqn(path: _Path) -> str:
    """As dcp makes it, of the place in a state dict."""
    return ".".join(map(str, path))


def _nodes(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """All that is in a state dict, and where dcp says that it is."""
    yield path, value
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _nodes(inner, (*path, str(key)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _nodes(inner, (*path, index))


def _own_key(container: Any, key: str | int) -> Any:
    """The container's own key for dcp's `key`: to dcp, all keys of a dict are strings."""
    if isinstance(container, list) or key in container:
        return key
    return next((own for own in container if str(own) == key), key)


_OTHER = "planner: dcp.{0} was given the other one's; pass {1}(...).planner(), or none"
_ELSEWHERE = (
    "this planner leaves planning to the {1} that made it, and dcp was called without that one; "
    "pass both, {0}=x and planner=x.planner(), or neither"
)
