"""How fast EtcdStore is beside torch's TCPStore: one client's calls, and barriers of many ranks.

Both servers run on this host and sync nothing to disk; each rank is a thread with a client of its
own. Times are medians. TCPStore's `set` waits for no answer; all other calls do. Prints a row of
JSON per result, then a table.
"""

import argparse
import json
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from harness import etcd_at, timed

from torch_ros.store import EtcdStore

TIMEOUT = timedelta(seconds=60)
LARGE = bytes(4 << 20)
WAKE_DELAY_S = 0.02  # by then, the other thread waits


def tcp_clients() -> Callable[[], Any]:
    """How to open one more client of a new TCPStore."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)  # noqa: FBT003

    def connect() -> Any:
        return dist.TCPStore(
            "127.0.0.1", server.port, timeout=TIMEOUT, wait_for_workers=False, use_libuv=True
        )

    return connect


def etcd_clients(endpoint: str) -> Callable[[], Any]:
    name = f"benchmark-{uuid.uuid4().hex}"
    return lambda: EtcdStore(endpoint, name, timeout=TIMEOUT)


def median_ms(call: Callable[[], object], rounds: int) -> float:
    return statistics.median(timed(call, rounds)) * 1000


def calls(store: Any, rounds: int) -> Iterator[tuple[str, float]]:
    """Each call of one client, alone."""
    store.set("there", b"x" * 64)
    keys = [f"many/{index}" for index in range(64)]
    store.multi_set(keys, keys)
    yield "set, 64 B", median_ms(lambda: store.set("k", b"x" * 64), rounds)
    yield "get, 64 B", median_ms(lambda: store.get("there"), rounds)
    yield "check", median_ms(lambda: store.check(["there"]), rounds)
    yield "wait, 1 key that is there", median_ms(lambda: store.wait(["there"]), rounds)
    yield "add", median_ms(lambda: store.add("n", 1), rounds)
    yield "multi_get, 64 keys", median_ms(lambda: store.multi_get(keys), rounds)
    yield "set and get, 4 MiB", median_ms(lambda: (store.set("l", LARGE), store.get("l")), 5)


def wake_ms(setting: Any, waiting: Any, rounds: int) -> float:
    """From `set` in one client to the end of `get` in another that waited."""

    def wait(key: str) -> float:
        waiting.get(key)
        return time.perf_counter()

    times_s = []
    with ThreadPoolExecutor(1) as pool:
        for index in range(rounds):
            woken = pool.submit(wait, f"wake/{index}")
            time.sleep(WAKE_DELAY_S)
            started_s = time.perf_counter()
            setting.set(f"wake/{index}", b"")
            times_s.append(woken.result() - started_s)
    return statistics.median(times_s) * 1000


def barrier_ms(stores: list[Any], rounds: int) -> float:
    """Until all of `stores` are through one barrier: an `add` each, and a `wait` for the last."""

    def arrive(store: Any, name: str) -> None:
        if store.add(f"{name}/arrived", 1) == len(stores):
            store.set(f"{name}/all", b"")
        store.wait([f"{name}/all"])

    with ThreadPoolExecutor(len(stores)) as pool:
        names = iter(f"barrier/{index}" for index in range(rounds + 1))

        def once() -> None:
            name = next(names)
            list(pool.map(lambda store: arrive(store, name), stores))

        return median_ms(once, rounds)


def measured(connect: Callable[[], Any], ranks: int, rounds: int) -> dict[str, float]:
    stores = [connect() for _ in range(ranks)]
    found = dict(calls(stores[0], rounds))
    found["set, until a get elsewhere ends"] = wake_ms(stores[0], stores[1], max(5, rounds // 10))
    found[f"barrier of {ranks} ranks"] = barrier_ms(stores, 5)
    for store in stores:
        if isinstance(store, EtcdStore):
            store.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", default="local", help="of the etcd (default: one of its own)")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    if given.ranks < 2:
        sys.exit("--ranks has to be at least 2")

    tcp = measured(tcp_clients(), given.ranks, given.rounds)
    with etcd_at(given.endpoint):
        etcd = measured(etcd_clients(given.endpoint), given.ranks, given.rounds)
    for call in tcp:
        print(json.dumps({"call": call, "tcp_ms": tcp[call], "etcd_ms": etcd[call]}))
    print(f"\n{'':34}{'TCPStore':>12}{'EtcdStore':>12}{'ratio':>8}")
    for call in tcp:
        ratio = etcd[call] / tcp[call]
        print(f"{call:34}{tcp[call]:9.3f} ms{etcd[call]:9.2f} ms{ratio:7.0f}x")


if __name__ == "__main__":
    main()
