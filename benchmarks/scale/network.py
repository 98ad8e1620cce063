"""A fluid network: flows share NICs and links max-min fairly, and relays pass on whole steps.

Time goes in ticks. A node is one process's memory, with the fraction of one version that it shows;
a flow reads from one node into another, no further than its reader has seen the source to be.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_ros.transfer.stall import EAGER_POLL_S, EAGER_S, POLL_S_MAX

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
NEARLY = 1.0  # byte: the rest is rounding
FREE = 0  # the link that never is the bottleneck
LOOK_S = 0.00026  # between two looks for what has landed: POLL_S, and what such a sleep adds
# Columns of a flow: its transfer, the nodes, and the links: out of a NIC, into one, and between
# datacenters.
PLACES = ("owner", "source", "reader", "out", "into", "way")
# More columns. The rate of one connection at most. In bytes of the flow: all, those that came,
# those that its source was seen to have, and the end of its next step. In bytes of its transfer:
# those that it began with, and all. If its source has no more: since when its reader waits, its
# pause, and the time at which it looks again. For how long some of this step were on their way. Of
# the steps that came since `landings` was asked: how many, the looks that each takes as its reader
# sees it, at most and at least, and of one at most the latter.
AMOUNTS = (
    "most",
    "share",
    "done",
    "seen",
    "next",
    "begins",
    "total",
    "since_s",
    "pause_s",
    "looks_s",
    "busy_s",
    "landed",
    "waited",
    "flown",
    "longest",
)

COUNTED = AMOUNTS[-4:]


@dataclass(eq=False, slots=True)
class Node:
    """A process's memory as others see it: a mailbox has one node."""

    number: int
    datacenter: str
    out: int  # links
    into: int
    readers: dict["Transfer", None] = field(default_factory=dict)
    readers_peak: int = 0
    is_dead: bool = False


@dataclass(eq=False, slots=True)
class Transfer:
    """One rank reads the rest of its part from one or more nodes, from each the same share.

    `ended` is called once: with None at its end, or with the source that was lost, and why.
    """

    reader: Node
    sources: Sequence[Node]
    bytes_total: float  # of the whole part
    begins: float  # the fraction that was there before
    ended: Callable[[Node | None, str], None]
    number: int = 0


