"""Optimizers that a handle guards: whether what they step is what the handle has registered."""

from collections.abc import Iterator, Mapping
from weakref import ReferenceType, ref

import torch
from torch.utils.hooks import RemovableHandle

from torch_ros.errors import UsageError
from torch_ros.transfer.named import local_of
from torch_ros.transfer.registered import LocalState


class Guarded:
    """The guarded optimizers' parameters among the tensors that were registered last."""

    def __init__(self) -> None:
        self._optimizers: list[tuple[ReferenceType[torch.optim.Optimizer], RemovableHandle]] = []
        # By fqn, the parameters that lay where the tensor did, and where that was.
        self._known: dict[str, tuple[ReferenceType[torch.Tensor], int]] = {}
        self._seen: ReferenceType[LocalState] | None = None  # those that were looked at last

    def add(self, optimizer: torch.optim.Optimizer, hook: RemovableHandle) -> None:
        self._optimizers.append((ref(optimizer), hook))
        self._seen = None

    @property
    def is_empty(self) -> bool:
        return not self._optimizers

    def look(self, tensors: LocalState) -> bool:
        """Whether some guarded optimizer steps some of these.

        Raises: UsageError: A parameter was a tensor of these, which is where it was, and is
            elsewhere by now. Names the tensor.
        """
        there = tensors.known or tensors
        is_new = self._seen is None or self._seen() is not there
        if is_new or any(map(_has_left, self._known.values())):
            self._compare(firsts(there))
        self._seen = ref(there)
        return bool(self._known)

    def _compare(self, addresses: Mapping[str, int]) -> None:
        own = ((local_of(parameter), parameter) for parameter in self._parameters())
        there = {local.data_ptr(): parameter for local, parameter in own if local.numel()}
        for fqn, known in self._known.items():
            if addresses.get(fqn) == known[1] and known[1] not in there and _has_left(known):
                raise UsageError(
                    f"the parameter that was registered as {fqn!r} has other memory by now "
                    "(p.data = ..., .to(), .half(), to_empty()), and a guarded optimizer steps "
                    "it there, while the registered tensor is the old memory, as those of "
                    "state_dict() are; unregister(), and register(module), which looks each up anew"
                )
        self._known = {
            fqn: (ref(there[address]), address)
            for fqn, address in addresses.items()
            if address in there
        }

    def _parameters(self) -> Iterator[torch.Tensor]:
        """Yield those of optimizers that live, and whose hook was not removed."""
        kept = []
        for each in self._optimizers:
            optimizer, hooks = each[0](), each[1].hooks_dict_ref()
            if optimizer is None or hooks is None or each[1].id not in hooks:
                continue
            kept.append(each)
            for group in optimizer.param_groups:
                yield from group["params"]
        self._optimizers = kept


def firsts(state: LocalState) -> Mapping[str, int]:
    """Where the first chunk of each tensor is that has one, by fqn; objects left out."""
    return {t.fqn: t.chunks[0].tensor.data_ptr() for t in state.tensors if t.chunks}


def _has_left(known: tuple[ReferenceType[torch.Tensor], int]) -> bool:
    parameter, address = known[0](), known[1]
    return parameter is not None and local_of(parameter).data_ptr() != address
