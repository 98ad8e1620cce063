"""One turn of one peer in one case; prints what it took, in JSON. `beside.py` starts it.

A turn has processes, a directory and ports of its own, and nothing of it is left afterwards.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ends
from harness import ChildFailed, Sample, ask_all
from peers import Peer, Place

MARK = "TORCH_ROS_TURN"  # a variable of the environment
CASES = {"one": (1, 1), "four": (1, 4), "resharded": (2, 1)}  # ranks of the trainer, and rollouts
WARM_UP = 2
SAMPLE_S = 0.02


def measure(file: str, place: Place, repeat: int) -> dict[str, Any]:
    peer = ends.load(file)
    before = used_bytes()
    builds = {
        f"{name} {rank}": partial(build, file, place, rank)
        for name, build, count in (
            ("trainer", ends.trainer, place.trainers),
            ("rollout", ends.rollout, place.rollouts),
        )
        for rank in range(count)
    }
    with peer.services(place), peer.started(place, builds) as children:
        trainers, rollouts = children[: place.trainers], children[place.trainers :]
        cards, sizes = zip(*ask_all(trainers, "end", "card"), strict=True)
        tensors = sum(sizes) + sum(ask_all(rollouts, "end", "meet", cards))
        once = partial(exchange, peer, trainers, rollouts)
        samples = [once(version) for version in range(1, WARM_UP + repeat + 1)][WARM_UP:]
        between = used_bytes()
        with peak_bytes() as peak:
            once(WARM_UP + repeat + 1)
    return {
        "samples": samples,
        "beyond": {
            "between versions": (between - before - tensors) / 2**20,
            "peak": (peak() - before - tensors) / 2**20,
        },
    }


def exchange(peer: Peer, trainers: Sequence[Any], rollouts: Sequence[Any], version: int) -> Sample:
    """A version from its first byte to its last, and what the trainer waits for."""
    ask_all(trainers, "end", "write", version)
    if peer.together:
        for each in rollouts:
            each.tell("end", "receive", (version, ()))
        published = ask_all(trainers, "end", "publish", version)
        received = [each.hear() for each in rollouts]
    else:
        published = ask_all(trainers, "end", "publish", version)
        tickets = [ticket for ticket, *_ in published]
        received = ask_all(rollouts, "end", "receive", version, tickets)
    released = ask_all(trainers, "end", "release")
    ask_all(rollouts, "end", "verify", version)
    ask_all((*trainers, *rollouts), "end", "forget")
    began_s = min(began for _, began, _ in published)
    held = zip(published, released, strict=True)
    may_write_s = released if peer.lends else [(0.0, ended) for *_, ended in published]
    return {
        "last": max(received) - began_s,
        "held": max(ended - began + took for (_, began, ended), (took, _) in held),
        "may write": max(ended for _, ended in may_write_s) - began_s,
    }


# Memory


def used_bytes() -> int:
    """Memory of all processes of this turn, each page once, and of the host's files in it."""
    found = entries(Path("/proc/meminfo"))["Shmem"]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark() in (process / "environ").read_bytes().split(b"\0"):
                found += entries(process / "smaps_rollup")["Pss_Anon"]
    return found


def mark() -> bytes:
    """Return what all processes of this turn have in their environment."""
    return f"{MARK}={os.environ.setdefault(MARK, secrets.token_hex(8))}".encode()


def entries(path: Path) -> dict[str, int]:
    """Bytes by name."""
    lines = re.findall(r"^(\w+): +(\d+) kB$", path.read_text(), re.MULTILINE)
    return {name: int(count) << 10 for name, count in lines}


@contextmanager
def peak_bytes() -> Iterator[Any]:
    """Look often. Gives a function that says the most that was found."""
    found, ended = [used_bytes()], threading.Event()

    def look() -> None:
        while not ended.wait(SAMPLE_S):
            found.append(used_bytes())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield lambda: max(found)
    finally:
        ended.set()
        looking.join()


def named(package: str) -> str:
    """The package, its version, and the commit that it was made from, if it is no release."""
    found = importlib.metadata.distribution(package)
    made_from = json.loads(found.read_text("direct_url.json") or "{}").get("vcs_info", {})
    commit = f", commit {made_from['commit_id'][:7]}" if made_from else ""
    return f"{package} {found.version}{commit}"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", help="a file of benchmarks/peers, without .py")
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--size-mib", type=int, default=1024, help="of a version")
    parser.add_argument("--repeat", type=int, default=5, help="exchanges that count")
    where = "/dev/shm"  # noqa: S108  # the turn makes a directory of its own there
    parser.add_argument("--directory", default=where, help="in memory")
    given = parser.parse_args()
    peer = ends.load(given.peer)
    told = {"name": peer.name, "package": named(peer.package), "lends": peer.lends}
    if given.case in peer.cases:
        with tempfile.TemporaryDirectory(prefix="turn-", dir=given.directory) as directory:
            name, size_bytes = f"beside-{secrets.token_hex(4)}", given.size_mib << 20
            place = Place(directory, name, free_port(), size_bytes, *CASES[given.case])
            told |= measure(given.peer, place, given.repeat)
    print(json.dumps(told))


if __name__ == "__main__":
    try:
        main()
    except ChildFailed as failed:
        sys.exit(str(failed))
