"""Archivers that are killed while they write: whatever the bucket shows is whole.

TORCH_ROS_KILLS=n kills so many, by default a handful. What they left is collected in the end.
"""

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torch_ros
import torch_ros.bucket
from torch_ros.bucket import archive
from torch_ros.bucket.archive import Archiver
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
            odd = [name for name, tensor in self.tensors.items() if not tensor.eq(version).all()]
            assert not odd, f"version {version}: {odd}"
            self.load_count += 1
            self.seen.add(version)


def content(root):
    """All files below a folder, those of uploads that nobody finished as well."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def wait_until(what, puppet):
    deadline_s = time.monotonic() + START_S
    while not (found := what()):
        assert puppet.poll() is None, puppet.end_of_log()
        assert time.monotonic() < deadline_s, puppet.end_of_log()
        time.sleep(0.001)
    return found


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
    stages, write_s = [], None

    def publish(version):
        trainer.unpublish()
        for tensor in tensors.values():
            tensor.fill_(version)
        trainer.publish(version)

    def start(*options):
        arguments = ["--endpoint", endpoint, "archive", trainer.model, str(root)]
        options = ["--keep", str(KEEP), "--grace", str(GRACE_S), *options]
        return started.start(ARCHIVER, *arguments, *options)

    def folders():
        return set((root / trainer.model).glob("*/data/*"))

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader.read)
        for version in range(KILLS + 1):  # nobody kills the first one: it tells how long they write
            publish(version)
            before = folders()
            archiver = start(*random.choice(([], ["--stream"])))
            wait_until(lambda before=before: folders() - before, archiver)
            began_s = time.monotonic()
            if write_s is None:
                wait_until(bucket.list, archiver)
                write_s = time.monotonic() - began_s
                archiver.signal(signal.SIGTERM)
                archiver.finish()
            else:
                time.sleep(random.uniform(0, 1.5 * write_s))
                archiver.kill()
            is_written = any(each.version == version for each in bucket.kept())
            files = content(root / trainer.model)
            is_staged = any("#" in name for name in files if f"/{version:020d}-" in name)
            stages.append("whole" if is_written else "in a file" if is_staged else "between files")
        reader.ends.set()
        reading.result()
    print({stage: stages[1:].count(stage) for stage in stages}, reader.load_count, "loads")
    reader.read_once()
    assert set(stages[1:]) != {"whole"}
    assert len(reader.seen) >= stages.count("whole")
    assert len(bucket.kept()) >= min(KEEP, stages.count("whole"))
    collector = Archiver(opened("archiver", spot=True), bucket, keep=KEEP, grace_s=GRACE_S)
    clock = [time.monotonic()]
    monkeypatch.setattr(archive, "monotonic", lambda: clock[0])
    collector.collect()
    clock[0] += GRACE_S + 1
    collector.collect()
    named = {found.key for found in bucket.kept()}
    for found in bucket.kept():
        named |= {f"{found.files_at}/{file.name}" for file in bucket.manifest(found).files}
        named.add(f"{found.files_at}/model.safetensors.index.json")
    assert content(root / trainer.model) == named
