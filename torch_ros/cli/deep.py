"""`--deep`: asks the memory of those that read how far they are. No process does anything for it.

A rank's word is its position (docs/PROTOCOL.md#the-bytes-that-a-process-shows), which its own
readers ask for in the same way. Nothing is written: neither a seat, nor a lease, nor a record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress

import msgspec

from torch_ros.cli.asking import ANSWER_S
from torch_ros.cli.headway import Headway, Position, summed
from torch_ros.deadline import Deadline
from torch_ros.errors import TorchRosError
from torch_ros.p2p.choose import Network, choose_transport
from torch_ros.p2p.transport import Transport
from torch_ros.protocol.fleet import Fleet
from torch_ros.protocol.keys import Keys, parse_shard
from torch_ros.protocol.legible import readable
from torch_ros.protocol.records import ShardRecord
from torch_ros.store.kv import KV
from torch_ros.store.txn import Read
from torch_ros.transfer.card import Card
from torch_ros.transfer.peers import Peers, PeerState

RANK_S = 1.0  # for one rank's answer
LOOK_S = 5.0  # for all of them; who comes later is not asked
BETWEEN_S = 0.3  # two looks, which a rate is made of
REST_S = 10.0  # who did not answer is left alone


class Depths:
    """Asks the replicas that fill. For one thread at a time; its memory is let go of at the end.

    Args:
        transport: Closed at the end. None: as of a process that names no datacenter.
    """

    def __init__(self, kv: KV, model: str, transport: Transport | None = None) -> None:
        self._kv, self._keys = kv, Keys(model)
        self._transport = transport or choose_transport(
            "auto",
            Network(connect_s=RANK_S),
            replica="torch-ros",
            rank=0,
            in_process=False,
            reason="it only looks",
        )
        self._peers = Peers(self._transport)
        self._rests_until_s: dict[str, float] = {}  # by incarnation

    def close(self) -> None:
        with closing(self._transport):
            self._peers.close()

    def look(self, fleet: Fleet) -> Mapping[str, Headway]:
        """How far each one is that fills, by its `inst`; takes `BETWEEN_S`, and the answers.

        Raises:
            BackendError: etcd does not answer.
        """
        filling = [each.inst for each in fleet.held if each.state == "filling"]
        if not filling:
            return {}
        ranges = tuple(map(self._keys.shards, filling))
        view = self._kv.read(Read(ranges), timeout_s=ANSWER_S)
        until_s, found = time.monotonic() + LOOK_S, dict[str, Headway]()
        first: dict[str, Sequence[tuple[PeerState, Position]]] = {}
        for range_, inst in zip(ranges, filling, strict=True):
            there = readable(view.within(range_), parse_shard, ShardRecord)
            cards = [shard.card for _, _, shard, _ in there]
            if excuse := self._excuse(inst, until_s):
                found[inst] = Headway(problem=excuse)
                continue
            try:
                first[inst] = [self._first(card) for card in cards]
            except TorchRosError as error:
                found[inst] = self._unanswered(inst, cards, error)
        time.sleep(BETWEEN_S if first else 0.0)
        for inst, looks in first.items():
            try:
                found[inst] = summed([self._again(*look) for look in looks])
            except TorchRosError as error:
                found[inst] = self._unanswered(inst, (), error)
        return found

    def _excuse(self, inst: str, until_s: float) -> str:
        """Why it is not asked."""
        if time.monotonic() > until_s:
            return f"not asked: the others took {LOOK_S:g} s"
        rests = time.monotonic() < self._rests_until_s.get(inst, 0.0)
        return f"it has not answered within {RANK_S:g} s" if rests else ""

    def _unanswered(self, inst: str, cards: Sequence[bytes], error: TorchRosError) -> Headway:
        self._rests_until_s[inst] = time.monotonic() + REST_S
        for card in cards:
            with suppress(TorchRosError, msgspec.MsgspecError):
                self._peers.leave(Card.decode(card).agent)  # or the end would wait for it
        return Headway(problem=str(error))

    def _first(self, card: bytes) -> tuple[PeerState, Position]:
        state = self._peers.state(card, Deadline("--deep", RANK_S), serves=True)
        return state, _position(state, state.word.mark, state.word.position)

    def _again(self, state: PeerState, first: Position) -> tuple[Position, Position]:
        word = self._peers.word(state, Deadline("--deep", RANK_S))
        return first, _position(state, word.mark, word.position)


def _position(state: PeerState, mark: int, position: int) -> Position:
    if state.manifest is None or not mark:
        return Position(time.monotonic(), 0, 0, 0)
    blocks = state.manifest.layout.blocks
    done = blocks.bytes_before(position)
    return Position(time.monotonic(), mark, done, blocks.bytes_before(blocks.total))
