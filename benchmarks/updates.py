"""Updates by deltas beside updates in full: bytes, time and CPU, by the share that has changed.

A trainer in one process publishes each step twice, as copies with deltas and without; a rollout in
another updates from both. Calls take turns, and either is first in every other round. Ratios are
with deltas over without, of the medians. "at once": the update begins when `publish_copy` has
returned, while the delta is being made. Bits of random elements are flipped. Prints a row of JSON
per share.

    python benchmarks/updates.py                               # on one host
    python benchmarks/updates.py --rate 1gbit --shares 0.01    # over TCP; needs root
"""

import argparse
import contextlib
import json
import os
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import tensors as contents
import torch
from harness import Actors, Child, Setup, etcd_at, say, seconds, started
from report import machine

import torch_ros

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "wan")]

from star import CENTRE, LIBRARY, Star  # noqa: E402

import puppets  # noqa: E402

SHARES = (0.0, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0)
DELTAS = {"on": 4, "off": 0}
MADE_S = 60.0
Sample = dict[str, Any]


def opened(setup: Setup, replica: str) -> dict[str, torch_ros.ShardHandle]:
    options: dict[str, Any] = {"endpoint": setup.endpoint, "digests": "full"}
    return {
        way: torch_ros.open(f"{setup.name}-{way}", replica=replica, **options) for way in DELTAS
    }


class Trainer:
    """Two models of the same tensors."""

    def __init__(self, setup: Setup, count: int) -> None:
        self._handles, self._version = opened(setup, "trainer"), 0
        self._tensors = contents.plain(setup.size_bytes, count)

    def step(self, share: float) -> None:
        self._version += 1
        for tensor in self._tensors.values():
            words = tensor.view(torch.int16)
            if share == 1:
                words ^= 1
            elif share:
                words ^= (torch.rand(tensor.shape) < share).to(torch.int16)

    def publish(self, way: str) -> Sample:
        handle, began_s = self._handles[way], time.process_time()
        call = partial(handle.publish_copy, self._version, self._tensors, deltas=DELTAS[way])
        return {"elapsed_s": seconds(call), "cpu_s": time.process_time() - began_s}

    def made(self) -> float:
        """Wait until no delta is being made; the seconds that the last one took."""
        end_s = time.monotonic() + MADE_S
        making = self._handles["on"]._deltas.copies._making  # noqa: SLF001  # no call waits for it
        while making is not None and not making.has_ended:
            assert time.monotonic() < end_s
            time.sleep(0.002)
        return making.elapsed_s if making is not None else 0.0

    def close(self) -> None:
        for handle in self._handles.values():
            handle.close(linger_s=0)


class Rollout:
    def __init__(self, setup: Setup, count: int) -> None:
        self._handles = opened(setup, "rollout")
        for handle in self._handles.values():
            handle.register(contents.plain(setup.size_bytes, count))

    def update(self, way: str) -> Sample:
        handle, began_s = self._handles[way], time.process_time()
        elapsed_s = seconds(handle.update)
        report = handle.last_read
        assert report is not None
        return {
            "elapsed_s": elapsed_s,
            "cpu_s": time.process_time() - began_s,
            "bytes": report.bytes_read,
            "total": report.bytes_total,
            "via": report.via,
            "changed": report.changed,
            "links": report.links,
            **{f"{stage}_s": taken_s for stage, taken_s in report.stages_s.items()},
        }

    def close(self) -> None:
        for handle in self._handles.values():
            handle.close(linger_s=0)


def trainer(setup: Setup, count: int) -> Actors:
    return {"it": Trainer(setup, count)}


def rollout(setup: Setup, count: int) -> Actors:
    return {"it": Rollout(setup, count)}


def round_of(pair: list[Child], share: float, ways: list[str], *, waits: bool) -> Sample:
    """One step, published and read in both ways; by what was done, and which way."""
    source, reader = pair
    source.ask("it", "step", share)
    found: Sample = {}
    for way in ways:
        found["publish", way] = source.ask("it", "publish", way)
        if waits:
            found["make", way] = {"elapsed_s": source.ask("it", "made")}
        else:
            found["at once", way] = reader.ask("it", "update", way)
            source.ask("it", "made")
    if waits:
        for way in ways:
            found["update", way] = reader.ask("it", "update", way)
    return found


def measured(pair: list[Child], share: float, rounds: int) -> dict[str, object]:
    samples: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for number in range(2 * rounds + 2):
        ways = [*DELTAS] if number // 2 % 2 else [*DELTAS][::-1]
        found = round_of(pair, share, ways, waits=bool(number % 2))
        for what, sample in found.items():
            if number > 1:
                samples[what].append(sample)

    def of(what: str, way: str, field: str = "elapsed_s") -> float:
        return median(sample.get(field, 0.0) for sample in samples[what, way])

    row: dict[str, object] = {"share": share, "rounds": rounds}
    for what in ("publish", "update", "at once"):
        row |= {
            f"{what}: time": round(of(what, "on") / of(what, "off"), 4),
            f"{what}: cpu": round(of(what, "on", "cpu_s") / of(what, "off", "cpu_s"), 3),
            f"{what}: ms on, off": [round(1e3 * of(what, way), 1) for way in DELTAS],
        }
        if what != "publish":
            row[f"{what}: by deltas"] = sum(each["via"] == "delta" for each in samples[what, "on"])
    stages = ("decide", "manifests", "plan", "delta", "read", "digest", "commit")
    for way in DELTAS:
        row[f"update: ms {way}, by stage"] = {
            stage: round(1e3 * of("update", way, f"{stage}_s"), 1) for stage in stages
        }
    total = of("update", "on", "total")
    row |= {
        "bytes: full over deltas": round(total / max(1, of("update", "on", "bytes")), 1),
        "changed": of("update", "on", "changed"),
        "making: s/GiB": round(of("make", "on") * 2**30 / total, 3),
    }
    return row


@contextlib.contextmanager
def fleet(given: argparse.Namespace) -> Iterator[list[Child]]:
    """A trainer, perhaps behind a link, and a rollout."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        beyond: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        endpoint = "local"
        if given.rate:
            star = enter(Star({"trainer": given.rate}))
            beyond = star.host("trainer")
            enter(star.host("centre"))
            os.environ |= LIBRARY
            server = enter(puppets.running_etcd(Path(enter(TemporaryDirectory())), address=CENTRE))
            endpoint = f"etcd://{server.host}"
        else:
            enter(etcd_at(endpoint))
        name = f"bench-{secrets.token_hex(4)}"
        setup = Setup(endpoint, name, given.size_mib, given.rounds, "")
        say(str(machine(endpoint)))
        with beyond:
            source = enter(started({"trainer": partial(trainer, setup, given.tensors)}))
        yield [*source, *enter(started({"rollout": partial(rollout, setup, given.tensors)}))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--rate", help="of a link to the trainer, as 10gbit; by default none")
    given = parser.parse_args()
    with fleet(given) as pair:
        for share in given.shares:
            print(json.dumps(measured(pair, share, given.rounds)), flush=True)


if __name__ == "__main__":
    main()
