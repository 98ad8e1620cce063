"""`--deep`: asks the memory of those that read how far they are. No process does anything for it.

A rank's word is its position (docs/protocol/wire.md#mailbox), which its own
readers ask for in the same way. Nothing is written: neither a seat, nor a lease, nor a record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import get_args

from torch_ros import arguments, environment
from torch_ros.cli.asking import ANSWER_S
from torch_ros.cli.headway import Headway, Position, summed
from torch_ros.deadline import Deadline
from torch_ros.errors import TorchRosError
from torch_ros.face.choose import Network, TransportName, choose_transport
from torch_ros.fleet.fleet import Fleet, Held
from torch_ros.p2p.transport import Transport
from torch_ros.protocol.keys import Keys, parse_shard
from torch_ros.protocol.legible import holdings, readable
from torch_ros.protocol.records import ShardRecord
from torch_ros.store.kv import KV
from torch_ros.store.txn import Range, Read, View, one
from torch_ros.transfer.peers import Peers, PeerState

RANK_S = 1.0  # for one rank's answer
LOOK_S = 5.0  # for all of them; who comes later is not asked
BETWEEN_S = 0.3  # two looks, which a rate is made of
REST_S = 10.0  # who did not answer is left alone
ABREAST = 32  # replicas that are asked at the same time: who is mute keeps few others waiting


class Depths:
    """Asks the replicas that fill. For one thread at a time; its memory is let go of at the end.

    Args:
        transport: Closed at the end. None: as the environment's TORCH_ROS_TRANSPORT says, of a
            process that names no datacenter.
    """

    def __init__(self, kv: KV, model: str, transport: Transport | None = None) -> None:
        self._kv, self._keys = kv, Keys(model)
        way = environment.value(environment.TRANSPORT) or "auto"
        arguments.one_of(get_args(TransportName))(environment.TRANSPORT, way)
        self._transport = transport or choose_transport(
            "auto" if way == "memory" else way,
            Network(connect_s=RANK_S),
            replica="torch-ros",
            rank=0,
            in_process=False,
            reason="it only looks",
        )
        self._threads = ThreadPoolExecutor(ABREAST, "torch_ros --deep")
        self._peers: dict[str, Peers] = {}  # by incarnation; each is one thread's at a time
        self._rests_until_s: dict[str, float] = {}  # by incarnation

    def close(self) -> None:
        with closing(self._transport):
            for inst in tuple(self._peers):
                self._leave(inst)
            self._threads.shutdown()

    def look(self, fleet: Fleet) -> Mapping[str, Headway]:
        """How far each one is that fills, by its `inst`; takes `BETWEEN_S`, and the answers.

        Raises: BackendError: etcd does not answer.
        """
        filling = {
            each.inst: each
            for each in fleet.held
            if each.state == "filling" and each.kind != "original"  # a publisher reads nothing
        }
        for inst in self._peers.keys() - filling.keys():
            self._leave(inst)
        if not filling:
            return {}
        ranges = [*map(self._holding, filling.values()), *map(self._keys.shards, filling)]
        view = self._kv.read(Read(tuple(ranges)), timeout_s=ANSWER_S)
        until_s = time.monotonic() + LOOK_S
        asked = {
            inst: self._threads.submit(self._headway, each, view, until_s)
            for inst, each in filling.items()
        }
        return {inst: each.result() for inst, each in asked.items()}

    def _holding(self, held: Held) -> Range:
        ref = held.ref
        return one(self._keys.holding(ref.run, ref.version, held.datacenter, held.inst))

    def _leave(self, inst: str) -> None:
        """Disconnect, in a thread: from who does not answer it takes a while."""
        if peers := self._peers.pop(inst, None):
            self._threads.submit(peers.close)

    def _headway(self, held: Held, view: View, until_s: float) -> Headway:
        inst, now_s = held.inst, time.monotonic()
        if now_s < self._rests_until_s.get(inst, 0.0):
            return Headway(problem=f"it has not answered within {RANK_S:g} s")
        if now_s > until_s:
            return Headway(problem=f"not asked: the others took {LOOK_S:g} s")
        there = readable(view.within(self._keys.shards(inst)), parse_shard, ShardRecord)
        cards = [shard.card for _, _, shard, _ in there]
        marks = [holding.mark for _, _, holding, _ in holdings(view.within(self._holding(held)))]
        if not marks or len(cards) != held.world_size:
            return Headway(problem=f"{len(cards)} of {held.world_size} ranks are there")
        peers = self._peers.setdefault(inst, Peers(self._transport))
        try:
            states = [peers.state(card, Deadline("--deep", RANK_S), serves=True) for card in cards]
            first = [_position(peers, state, marks[0]) for state in states]
            time.sleep(BETWEEN_S)
            later = [_position(peers, state, marks[0]) for state in states]
        except TorchRosError as error:
            self._rests_until_s[inst] = time.monotonic() + REST_S
            self._leave(inst)
            return Headway(problem=str(error))
        return summed(list(zip(first, later, strict=True)))


def _position(peers: Peers, state: PeerState, mark: int) -> Position:
    """How far a rank is with what has this mark; it may still show what it had before."""
    word = peers.word(state, Deadline("--deep", RANK_S))
    if state.manifest is None or word.mark != mark:
        return Position(time.monotonic(), 0, 0, 0)
    blocks = state.manifest.layout.blocks
    done = blocks.bytes_before(word.position)
    return Position(time.monotonic(), mark, done, blocks.bytes_before(blocks.total))
