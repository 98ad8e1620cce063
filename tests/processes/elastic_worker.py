"""The program that torchrun runs in test_torchrun.py, which imports `push` and `pop`:

python elastic_worker.py train|fail|once ETCD NAME

Says what happens, and is told what to do, through two queues in the EtcdStore NAME.
"""

import hashlib
import io
import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard

import torch_ros.store.distributed.rendezvous  # noqa: F401  # torch knows etcd:// from here on
from torch_ros.dcp import ROSReader, ROSWriter, default_handle
from torch_ros.errors import PeerError
from torch_ros.store import EtcdStore

PATIENCE_S = 120


def push(control, queue, item):
    """Add `item` to a queue: each under its number. Anybody may."""
    control.set(f"{queue}/{control.add(f'{queue}/pushed', 1)}", item)


def pop(control, queue):
    """Wait for the queue's next item. One process at a time may; killed here, it takes none."""
    item = control.get(f"{queue}/{control.add(f'{queue}/popped', 0) + 1}")
    control.add(f"{queue}/popped", 1)
    return item.decode()


def resume(state_dict):
    """The newest version that a process still holds, 0 if there is none."""
    reader = default_handle("load")
    choice = [max(reader.list(), default=0)]
    dist.broadcast_object_list(choice)
    deadline_s = time.monotonic() + PATIENCE_S
    while choice[0]:
        try:
            dcp.load(state_dict, storage_reader=ROSReader("latest", serve=False))
        except CheckpointException as error:
            # A process that was killed is listed until its lease ends.
            if not all(isinstance(reason, PeerError) for reason, _ in error.failures.values()):
                raise
            if time.monotonic() > deadline_s:
                raise
        else:
            return state_dict["version"]
    return 0


def digest(model):
    """The same on all ranks, and for any number of them."""
    found = io.BytesIO()
    for name, weight in model.state_dict().items():
        found.write(name.encode() + weight.full_tensor().numpy().tobytes())
    return hashlib.sha256(found.getvalue()).hexdigest()


def train(control):
    dist.init_process_group("gloo", init_method="etcd://", timeout=timedelta(seconds=PATIENCE_S))
    is_first = dist.get_rank() == 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 4))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    state_dict = {"model": model.state_dict(), "version": 0}
    version = resume(state_dict)
    found = digest(model)

    def say(what, weights):
        node = [None] * dist.get_world_size()
        dist.all_gather_object(node, os.environ["TEST_NODE"])
        if is_first:
            event = {"what": what, "version": version, "weights": weights, "nodes": node}
            push(control, "events", json.dumps(event))

    say("started", found)
    while True:
        told = [pop(control, "commands") if is_first else None]
        dist.broadcast_object_list(told)
        if told == ["stop"]:
            break
        model(torch.randn(8, 16)).square().mean().backward()
        default_handle("save").unpublish()
        optimizer.step()
        optimizer.zero_grad()
        version += 1
        found = digest(model)
        state_dict = {"model": model.state_dict(), "version": version}
        dcp.save(state_dict, storage_writer=ROSWriter(version))
        say("published", found)
    dist.barrier()
    dist.destroy_process_group()


def fail(control):
    push(control, "events", os.environ["TORCHELASTIC_RESTART_COUNT"])
    sys.exit(3)


def once(control):
    """A group by env://, which ends well the second time."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    total = torch.ones(1)
    dist.all_reduce(total)
    count = control.add(f"done/{os.environ['TEST_NODE']}", 1)
    push(control, "events", json.dumps([total.item(), os.environ.get("TORCH_ROS_ENDPOINT")]))
    if count == 1:
        control.barrier("both have failed", 2)  # the first to go would end the other
        sys.exit(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, job, endpoint, name = sys.argv
    {"train": train, "fail": fail, "once": once}[job](EtcdStore(endpoint, name))
