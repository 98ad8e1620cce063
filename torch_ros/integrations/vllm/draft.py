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


def vet(
    engine: Any, draft: torch.nn.Module | None, chosen: Draft | None, model: str | None
) -> None:
    """Refuse to leave the weights of a draft as they are, unless that is what was chosen.

    Args:
        engine: vLLM's weight transfer engine.
        draft: The draft model that the worker has loaded; None: none, or one without weights.
        model: The name under which versions of the draft are published, if it is one of its own.

    Raises: NotSupported: The draft cannot follow, or nobody has said that it need not.
    """
    if draft is None or not own_names(draft, engine.model):
        return
    method = engine.vllm_config.speculative_config.method
    name = f"{type(draft).__name__}, the draft of this engine ({method})"
    keep = 'draft="keep" leaves it as it is: ever fewer of its tokens are accepted'
    follow = 'draft="follow"' if method == MTP else 'draft="follow" with draft_model=NAME'
    if chosen is None:
        advice = f"pass {follow}, which updates it with the engine; {keep}"
        raise NotSupported(f"torch_ros with {name}", advice)
    if chosen == "follow" and (model is None) != (method == MTP):
        raise NotSupported(f"draft_model={model!r} with {name}", f"pass {follow}; {keep}")
    if chosen == "keep":
        log.warning("%s keeps the weights that it has: ever fewer of its tokens are accepted", name)


def own_names(draft: torch.nn.Module, target: torch.nn.Module) -> set[str]:
    """The parameters of a draft that are not its target's."""
    shared = {id(one) for one in target.parameters()}
    return {name for name, one in draft.named_parameters() if id(one) not in shared}


class DraftModel(VLLMModel):
    """A draft, which takes its own layers of a version; what both share comes with the target.

    Args:
        is_part: Versions are the target's, with all tensors of both; else the draft's own.
    """

    def __init__(
        self, draft: torch.nn.Module, target: torch.nn.Module, *, is_part: bool, **named: Any
    ) -> None:
        super().__init__(draft, **named)
        self._target, self._is_part = target, is_part

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
            partial={**found.partial, **dict.fromkeys(theirs, ())},
        )

    def state(self) -> dict[str, torch.Tensor]:
        return _without(super().state(), self._shared())

    def _shared(self) -> set[str]:
        """Names of the draft under which there is a tensor of the target."""
        there = {id(one) for one in (*self._target.parameters(), *self._target.buffers())}
        return {name for name, one in super().state().items() if id(one) in there}

    def may_lack(self, fqn: str) -> bool:
        """Of the target's versions, everything: the target sees to it that all has a place."""
        return self._is_part or super().may_lack(fqn)


def _without(found: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: one for name, one in found.items() if name not in names}
