"""A state dict's structure, cheaply: to notice that it is still the one that was planned for.

Two outlines with equal tokens have the same names, nesting, kinds, dtypes, shapes, strides, devices
and shardings, in the same order; they may differ in where the tensors are and in what the objects
are. About a microsecond per tensor, where planning takes a hundred.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_DICT, _LIST, _TENSOR, _DTENSOR, _OBJECT = "dict", "list", "tensor", "dtensor", "object"


@dataclass(slots=True)
class Outline:
    """A state dict's leaves, in the order in which dcp flattens it.

    It refers to the state dict's tensors: keep `tokens` and `addresses`, and let go of the rest.
    """

    tokens: list[object] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    locals: dict[int, torch.Tensor] = field(default_factory=dict)  # by leaf, of those on this rank
    addresses: list[int] = field(default_factory=list)  # of `locals`
    is_known: bool = True  # nothing in it of a kind that only dcp understands
    sharded: list[torch.Tensor] = field(default_factory=list)  # the DTensors
    meshes: dict[int, Any] = field(default_factory=dict)  # of the DTensors, by identity


def outline(state_dict: Mapping[str, object]) -> Outline:
    """The outline of a state dict, nested or flat. Reads no tensor's content."""
    found = Outline()
    try:
        _visit(state_dict, found)
    except RuntimeError:  # a tensor that is not plain memory has no strides, or no shape
        found.is_known = False
    if found.is_known and 0 in found.addresses:  # a tensor without elements has no memory
        pairs = zip(found.addresses, found.locals.values(), strict=True)
        # One with elements and none has lost it, or never had any: dcp shall deal with it.
        found.is_known = all(address or not local.numel() for address, local in pairs)
    found.tokens.append([mesh.get_coordinate() for mesh in found.meshes.values()])
    return found


def _visit(value: Any, found: Outline) -> None:
    """Add to `found` all that lies within `value`, in the order in which dcp flattens it."""
    kind = type(value)
    if kind in _PLAIN:
        found.tokens.append(_TENSOR)
        _visit_memory(value, value, found)
    elif kind is DTensor and type(value._local_tensor) in _PLAIN:  # noqa: SLF001  # `to_local` costs more
        spec = value._spec  # noqa: SLF001  # has the global shape too
        found.tokens += (_DTENSOR, spec)
        found.meshes[id(spec.mesh)] = spec.mesh
        found.sharded.append(value)
        _visit_memory(value, value._local_tensor, found)  # noqa: SLF001  # as above
    elif isinstance(value, torch.Tensor):  # of a class that may be more than plain memory
        found.is_known = False
        found.leaves.append(value)
        if isinstance(value, DTensor):
            found.sharded.append(value)
    elif kind is dict or isinstance(value, Mapping):
        found.tokens += (_DICT, len(value))
        for name, inner in value.items():
            found.tokens.append(name if type(name) is str else str(name))
            _visit(inner, found)
    elif isinstance(value, list) and _is_traversed(value):
        found.tokens += (_LIST, len(value))
        for inner in value:
            _visit(inner, found)
    else:
        found.tokens.append(_OBJECT)
        found.leaves.append(value)


def _visit_memory(tensor: torch.Tensor, local: torch.Tensor, found: Outline) -> None:
    """Note a leaf that is plain memory; a lazily negated or conjugated one is not what it holds."""
    found.tokens += (local.dtype, local.shape, local.stride(), local.device)
    if local.is_neg() or local.is_conj():
        found.is_known = False
    found.locals[len(found.leaves)] = local
    found.addresses.append(local.data_ptr())
    found.leaves.append(tensor)


def _is_traversed(values: list[Any]) -> bool:
    """Whether dcp looks for tensors in this list, or pickles it as it is."""
    return any(
        isinstance(value, torch.Tensor | Mapping)
        or (isinstance(value, list) and _is_traversed(value))
        for value in values
    )
