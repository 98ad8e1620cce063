"""The tensors that this process has registered, and shows to its readers."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_ros.errors import UsageError
from torch_ros.p2p.pages import Pages
from torch_ros.printable import log_of
from torch_ros.protocol.records import VersionRef
from torch_ros.shard.seams import Feature
from torch_ros.transfer.mailbox import Digests, Mailbox
from torch_ros.transfer.named import Named, NamedTensors
from torch_ros.transfer.registered import LocalState
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
    """At most one set of tensors at a time. Who replaces one makes sure that nobody reads it."""

    def __init__(self, mailbox: Mailbox, pages: Pages, features: Sequence[Feature] = ()) -> None:
        self._mailbox, self._pages, self._features = mailbox, pages, features
        self.registered: LocalState | None = None
        self.brought: Brought | None = None  # by a read, and nothing has been filled since
        self._named: NamedTensors | None = None  # of `register` or a read, not a save or load
        self.is_copy = False  # what is registered was made for one version
        self._places: Sequence[int] = ()  # of what is registered, as it was shown
        self._told = set[object]()  # what warnings have said that are given once

    def show(self, state: LocalState, *, is_copy: bool = False) -> LocalState:
        """Register `state` in place of the tensors before, and show it.

        Tensors that are registered already stay so, since registering costs milliseconds; only the
        objects of `state` go into the buffers that are registered with them. `is_copy`: they were
        made for one version, and no later call may publish them.
        """
        registered = state.known or state
        if registered is not state:
            for fqn, pickled in state.objects.items():
                copy_bits(registered.objects[fqn], pickled)
        if registered is self.registered:
            return registered
        before, self.brought, places = self._mailbox.regions, None, _places(registered)
        try:
            self._mailbox.show(
                registered.layout, registered.addresses, registered.devices, registered.regions
            )
        except BaseException:
            self.hide()  # the mailbox may have let go of those before already
            raise
        self.registered, self.is_copy, self._places = registered, is_copy, places
        for feature in self._features:
            feature.lets_go()
        self._named = registered.named or self._named  # a save or load keeps those of `register`
        if self._pages.is_on and self._mailbox.regions is not before:
            self._pages.follow(*registered.unpinned())
        return registered

    def register(self, state: LocalState) -> None:
        """Register the user's own tensors; while a copy is shown, for what comes after it.

        Raises: UsageError: There are some.
        """
        if self._named is not None or (self.registered is not None and not self.is_copy):
            raise UsageError("this handle has registered tensors; unregister() them first")
        self.examine(state)
        if self.registered is None:  # else a copy is shown: `current` shows these in its place
            self.show(state)
        self._named = state.named

    def state_of(self, given: Named) -> LocalState:
        """The user's tensors as a state: the registered one, if it is of these very tensors."""
        shown = self.registered
        if shown is not None and shown.named is not None and shown.named.are(given):
            return shown
        return LocalState.of(given)

    def hide(self) -> None:
        """Show nothing, and let memory go; `current` shows again what `register` was given."""
        self._mailbox.withdraw()
        self.registered = self.brought = None
        self._pages.follow(())
        for feature in self._features:
            feature.lets_go()

    def withdraw(self) -> None:
        """Do as `hide`, and forget what `register` was given."""
        self.hide()
        self._named = None

    def examine(self, state: LocalState) -> None:
        """Raises: UsageError: A feature refuses that these tensors, as they are, are published."""
        for feature in self._features:
            feature.examines(state)

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
            UsageError: There are none, or they are the copy of a save, or a feature refuses them.
        """
        registered = self._found(call)
        self.examine(registered)
        return registered

    def require_in_use(self, call: str) -> None:
        """Raises: UsageError: `register` was given a function that makes copies."""
        if self._named is not None:
            self._named.require_in_use(call)

    def _found(self, call: str) -> LocalState:
        """The tensors of `register`, shown again if others are, or their memory is elsewhere."""
        named = self._named
        if named is None:  # `register` was not called: the last save or load has tensors, perhaps
            self._require_no_copy(call)
            return self.require(call)
        shown = self.registered if self.registered and self.registered.named is named else None
        if shown is not None and named.is_current:
            return shown
        state = LocalState.of(named.given)
        moved = named.others(state.named) if state.named is not None else []
        if shown is not None and not moved:  # other views of the same memory
            return shown
        if moved:
            log.info(
                "%d of %d registered tensors have other memory or shapes now (%s, ...); "
                "registered again",
                len(moved),
                len(named.tensors),
                moved[0],
            )
        return self.show(state)

    def _require_no_copy(self, call: str) -> None:
        """Raises: UsageError: What is registered is the copy of a save, made for one version."""
        if self.registered is not None and self.is_copy:
            raise UsageError(
                f"{call}: this handle has no tensors, only a copy that was made of some to be "
                "published once (by publish_copy, mode='copy' or dcp.async_save); register() "
                "the tensors, or publish a copy again"
            )

    def are(self, state: LocalState, *, is_alone: bool) -> bool:
        """Whether the tensors of `state` are those that are registered, in the same memory.

        Objects do not count: they come in new buffers each time. Where the replica has one rank
        (`is_alone`), it does not count either whether a tensor is spread over ranks.
        """
        registered = self.registered
        if registered is None:
            return False
        if registered in (state, state.known):
            return True
        theirs, mine = registered.layout, state.layout
        if is_alone:
            theirs, mine = theirs.unspread, mine.unspread
        return theirs.digest == mine.digest and registered.spans == state.spans

    def is_news(self, what: object) -> bool:
        """Whether this is asked for the first time: a warning that is given once in a handle."""
        is_new = what not in self._told
        self._told.add(what)
        return is_new

    def offered(self) -> None:
        """The registered tensors are a version from now on, and nobody may write to them."""
        for feature in self._features:
            feature.offers()

    @property
    def freed(self) -> str:
        """Tells, as a sentence, of a tensor whose memory was freed since it was shown; "": of none.

        That memory may be another tensor's by now, which readers would take for this one's.
        """
        registered = self.registered
        if registered is None or self._places == (now := _places(registered)):
            return ""
        number = next(n for n, place in enumerate(now) if place != self._places[n])
        fqn = registered.layout.tensors[registered.layout.chunks[number].tensor].fqn
        how = "untyped_storage().resize_(), share_memory()"
        return f"the memory of tensor {fqn!r} was freed, its storage is elsewhere ({how})"

    def require_there(self) -> None:
        """Raises: MemoryError: Memory of what is registered was freed."""
        if freed := self.freed:
            raise MemoryError(freed)


def _places(registered: LocalState) -> list[int]:
    return list(map(torch.Tensor.data_ptr, registered.memory))


def first_changed(
    registered: LocalState, before: Sequence[int], after: Sequence[int]
) -> str | None:
    """The fqn of the first chunk whose digests differ; None: all are equal."""
    for chunk, old, new in zip(registered.layout.chunks, before, after, strict=True):
        if old != new:
            return registered.layout.tensors[chunk.tensor].fqn
    return None
