"""What the control plane costs: the calls of a group in etcd, without weights.

Ranks and replicas are threads of this process, each with a connection of its own, on a store where
nothing else happens. Two parts:

* calls of groups of several sizes, one after another; times are those of the slowest rank;
* bursts: one replica holds a version; N others join, and replicate it, all at once; then it
  publishes the next one, and they go on to that. None ends its read before all have found a source,
  as if the version were large. Counted is what they ask of etcd, and the bytes of keys and values
  that move, besides the renewals of leases.

Prints a row of JSON per result, then tables.
"""

import argparse
import itertools
import json
import math
import sys
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from harness import etcd_at
from report import Row, machine, table

from torch_ros.deadline import Deadline
from torch_ros.features.retention.copying import LastCopies
from torch_ros.protocol import calls as rules
from torch_ros.protocol.call import GroupCall
from torch_ros.protocol.group import Group, GroupTask
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.membership import Applicant
from torch_ros.protocol.policy import NEWEST, decided_next
from torch_ros.protocol.reaching import ClaimedSources
from torch_ros.protocol.records import Asked, Call, Outcome, ShardRecord, VersionRef
from torch_ros.protocol.seat import Seat, own_group
from torch_ros.protocol.versions import Spec, newer_ranges
from torch_ros.store.endpoint import connect
from torch_ros.store.kv import KV
from torch_ros.store.loops import Done, Step
from torch_ros.store.txn import Put, Read, Reply, Txn, View, Watch

T = TypeVar("T")
Burst = dict[str, Any]

CALLS = "Calls of a group, slowest rank"
CALL_S = 60.0
CARD = bytes(1500)  # about what a process with NIXL has
LATEST = Spec.parse("latest")
LAYOUT = "0" * 32
WARM_UP = 3
JOIN, GO_ON = "All join and replicate", "All go on to the next version"
LARGE = ("groups", "holdings", "readers", "shards")  # what bytes may be about


class Meter:
    """A `KV` that counts what goes through it."""

    def __init__(self, kv: KV) -> None:
        self._kv, self.endpoint = kv, kv.endpoint
        self.requests: Counter[str] = Counter()
        self.bytes_of: Counter[str] = Counter()  # of keys and values, by what they are about

    def _count_bytes(self, records: Iterable[tuple[str, bytes]]) -> None:
        for key, value in records:
            self.bytes_of[key.split("/")[3]] += len(key) + len(value)

    def read(self, request: Read, *, timeout_s: float) -> View:
        view = self._kv.read(request, timeout_s=timeout_s)
        self.requests["reads"] += 1
        self._count_bytes((key, entry.value) for key, entry in view.entries.items())
        return view

    def commit(self, txn: Txn, *, timeout_s: float) -> Reply:
        self._count_bytes((op.key, op.value) for op in txn.ops if isinstance(op, Put))
        reply = self._kv.commit(txn, timeout_s=timeout_s)
        self.requests["commits" if reply.applied else "lost"] += 1
        seen = [result for result in reply.results if not isinstance(result, int)]
        for entries in (*seen, *([reply.view.entries] if reply.view else [])):
            self._count_bytes((key, entry.value) for key, entry in entries.items())
        return reply

    def wait(self, watch: Watch, *, timeout_s: float) -> bool:
        self.requests["watches"] += 1
        return self._kv.wait(watch, timeout_s=timeout_s)

    def grant(self, ttl_s: int, *, timeout_s: float) -> tuple[int, int]:
        return self._kv.grant(ttl_s, timeout_s=timeout_s)

    def keep_alive(self, lease_id: int, *, timeout_s: float) -> int:
        return self._kv.keep_alive(lease_id, timeout_s=timeout_s)

    def revoke(self, lease_id: int, *, timeout_s: float) -> None:
        self._kv.revoke(lease_id, timeout_s=timeout_s)

    def close(self) -> None:
        self._kv.close()


def place(keys: Keys, name: str, rank: int = 0, world_size: int = 1) -> Applicant:
    return Applicant(
        keys=keys,
        replica=name,
        rank=rank,
        world_size=world_size,
        run=None,
        datacenter="default",
        spot=False,
        keeper=LastCopies(),
        ttl_s=30,
        drain_s=60.0,
        shard=ShardRecord("host", rank, CARD),
    )


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))


