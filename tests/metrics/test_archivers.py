"""The figures of `torch-ros archive`, scraped from a real one."""

import signal

import pytest
import torch
from kit import until
from scraping import samples

from torch_ros.cli import main

pytest.importorskip("obstore")
ARCHIVER = """
import sys
from torch_ros.bucket import objects
from torch_ros.cli import archiving, main
objects.RETRIES, objects.RETRY_S, archiving.RETRY_MAX_S = 1, 1, 2
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
def test_an_archiver_tells_how_far_it_is_behind_and_what_it_has_done(
    opened, endpoint, started, server
):
    trainer, tensors = opened("trainer"), {"w": torch.zeros(1000)}
    trainer.register(tensors)
    trainer.publish(7)
    arguments = ["--endpoint", endpoint, "archive", trainer.model, "s3://weights/p"]
    options = ["--keep", 1, "--deltas", 0, "--metrics-port", "127.0.0.1:0"]
    archiver = started.start(ARCHIVER, *arguments, *options)

    def figures():
        found = {}
        for each in samples(archiver.log.read_text()):
            assert each.labels.pop("model") == trainer.model
            name = each.name.removeprefix("torch_ros_archive_")
            found[name, *each.labels.values()] = each.value
        return found

    def once(is_so):
        until(lambda: "figures of the archiver" in archiver.log.read_text(), by=archiver)
        until(lambda: is_so(figures()), by=archiver)
        return figures()

    found = once(lambda found: found["versions_total",] == 1)
    assert (found["behind_versions",], found["behind_seconds",]) == (0, 0)
    assert found["bytes_total",] > 4000
    assert found["seconds_total",] > 0
    server.is_away = True
    trainer.unpublish()
    trainer.publish(9)
    found = once(lambda found: found.get(("retries_total", "BucketError"), 0) > 1)
    assert found["behind_versions",] == 2
    assert 0 < found["behind_seconds",] < 100
    server.is_away = False
    found = once(lambda found: found["collected_total",] > 0)
    assert (found["behind_versions",], found["behind_seconds",]) == (0, 0)
    assert found["versions_total",] == 2
    archiver.signal(signal.SIGTERM)
    archiver.finish()


@pytest.mark.parametrize("where", ["x", "127.0.0.1:", "70000", "host:-1"])
@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_place_for_figures_is_a_port(opened, endpoint, where, capsys, tmp_path):
    trainer = opened("trainer")
    command = ["archive", trainer.model, str(tmp_path), f"--metrics-port={where}"]
    assert main.main(["--endpoint", endpoint, *command]) == 2
    assert "expected PORT, or HOST:PORT" in capsys.readouterr().err
