"""Follows checkpoint tensors through a loader's operations, and keeps it from writing anything."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._C import (
    DisableTorchFunction,
    _DisableTorchDispatch,
    _len_torch_dispatch_stack,
    is_grad_enabled,
)
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from torch_ros.boxes import Box
from torch_ros.integrations.boxes import PAIRS_MAX, Frame, pairs
from torch_ros.integrations.provenance import Made, Memory, Patch, Plain, landed, storage_of

aten: Any = torch.ops.aten
Content = list[Patch]
SEQUENCES = (list, tuple)
META = torch.device("meta")
UNKNOWN = Made(frozenset(), "copied from no checkpoint tensor")


UNDISPATCHED: set[Any] = {  # Python's ways to the elements, past torch's dispatcher
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
}


INT: set[type] = {int}
PLAIN: set[type] = {torch.Tensor, torch.nn.Parameter}  # a subclass may do something else
AT_ONCE: dict[Any, set[type]] = {  # and of which types is all that follows the first tensor
    torch.Tensor.data.__get__: INT,  # type: ignore[attr-defined]
    torch.Tensor.narrow: INT,
    torch.Tensor.select: INT,
    torch.Tensor.__getitem__: INT,
    torch.Tensor.unsqueeze: INT,
    torch.Tensor.unbind: INT,
    torch.Tensor.copy_: PLAIN,
}
NOTED: dict[Any, set[type]] = dict.fromkeys(UNDISPATCHED, PLAIN) | AT_ONCE
COPY = torch.Tensor.copy_


class NeedsValue(Exception):
    """The loader looks at an element's value, which a tensor on meta does not have."""


