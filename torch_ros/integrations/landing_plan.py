"""Which tensors of a version are read into an engine's parameters, and which it has to load."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

import torch_ros
from torch_ros.boxes import Box
from torch_ros.errors import ManifestMismatch
from torch_ros.integrations.boxes import uncovered
from torch_ros.integrations.landings import Landing, Recording, uncollected

SAME = "its elements are equal, which shows nothing of their order"
SMALL_BYTES = 1 << 20  # of a tensor that is looked at where it was read in place
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor's elements lie in its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Geometry":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def __str__(self) -> str:
        return f"{self.dtype} of shape {list(self.shape)} and strides {list(self.strides)}"


Place = tuple[object, ...]  # address, or identity of what has no memory; shape, strides, dtype


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A reason for which nothing is read into a parameter in place."""

    reason: str
    is_provable: bool = False  # gone once the loader has installed a version, and `misplaced` none


@dataclass(frozen=True)
class LandingPlan:
    """How each tensor of a version gets into an engine: in place, through its loader, or not.

    Every tensor of the version is in one of `direct`, `staged`, `ignored` and the recording's
    `unused`.
    """

    direct: Mapping[str, Landing]
    staged: Mapping[str, str]  # the reason for each; what goes into one module stands together
    modules: frozenset[str]  # those that `staged` go into
    provable: Mapping[str, Landing]  # those of `staged` that a proof would bring to `direct`
    ignored: Mapping[str, str]  # the engine's loader fails for them, and nothing lacks them

    def is_whole(self, contents: Mapping[str, object]) -> bool:
        """Whether each tensor of the version is read in place."""
        return not self.staged and len(self.direct) == len(contents)

    @cached_property
    def direct_bytes(self) -> int:
        return sum(landing.size_bytes for landing in self.direct.values())


