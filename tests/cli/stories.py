"""Journals as a fleet would leave them, of which all moments are known."""

import random

from torch_ros.protocol.journal import FORMAT, Author, Journal, Journaled, line
from torch_ros.release import RELEASE

BEGAN_NS = 1_790_000_000_000_000_000
STAGES = ("decide", "manifests", "plan", "read", "digest", "commit")
MS = 1_000_000


class Story:
    """`skews`: by how many ms each host's clock is ahead of the truth."""

    def __init__(self, seed=0, skews=None):
        self.random, self.skews = random.Random(seed), skews or {}
        self.lines = {}  # of a host, process and replica
        self.calls = {}

    def did(self, host, replica, kind, began_ms, took_ms, **more):
        """One rank of a replica has done something, at these moments of the truth."""
        ended_ns = BEGAN_NS + int((began_ms + took_ms + self.skews.get(host, 0)) * MS)
        given = {"rank": 0, "start": "aa", "version": 1, "model": "policy", **more}
        given.setdefault("uid", f"u{given['version']}")
        if "call" not in given:
            given["call"] = self.calls[replica] = self.calls.get(replica, 0) + 1
        done = Journaled(
            kind=kind, replica=replica, ended_ns=ended_ns, elapsed_s=took_ms / 1e3, **given
        )
        self.lines.setdefault((host, replica, given["rank"]), []).append(done)
        return done

    def publish(self, host, replica, began_ms, took_ms=2.0, **more):
        stages = {"decide": took_ms / 2e3, "commit": took_ms / 2e3}
        return self.did(host, replica, "publish", began_ms, took_ms, stages_s=stages, **more)

    def read(self, host, replica, source, began_ms, took_ms, **more):
        """Its stages leave out a little, as the stopwatch does."""
        parts = [self.random.uniform(0.01, 1) * (10 if stage == "read" else 1) for stage in STAGES]
        scale = took_ms / 1e3 * self.random.uniform(0.992, 1) / sum(parts)
        stages = {stage: part * scale for stage, part in zip(STAGES, parts, strict=True)}
        more = {"stages_s": stages, "sources": [source], "size_bytes": 15 << 30, **more}
        return self.did(host, replica, "read", began_ms, took_ms, ways={"cma": 15 << 30}, **more)

    def journals(self):
        return [
            Journal(f"{replica}-{rank}.jsonl", author(host), tuple(lines))
            for (host, replica, rank), lines in self.lines.items()
        ]

    def write(self, folder):
        for each in self.journals():
            text = b"".join(map(line, (each.author, *each.done)))
            (folder / each.name).write_bytes(text)


def author(host):
    return Author(FORMAT, RELEASE, host, 7, f"boot of {host}")


def spread(story, replicas, versions, hosts=10):
    """A trainer publishes; rollouts read, each from the one before it, or from the trainer."""
    story.publish("gpu-0", "trainer", 0, version=1)
    at_ms = 10.0
    for version in range(1, versions + 1):
        ends_ms = {}
        if version > 1:
            story.did("gpu-0", "trainer", "drain", at_ms, 0.5, version=version - 1)
            story.publish("gpu-0", "trainer", at_ms + 1, version=version)
        for number in range(replicas):
            host, name = f"gpu-{number % hosts}", f"roll-{number}"
            if version > 1:
                story.did(host, name, "drain", at_ms + 3, 0.1, version=version - 1)
            source = f"roll-{number - 1}" if number and story.random.random() < 0.7 else "trainer"
            began_ms = at_ms + 4 + number / 100
            least_ms = ends_ms[source] - began_ms if source in ends_ms else 0  # a relay's
            took_ms = max(story.random.uniform(1, 200), least_ms)
            story.read(host, name, source, began_ms, took_ms, version=version)
            ends_ms[name] = began_ms + took_ms
        at_ms += 300
    return story
