"""The tensors that this process has registered, and shows to its readers."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle

from torch_ros.errors import ContractBroken, UsageError
from torch_ros.p2p.pages import Pages
from torch_ros.printable import log_of
from torch_ros.protocol.records import VersionRef
from torch_ros.shard.guarding import Guarded
from torch_ros.transfer.mailbox import Digests, Mailbox
from torch_ros.transfer.named import Named, NamedTensors
from torch_ros.transfer.registered import LocalState, finish_kernels
from torch_ros.transfer.writes import Counts, Write
from torch_ros.weights.local import copy_bits
from torch_ros.weights.manifest import Logical

log: logging.Logger = log_of(__name__)


@dataclass(frozen=True, slots=True)
class Brought:
    """The version that the last `read` has put into the registered tensors."""

    ref: VersionRef
    digests: Digests  # of the version, or of what landed, as far as this rank knows them
    wanted: Logical | None  # what its source showed


class Tensors:
    """At most one set of tensors at a time. The caller makes sure that nobody reads them."""

    def __init__(self, mailbox: Mailbox, pages: Pages) -> None:
        self._mailbox, self._pages = mailbox, pages
        self.registered: LocalState | None = None
        self.brought: Brought | None = None  # by a read, and nothing has been filled since
        self._named: NamedTensors | None = None  # of `register` or a read, not a save or load
        self._is_copy = False  # what is registered was made for one version
        self._guarded = Guarded()
        self._counts: Counts | None = None  # of writes, since what is registered was offered
        self._told = set[object]()  # what warnings have said that are given once

    def show(self, state: LocalState, *, is_copy: bool = False) -> LocalState:
        """Register `state` in place of the tensors before, and show it.

        If that is registered already, its buffers take over the objects.
        """
        registered = state.known or state
        if registered is not state:
            for fqn, pickled in state.objects.items():
                copy_bits(registered.objects[fqn], pickled)
        if registered is self.registered:
            return registered
        before, self.brought = self._mailbox.regions, None
        try:
            self._mailbox.show(
                registered.layout, registered.addresses, registered.devices, registered.regions
            )
        except BaseException:
            self.hide()
            raise
        self.registered, self._is_copy, self._counts = registered, is_copy, None
        self._named = registered.named or self._named
        if self._pages.is_on and self._mailbox.regions is not before:
            self._pages.follow(*registered.unpinned())
        return registered

    def register(self, state: LocalState) -> None:
        """Register the user's own tensors; while a copy is shown, for what comes after it.

        Raises: UsageError: There are some.
        """
        if self._named is not None or (self.registered is not None and not self._is_copy):
            raise UsageError("this handle has registered tensors; unregister() them first")
        self.look_at_guarded(state)
        if self.registered is None:
            self.show(state)
        self._named = state.named

    def state_of(self, given: Named) -> LocalState:
        """The user's tensors; without looking at each, if they are those that are registered."""
        shown = self.registered
        if shown is not None and shown.named is not None and shown.named.are(given):
            return shown
        return LocalState.of(given)

    def hide(self) -> None:
        """Show nothing; what `register` was given may be shown again."""
        self._mailbox.withdraw()
        self.registered = self.brought = self._counts = None
        self._pages.follow(())

    def withdraw(self) -> None:
        """The same, and forget what `register` was given."""
        self.hide()
        self._named = None

    def guard(self, optimizer: torch.optim.Optimizer, hook: RemovableHandle) -> None:
        """Look from now on whether what `optimizer` steps is what is registered."""
        self._guarded.add(optimizer, hook)
        if self.registered is None or self._is_copy or self.look_at_guarded(self.registered):
            return
        log.warning(
            "no parameter of the guarded optimizer lies where a registered tensor does, and so "
            "its steps do not change what is published: register the module that it trains"
        )

    def look_at_guarded(self, state: LocalState) -> bool:
        """Whether a guarded optimizer steps some of these tensors, which are to be published.

        Raises: UsageError: One of its parameters has left what is registered.
        """
        return not self._guarded.is_empty and self._guarded.look(state.firsts)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is registered, nor was by `register` before a save or load."""
        return self.registered is None and self._named is None

    def require(self, call: str) -> LocalState:
        """Raises: UsageError: Nothing is registered."""
        if self.registered is None:
            raise UsageError(f"{call}: this handle has no tensors; register() them first")
        return self.registered

    def current(self, call: str) -> LocalState:
        """The tensors of `register` where they are now, registered again if that is elsewhere.

        If `register` was not called: those of the last save or load.

        Raises:
            UsageError: There are none, or they are the copy of a save; or a guarded optimizer's
                parameter has left them.
        """
        registered = self._found(call)
        self.look_at_guarded(registered)
        return registered

    def require_in_use(self, call: str) -> None:
        """Raises: UsageError: `register` was given a function that makes copies."""
        if self._named is not None:
            self._named.require_in_use(call)

    def _found(self, call: str) -> LocalState:
        named = self._named
        if named is None:
            if self.registered is not None and self._is_copy:
                raise UsageError(
                    f"{call}: this handle has no tensors, only a copy that was made of some to be "
                    "published once (by publish_copy, mode='copy' or dcp.async_save); register() "
                    "the tensors, or publish a copy again"
                )
            return self.require(call)
        shown = self.registered if self.registered and self.registered.named is named else None
        if shown is not None and named.is_current:
            return shown
        state = LocalState.of(named.given)
        others = named.others(state.named) if state.named is not None else []
        if shown is not None and not others:
            return shown
        if others:
            log.info(
                "%d of %d registered tensors have other memory or shapes now (%s, ...); "
                "registered again",
                len(others),
                len(named.tensors),
                others[0],
            )
        return self.show(state)

    def are(self, state: LocalState, *, is_alone: bool) -> bool:
        """Whether `state` is registered; objects, always in new buffers, aside.

        Marks of what is spread do not matter to a replica of one rank.
        """
        known = self.registered
        if known is None:
            return False
        if known in (state, state.known):
            return True
        there, here = known.layout, state.layout
        if is_alone:
            there, here = there.unspread, here.unspread
        return there.digest == here.digest and known.spans == state.spans

    def is_news(self, what: object) -> bool:
        """Whether this is asked for the first time: a warning that is given once in a handle."""
        is_new = what not in self._told
        self._told.add(what)
        return is_new

    def offered(self) -> None:
        """The registered tensors are a version from now on, and nobody may write to them."""
        if self._counts is None and self.registered is not None and not self._is_copy:
            names = {address: fqn for fqn, address in self.registered.firsts.items()}
            if self.registered.named is not None:
                own, is_own = self.registered.named.own, True
            else:
                own = [*self.registered.phases[-1].memory, *self.registered.sharded]
                is_own = False
            self._counts = Counts(own, self.registered.memory, names, is_own=is_own)
        if self._counts is not None:
            self._counts.note()

    def written(self) -> Write | None:
        """A tensor that torch counts as written to since all of them were offered."""
        return self._counts.since() if self._counts is not None else None

    def require_there(self) -> None:
        """Raises: MemoryError: Memory of what is offered was freed."""
        if self._counts is not None and self._counts.is_freed:
            raise MemoryError(f"{self._counts.since()}")

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
    registered: LocalState, before: Sequence[int], after: Sequence[int]
) -> str | None:
    """The fqn of the first chunk whose digests differ."""
    for chunk, old, new in zip(registered.layout.chunks, before, after, strict=True):
        if old != new:
            return registered.layout.tensors[chunk.tensor].fqn
    return None
