"""The tensors that an engine has: followed while its loader runs, and put back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_ros.errors import UsageError
from torch_ros.integrations.boxes import Frame
from torch_ros.integrations.provenance import Memory, storage_of

REGISTERED = ("_parameters", "_buffers", "_modules")  # where a module has them


@dataclass(frozen=True, slots=True, eq=False)
class Owned:
    """A parameter or buffer, where the engine has it, and its memory."""

    module: torch.nn.Module
    attribute: str
    name: str  # in the whole engine
    tensor: torch.Tensor
    memory: torch.Tensor  # what `tensor` was when it was found

    def is_in_place(self) -> bool:
        """Whether the engine still has this very tensor, and it this memory."""
        now = getattr(self.module, self.attribute, None)
        return now is self.tensor and _place(self.tensor) == _place(self.memory)

    def put_back(self) -> None:
        if _place(self.tensor) != _place(self.memory):
            self.tensor.data = self.memory


@dataclass(frozen=True, slots=True)
class Attributes:
    """The attributes of a module: parameters, buffers, modules below it, and any other."""

    module: torch.nn.Module
    found: Mapping[str, Any]
    registered: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, module: torch.nn.Module) -> Self:
        now = vars(module)
        return cls(module, dict(now), {name: dict(now[name]) for name in REGISTERED})

    def put_back(self) -> None:
        """Also removes those that came since."""
        now = vars(self.module)
        both = [(now[name], before) for name, before in self.registered.items()]
        for there, before in ((now, self.found), *both):
            for name in there.keys() - before.keys():
                del there[name]
            there.update(before)


def owned_by(engine: torch.nn.Module) -> list[Owned]:
    """All of an engine, each under every name that it has.

    Raises:
        UsageError: One is not plain memory; names it.
    """
    found = []
    for prefix, module in engine.named_modules():
        both = (module.named_parameters, module.named_buffers)
        for name, tensor in (
            one for named in both for one in named(recurse=False, remove_duplicate=False)
        ):
            full = f"{prefix}.{name}" if prefix else name
            if is_lazy(tensor):
                raise UsageError(f"{full!r} is not initialised; load the engine once")
            if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
                raise UsageError(
                    f"{full!r} is a {type(tensor).__name__} of layout {tensor.layout}: expected "
                    "plain memory; only the engine's own loader can write it"
                )
            found.append(Owned(module, name, full, tensor, tensor.detach()))
    return found


def memories(owned: Sequence[Owned]) -> dict[int, list[Memory]]:
    """By storage, with nothing noted yet; tied tensors and views of others are one memory."""
    found: dict[int, list[Memory]] = {}
    for one in sorted(owned, key=lambda one: -one.memory.numel()):  # a whole before its views
        if one.memory.numel() == 0:
            continue
        there = found.setdefault(storage_of(one.memory), [])
        own, itemsize = Memory.of(one.memory, one.name), one.memory.element_size()
        ends = own.frame.offset * itemsize, (own.frame.end - 1) * itemsize
        memory = next((other for other in there if all(map(other.has, ends))), own)
        memory.is_parameter |= isinstance(one.tensor, torch.nn.Parameter)
        if memory is own:
            there.append(own)
    return found


def _place(tensor: torch.Tensor) -> tuple[int, Frame]:
    return storage_of(tensor), Frame.of(tensor)
