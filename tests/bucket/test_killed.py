"""Archivers that are killed while they write: whatever the bucket shows is whole.

TORCH_ROS_KILLS=n kills so many, by default a handful. What they left is collected in the end.
"""

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch
from kit import until

import torch_ros
import torch_ros.bucket
from torch_ros.bucket import archive
from torch_ros.bucket.archive import Archiver
from torch_ros.bucket.objects import MARKER
from torch_ros.errors import VersionNotFound

pytest.importorskip("obstore")
KILLS, KEEP, GRACE_S = int(os.environ.get("TORCH_ROS_KILLS", "5")), 3, 60
START_S = 60  # until an archiver writes, on a busy machine
ARCHIVER = """
import functools, sys
from torch_ros.cli import archiving, main
archiving.Form = functools.partial(archiving.Form, file_bytes=2 << 20)
sys.exit(main.main(sys.argv[1:]))
"""


def expected(version, names):
    """The number in each tensor: a step changes one of them, in turn, so that deltas are small."""
    return {name: max(version - (version - n) % len(names), 0) for n, name in enumerate(names)}


class Reader:
    """Loads each version that the bucket lists, again and again, and looks at all of it."""

    def __init__(self, bucket, tensors):
        self.bucket, self.tensors = bucket, {n: torch.zeros_like(t) for n, t in tensors.items()}
        self.load_count, self.seen, self.ends = 0, set(), threading.Event()

    def read(self):
        while not self.ends.is_set():
            self.read_once()

    def read_once(self):
        for version in self.bucket.list():
            try:
                self.bucket.load(self.tensors, version)
            except VersionNotFound:  # it was collected since the list
                continue
            there = expected(version, self.tensors)
            odd = [
                name for name, tensor in self.tensors.items() if not tensor.eq(there[name]).all()
            ]
            assert not odd, f"version {version}: {odd}"
            self.load_count += 1
            self.seen.add(version)


def content(root):
    """All files below a folder, those of uploads that nobody finished as well."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.mark.long
@pytest.mark.timeout(60 + 60 * KILLS)
@pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
def test_archivers_that_are_killed_leave_whole_versions_and_nothing_that_stays(
    opened, endpoint, started, tmp_path, monkeypatch
):
    trainer, root = opened("trainer"), tmp_path / "bucket"
    tensors = {f"w{n}": torch.zeros(1 << 18) for n in range(16)}
    trainer.register(tensors)
    bucket = torch_ros.bucket.open(str(root), trainer.model)
    reader = Reader(bucket, tensors)
    kinds = set()
    stages, write_s, numbers = [], None, count()

    def publish():
        version = next(numbers)
        trainer.unpublish()
        for name, number in expected(version, tensors).items():
            tensors[name].fill_(number)
        trainer.publish(version)
        return version

    def start(*options):
        arguments = ["--endpoint", endpoint, "archive", trainer.model, str(root)]
        options = ["--keep", str(KEEP), "--grace", str(GRACE_S), *options]
        return started.start(ARCHIVER, *arguments, *options)

    def folders():
        return set((root / trainer.model).glob("*/data/*"))

    with ThreadPoolExecutor(1) as pool:
        for killed in range(KILLS + 1):  # nobody kills the first one: it tells how long they write
            version = publish()
            before = folders()
            archiver = start(*random.choice(([], ["--stream"])))
            if killed % 2:  # while it writes its second one, a delta unless it streams
                until(lambda v=version: v in bucket.list(), by=archiver)
                version, before = publish(), folders()
            until(lambda before=before: folders() - before, by=archiver)
            began_s = time.monotonic()
            if write_s is None:
                until(bucket.list, by=archiver)
                write_s = time.monotonic() - began_s
                reading = pool.submit(reader.read)  # before, there is no bucket
                archiver.signal(signal.SIGTERM)
                archiver.finish()
            else:
                time.sleep(random.uniform(0, 1.5 * write_s))
                archiver.kill()
            kinds |= {each.kind for each in bucket.kept()}
            is_written = any(each.version == version for each in bucket.kept())
            files = content(root / trainer.model)
            is_staged = any("#" in name for name in files if f"/{version:020d}-" in name)
            stages.append("whole" if is_written else "in a file" if is_staged else "between files")
        reader.ends.set()
        reading.result()
    print({stage: stages[1:].count(stage) for stage in stages}, reader.load_count, "loads")
    reader.read_once()
    assert KILLS < 20 or (set(stages[1:]) > {"whole"} and kinds == {"full", "delta"})
    assert len(reader.seen) >= stages.count("whole")
    assert len(bucket.kept()) >= min(KEEP, stages.count("whole"))
    collector = Archiver(opened("archiver", spot=True), bucket, keep=KEEP, grace_s=GRACE_S)
    clock = [time.monotonic()]
    monkeypatch.setattr(archive, "monotonic", lambda: clock[0])
    collector.collect()
    clock[0] += GRACE_S + 1
    collector.collect()
    named = {MARKER, *(found.key for found in bucket.kept())}
    for found in bucket.kept():
        named |= {f"{found.files_at}/{file.name}" for file in bucket.manifest(found).files}
        if found.kind == "full":
            named.add(f"{found.files_at}/model.safetensors.index.json")
    assert content(root / trainer.model) == named
