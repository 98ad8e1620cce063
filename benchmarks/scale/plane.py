"""The memory that processes show to each other, modelled: mailboxes, and reads of whole versions.

The library's `Replication` uses these as it uses its own; they move fractions instead of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
from network import Node, Transfer

from torch_ros.costs import NIXL_COSTS, Costs
from torch_ros.deadline import Deadline
from torch_ros.errors import SourceLost, TransferFailed
from torch_ros.features.pace.judging import PacedRead
from torch_ros.features.pace.rates import WINDOW_S, Landings
from torch_ros.p2p.regions import Region
from torch_ros.transfer.card import ALL_BLOCKS, Card, Word
from torch_ros.transfer.feed import Feed, FeedSource, Following, Progress, Supply
from torch_ros.transfer.mailbox import Digests
from torch_ros.transfer.peers import PeerState
from torch_ros.transfer.registered import LocalState, Phase
from torch_ros.transfer.stall import EAGER_POLL_S, EAGER_S, POLL_S_MAX, STALL_S, SourceWait
from torch_ros.weights.local import local_chunks
from torch_ros.weights.manifest import Layout, Manifest

if TYPE_CHECKING:
    from cluster import Cluster, Process
    from schedule import Actor

CONNECTION = bytes(1400)  # about as many as a process with NIXL has in its card
LOOKS_S = 0.51 * WINDOW_S  # between two judgements of a source; of the library, after each batch
QUESTIONS = 3  # to see what a peer shows: its word, its mailbox, its manifest


def registered(bytes_total: float) -> LocalState:
    """The tensors that each process has registered: one block, for `bytes_total`."""
    known = LocalState(local_chunks({"w": torch.zeros(1)}), {}, {})
    vars(known)["bytes_total"] = int(bytes_total)
    return known


class Mailbox:
    """A process's word, as its node in the network."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self.cluster, self.process, self.node = cluster, process, process.node()
        self.agent = agent_of(self.node)
        cluster.boxes[self.agent] = self
        self.card = msgspec.msgpack.encode(Card(self.agent, CONNECTION, b"", 0))
        known = cluster.registered
        self._shown = Manifest(known.layout, tuple(known.addresses), tuple(known.devices), b"")
        self.manifest: Manifest | None = self._shown
        self.regions: tuple[Region, ...] = ()
        self.mark = self._mark_shown = 0
        self.rate = 0
        self.transfer: Transfer | None = None  # into this process's memory
        self.waiting: list[tuple[Actor, int]] = []  # for this process to serve something

    @property
    def word(self) -> Word:
        is_all = self.cluster.network.shown(self.node) == 1.0
        return Word(self.mark, ALL_BLOCKS if is_all else 0)

    def serve(self, mark: int, position: int) -> None:
        self.mark = mark
        self.fill(mark)
        if position == ALL_BLOCKS:
            self.cluster.network.show(self.node, 1.0)
        self.wake("served")

    def tell_rate(self, bytes_per_s: int) -> None:
        self.rate = bytes_per_s

    def wake(self, why: str) -> None:
        """Those who wait for this process to serve something look at it again."""
        for actor, token in self.waiting:
            self.cluster.clock.wake(actor, token, why)
        self.waiting.clear()

    def fill(self, mark: int) -> float:
        """The fraction that is there of what that mark names, served or not."""
        if mark != self._mark_shown:  # bytes that came before a source was lost are there still
            self._mark_shown = mark
            self.cluster.network.show(self.node, 0.0)
        return self.cluster.network.shown(self.node)

    def void(self) -> None:
        if self.mark:
            self.mark = 0
            self.cluster.network.lose(self.node, "it does not serve it any more")

    def show(self, *_: Any) -> Manifest:
        self.manifest = self._shown
        return self._shown

    def show_digests(self, digests: Digests, more: object = None) -> None:
        pass

    def withdraw(self) -> None:
        self.void()
        self.manifest = None

    def close(self) -> None:
        self.withdraw()