def state_of(engine: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under each of their names."""
    parameters, buffers = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    # One walk instead of those of named_parameters and named_buffers, for each update.
    for path, module in engine.named_modules(remove_duplicate=False):
        start = f"{path}." if path else ""
        for found, own in (
            (parameters, module._parameters),  # noqa: SLF001  # as torch's own
            (buffers, module._buffers),  # noqa: SLF001
        ):
            found |= {start + name: one for name, one in own.items() if one is not None}
    return parameters | buffers


def changed(
    loaded: Mapping[str, Geometry], state: Mapping[str, torch.Tensor]
) -> dict[str, Obstacle]:
    """The parameters that an engine does not have any more as they were when it was loaded."""
    found = {}
    for name, before in loaded.items():
        now = Geometry.of(state[name]) if name in state else None
        if now != before:
            reason = f"{name} is {now or 'gone'}, was {before} when it was loaded"
            found[name] = Obstacle(reason)
    return found


@uncollected()
def plan_landings(recording: Recording, obstacles: Mapping[str, Obstacle]) -> LandingPlan:
    """Tell tensors that can be read in place from those that the engine's loader has to take.

    Tensors that go into one module are all read in place, or all loaded: a loader that gets a part
    of a module may make the rest of it anew.

    Args:
        recording: Of this version's tensors and this engine.
        obstacles: By parameter; those without one may be read into.
    """
    firm = {name: one for name, one in obstacles.items() if not one.is_provable}
    staged, at_least = _staged(recording, obstacles), _staged(recording, firm)
    targets = dict(_targets(recording))
    modules = {module for fqn in staged for module in targets.get(fqn, ())}
    if staged:  # a loader that runs at all gives these other memory
        modules |= {_module(name) for name in recording.replaced}
    if _unseen(recording):
        modules |= {_module(name) for name in recording.unwritten}
    return LandingPlan(
        {fqn: one for fqn, one in recording.landings.items() if fqn not in staged},
        {fqn: staged[fqn] for fqn in _by_module(recording, staged)},
        frozenset(modules),
        {fqn: recording.landings[fqn] for fqn in staged if fqn not in at_least},
        {fqn: recording.staged[fqn] for fqn in recording.staged if fqn in recording.failed},
    )


def missing(recording: Recording, state: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Parameters that would keep what they had, and how many elements of each.

    A parameter whose memory belongs to another one, too, is loaded with that. Empty if tensors are
    staged of which nobody saw where they go: only loading tells.
    """
    if _unseen(recording):
        return {}
    landed = (box.parameter for one in recording.landings.values() for box in one.boxes)
    loaded = (name for names in recording.targets.values() for name in names)
    names = {*landed, *loaded, *recording.filled} - recording.unwritten.keys()
    written = {_place(state[name]) for name in names if name in state}
    return {
        name: count
        for name, count in recording.unwritten.items()
        if name not in state or _place(state[name]) not in written
    }


def homeless(
    contents: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    partial: Sequence[Mapping[str, Iterable[Box]]],
) -> dict[str, int]:
    """The tensors with elements that land on no rank, and how many.

    Args:
        partial: By rank, the tensors that it does not have whole, and the boxes that it has.
    """
    found = {}
    for fqn in partial[0]:
        boxes = [ranks[fqn] for ranks in partial if fqn in ranks]
        if len(boxes) == len(partial):
            found[fqn] = uncovered(
                tuple(contents[fqn][1]), [box for those in boxes for box in those]
            )
    return {fqn: count for fqn, count in found.items() if count}


def misplaced(
    landings: Mapping[str, Landing],
    state: Mapping[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> dict[str, str]:
    """The tensors that an engine, having loaded them, does not have where they would land.

    Bits are compared. A box of equal elements (`SAME`) proves nothing: the order may be another.

    Args:
        tensors: As they were published: whole, each with its name.
    """
    found = {}
    for fqn, whole in tensors:
        for box, (offsets, view) in zip(
            landings[fqn].boxes, landings[fqn].chunks(state), strict=True
        ):
            ends = zip(offsets, box.sizes, strict=True)
            published = _bits(whole[tuple(slice(at, at + size) for at, size in ends)])
            if not torch.equal(_bits(view), published.to(view.device)):
                found[fqn] = f"{box.parameter} does not have it where the loader put it"
            elif len(published) > 1 and bool((published == published[0]).all()):
                found.setdefault(fqn, SAME)
    return found


def chunked(
    landings: Mapping[str, Landing], state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of a version that lie in an engine's parameters, to be read into."""
    return {
        fqn: torch_ros.Chunked(landing.shape, landing.dtype, dict(landing.chunks(state)))
        for fqn, landing in landings.items()
    }


def has_nan(tensor: torch.Tensor) -> bool:
    """Whether an element is no number; infinities are. A tenth of the time that a copy takes."""
    return bool(_nan_in(tensor)) if _may_have_nan(tensor) else False


def small_with_nan(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The first of the small tensors, such as norms and biases, that has a NaN.

    Weights that diverge do so in all tensors, and to look at these takes next to no time: one wait
    for each device.
    """
    boxes = [
        (fqn, box)
        for fqn, tensor in tensors.items()
        if tensor.nbytes <= SMALL_BYTES
        for box in (tensor.chunks.values() if isinstance(tensor, torch_ros.Chunked) else [tensor])
        if _may_have_nan(box)
    ]
    found: dict[torch.device, list[torch.Tensor]] = {}
    for _, box in boxes:
        found.setdefault(box.device, []).append(_nan_in(box))
    if not any(bool(torch.stack(each).any()) for each in found.values()):
        return None
    return next(fqn for fqn, box in boxes if bool(_nan_in(box)))


def no_numbers(fqn: str, version: int, model: str) -> ManifestMismatch:
    """The error of a version with a NaN."""
    return ManifestMismatch(
        f"{fqn!r} of version {version} of model {model!r}",
        "numbers",
        "a NaN",
        "look for the step that made it, and publish a version from before that",
    )


def _may_have_nan(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex())


def _nan_in(tensor: torch.Tensor) -> torch.Tensor:
    is_ordered = tensor.is_floating_point() and tensor.dtype.itemsize > 1
    return (tensor.amin() if is_ordered else tensor).isnan().any()


def places(names: Iterable[str], state: Mapping[str, torch.Tensor]) -> dict[str, Place]:
    """Where these parameters are; those that are gone are left out."""
    return {name: _place(state[name]) for name in names if name in state}


def named_alike(names: Iterable[str], state: Mapping[str, torch.Tensor]) -> set[str]:
    """All names of these parameters: modules that share one, as a router's bias, have one each."""
    there = {_place(state[name]) for name in names}
    return {name for name, one in state.items() if _place(one) in there}


def _place(tensor: torch.Tensor) -> Place:
    return tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride(), tensor.dtype


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(WORDS[tensor.dtype.itemsize])


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _unseen(recording: Recording) -> list[str]:
    """Staged tensors of which nobody saw where they go."""
    return [
        fqn
        for fqn in recording.staged
        if fqn not in recording.failed and fqn not in recording.targets
    ]


def _targets(recording: Recording) -> Iterator[tuple[str, list[str]]]:
    """The modules that each tensor goes into."""
    for fqn, landing in recording.landings.items():
        yield fqn, [_module(box.parameter) for box in landing.boxes]
    for fqn, names in recording.targets.items():
        yield fqn, [_module(name) for name in names]


def _staged(recording: Recording, obstacles: Mapping[str, Obstacle]) -> dict[str, str]:
    """Names of tensors that cannot be read in place, each with its reason."""
    found = {fqn: why for fqn, why in recording.staged.items() if fqn not in recording.failed}
    modules = {_module(name): f"the loader replaces {name}" for name in recording.replaced}
    modules |= {_module(name): one.reason for name, one in obstacles.items()}
    if unseen := _unseen(recording):
        reason = f"nobody saw where {unseen[0]!r} goes, perhaps there"
        modules |= {_module(name): reason for name in recording.unwritten}
    targets = dict(_targets(recording))
    while True:
        for fqn in found:
            reason = f"goes into one module with {fqn!r}, which is staged"
            for module in targets.get(fqn, ()):
                modules.setdefault(module, reason)
        more = {
            fqn: modules[module]
            for fqn in recording.landings
            if fqn not in found
            for module in targets[fqn]
            if module in modules
        }
        if not more:
            return found
        found |= more


def _by_module(recording: Recording, staged: Container[str]) -> list[str]:
    """The names, so that those of one module follow each other, modules as they come first."""
    targets = dict(_targets(recording))
    modules: dict[str, list[str]] = {}
    for fqn in (*recording.landings, *recording.staged):
        modules.setdefault(targets.get(fqn, [fqn])[0], []).append(fqn)
    return [fqn for fqns in modules.values() for fqn in fqns if fqn in staged]
