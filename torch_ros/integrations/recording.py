"""Finds out where an engine's own loader puts each part of each checkpoint tensor."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, combinations
from math import prod

import torch

from torch_ros.boxes import Box, common
from torch_ros.integrations.boxes import uncovered
from torch_ros.integrations.landings import LandedBox, Landing, Recording, uncollected
from torch_ros.integrations.owned import Attributes, Owned, memories, owned_by
from torch_ros.integrations.provenance import Made, Memory, Patch, Plain, groups, landed
from torch_ros.integrations.recorder import Looks, NeedsValue, Recorder

PASSES_MAX = 16  # the loader fails for other tensors each time: another pass is as likely to fail

Contents = Mapping[str, tuple[torch.dtype, Sequence[int]]]  # of a version: dtypes and shapes
LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


@uncollected()
def record(
    engine: torch.nn.Module, contents: Contents, load_weights: LoadWeights | None = None
) -> Recording:
    """Run the engine's loader on tensors without memory, and note where it puts what.

    Afterwards the engine's parameters and buffers are as before: their bytes, their memory, and
    which tensors they are. They may lie on any device, also on meta. All other attributes of its
    modules are as before, too, except for what the loader has put into a list, a dict or a set.
    Takes about 0.1 ms per tensor, and no memory to speak of; Python's garbage collector is off.

    A tensor for which the loader fails is staged, and the loader runs again on all others. If it
    looks at a value, every tensor is staged: nobody knows what the value decides. Kernels
    that torch does not dispatch, and other threads of the loader, are not seen: they get tensors on
    meta, and fail; on an engine on meta they write nothing, and `unwritten` tells.

    Args:
        engine: The module that has the parameters and buffers to be written.
        contents: Name, dtype and shape of each checkpoint tensor, in the order of loading.
        load_weights: Takes pairs of name and tensor; by default the method of `engine`.

    Raises:
        UsageError: A parameter or buffer is not plain memory; names it.
    """
    load = engine.load_weights if load_weights is None else load_weights
    assert callable(load)
    owned = owned_by(engine)
    attributes = [Attributes.of(module) for module in engine.modules()]
    needed: dict[str, str] = {}
    raised: dict[str, str] = {}
    for _ in range(PASSES_MAX):
        left = [fqn for fqn in contents if fqn not in needed and fqn not in raised]
        recorder = Recorder(memories(owned))
        try:
            errors = _run(recorder, load, contents, left)
            kept = _kept(recorder)
            replaced = tuple(one.name for one in owned if not one.is_in_place())
        finally:
            for module in attributes:
                module.put_back()
            for one in owned:
                one.put_back()
        is_known = recorder.needed.keys() <= needed.keys()
        needed |= recorder.needed
        raised |= errors
        if not errors and is_known:
            break
    else:
        reason = f"the loader failed {PASSES_MAX} times, for other tensors each time"
        recorder, replaced, kept = Recorder(memories(owned)), (), dict.fromkeys(contents, reason)
        raised.clear()  # only loading tells which of them it takes
    if needed:
        reason = f"the loader looks at values of {next(iter(needed))!r}, which may decide over it"
        kept = dict.fromkeys(contents, reason) | kept
    staged = kept | needed | raised
    return _recording(owned, contents, recorder, staged, raised.keys(), replaced)


class _Feed:
    """Tensors on meta, made as the loader asks for them."""

    def __init__(self, recorder: Recorder, contents: Contents, fqns: Sequence[str]) -> None:
        self._recorder, self._contents, self._fqns = recorder, contents, fqns
        self.asked_for = 0
        self.is_finished = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for fqn in self._fqns:
            self.asked_for += 1
            self._recorder.during = fqn
            yield fqn, self._recorder.tensor(fqn, *self._contents[fqn])
        self.is_finished = True

    def blamed(self) -> str:
        """The tensor for which the loader fails: the last that it asked for, or worked on."""
        return (self.is_finished and self._recorder.touched) or self._recorder.during


def _run(
    recorder: Recorder, load: LoadWeights, contents: Contents, fqns: Sequence[str]
) -> dict[str, str]:
    """Returns for which names it raised; after each it goes on, to find the others too."""
    raised: dict[str, str] = {}
    while True:
        feed = _Feed(recorder, contents, fqns)
        try:
            with recorder, Looks(recorder), torch.no_grad():
                load(iter(feed))
        except Exception as error:
            if isinstance(error, NeedsValue):  # the recorder knows these
                if not feed.asked_for:
                    return raised
            elif not feed.asked_for:
                raise
            else:
                raised[feed.blamed()] = f"the loader raised {type(error).__name__}: {error}"[:200]
        else:
            return raised
        fqns = fqns[feed.asked_for :]
        if not fqns:
            return raised


def _kept(recorder: Recorder) -> dict[str, str]:
    """Tensors of which the engine keeps something in memory that is not what it had."""
    reason = "the engine keeps other memory, which its loader made of it"

    def kept() -> dict[str, str]:
        return {
            fqn: reason
            for memory in recorder.own.values()
            if not memory.storage.expired()  # type: ignore[no-untyped-call]
            for patch in memory.settle()
            for fqn in patch.origin.fqns
        }

    if kept():
        gc.collect()
    return kept()


def _recording(
    owned: Sequence[Owned],
    contents: Contents,
    recorder: Recorder,
    staged: Mapping[str, str],
    failed: AbstractSet[str],
    replaced: Sequence[str],
) -> Recording:
    order = {one.name: position for position, one in enumerate(owned)}
    written = [memory for both in recorder.engine.values() for memory in both]
    written.sort(key=lambda memory: order[memory.name])
    boxes = _boxes(written, contents)
    made = _made(written, recorder.foreign.values())
    partial = _partial(recorder, contents, staged.keys() - failed)
    staged = _repeated(boxes) | _left_behind(written, replaced) | made | dict(staged)
    staged = _rivals(written, staged)
    stale = [memory for memory in written if _left(memory) and memory.name not in replaced]
    return Recording(
        {
            fqn: Landing(fqn, dtype, tuple(shape), tuple(boxes[fqn]))
            for fqn, (dtype, shape) in contents.items()
            if fqn in boxes and fqn not in staged
        },
        {fqn: staged[fqn] for fqn in contents if fqn in staged},
        frozenset(failed),
        _targets(written, staged),
        tuple(fqn for fqn in contents if fqn not in boxes and fqn not in staged),
        {memory.name: _left(memory) for memory in stale if memory.is_parameter},
        {memory.name: count for memory in written if (count := _filled(memory))},
        tuple(replaced),
        tuple(memory.name for memory in stale if not memory.is_parameter),
        partial,
    )


def _partial(
    recorder: Recorder, contents: Contents, unknown: AbstractSet[str]
) -> dict[str, tuple[Box, ...]]:
    """The tensors of which elements go nowhere, and the boxes of each that go somewhere.

    A box counts if it lies below something else in the engine, or something else is made of it.
    """
    seen = {fqn: set(boxes) for fqn, boxes in recorder.used.items()}
    for memory in chain.from_iterable(recorder.engine.values()):
        for fqn, box in landed([*memory.settle(), *(under for under, _ in memory.covered)]):
            seen.setdefault(fqn, set()).add(box)
    away = {
        fqn
        for memory in recorder.foreign.values()
        for patch in memory.settle()
        for fqn in patch.origin.fqns
    }
    return {
        fqn: tuple(seen.get(fqn, ()))
        for fqn, (_, shape) in contents.items()
        if fqn not in unknown | away and uncovered(tuple(shape), seen.get(fqn, ()))
    }


def _boxes(written: Iterable[Memory], contents: Contents) -> dict[str, list[LandedBox]]:
    found: dict[str, list[LandedBox]] = {}
    for memory in written:
        for patch in memory.settle():
            if isinstance(patch.origin, Plain):
                rank = len(contents[patch.origin.fqn][1])
                found.setdefault(patch.origin.fqn, []).append(_box(memory, patch, rank))
    return {fqn: sorted(boxes, key=lambda box: box.offsets) for fqn, boxes in found.items()}


def _box(memory: Memory, patch: Patch, rank: int) -> LandedBox:
    """The same box, seen from the checkpoint tensor."""
    assert isinstance(patch.origin, Plain)
    dims: list[int | None] = [None] * rank
    for dim, own in enumerate(patch.origin.dims):
        if own is not None:
            dims[own] = dim
    within = memory.frame.shape
    box = patch.origin.box(patch.sizes)
    return LandedBox(*box, memory.name, within, patch.offsets, tuple(dims))


def _repeated(boxes: Mapping[str, Sequence[LandedBox]]) -> dict[str, str]:
    reason = "an element lands in several places"
    return {fqn: reason for fqn, those in boxes.items() if _overlap(those)}


def _overlap(boxes: Sequence[LandedBox]) -> bool:
    those = [(box.offsets, box.sizes, (box.offsets, box.sizes)) for box in boxes]
    return any(common(*two) for group in groups(those) for two in combinations(group, 2))


def _made(written: Iterable[Memory], foreign: Iterable[Memory]) -> dict[str, str]:
    """The tensors of which something else than a copy goes to the engine, or to nobody knows."""
    found: dict[str, str] = {}
    for memory in written:
        for patch in memory.settle():
            if isinstance(patch.origin, Made):
                found |= dict.fromkeys(patch.origin.fqns - found.keys(), patch.origin.reason)
    for memory in foreign:
        reason = "written to memory that is neither a parameter nor a buffer"
        for patch in memory.settle():
            found |= dict.fromkeys(patch.origin.fqns - found.keys(), reason)
    return found


def _left_behind(written: Iterable[Memory], replaced: Sequence[str]) -> dict[str, str]:
    """The tensors in memory that is no parameter's any more when the loader has run."""
    return {
        fqn: f"the loader gives {memory.name} other memory"
        for memory in written
        if memory.name in replaced
        for patch in memory.settle()
        for fqn in patch.origin.fqns
    }


def _targets(written: Iterable[Memory], staged: Iterable[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for memory in written:
        fqns = {fqn for patch in memory.settle() for fqn in patch.origin.fqns}
        for fqn in fqns.intersection(staged):
            found.setdefault(fqn, []).append(memory.name)
    return {fqn: tuple(names) for fqn, names in found.items()}


def _rivals(written: Iterable[Memory], staged: Mapping[str, str]) -> dict[str, str]:
    """The staged, and those that lie over one: staged after them, it would lie over them."""
    found = dict(staged)
    covered = [pair for memory in written for pair in memory.covered]
    while True:
        more = {
            fqn: f"lies over what is loaded with {below!r}, which is staged"
            for under, over in covered
            for below in sorted({*under.origin.fqns, under.during} & found.keys())
            for fqn in over.origin.fqns - found.keys()
        }
        if not more:
            return found
        found |= more


def _left(memory: Memory) -> int:
    """How many elements nothing was written to."""
    return prod(memory.frame.shape) - sum(patch.numel for patch in memory.settle())


def _filled(memory: Memory) -> int:
    return sum(patch.numel for patch in memory.settle() if not patch.origin.fqns)