class Room:
    """Memory for a copy of what each process has."""

    def __init__(self, cluster: Cluster) -> None:
        self.state = cluster.registered

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Plan:
    bytes_read: int


class Peers:
    def __init__(self, cluster: Cluster, process: Process) -> None:
        self._cluster, self._process = cluster, process
        self._waits: dict[str, float] = {}  # by agent: since when it waits for that peer

    def state(
        self,
        card: bytes,
        deadline: Deadline,
        still: Callable[[], None] = lambda: None,
        *,
        serves: bool = False,
    ) -> PeerState:
        where, clock = Card.decode(card), self._cluster.clock
        box = self._cluster.boxes[where.agent]
        rtt_s = self._cluster.rtt_s(box.process.datacenter, self._process.datacenter)
        clock.sleep(rtt_s)
        if box.process.is_dead:
            clock.sleep(self._cluster.model.detect_s)
            raise TransferFailed(where.agent, "it is gone")
        if serves and not box.mark:
            self._wait_for(box, rtt_s)
        clock.sleep((QUESTIONS - 1) * rtt_s)
        return PeerState(where.agent, 0, box.word, box.manifest)

    def _wait_for(self, box: Mailbox, asking_s: float) -> None:
        """Return when the caller, who asks ever more seldom, would learn that the peer serves.

        After `STALL_S` it returns anyway: the caller then asks the store. To wake the caller for
        each of its questions would take most of the time of a large burst.
        """
        clock = self._cluster.clock
        began_s = self._waits.setdefault(box.agent, clock.now_s)
        box.waiting.append((clock.current, clock.current.token))
        if clock.park("waits for a relay", clock.now_s + STALL_S) is None:
            return
        del self._waits[box.agent]
        clock.sleep(asked_at(began_s, clock.now_s, asking_s) - clock.now_s)

    def manifest(
        self, card: bytes, deadline: Deadline, still: Callable[[], None] = lambda: None
    ) -> tuple[str, Manifest]:
        state = self.state(card, deadline, still)
        assert state.manifest is not None
        return state.agent, state.manifest

    def costs(self, agents: Sequence[str]) -> Costs:
        return NIXL_COSTS

    def is_near(self, agents: Sequence[str]) -> bool:
        return False

    def forget(self, agent: str) -> None:
        pass

    leave = forget

    def close(self) -> None:
        pass


class Steps(Landings):
    """Landings of one size, many at a time, of which the last may end a window."""

    def is_due(self, now_s: float) -> bool:
        """Whether one could; till then they wait to be added."""
        return now_s - self._since_s >= WINDOW_S

    def add_all(
        self, now_s: float, step_bytes: int, count: int, times_s: tuple[float, float, float]
    ) -> bool:
        """Note so many: the two bounds of their times, and the longest of the lower ones."""
        waited_s, flown_s, longest_s = times_s
        self._count += count - 1
        self._bytes += (count - 1) * step_bytes
        self._longest = max(self._longest, (longest_s, step_bytes))
        self._waited_s += waited_s
        self._flown_s += flown_s
        return self.add(now_s, step_bytes, 0.0, 0.0)


class Measured:
    """How the steps of a transfer land, as its reader would measure it."""

    def __init__(
        self, cluster: Cluster, transfer: Transfer, progress: Progress, source: FeedSource
    ) -> None:
        self._cluster, self._transfer, self._progress = cluster, transfer, progress
        box = cluster.boxes[agent_of(transfer.sources[0])]
        beside = SimpleNamespace(
            is_near=False, feed=SimpleNamespace(source=source), rate=lambda _: box.rate
        )
        assert source.judge is not None
        judge = source.judge(cast("Following", beside), progress)
        assert isinstance(judge, PacedRead)
        self.judge = judge
        self._landings = judge.landings = Steps(cluster.clock.now_s)

    def look(self) -> None:
        """Note the steps that have come since the last time."""
        network, now_s = self._cluster.network, self._cluster.clock.now_s
        if not self._landings.is_due(now_s):
            return
        count, waited_s, flown_s, longest_s = network.landings(self._transfer)
        if not count:
            return
        waited_s += count * self._cluster.model.near_rtt_s
        times_s = waited_s, flown_s, longest_s
        if self._landings.add_all(now_s, int(network.step_bytes), count, times_s):
            self._progress.tell_rate(self._landings.told)
            self.judge.compare([0])