# The calls, as ShardHandle makes them


def end(call: GroupCall) -> None:
    call.finish(LAYOUT, lambda _: call.complete(Outcome(said=LAYOUT)))


def publish(group: Group, version: int) -> VersionRef:
    def body(call: GroupCall) -> VersionRef:
        call.decide_to_publish(version)
        end(call)
        return call.ref

    asked = Asked("publish", version)
    return group.make(GroupTask("publish", asked, Deadline(f"{asked}", CALL_S), body))


def replicate(group: Group, reading: Callable[[], None] = lambda: None) -> VersionRef:
    def body(call: GroupCall) -> VersionRef:
        call.decide_and_claim(partial(rules.announce_filling, spec=LATEST, is_relay=True))
        ClaimedSources(call).read(call.decided.sources, lambda _: reading())
        end(call)
        return call.ref

    asked = Asked("replicate", "latest")
    return group.make(GroupTask("replicate", asked, Deadline(f"{asked}", CALL_S), body))


def update(group: Group, held: VersionRef) -> VersionRef | None:
    ranges, deadline = newer_ranges(group.seat.keys, held), Deadline("update", CALL_S)

    def ask(view: View) -> Step[VersionRef | None]:
        own_group(view, group.seat)
        return Done(NEWEST.next_version(view, group.seat, LATEST, held).ref)

    def effects(view: View, seat: Seat, call: Call) -> Step[Call]:
        found = NEWEST.next_version(view, seat, LATEST, held)
        return decided_next(view, seat, call, found)

    def decide(call: GroupCall) -> VersionRef | None:
        call.decide(ranges, effects, is_cheap=True)
        return call.decided.ref

    if group.seat.world_size == 1:
        return group.ask((*group.seat.own, *ranges), ask, deadline)
    return group.make(GroupTask("update", Asked("update", "latest"), deadline, decide))


def unpublish(group: Group, ref: VersionRef) -> None:
    asked = Asked("unpublish", ref.version)

    def body(call: GroupCall) -> None:
        call.unpublish(ref)

    group.make(GroupTask("unpublish", asked, Deadline(f"{asked}", CALL_S), body))


# Measured


def timed_calls(endpoint: str, size: int, rounds: int) -> Iterator[Row]:
    """A trainer and a rollout of `size` ranks each; what their calls take."""
    keys = Keys(f"control-{uuid.uuid4().hex}")
    join = lambda name, rank: Group.join(  # noqa: E731  # what at_once is given
        connect(endpoint, timeout_s=5), place(keys, name, rank, size), Deadline("join", CALL_S)
    )
    trainer, rollout = (
        at_once([partial(join, name, rank) for rank in range(size)])
        for name in ("trainer", "rollout")
    )
    times: dict[str, list[float]] = defaultdict(list)
    pool = ThreadPoolExecutor(size)

    def timed(what: str, call: Callable[[Group], T], ranks: Sequence[Group]) -> T:
        started_s = time.perf_counter()
        answers = list(pool.map(call, ranks))
        times[what].append(time.perf_counter() - started_s)
        return answers[0]

    for version in range(rounds + WARM_UP):
        if version == WARM_UP:
            times.clear()
        ref = timed("publish", partial(publish, version=version), trainer)
        timed("replicate, decisions only", replicate, rollout)
        timed("update that finds nothing", partial(update, held=ref), rollout)
        timed("unpublish, nobody reads", partial(unpublish, ref=ref), rollout)
        timed("unpublish, nobody reads", partial(unpublish, ref=ref), trainer)
    pool.shutdown()
    at_once([rank.close for rank in (*trainer, *rollout)])
    for what, taken_s in times.items():
        samples = [1e3 * one_s for one_s in taken_s]
        params = {"ranks": size}
        yield Row(part=CALLS, what=what, params=params, unit="ms", samples=samples, has_tail=True)


