"""The draft model of a vLLM engine: layers of its own, and tensors that are its target's."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from torch_ros.errors import NotSupported
from torch_ros.integrations.landings import Recording
from torch_ros.integrations.seams import Contents
from torch_ros.integrations.vllm.model import VLLMModel
from torch_ros.printable import log_of

Draft = Literal["keep", "follow"]
log: logging.Logger = log_of("vllm.torch_ros")  # vLLM configures its own loggers only

MTP = "mtp"  # vLLM's method whose draft is a part of the target's checkpoint


def vet(engine: Any, draft: torch.nn.Module | None, chosen: Draft | None) -> None:
    """Refuse to leave the weights of a draft as they are, unless that is what was chosen.

    Args:
        engine: vLLM's weight transfer engine.
        draft: The draft model that the worker has loaded; None: none, or one without weights.

    Raises: NotSupported: The draft cannot follow, or nobody has said that it need not.
    """
    if draft is None or not own_names(draft, engine.model):
        return
    method = engine.vllm_config.speculative_config.method
    name = f"{type(draft).__name__}, the draft of this engine ({method})"
    keep = 'draft="keep" leaves it as it is: ever fewer of its tokens are accepted'
    if chosen is None:
        advice = f'draft="follow" updates it with the engine, and {keep}'
        raise NotSupported(f"torch_ros with {name}", advice if method == MTP else f"pass {keep}")
    if chosen == "follow" and method != MTP:
        raise NotSupported(f'draft="follow" with {name}, which is no part of a version', keep)
    if chosen == "keep":
        log.warning("%s keeps the weights that it has: ever fewer of its tokens are accepted", name)


def own_names(draft: torch.nn.Module, target: torch.nn.Module) -> set[str]:
    """The parameters of a draft that are not its target's."""
    shared = {id(one) for one in target.parameters()}
    return {name for name, one in draft.named_parameters() if id(one) not in shared}


class DraftModel(VLLMModel):
    """A draft that is a part of the target's checkpoint: it takes its own layers of a version.

    What both share, such as the embedding, comes with the target.
    """

    def __init__(self, draft: torch.nn.Module, target: torch.nn.Module, **named: Any) -> None:
        super().__init__(draft, **named)
        self._target = target

    def record(self, contents: Contents) -> Recording:
        shared = self._shared()
        found = super().record(contents)
        goes = {fqn: [box.parameter for box in one.boxes] for fqn, one in found.landings.items()}
        goes |= {fqn: list(names) for fqn, names in found.targets.items()}
        theirs = {fqn for fqn, names in goes.items() if names and shared.issuperset(names)}
        return replace(
            found,
            landings=_without(found.landings, theirs),
            staged=_without(found.staged, theirs),
            targets=_without(found.targets, theirs),
            unused=(*found.unused, *sorted(theirs)),
            unwritten=_without(found.unwritten, shared),
            filled=_without(found.filled, shared),
            replaced=tuple(name for name in found.replaced if name not in shared),
        )

    def state(self) -> dict[str, torch.Tensor]:
        return _without(super().state(), self._shared())

    def _shared(self) -> set[str]:
        """Names of the draft under which there is a tensor of the target."""
        there = {id(one) for one in (*self._target.parameters(), *self._target.buffers())}
        return {name for name, one in super().state().items() if id(one) in there}

    def may_lack(self, _fqn: str) -> bool:
        """Everything: the target sees to it that all of a version has a place."""
        return True


def _without(found: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: one for name, one in found.items() if name not in names}