class Network:
    """Moves bytes while there are transfers.

    Args:
        step_bytes: The step that a relay passes on as a whole.
        tick_s: The step in which time goes.
    """

    def __init__(self, step_bytes: float, tick_s: float) -> None:
        self.step_bytes, self.tick_s, self.now_s = step_bytes, tick_s, 0.0
        self.nodes: list[Node] = []
        self._rate_of = [np.inf]  # of each link
        self._ways: dict[tuple[str, str], tuple[int, float]] = {}
        self._shown = np.zeros(0)  # of each node: the fraction that its word says
        self._transfers: dict[int, Transfer] = {}
        self._count = 0
        self._table: dict[str, npt.NDArray[Any]] = {
            **{name: np.zeros(0, np.int64) for name in PLACES},
            **{name: np.zeros(0) for name in AMOUNTS},
        }
        self._row: dict[int, int] = {}  # the first of each transfer
        self._new: list[tuple[float, ...]] = []
        self._gone: set[int] = set()
        self._sent = np.zeros(0)  # by each node
        self._carried = np.zeros(0)  # by each link
        self._arrange()

    # Nodes and links

    def link(self, bytes_per_s: float) -> int:
        self._rate_of.append(bytes_per_s)
        return len(self._rate_of) - 1

    def set_rate(self, link: int, bytes_per_s: float) -> None:
        self._rate_of[link] = bytes_per_s
        self._arrange()

    def join(self, a: str, b: str, bytes_per_s: float, most: float = np.inf) -> None:
        """A way between two datacenters, of which one connection gets `most` bytes per second."""
        for pair in ((a, b), (b, a)):
            self._ways[pair] = self.link(bytes_per_s), most

    def node(self, datacenter: str, out: int, into: int) -> Node:
        made = Node(len(self.nodes), datacenter, out, into)
        self.nodes.append(made)
        return made

    # Processes show, read and die

    def shown(self, node: Node) -> float:
        self._grow()
        return float(self._shown[node.number])

    def show(self, node: Node, fraction: float) -> None:
        """The node's word says this fraction; readers see it a little later."""
        self._grow()
        self._shown[node.number] = fraction

    def lose(self, node: Node, why: str) -> None:
        """All readers of the node notice that they have lost it."""
        for transfer in list(node.readers):
            self.stop(transfer)
            transfer.ended(node, why)

    def kill(self, node: Node) -> None:
        """The node sends nothing any more; its readers have not noticed yet."""
        node.is_dead = True
        self._arrange()
        self._table["most"][self._table["source"] == node.number] = 0.0
        self._arrange()

    def start(self, transfer: Transfer) -> None:
        self._grow()
        self._count += 1
        transfer.number = self._count
        self._transfers[self._count] = transfer
        begins = transfer.begins * transfer.bytes_total
        share = max((transfer.bytes_total - begins) / len(transfer.sources), NEARLY)
        for source in transfer.sources:
            source.readers[transfer] = None
            source.readers_peak = max(source.readers_peak, len(source.readers))
            pair = source.datacenter, transfer.reader.datacenter
            way, most = self._ways.get(pair, (FREE, np.inf))
            self._new.append((
                *(self._count, source.number, transfer.reader.number),
                *(source.out, transfer.reader.into, way),
                *(0.0 if source.is_dead else most, share, 0.0, -1.0, -1.0),
                *(begins, transfer.bytes_total, self.now_s, EAGER_POLL_S, self.now_s),
                *(0.0, 0.0, 0.0, 0.0, 0.0),
            ))  # fmt: skip

    def stop(self, transfer: Transfer) -> None:
        """No byte of the transfer is in flight any more; its reader has all that it shows."""
        if transfer.number in self._transfers:
            self._end(transfer.number)

    def _end(self, owner: int) -> Transfer:
        transfer = self._transfers.pop(owner)
        self._gone.add(owner)
        for source in transfer.sources:
            source.readers.pop(transfer, None)
        return transfer

    def landings(self, transfer: Transfer) -> tuple[int, float, float, float]:
        """Of the steps that came from its first source since it was asked: how many, and in seconds
        the two bounds of their times on the way, and the longest one of the lower bounds.
        """
        row = self._row.get(transfer.number)
        if row is None or not self._table["landed"][row]:
            return 0, 0.0, 0.0, 0.0
        count, *looks = (float(self._table[name][row]) for name in COUNTED)
        for name in COUNTED:
            self._table[name][row] = 0.0
        waited, flown, longest = (each * LOOK_S for each in looks)
        return int(count), waited, flown, longest

    # Bytes that were carried

    def sent(self) -> Floats:
        """Bytes that each node has sent."""
        self._arrange()
        return self._sent

    def crossed(self, a: str, b: str) -> float:
        """Bytes that went from one datacenter to another."""
        self._arrange()
        return float(self._carried[self._ways[a, b][0]])

    # Time

    @property
    def is_idle(self) -> bool:
        return not self._transfers

    def skip_to(self, now_s: float) -> None:
        """Time passes until `now_s`, and nothing flows."""
        self.now_s = now_s

    def tick(self) -> None:
        self.now_s += self.tick_s
        if self._new or self._gone:
            self._arrange()
        table = self._table
        there = table["seen"] - table["done"]
        looks = np.flatnonzero((there < NEARLY) & (table["looks_s"] <= self.now_s))
        if len(looks):
            self._look(looks)
            there[looks] = table["seen"][looks] - table["done"][looks]
        table["busy_s"] += np.where(there >= NEARLY, self.tick_s, 0.0)
        moved = self._rates(np.maximum(there, 0.0) / self.tick_s) * self.tick_s
        table["done"] += moved
        self._moved += moved
        tells = np.flatnonzero(table["done"] >= table["next"] - NEARLY)
        if len(tells):
            self._tell(tells)

    def _grow(self) -> None:
        missing = len(self.nodes) - len(self._shown)
        if missing > 0:
            more = np.zeros(missing)
            self._shown = np.concatenate([self._shown, more])
            self._sent = np.concatenate([self._sent, more])

    def _arrange(self) -> None:
        """Take in transfers that begin, and leave out those that have ended."""
        self._grow()
        links = len(self._rate_of)
        self._capacity = np.array(self._rate_of)
        more = np.zeros(links - len(self._carried))
        self._carried = np.concatenate([self._carried, more])
        table = self._table
        if len(table["owner"]):  # book what was carried since the last time
            self._sent += np.bincount(table["source"], self._moved, minlength=len(self._sent))
            for name in ("out", "into", "way"):
                self._carried += np.bincount(table[name], self._moved, minlength=links)
        if self._gone or self._new:
            stay = ~np.isin(table["owner"], np.fromiter(self._gone, np.int64, len(self._gone)))
            rows = [row for row in self._new if row[0] not in self._gone]
            for name, new in zip(table, zip(*rows, strict=True) if rows else table, strict=True):
                kept = table[name][stay]
                table[name] = np.concatenate([kept, np.array(new)]) if rows else kept
            for name in PLACES:
                table[name] = table[name].astype(np.int64)
            self._new, self._gone = [], set()
        self._moved = np.zeros(len(table["owner"]))
        owners, first, counts = np.unique(table["owner"], return_index=True, return_counts=True)
        self._row = dict(zip(owners.tolist(), first.tolist(), strict=True))
        self._flows = np.repeat(counts, counts)  # of the transfer that a flow is of
        self._start, self._is_single = np.repeat(first, counts), bool((counts == 1).all())
        new = np.flatnonzero(table["next"] < 0)
        self._see(new)
        table["next"][new] = self._next(new)
        places = [table[name] for name in ("out", "into", "way")]
        users = sum(np.bincount(each, minlength=links) for each in places)
        is_alone = all((users[each] <= 1)[each != FREE].all() for each in places)
        # Where all flows are alone on all links, no shares have to be found.
        self._limit = np.minimum.reduce([self._capacity[each] for each in places])
        self._limit = np.minimum(self._limit, table["most"]) if is_alone else None

    def _see(self, rows: Ints) -> None:
        """Readers of these flows look at how much their sources have."""
        table = self._table
        shown = self._shown[table["source"][rows]] * table["total"][rows]
        of_all = table["total"][rows] - table["begins"][rows]
        part = (shown - table["begins"][rows]) / np.maximum(of_all, NEARLY)
        table["seen"][rows] = np.maximum(part, 0.0) * table["share"][rows]

    def _look(self, rows: Ints) -> None:
        """Readers that have all that they saw look again, and then ever more seldom (`stall`)."""
        table = self._table
        before = table["seen"][rows]
        self._see(rows)
        has_more = table["seen"][rows] > before
        pause_s = table["pause_s"][rows]
        table["looks_s"][rows] = self.now_s + np.where(has_more, 0.0, pause_s)
        table["since_s"][rows[has_more]] = self.now_s
        is_eager = self.now_s - table["since_s"][rows] < EAGER_S
        longer_s = np.minimum(np.where(is_eager, 1, 2) * pause_s, POLL_S_MAX)
        table["pause_s"][rows] = np.where(has_more, EAGER_POLL_S, longer_s)

    def _rates(self, wanted: Floats) -> Floats:
        """The max-min fair rate of each flow, which wants no more than its source has."""
        if self._limit is not None:
            return np.minimum(wanted, self._limit)
        table = self._table
        wanted = np.minimum(wanted, table["most"])
        rates = np.zeros(len(wanted))
        live = np.flatnonzero(wanted > 0)
        left = self._capacity.copy()
        while len(live):
            links = [table[name][live] for name in ("out", "into", "way")]
            users = sum(np.bincount(each, minlength=len(left)) for each in links)
            fair = left / np.maximum(users, 1)
            offers = [fair[each] for each in links]
            least = np.minimum(np.minimum(*offers[:2]), offers[2])
            gets = np.minimum(wanted[live], least)
            # A link is the bottleneck of all its users if none gets less for another reason.
            is_open = sum(
                np.bincount(each, gets < offer, minlength=len(left))
                for each, offer in zip(links, offers, strict=True)
            )
            is_settled = wanted[live] <= least
            for each in links:
                is_settled |= is_open[each] == 0
            settled = live[is_settled]
            rates[settled] = given = gets[is_settled]
            for each in links:
                left -= np.bincount(each[is_settled], given, minlength=len(left))
            left = np.maximum(left, 0.0)
            live = live[~is_settled]
        return rates

    def _next(self, rows: Ints) -> Floats:
        """The ends of these flows' steps, each of which is a part of a step of the transfer."""
        table, flows = self._table, self._flows[rows]
        size, done, share = self.step_bytes / flows, table["done"][rows], table["share"][rows]
        begins = table["begins"][rows] / flows
        ends = (np.floor((begins + done) / size + 1e-6) + 1) * size - begins
        return np.where(done >= share - NEARLY, np.inf, np.minimum(ends, share))

    def _tell(self, rows: Ints) -> None:
        """Readers show their whole steps; a transfer ends when its reader has all of it."""
        table = self._table
        looks = table["busy_s"][rows] / LOOK_S
        flown = np.floor(looks)
        table["landed"][rows] += 1.0
        table["waited"][rows] += np.ceil(looks)
        table["flown"][rows] += flown
        table["longest"][rows] = np.maximum(table["longest"][rows], flown)
        table["busy_s"][rows] = 0.0
        table["next"][rows] = self._next(rows)
        # At the end of each step a reader asks its source whether the bytes count, and hears how
        # far the source is.
        self._see(rows)
        first = rows if self._is_single else np.unique(self._start[rows])
        part = table["done"][first] / table["share"][first]
        several = [] if self._is_single else np.flatnonzero(self._flows[first] > 1).tolist()
        for number in several:
            all_ = slice(first[number], first[number] + self._flows[first[number]])
            part[number] = (table["done"][all_] / table["share"][all_]).min()
        begins, total = table["begins"][first], table["total"][first]
        there = begins + part * (total - begins)
        is_all = there >= total - NEARLY
        whole = np.floor(there / self.step_bytes + 1e-6) * self.step_bytes
        told = np.where(is_all, total, np.maximum(np.minimum(whole, there), begins))
        self._shown[table["reader"][first]] = told / total
        for owner in table["owner"][first[is_all]].tolist():
            self._end(owner).ended(None, "")