class Reading:
    """The reads of one process, or of its forerunner, into what `own` shows."""

    own: Mailbox

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self._cluster, self._process = cluster, process
        self.peers = Peers(cluster, process)

    def supply(self, feed: Feed, target: Layout, rank: int) -> Supply:
        return Supply(cast(Any, Plan(self._cluster.registered.bytes_total)), feed)

    def read(
        self,
        supplies: Sequence[Supply],
        phase: Phase,
        progress: Progress,
        deadline: Deadline,
        counted: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Read what is missing, from one rank of each source.

        Raises:
            SourceLost: A source is gone, or does not serve the call any more.
        """
        self._process.begins_to_read()
        own = self.own
        sources = {self._node(each.feed): each.feed.source for each in supplies}
        begins = own.fill(progress.mark)
        if len(sources) > 1:
            progress.tell_rate(0)
        if (lost := self._transferred(progress, sources, begins, deadline)) is not None:
            raise lost
        bytes_read = self._cluster.registered.bytes_total
        progress.add(phase.blocks, bytes_read)
        counted(bytes_read)

    def _node(self, feed: Feed) -> Node:
        state = feed.states[self._process.rank % len(feed.states)]
        return self._cluster.boxes[state.agent].node

    def _transferred(
        self, progress: Progress, sources: dict[Node, FeedSource], begins: float, deadline: Deadline
    ) -> SourceLost | None:
        """The source that was lost; None: all is there."""
        cluster, clock, network = self._cluster, self._cluster.clock, self._cluster.network
        own = self.own
        actor, ended = clock.current, list[tuple[Node | None, str]]()

        def end(lost: Node | None, why: str) -> None:
            ended.append((lost, why))
            clock.wake(actor, actor.token, "ended")

        for node, source in sources.items():  # a source may have changed since `state`
            if cluster.boxes[agent_of(node)].mark != source.mark:
                return SourceLost(source.replica, "it does not serve it any more")
        size = cluster.registered.bytes_total
        [node, *others] = sources
        own.transfer = transfer = Transfer(own.node, list(sources), size, begins, end)
        network.start(transfer)
        measured = None if others else Measured(cluster, transfer, progress, sources[node])
        waits = {
            source.replica: SourceWait(source.replica, deadline, source.is_there)
            for source in sources.values()
            if not source.is_full
        }
        try:
            while not ended:
                before = network.shown(own.node)
                clock.park("reads", clock.now_s + (STALL_S if others else LOOKS_S))
                next(iter(sources.values())).check()
                has = network.shown(own.node)
                if measured and not ended:
                    measured.look()
                shown = int(has * size), int(network.shown(node) * size)
                if measured and not ended:
                    measured.judge.keep_up(clock.now_s, *shown)
                for replica, wait in waits.items():
                    if has != before:
                        wait.reset()
                    elif not ended:
                        wait.look(f"{replica!r} has no more of it than before")
        finally:
            network.stop(transfer)
            own.transfer = None
        lost, why = ended[0]
        return None if lost is None else SourceLost(sources[lost].replica, why)

    def forget(self, agent: str | None = None) -> None:
        pass

    def close(self) -> None:
        pass


def asked_at(began_s: float, now_s: float, asking_s: float) -> float:
    """The time at which a `SourceWait` since `began_s` asks next; a question takes `asking_s`."""
    pause_s, still_s = EAGER_POLL_S, 0.0
    while still_s < now_s - began_s:
        is_eager = still_s < EAGER_S
        still_s += pause_s + asking_s
        if not is_eager:
            pause_s = min(2 * pause_s, POLL_S_MAX)
    return began_s + still_s


def agent_of(node: Node) -> str:
    return f"agent-{node.number}"
