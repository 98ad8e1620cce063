"""An engine that is killed, and a trainer that waits for installs: real processes, and etcd."""

import time

import pytest
import torch

import torch_ros
from torch_ros.errors import DeadlineExceeded

TTL_S = 2

ENGINE = """
import sys
import time
import torch
import torch_ros

endpoint, model, name = sys.argv[1:]
handle = torch_ros.open(
    model, replica=name, installs=True, endpoint=endpoint, ttl_s=2, timeout_s=20
)
for version in (1, 2):
    with handle.installing(version):
        handle.read(version, {"w": torch.empty(4)})
    print("installed", flush=True)
time.sleep(600)
"""


def test_a_killed_engine_is_missing_at_first_and_then_gone(etcd_endpoint, started, request):
    model = request.node.name
    with torch_ros.open(model, endpoint=etcd_endpoint, ttl_s=TTL_S, timeout_s=20) as trainer:
        weight = {"w": torch.ones(4)}
        trainer.publish_copy(1, weight)
        stays, dies = (
            started.start(ENGINE, etcd_endpoint, model, name, talks=True)
            for name in ("stays", "dies")
        )
        assert (stays.hear(), dies.hear()) == ("installed", "installed")
        assert trainer.wait_installed(1).active.keys() == {"stays", "dies"}
        dies.kill()
        killed_s = time.monotonic()
        trainer.publish_copy(2, weight)
        with pytest.raises(DeadlineExceeded, match="'dies' is missing, and was"):
            trainer.wait_installed(2, timeout_s=TTL_S + 2)
        left_s = 3 * TTL_S + 2 - (time.monotonic() - killed_s)
        found = trainer.wait_installed(2, timeout_s=left_s)
        assert (list(found.active), found.gone) == (["stays"], ("dies",))
