"""A bucket that archivers have written before; replicas read it when nobody holds anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from torch_ros.bucket import chain
from torch_ros.bucket.files import InBucket, kept
from torch_ros.errors import BucketError, UnreadableVersion
from torch_ros.weights.manifest import logical

URL = "sim://bucket"
PIECES = 3  # in which a rank's shards come
READ_S = 2.0  # for each
OLD_RUN, OLD_NUMBER = "before", 3


@dataclass
class ModelBucket:
    """As `FallbackBucket`, of versions that archivers have written before."""

    world: object
    list_s: float = 0.0  # that a list takes, at most
    read_s: float = READ_S
    url: str = URL
    there: dict[str, tuple[InBucket, int]] = field(default_factory=dict)  # by key; the contents
    corrupt: set[str] = field(default_factory=set)
    is_away: bool = False
    fails: float = 0.0  # how often it does not answer, before the world is calm
    slow: float = 1.0  # how many times as long all ranks but the first take
    lists: int = 0
    cells: int = 0  # that were read
    first_s: float = 0.0  # when the first one was
    on_begin = staticmethod(lambda of, content: None)
    on_read = staticmethod(lambda: None)

    def archive(self, version: int, content: int, born_ms: int = 0, run: str = OLD_RUN) -> str:
        world, uid = self.world, f"{content:016x}"
        of = InBucket(OLD_NUMBER, run, version, born_ms or version, uid, world.token())
        self.there[of.key] = (of, content)
        world.checks.truth[uid], world.versions[uid] = content, version
        return of.key

    def _answer(self) -> None:
        fails = self.fails and not self.world.is_calm and self.world.random() < self.fails
        if self.is_away or fails:
            raise BucketError(self.url, "", "it does not answer", "wait")

    def newest_run(self):
        self.world.sleep(self.list_s * self.world.random())
        self._answer()
        alive = chain.living(of for of, _ in self.there.values())
        return (alive[0].run_number, alive[0].run) if alive else (0, "")

    def choose(self, layout, avoided, *, is_alone):
        self.lists += 1
        self.world.sleep(self.list_s * self.world.random())
        self._answer()
        for of in chain.living(of for of, _ in self.there.values()):
            if of.key not in avoided:
                digest = logical([layout]).digest
                return SimpleNamespace(
                    manifest=of.key, version=of.version, uid=of.uid, layout=digest, at_ms=of.born_ms
                )
        return None

    def contents(self, manifest: str):
        assert kept(manifest) is not None
        self.world.sleep(0.1)
        return SimpleNamespace(fill=lambda *asked: self._fill(manifest, *asked))

    def _fill(self, manifest, layout, memory, look) -> int:
        world, process = self.world, self.world.current.process
        of, content = self.there[manifest]
        self.on_begin(of, content)
        self.first_s = self.first_s or world.now_s
        expected = process.expected(content)
        for piece in np.array_split(np.arange(len(expected)), PIECES):
            until_s = world.now_s + self.read_s * (self.slow if process.rank else 1.0)
            while world.now_s < until_s:
                world.sleep(min(0.5, self.read_s))
                look(0)
            self._answer()
            process.cells[piece] = expected[piece]
            self.cells += len(piece)
            world.checks.wrote(process)
            self.on_read()
            look(8 * len(piece))
        if manifest in self.corrupt and process.rank == 0:
            process.cells[:] = -1
            world.saw("a bucket's version is corrupt")
            raise UnreadableVersion(self.url, manifest, "it is corrupt", "read another")
        world.saw("read from a bucket")
        return 8 * len(expected)