def burst(endpoint: str, replicas: int) -> Iterator[Burst]:
    """`replicas` newcomers for one version, which then go on to the next."""
    keys = Keys(f"control-{uuid.uuid4().hex}")
    trainer = Group.join(
        connect(endpoint, timeout_s=5), place(keys, "trainer"), Deadline("join", 9)
    )
    ref = publish(trainer, 1)
    meters = [Meter(connect(endpoint, timeout_s=5)) for _ in range(replicas)]
    all_have_a_source = threading.Barrier(replicas)

    def reading() -> None:
        all_have_a_source.wait(CALL_S)

    def come(number: int) -> Group:
        group = Group.join(meters[number], place(keys, f"r{number}"), Deadline("join", CALL_S))
        assert replicate(group, reading) == ref
        return group

    def go_on(group: Group) -> None:
        assert update(group, ref) == after
        unpublish(group, ref)
        assert replicate(group, reading) == after

    groups, row = measured(JOIN, meters, [partial(come, number) for number in range(replicas)])
    yield row
    unpublish(trainer, ref)
    after = publish(trainer, 2)
    _, row = measured(GO_ON, meters, [partial(go_on, group) for group in groups])
    yield row
    at_once([group.close for group in (*groups, trainer)])


def measured(
    what: str, meters: Sequence[Meter], calls: Sequence[Callable[[], T]]
) -> tuple[list[T], Burst]:
    for meter in meters:
        meter.requests.clear()
        meter.bytes_of.clear()
    started_s = time.perf_counter()
    answers = at_once(calls)
    elapsed_s = time.perf_counter() - started_s
    requests: Counter[str] = sum((meter.requests for meter in meters), Counter())
    bytes_of: Counter[str] = sum((meter.bytes_of for meter in meters), Counter())
    return answers, {
        "what": what,
        "replicas": len(calls),
        "elapsed_s": elapsed_s,
        "requests": requests.total(),
        "bytes": bytes_of.total(),
        **requests,
        "bytes_of": dict(bytes_of),
    }


def growth(rows: Sequence[Burst], of: Callable[[Burst], float]) -> list[str]:
    """How each row has grown, as an exponent of the number of replicas: 1 linear, 2 quadratic."""
    found = [""]
    for before, after in itertools.pairwise(rows):
        ratio = math.log(after["replicas"] / before["replicas"])
        found.append(f"{math.log(of(after) / of(before)) / ratio:.1f}")
    return found


def burst_table(what: str, bursts: Sequence[Burst]) -> Iterator[str]:
    yield what
    heads = ("replicas", "seconds", "requests", "commits", "lost", "KiB", *LARGE)
    yield "".join(f"{head:>10}" for head in heads) + "   growth: requests, bytes"
    grown = zip(
        growth(bursts, lambda row: row["requests"]),
        growth(bursts, lambda row: row["bytes"]),
        strict=True,
    )
    for row, (requests, moved) in zip(bursts, grown, strict=True):
        yield (
            f"{row['replicas']:10}{row['elapsed_s']:10.2f}{row['requests']:10}{row['commits']:10}"
            f"{row.get('lost', 0):10}{row['bytes'] / 1024:10.0f}"
            + "".join(f"{row['bytes_of'].get(name, 0) / 1024:10.0f}" for name in LARGE)
            + f"{requests:>19}{moved:>7}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", default="local", help="of the etcd (default: one of its own)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--replicas", type=int, nargs="+", default=[16, 32, 64, 128])
    given = parser.parse_args()
    if min(*given.ranks, *given.replicas, given.rounds, 1) < 1:
        sys.exit("expected numbers of at least 1")

    calls: list[Row] = []
    bursts: list[Burst] = []
    with etcd_at(given.endpoint):
        print(json.dumps(machine(given.endpoint)), flush=True)
        for size in given.ranks:
            for row in timed_calls(given.endpoint, size, given.rounds):
                print(json.dumps(row.as_json()), flush=True)
                calls.append(row)
        for replicas in given.replicas:
            for row in burst(given.endpoint, replicas):
                bursts.append(row)
                print(json.dumps(row), flush=True)
    print("", *table(calls), sep="\n")
    for what in (JOIN, GO_ON):
        print("", *burst_table(what, [row for row in bursts if row["what"] == what]), sep="\n")


if __name__ == "__main__":
    main()
