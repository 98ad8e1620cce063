"""Streams of a version's tensors: `ShardHandle.stream`, and what a handle keeps of them."""

import itertools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Self

import torch

from torch_ros import arguments
from torch_ros.deadline import Deadline
from torch_ros.errors import ClosedError, UsageError
from torch_ros.features.streams import rules
from torch_ros.features.streams.buffers import Lane
from torch_ros.features.streams.filling import Filling
from torch_ros.features.streams.leased import Wanted
from torch_ros.protocol.call import GroupCall
from torch_ros.protocol.group import GroupTask
from torch_ros.protocol.records import Asked, VersionRef
from torch_ros.protocol.versions import Spec, resolve, spec_ranges
from torch_ros.shard.collective import collectively
from torch_ros.shard.core import Shard
from torch_ros.shard.seams import Feature
from torch_ros.store.loops import Done, Step, Wait
from torch_ros.store.txn import View

CLOSE_S = 5.0  # for its thread to see reads in flight to their end, and to take its record back


class Stream(Iterator[tuple[str, torch.Tensor]]):
    """Whole tensors of one version, one after the other, in two buffers; see `ShardHandle.stream`.

    For one thread at a time. After an error, `next` raises it again; after Ctrl-C in `next`, the
    next call goes on. A stream that is dropped, exhausted or closed leaves nothing behind.
    """

    def __init__(self, shard: Shard, filling: Filling, call: Deadline) -> None:
        self._shard, self._filling, self._call = shard, filling, call
        self._left: deque[tuple[str, torch.Tensor]] = deque()
        self._taken = 0  # buffers
        self._is_closed = False
        weakref.finalize(self, filling.drop).atexit = False

    @property
    def version(self) -> int:
        """The version that is streamed."""
        return self._filling.wanted.ref.version

    @property
    def run(self) -> str:
        """The run in which it has this number."""
        return self._filling.wanted.ref.run

    @property
    def uid(self) -> str:
        """Of its content, as `Contents` has it: a number that is published again has another."""
        return self._filling.wanted.ref.uid

    @property
    def bytes_read(self) -> int:
        """The bytes that have come so far, in buffers that are full."""
        return self._filling.bytes_read

    @property
    def read_s(self) -> float:
        """The seconds in which they came, without those in which it waited for its consumer."""
        return self._filling.read_s

    @property
    def published_digests(self) -> Mapping[str, int]:
        """The digests of whole tensors, by fqn, that the version was published with.

        Those of every bit (`open(digests="full")` at the publisher); empty: there are none.
        """
        known = self._filling.published
        return dict(known.totals) if known.depth == "full" else {}

    @property
    def left_in_buffer(self) -> int:
        """How many tensors are to come before the next `next` ends those of this buffer."""
        return len(self._left)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        """The next tensor, and its name.

        Raises:
            SourceLost: The last source was lost; what was handed out before is good.
            VersionNotFound: Likewise, of a consumer that stood still: nobody has it any more.
            DeadlineExceeded: A buffer was not filled in time.
            CorruptWeights: A tensor of the buffer is not what was published.
            ClosedError: The handle was closed, or this is a fork.
        """
        if self._is_closed:
            raise StopIteration
        self._shard.require_usable()
        if not self._left:
            if self._taken == len(self._filling.parts):
                self._filling.forget()
                raise StopIteration
            left = deque(self._filling.take(self._taken))
            self._left, self._taken = left, self._taken + 1  # Ctrl-C comes before, or after
        if len(self._left) == 1 and self._taken == len(self._filling.parts):
            self._shard.read_ends(self._filling.wanted.ref, self._call)
        return self._left.popleft()

    def close(self) -> None:
        """End it: nothing is read any more, and no source waits for it. Idempotent.

        Waits for reads in flight, for at most 5 s. What was handed out stays valid.
        """
        self._is_closed = True
        self._left.clear()
        self._filling.forget()
        self._filling.drop()
        with suppress(ClosedError):  # its thread has ended, or is the parent's
            self._shard.require_usable()
            self._filling.over.wait(CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Streams(Feature):
    """The streams of one handle, until it closes."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._numbers = itertools.count(1)
        self._open: set[Filling] = set()
        self._spare: list[Lane] = []  # connected, and used by nobody
        shard.attach(self)

    def open(
        self,
        version: int | str,
        fqns: Iterable[str],
        buffer_bytes: int,
        timeout_s: float | None,
        source: str | None,
    ) -> Stream:
        shard, asked = self._shard, Asked.of("stream", version)

        check = partial(_names, fqns, buffer_bytes)

        def flow(deadline: Deadline) -> tuple[VersionRef, Deadline, list[str] | None]:
            shard.read_begins(deadline)
            arguments.optional(arguments.text)("source", source)
            names = check() if shard.is_alone else None
            return self._decide(Spec.parse(version), deadline), deadline, names

        ref, deadline, names = collectively(shard, asked, flow, timeout_s)
        names = check() if names is None else names  # bad ones are this rank's own affair
        number = next(self._numbers)
        wanted = Wanted(ref, names, buffer_bytes, deadline.timeout_s, number, source or "")
        filling = Filling(shard, wanted, self._begun, self._ended)
        name = f"torch_ros streams {shard.group.seat.replica} {number}"
        try:
            stream = Stream(shard, filling, deadline)
            threading.Thread(target=filling.run, name=name, daemon=True).start()
            filling.plan()
        except BaseException:  # Ctrl-C, or no thread to be had
            filling.drop()
            raise
        if not filling.parts:
            shard.read_ends(ref, deadline)
        return stream

    def _decide(self, spec: Spec, deadline: Deadline) -> VersionRef:
        """The version, the same on all ranks. The call has ended when this returns."""
        shard, group = self._shard, self._shard.group
        keys = group.seat.keys

        def perform(call: GroupCall) -> VersionRef:
            call.decide(spec_ranges(keys), partial(rules.version_to_stream, spec=spec))
            return call.ref

        def rule(view: View) -> Step[VersionRef]:
            offer = resolve(view, keys, spec)
            return offer if isinstance(offer, Wait) else Done(offer.ref)

        if shard.is_alone:
            return group.ask(spec_ranges(keys), rule, deadline)
        return shard.make(GroupTask("agree", shard.asked, deadline, perform))

    def _begun(self, filling: Filling) -> Lane:
        """The means of its reads. Either this sees that the handle closes, or `close` sees it."""
        self._open.add(filling)
        self._shard.observed.open["streams"].add(filling)
        self._shard.require_usable()
        try:
            return self._spare.pop()
        except IndexError:
            return Lane(self._shard.reading.beside())

    def _ended(self, filling: Filling, lane: Lane | None) -> None:
        self._open.discard(filling)
        self._shard.observed.open["streams"].discard(filling)
        if lane is None:
            return
        if filling.error is None and not self._shard.is_closed and not self._spare:
            self._spare.append(lane)
        else:
            lane.close()

    def closes(self) -> None:
        """End all; wait for what they have in flight."""
        left = list(self._open)
        for filling in left:
            filling.drop()
        for filling in left:
            filling.over.wait(CLOSE_S)
        while self._spare:
            self._spare.pop().close()


def _names(fqns: Iterable[str], buffer_bytes: int) -> list[str]:
    """Raises: UsageError: The arguments of a stream are bad."""
    arguments.whole(1, 1 << 40)("buffer_bytes", buffer_bytes)
    names = fqns if isinstance(fqns, str) else list(fqns)
    # A tensor may have the name "", as one at the root of a state dict has.
    arguments.texts("fqns", names if isinstance(names, str) else [n for n in names if n != ""])
    twice = [fqn for fqn, count in Counter(names).items() if count > 1]
    if twice:
        raise UsageError(f"fqns: {twice[0]!r} stands there twice; expected each name once")
    return list(names)
