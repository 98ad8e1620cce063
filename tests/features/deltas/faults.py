"""Faults to plant where deltas are read, and where what they bring is compared."""

import math

import numpy as np
from faults import answers, fault, instead

from torch_ros.codec import delta
from torch_ros.errors import CorruptWeights
from torch_ros.protocol import records
from torch_ros.shard import seams


@fault(
    "deltas are applied before the word of their source is asked",
    "DeltaRead._certify",
    "Delta.received",  # checksums would refuse them, too
    scenario="rewritten",
)
def _(was):
    if getattr(was, "__self__", None) is delta.Delta:
        return classmethod(lambda cls, elements, *arrays: cls(elements, *arrays))
    return lambda self, ranks: None


fault("what the owner took back is a base", "core:Shard.base", scenario="not held")(
    lambda _: _last_held
)


def _last_held(shard):
    kept, registered = shard.group.ledger.held, shard.tensors.registered
    if kept is not None:
        shard.last = seams.Base(kept.ref, registered)
    return getattr(shard, "last", None)


@instead(
    "a base is taken again in the same call", "Replication._fill_otherwise", scenario="base once"
)
def _(fill, self, *args):
    self.first = getattr(self._target, "first", None) or self._target.base
    self._target.first = self._target.base = self.first
    fill(self, *args)


@instead("what deltas have brought is told at once", "Progress.fill", scenario="stray cell")
def _(fill, self, bytes_read):
    self.add(np.arange(len(self.done)), bytes_read)


@instead(
    "what deltas have brought is told by who makes its call again",
    "Progress.serve",
    scenario="stray cell, seat lost",
)
def _(serve, self, mark):
    self.is_unproven = False
    serve(self, mark)


@fault(
    "only who compares all tensors says that it was deltas",
    "Ready.encode",
    scenario="one without digests",
)
def _(encode):
    return lambda self: encode(records.Ready(self.value))


@instead(
    "who has read in full suspects its source of what deltas have made",
    "Verification.verify",
    scenario="one without digests",
)
def _(verify, self, source, **options):
    try:
        verify(self, source, **options)
    except CorruptWeights as error:
        raise CorruptWeights(error.model, error.version, error.fqn, source) from error


@instead("only the first delta of a chain is applied", "DeltaRead.scatter", scenario="by deltas")
def _(scatter, self, staged):
    scatter(self, {key: found[:1] for key, found in staged.items()})


answers(
    "a delta that is being made is waited for without a bound",
    "wait_s",
    value=math.inf,
    scenario="delta coming",
)


@fault(
    "a full source is believed to have no more than its word says",
    "Following.ask",
    "ReadPass.blocked",  # or it would ask nobody, for ever
    scenario="late end",
)
def _(was):
    def asks(self, rank):
        was(self, rank)
        state = self.feed.states[rank]
        self._positions[rank] = self._peers.word(state, self._deadline).position

    def waits(self):
        for source in self._sources:
            source.wait_for_more()

    return asks if was.__name__ == "ask" else waits


@instead(
    "who learns late that it holds what deltas brought tells nobody",
    "OwnWord.void_unless_held",
    scenario="late end, learned later",
)
def _(void_unless_held, self):
    if self._ledger.holds is None:
        self.void()