class Looks(TorchFunctionMode):
    """Tells a recorder of looks at values that torch does not dispatch.

    Frequent operations that torch does dispatch are done here: to dispatch them takes far longer.
    """

    def __init__(self, recorder: "Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = NOTED.get(func)
        if others is None:  # nearly always
            return func(*args, **kwargs) if kwargs else func(*args)
        if func in UNDISPATCHED:
            self._recorder.look(args[0], func)
        elif not kwargs and _is_plain(args, others):
            with _DisableTorchDispatch():
                return self._recorder.copy_(*args) if func is COPY else func(*args)
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation of the thread that entered it.

    Checkpoint tensors lie on meta, and so does all that is made of them. The engine's memory is
    never written: the recorder notes what would be, and nobody reads an element there any more.
    Memory that the loader allocates for itself works as ever, until something of the checkpoint
    goes there.
    """

    def __init__(self, engine: Mapping[int, Sequence[Memory]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.during = ""  # the checkpoint tensor that the loader asked for last
        self.touched: str = ""  # one that it did something with, last
        self.needed: dict[str, str] = {}  # by fqn: why a value was needed
        self.used: dict[str, set[Box]] = {}  # by fqn: its boxes of which something else was made
        # By storage, as `engine`:
        self.own: dict[int, Memory] = {}  # allocated since, and checkpoint tensors
        self.foreign: dict[int, Memory] = {}  # neither the engine's nor the loader's
        self.engine = engine

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # torch's; its way to skip it imports it, for seconds
        return False

    def tensor(self, fqn: str, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A checkpoint tensor, on meta, to be followed."""
        with _DisableTorchDispatch(), DisableTorchFunction():
            tensor = torch.empty(tuple(shape), dtype=dtype, device=META)
            memory = self.own[storage_of(tensor)] = Memory.of(tensor)
        begin, sizes = memory.whole
        origin = Plain(fqn, begin, tuple(range(len(begin))))
        memory.write([Patch(begin, sizes, origin, fqn)])
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):  # inference mode shows them whole; their parts say what they do
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten.copy_.default:
            return self.copy_(*args[:2])
        if func is aten._foreach_copy_.default:
            for written, copied in zip(*args[:2], strict=True):
                self.copy_(written, copied)
            return None
        tensors = _tensors(args, kwargs)
        if func.is_view:
            views = func(*args, **kwargs)
            if not _new(views, tensors):  # it may have promised too much
                return views
        content = self._read(tensors)
        if written := _written(func, args, kwargs):
            return self._write(func, args, kwargs, written, content)
        if not content:
            return self._own(func(*args, **kwargs), tensors)
        return self._make(func, args, kwargs, content)

    def copy_(self, written: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
        """Note a copy from one tensor to another."""
        memory, is_own = self._memory(written)
        source = self._find(copied)
        content = self._content(source, copied)
        self._touch(content)
        if is_own and not content:
            written.copy_(copied)
            if not memory.patches:
                return written
        if copied.shape != written.shape:
            copied = copied.expand(written.shape)
        memory.write(self._copied(memory, written, source, copied, content))
        return written

    def look(self, tensor: torch.Tensor, func: Any) -> None:
        """Refuse a look at values that are not there, or at memory that it would let out."""
        content = self._read([tensor])
        is_kept = func is torch.Tensor.tolist or storage_of(tensor) in self.own
        if content or not is_kept:
            raise self._needs(content, func.__name__)

    # -- operations

    def _write(
        self, func: Any, args: Any, kwargs: Any, written: Sequence[torch.Tensor], content: Content
    ) -> Any:
        """An operation that writes to some of its arguments, perhaps after it has read them."""
        memories = [self._memory(tensor) for tensor in written]
        if not content and all(is_own for _, is_own in memories):
            return func(*args, **kwargs)
        origin = self._made_of(content, f"written by {func}")
        for tensor, (memory, _) in zip(written, memories, strict=True):
            memory.write(self._all(memory, tensor, origin))
        returned = len(func._schema.returns)  # noqa: SLF001 (there is no other way to ask)
        return written[0] if returned == 1 else tuple(written) if returned else None

    def _make(self, func: Any, args: Any, kwargs: Any, content: Content) -> Any:
        """An operation that makes something else of checkpoint tensors."""
        if _gives_value(func):
            raise self._needs(content, func)
        shadows, options = tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        if options.get("device") is not None:
            options = {**options, "device": torch.device("meta")}
        try:
            made = func(*shadows, **options)
        except NotImplementedError as error:  # its shape depends on values
            raise self._needs(content, func) from error
        new = _new(made, _tensors(shadows, options))
        for tensor in new:
            self.own[storage_of(tensor)] = Memory.of(tensor)
        if func in {aten.clone.default, aten._to_copy.default}:  # noqa: SLF001 (its name)
            self.copy_(made, args[0])
        elif func in {aten.cat.default, aten.stack.default}:
            dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % made.ndim
            is_stack = func is aten.stack.default
            self._join(made, [one.unsqueeze(dim) if is_stack else one for one in args[0]], dim)
        else:
            origin = self._made_of(content, f"computed by {func}")
            for tensor in new:
                memory = self.own[storage_of(tensor)]
                memory.write(self._all(memory, tensor, origin))
        return made

    def _join(self, made: torch.Tensor, parts: Sequence[torch.Tensor], dim: int) -> None:
        begin = 0
        for part in parts:
            if part.ndim == made.ndim:  # torch takes an empty one with one dimension anywhere
                self.copy_(made.narrow(dim, begin, part.shape[dim]), part)
                begin += part.shape[dim]

    def _needs(self, content: Content, what: Any) -> NeedsValue:
        reason = f"the loader looks at its values ({what})"
        self.needed |= dict.fromkeys(_fqns(content) or (self.during,), reason)
        return NeedsValue(reason)

    def _made_of(self, content: Content, reason: str, exact: Content | None = None) -> Made:
        """Something made of this; the first thing that was done to any of it is the reason."""
        for fqn, box in landed(content if exact is None else exact):
            self.used.setdefault(fqn, set()).add(box)
        before = (
            one.origin.reason for one in content if isinstance(one.origin, Made) and one.origin.fqns
        )
        return Made(_fqns(content), next(before, reason))

    # -- memory

    def _own(self, made: Any, before: Sequence[torch.Tensor]) -> Any:
        """The same, noted as the loader's where it is new memory."""
        for tensor in _new(made, before):
            self.own[storage_of(tensor)] = Memory.of(tensor)
        return made

    def _find(self, tensor: torch.Tensor) -> Memory | None:
        key = storage_of(tensor)
        if (own := self.own.get(key)) is not None:
            return own
        for memory in self.engine.get(key, ()):
            if memory.has(int(tensor.storage_offset()) * tensor.element_size()):
                return memory
        return self.foreign.get(key)

    def _memory(self, tensor: torch.Tensor) -> tuple[Memory, bool]:
        """The memory that a tensor lies in, and whether it is the loader's own."""
        key = storage_of(tensor)
        if (own := self.own.get(key)) is not None:
            return own, True
        memory = self._find(tensor)
        if memory is None:
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            memory = self.foreign[key] = Memory.of(tensor)
            memory.frame = Frame((size,), (1,), 0)
        return memory, False

    def _read(self, tensors: Iterable[torch.Tensor]) -> Content:
        content = [patch for one in tensors for patch in self._content(self._find(one), one)]
        self._touch(content)
        return content

    def _touch(self, content: Content) -> None:
        self.touched = next((fqn for patch in content for fqn in patch.origin.fqns), self.touched)

    def _content(self, memory: Memory | None, tensor: torch.Tensor) -> Content:
        """The content of a tensor that lies in `memory`."""
        if not tensor.numel():
            return []
        if memory is None:
            if tensor.is_meta:
                raise self._needs([], "memory that it kept from another call")
            return []
        return memory.read(tensor)

    def _all(self, memory: Memory, written: torch.Tensor, origin: Made) -> Content:
        boxes = memory.boxes(written)
        if boxes is None:
            return self._perhaps(memory, written, origin)
        return [Patch(*box, origin, self.during) for box in boxes]

    def _perhaps(self, memory: Memory, written: torch.Tensor, origin: Made) -> Content:
        """All of it, and of its neighbours in the storage: mixed with what is there already."""
        for near in self.engine.get(storage_of(written), ()):
            if near is not memory:
                near.write([self._mixed(near, origin)])
        return [self._mixed(memory, origin)]

    def _mixed(self, memory: Memory, origin: Made) -> Patch:
        made = Made(origin.fqns | _fqns(memory.settle()), origin.reason)
        return Patch(*memory.whole, made, self.during)

    def _copied(
        self,
        memory: Memory,
        written: torch.Tensor,
        source: Memory | None,
        copied: torch.Tensor,
        content: Content,
    ) -> Content:
        """The content of `memory` after a copy to a part of it; both views have one shape."""
        if source is None or not content:
            return self._all(memory, written, UNKNOWN)
        frame = Frame.of(copied)
        reason = _obstacle(memory, written, source, copied, frame)
        found = pairs(source.frame, frame, memory.frame, Frame.of(written)) if not reason else None
        if found is None:
            reason = reason or f"copied in more than {PAIRS_MAX} boxes"
            exact = source.read(copied, is_exact=True)
            return self._all(memory, written, self._made_of(content, reason, exact))
        patches = [
            part.after(pair, self.during)
            for pair in found
            for top in source.settle()
            if (part := top.common(pair.source, pair.source_sizes)) is not None
        ]
        if sum(patch.numel for patch in patches) < written.numel():
            return [*self._all(memory, written, UNKNOWN), *patches]
        return patches


def _is_plain(args: Sequence[Any], others: set[type]) -> bool:
    """Whether torch would not refuse it, and no mode or transform of the loader's sees it first."""
    return (
        type(args[0]) in PLAIN
        and (len(args) == 1 or others.issuperset(map(type, args[1:])))
        and not (is_grad_enabled() or args[0].is_inference())
        and _len_torch_dispatch_stack() == 1
        and peek_interpreter_stack() is None
    )


def _fqns(content: Sequence[Patch]) -> frozenset[str]:
    return frozenset().union(*(patch.origin.fqns for patch in content))


def _obstacle(
    memory: Memory, written: torch.Tensor, source: Memory, copied: torch.Tensor, frame: Frame
) -> str | None:
    """The reason for which a copy is not one of bits from boxes to boxes."""
    if written.dtype != copied.dtype:
        return f"cast from {copied.dtype} to {written.dtype}"
    if source.dtype != copied.dtype or memory.dtype != written.dtype:
        return f"its bytes are taken for another dtype ({copied.dtype})"
    if copied.is_neg() or written.is_neg() or copied.is_conj() or written.is_conj():
        return "conjugated or negated on the way"
    if frame.is_spread:
        return "one element goes to several places (broadcast)"
    if not (memory.frame.is_regular and source.frame.is_regular):
        return "elements of the target share memory"
    return None


def _tensors(*trees: Any) -> list[torch.Tensor]:
    """Those that are memory of their own."""
    found: list[torch.Tensor] = []
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            if tree.layout is torch.strided:
                found.append(tree)
        elif isinstance(tree, SEQUENCES):
            found += _tensors(*tree)
        elif isinstance(tree, dict):
            found += _tensors(*tree.values())
    return found


def _new(made: Any, before: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors in memory that is none of those before."""
    there = set(map(storage_of, before))
    return [tensor for tensor in _tensors(made) if storage_of(tensor) not in there]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    strides, dtype = tensor.stride(), tensor.dtype
    return torch.empty_strided(tensor.shape, strides, dtype=dtype, device="meta")


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation writes to."""
    places = _writes(func)
    values = [kwargs.get(name, args[at] if at < len(args) else None) for at, name in places]
    return _tensors(values)


@cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)  # noqa: SLF001 (there is no other way to ask)
    return tuple(
        (at, one.name) for at, one in arguments if one.alias_info and one.alias_info.is_write
    )


@cache
def _gives_value(func: Any) -> bool:
    """Whether it returns a number or a boolean of Python."""
    return any("Tensor" not in str(one.type) for one in func._schema.returns)  # noqa: SLF001


@cache
def _is_composite(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001 (as FakeTensor asks it)
    return bool(func.has_kernel_for_dispatch_key(key))
