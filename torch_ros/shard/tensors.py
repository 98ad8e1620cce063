"""The tensors that this process has registered, and shows to its readers."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_ros.errors import ContractBroken, UsageError
from torch_ros.p2p.huge_pages import HugePages
from torch_ros.printable import log_of
from torch_ros.protocol.records import VersionRef
from torch_ros.transfer.mailbox import Digests, Mailbox
from torch_ros.transfer.registered import LocalState, NamedTensors, Registered, finish_kernels
from torch_ros.weights.local import build, span_of
from torch_ros.weights.manifest import OBJECT, Layout

log: logging.Logger = log_of(__name__)


@dataclass(frozen=True, slots=True)
class Brought:
    """The version that the last `read` has put into the registered tensors."""

    ref: VersionRef
    digests: Digests  # of the version, or of what landed, as far as this rank knows them


class Tensors:
    """At most one set of tensors at a time. The caller makes sure that nobody reads them."""

    def __init__(self, mailbox: Mailbox, pages: HugePages) -> None:
        self._mailbox, self._pages = mailbox, pages
        self.registered: Registered | None = None
        self.brought: Brought | None = None  # by a read, and nothing has been filled since
        self._named: NamedTensors | None = None  # of `register` or a read, not a save or load

    def show(self, state: LocalState) -> Registered:
        """Register `state` in place of the tensors before, and show it."""
        registered = Registered.of(state)
        if registered is self.registered:
            return registered
        before, self.brought = self._mailbox.regions, None
        try:
            self._mailbox.show(
                registered.layout, registered.addresses, registered.devices, registered.regions
            )
        except BaseException:
            self.withdraw()
            raise
        self.registered, self._named = registered, state.named
        if self._pages.is_on and self._mailbox.regions is not before:
            self._pages.follow(*registered.unpinned())
        return registered

    def show_named(self, tensors: Mapping[str, torch.Tensor]) -> Registered:
        """Register the tensors of `register`; `current` follows them when they move."""
        return self.show(LocalState.of(tensors))

    def state_of(self, tensors: Mapping[str, torch.Tensor]) -> LocalState:
        """The user's tensors; without looking at each, if they are those that are registered."""
        if self._named is not None and self._named.are(tensors):
            return LocalState((), {}, {}, known=self.registered)
        return LocalState.of(tensors)

    def withdraw(self) -> None:
        self._mailbox.withdraw()
        self.forget()

    def forget(self) -> None:
        self.registered = self._named = self.brought = None
        self._pages.follow(())

    def require(self, call: str) -> Registered:
        """Raises: UsageError: Nothing is registered."""
        if self.registered is None:
            raise UsageError(f"{call}: this handle has no tensors; register() them first")
        return self.registered

    def current(self, call: str) -> Registered:
        """The registered tensors where they are now, registered again if they have moved."""
        registered, named = self.require(call), self._named
        if named is None or not (moved := named.moved):
            return registered
        log.info(
            "%d of %d registered tensors have other memory or shapes now (%s, ...); "
            "registered again",
            len(moved),
            len(named.tensors),
            moved[0],
        )
        return self.show_named(named.tensors)

    def are(self, state: LocalState, layout: Layout, *, is_alone: bool) -> bool:
        """Whether `state`, of that layout, is registered; objects, always in new buffers, aside.

        Marks of what is spread do not matter to a replica of one rank.
        """
        known = self.registered
        if state.known is not None:
            return state.known is known
        if known is None:
            return False
        there, here = known.layout, layout
        if is_alone:
            there, here = there.unspread, here.unspread
        if there.digest != here.digest:
            return False
        is_object = [record.dtype == OBJECT for record in known.layout.tensors]
        chunks = zip(known.layout.chunks, known.memory, strict=True)
        tensors = [memory for chunk, memory in chunks if not is_object[chunk.tensor]]
        _, wanted = build(state.tensors, {})
        return [span_of(t) for t in tensors] == [span_of(t) for t in wanted]

    def check_unchanged(self, version: int, digests: Digests) -> None:
        """Compare the tensors with the digests that they had as `version`.

        Raises: ContractBroken: They were written to.
        """
        registered = self.registered
        if registered is None or not digests.chunks:
            return
        finish_kernels(registered.cuda_devices)
        fqn = first_changed(registered, digests.chunks, registered.digests(digests.depth))
        if fqn is not None:
            raise ContractBroken(
                version,
                f"tensor {fqn!r} is not what it was",
                "write only after unpublish() has returned; handle.guard(optimizer) sees to it",
            )


def first_changed(
    registered: Registered, before: Sequence[int], after: Sequence[int]
) -> str | None:
    """The fqn of the first chunk whose digests differ."""
    for chunk, old, new in zip(registered.layout.chunks, before, after, strict=True):
        if old != new:
            return registered.layout.tensors[chunk.tensor].fqn
    return None
