"""The user's own tensors by name: given as they are, or looked up anew in what owns them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, call, eq, is_

import torch
from torch.distributed.tensor import DTensor

from torch_ros.errors import UsageError
from torch_ros.weights.chunked import Chunked

Named = Mapping[str, torch.Tensor] | torch.nn.Module | Callable[[], Mapping[str, torch.Tensor]]

EXTRA_STATE = "_extra_state"  # what torch calls a module's own objects in its state_dict()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, the very object; `to_local` makes another each time."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001


def tensors_of(given: Named) -> Mapping[str, torch.Tensor]:
    """The tensors that `given` has now.

    Raises: UsageError: A module whose state_dict() has tensors that are not its own.
    """
    if isinstance(given, torch.nn.Module):
        return _of_module(given)
    return given() if callable(given) and not isinstance(given, Mapping) else given


def _of_module(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Its parameters and persistent buffers themselves, under the names of its state_dict()."""
    state = module.state_dict(keep_vars=True)  # its hooks make FSDP2 go back to the shards
    own = {id(tensor) for tensor in chain(module.parameters(), module.buffers())}
    found = {}
    for fqn, tensor in state.items():
        if fqn.rpartition(".")[2] == EXTRA_STATE:
            continue
        if isinstance(tensor, torch.Tensor) and id(tensor) not in own:
            raise UsageError(
                f"{fqn!r} of {type(module).__name__}.state_dict() is neither a parameter nor a "
                "buffer of the module: a hook has made it, so it is a copy; pass the tensors "
                "that you mean, or a function that gives them"
            )
        found[fqn] = tensor
    return found


class NamedTensors:
    """The user's own tensors, and where they were when they were registered.

    Args:
        tensors: Those that `tensors_of` has found in `given`, by fqn; all are tensors.
    """

    def __init__(self, given: Named, tensors: Mapping[str, torch.Tensor]) -> None:
        self.given: Named = given
        self.tensors: dict[str, torch.Tensor] = dict(tensors)
        self._owners = _Owners(given) if isinstance(given, torch.nn.Module) else None
        sharded = {fqn: t for fqn, t in tensors.items() if isinstance(t, DTensor)}
        plain = [(fqn, own) for fqn, t in tensors.items() if fqn not in sharded for own in _own(t)]
        self._plain, self._sharded = [own for _, own in plain], list(sharded.values())
        self._names = [*(fqn for fqn, _ in plain), *sharded]
        # How to ask each for its strides: they are dear, and a contiguous tensor's shape says them.
        is_contiguous, stride = torch.Tensor.is_contiguous, torch.Tensor.stride
        self._cuts = [is_contiguous if is_contiguous(t) else stride for t in self._local]
        self._places = list(self._now())
        self._is_in_use = isinstance(given, Mapping | torch.nn.Module)  # a function may make copies

    @property
    def is_looked_up(self) -> bool:
        """Whether they are looked up anew each time."""
        return not isinstance(self.given, Mapping)

    @property
    def own(self) -> list[torch.Tensor]:
        """The tensors themselves; of a `Chunked` its boxes."""
        return self._plain + self._sharded

    @property
    def _local(self) -> list[torch.Tensor]:
        # to_local() would make a new tensor each time, which takes a microsecond.
        return self._plain + [tensor._local_tensor for tensor in self._sharded]  # noqa: SLF001

    def _now(self) -> Iterator[tuple[object, ...]]:
        """Yield where each tensor is, and how it is cut. One pass, and nothing is kept: a step
        leaves none of these tensors in the caches, and fetching one takes longer than asking it.
        """
        local = self._local
        addresses, shapes = map(torch.Tensor.data_ptr, local), map(torch.Tensor.size, local)
        dtypes, cuts = map(attrgetter("dtype"), local), map(call, self._cuts, local)
        return zip(addresses, shapes, dtypes, cuts, strict=True)

    @property
    def moved(self) -> list[str]:
        """The fqns of those that are elsewhere (`p.data = ...`) or cut otherwise (`p.t_()`)."""
        if all(map(eq, self._now(), self._places)):
            return []
        changes = zip(self._names, self._places, self._now(), strict=True)
        return [fqn for fqn, there, here in changes if there != here]

    @property
    def is_current(self) -> bool:
        """Whether `given` has these tensors still, where they were; False for a function."""
        if isinstance(self.given, Mapping):
            return self._has_same(self.given) and not self.moved
        return self._owners is not None and self._owners.are_same() and not self.moved

    def others(self, now: NamedTensors) -> list[str]:
        """The fqns whose tensors have other memory or shapes in `now`, or that only one has."""
        there, here = self._by_name(), now._by_name()
        return [fqn for fqn in {**there, **here} if there.get(fqn) != here.get(fqn)]

    def _by_name(self) -> dict[str, list[object]]:
        """By fqn, what `others` compares: shape, dtype, and the place of each box of the tensor."""
        found: dict[str, list[object]] = {
            fqn: [tensor.shape, tensor.dtype] for fqn, tensor in self.tensors.items()
        }
        for fqn, place in zip(self._names, self._places, strict=True):
            found[fqn].append(place)
        return found

    def require_in_use(self, call: str) -> None:
        """Before the first read, call a function that gave the tensors once more, to compare.

        Raises: UsageError: It makes copies, in which nobody else would see what is read.
        """
        if self._is_in_use:
            return
        others = self.others(NamedTensors(self.given, tensors_of(self.given)))
        if others:
            raise UsageError(
                f"{call}: the function that gives the tensors makes {others[0]!r} anew each time: "
                "a copy, and nobody else would see what is read into it; let it return the tensors "
                "in use"
            )
        self._is_in_use = True

    def are(self, given: Named) -> bool:
        """Whether `given` has these very objects, by the same names, each where it was."""
        if self.is_looked_up or not isinstance(given, Mapping):
            return given is self.given and self.is_current
        return self._has_same(given) and not self.moved

    def _has_same(self, given: Mapping[str, torch.Tensor]) -> bool:
        is_same = all(map(is_, given.values(), self.tensors.values()))
        return is_same and list(given) == list(self.tensors)


class _Owners:
    """The modules in a module, and what each of them has: a look at it takes 0.1 us a tensor."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._modules = list(module.modules())
        self._found = list(self._now())

    def _now(self) -> Iterator[object]:
        for three in map(attrgetter("_parameters", "_buffers", "_modules"), self._modules):
            for each in three:
                yield from each.values()
                yield from each.keys()  # a module may be renamed

    def are_same(self) -> bool:
        now = list(self._now())
        return len(now) == len(self._found) and all(map(is_, now, self._found))


def _own(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    return tensor.chunks.values() if isinstance(tensor, Chunked) else (tensor,)
