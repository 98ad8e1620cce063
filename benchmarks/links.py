"""The price of `torch-ros doctor --links` for a read beside it, of the same source.

Reads of a version take turns with reads beside which one probe runs: its handle is open before, as
its start is work of a core and not of the link.

    python benchmarks/links.py --rounds 15                                # copied within a host
    python benchmarks/links.py --rounds 15 --size-mib 1024 --rate 2gbit   # over TCP; needs root
"""

import argparse
import contextlib
import os
import secrets
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import tensors as contents
from harness import Actors, Child, Sample, Setup, etcd_at, rounds, say, started
from report import machine

import torch_ros
from torch_ros.cli import probing

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "wan")]

from star import CENTRE, LIBRARY, Star  # noqa: E402

import puppets  # noqa: E402

TENSORS = 256
READ_S, INSIDE = "s of a read", "share of the probe's reads within it"
ALONE, BESIDE = "alone", "beside a probe"
LEAD_S = 0.05  # for the read to have begun


class Member:
    """A trainer, a rollout, or a doctor."""

    def __init__(self, setup: Setup, name: str) -> None:
        self._handle = torch_ros.open(
            setup.name, endpoint=setup.endpoint, replica=name, huge_pages=False
        )
        if name != "doctor":
            self._tensors = contents.plain(setup.size_bytes, TENSORS)
            self._handle.register(self._tensors)

    def publish(self) -> None:
        self._handle.publish(1)

    def read(self) -> tuple[float, float]:
        """When it began and ended."""
        self._handle.unpublish()
        began_s = time.monotonic()
        self._handle.replicate(1)
        return began_s, time.monotonic()

    def probe(self) -> tuple[float, float]:
        time.sleep(LEAD_S)
        began_s = time.monotonic()
        [link] = probing.links(self._handle, {})
        assert not link.problem, link.problem
        return began_s, time.monotonic()

    def close(self) -> None:
        self._handle.close()


def member(setup: Setup, name: str) -> Actors:
    return {"member": Member(setup, name)}


def alone(rollout: Child) -> Sample:
    began_s, ended_s = rollout.ask("member", "read")
    return {READ_S: ended_s - began_s}


def beside(rollout: Child, doctor: Child) -> Sample:
    for child, method in ((rollout, "read"), (doctor, "probe")):
        child.tell("member", method, ())
    (began_s, ended_s), (first_s, last_s) = rollout.hear(), doctor.hear()
    inside = max(0.0, min(ended_s, last_s) - max(began_s, first_s)) / (last_s - first_s)
    return {READ_S: ended_s - began_s, INSIDE: inside}


@contextlib.contextmanager
def fleet(given: argparse.Namespace) -> Iterator[tuple[str, list[Child]]]:
    """Where etcd is, and a trainer, a rollout and a doctor; the trainer may be behind a link."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        beyond: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if given.rate:
            star = enter(Star({"trainer": given.rate}))
            beyond = star.host("trainer")
            enter(star.host("centre"))
            os.environ |= LIBRARY
            server = enter(puppets.running_etcd(Path(enter(TemporaryDirectory())), address=CENTRE))
            endpoint = f"etcd://{server.host}"
        else:
            endpoint = "local"
            enter(etcd_at(endpoint))
        name, files = f"bench-{secrets.token_hex(4)}", enter(TemporaryDirectory())
        setup = Setup(endpoint, name, given.size_mib, given.rounds, files)
        builds = {each: partial(member, setup, each) for each in ("trainer", "rollout", "doctor")}
        with beyond:
            trainer = enter(started({"trainer": builds.pop("trainer")}))
        yield endpoint, [*trainer, *enter(started(builds))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size-mib", type=int, default=2048)
    parser.add_argument("--rate", help="of a link to the trainer, as 2gbit; by default none")
    given = parser.parse_args()
    with fleet(given) as (endpoint, (trainer, rollout, doctor)):
        trainer.ask("member", "publish")
        cases = {
            ALONE: partial(alone, rollout),
            BESIDE: partial(beside, rollout, doctor),
        }
        samples = rounds(given.rounds, cases)
        say(str(machine(endpoint)))
    ratios = sorted(
        with_probe[READ_S] / without[READ_S]
        for without, with_probe in zip(samples[ALONE], samples[BESIDE], strict=True)
    )
    median_s = statistics.median(each[READ_S] for each in samples[ALONE])
    inside = statistics.median(each[INSIDE] for each in samples[BESIDE])
    print(
        f"a read of {given.size_mib} MiB: {median_s:.2f} s alone; beside a probe, of which "
        f"{inside:.0%} was within it, {statistics.median(ratios):.3f} times ({ratios[0]:.3f} to "
        f"{ratios[-1]:.3f})"
    )


if __name__ == "__main__":
    main()
