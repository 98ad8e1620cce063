"""An archiver that has nothing to do asks nobody, and hears at once when it has."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kit import inside, until

import torch_ros.bucket
from torch_ros.bucket.archive import Archiver
from torch_ros.cli import archiving, main, moving

pytest.importorskip("obstore")


class Counts:
    """What the archiver of this process asks etcd, and how often it has waited."""

    def __init__(self):
        self.read_count = self.wait_count = 0

    def archiver(self, handle, bucket, **options):
        kv, wait = inside(handle).group.kv, handle.archives.wait

        def counted(ask):
            def asking(request, *, timeout_s):
                self.read_count += 1
                return ask(request, timeout_s=timeout_s)

            return asking

        def waiting(predicate, *, timeout_s):
            self.wait_count += 1
            return wait(predicate, timeout_s=timeout_s)

        kv.read, kv.commit = counted(kv.read), counted(kv.commit)
        handle.archives.wait = waiting
        return Archiver(handle, bucket, **options)


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_an_archiver_with_nothing_to_do_asks_nobody_and_hears_of_the_next_version(
    opened, endpoint, server, monkeypatch
):
    counts, trainer = Counts(), opened("trainer")
    monkeypatch.setattr(archiving, "Archiver", counts.archiver)
    monkeypatch.setattr(archiving, "LOOK_S", 0.1)
    monkeypatch.setattr(archiving, "FLEET_S", 0.2)
    tensors = {"w": torch.zeros(1000)}
    trainer.register(tensors)
    trainer.publish(7)
    bucket = torch_ros.bucket.open("s3://weights/p", trainer.model)

    def look_on():
        try:
            until(lambda: counts.wait_count > 1)
            assert bucket.list() == {7: "full"}
            before = counts.wait_count, counts.read_count, len(server.asked)
            until(lambda: counts.wait_count > before[0] + 5)
            assert len(server.asked) == before[2]
            # When a wait begins, when it ends, and the fleet.
            assert counts.read_count - before[1] <= 3 * (counts.wait_count - before[0])
            monkeypatch.setattr(archiving, "FLEET_S", 1000)
            for version, look_s in ((8, 1000), (9, 0.1)):
                monkeypatch.setattr(archiving, "LOOK_S", look_s)
                waited = counts.wait_count
                until(lambda waited=waited: counts.wait_count > waited)  # for that long
                trainer.unpublish()
                trainer.publish(version)
                until(lambda version=version: version in bucket.list())
        finally:
            monkeypatch.setattr(archiving, "LOOK_S", 0.1)
            os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look_on)
        assert main.main(["--endpoint", endpoint, "archive", trainer.model, bucket.url]) == 0
        looking.result()


@pytest.mark.long
def test_an_idle_archiver_goes_on_after_etcd_was_away(etcd_server, server, monkeypatch, caplog):
    monkeypatch.setattr(archiving, "LOOK_S", 0.1)
    monkeypatch.setattr(archiving, "RETRY_S", 0.1)
    monkeypatch.setattr(moving, "OPEN_S", 2.0)
    endpoint, tensors = f"etcd://{etcd_server.host}", {"w": torch.zeros(1000)}
    bucket, counts = torch_ros.bucket.open("s3://weights/p", "m"), Counts()
    monkeypatch.setattr(archiving, "Archiver", counts.archiver)

    def look_on(trainer):
        try:
            until(lambda: counts.wait_count > 1)
            etcd_server.kill()
            until(lambda: "it tries again in" in caplog.text)
            etcd_server.start()
            trainer.unpublish()
            trainer.publish(8)
            until(lambda: 8 in bucket.list())
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with torch_ros.open("m", endpoint=endpoint, replica="trainer") as trainer:
        trainer.register(tensors)
        trainer.publish(7)
        with ThreadPoolExecutor(1) as pool:
            looking = pool.submit(look_on, trainer)
            assert main.main(["--endpoint", endpoint, "archive", "m", bucket.url]) == 0
            looking.result()
