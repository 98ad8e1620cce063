"""Train, and survive the loss of nodes: the weights come back from whoever still has them.

torchrun runs it, on any number of ranks; ../torchrun_elastic.sh shows it.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model import build
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard

import torch_ros.store.distributed.rendezvous  # noqa: F401  # torch knows etcd:// from here on
from torch_ros.dcp import ROSReader, ROSWriter, default_handle
from torch_ros.errors import NotAvailable, PeerError


def resume(state_dict: dict[str, object]) -> int:
    """Read the newest version that a process still has. Its number; 0: there is none.

    What a killed process had is listed until its lease ends, 10 s later, and cannot be read.
    """
    reader = default_handle("load")
    while True:
        newest = [max(reader.list(), default=0)]
        dist.broadcast_object_list(newest)
        (version,) = newest
        if version == 0:
            return 0
        try:
            dcp.load(state_dict, storage_reader=ROSReader(version, serve=False, timeout_s=20))
        except CheckpointException as error:
            reasons = [reason for reason, _ in error.failures.values()]
            if not all(isinstance(reason, (PeerError, NotAvailable)) for reason in reasons):
                raise
            time.sleep(1)
        else:
            return version


def main() -> None:
    steps = int(sys.argv[1])
    dist.init_process_group("gloo", init_method="etcd://", timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, truth = build(seed=0), build(seed=1)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    began_s = time.perf_counter()
    version = resume({"model": model.state_dict()})
    if rank == 0:
        found = default_handle("load").last_read
        origin = "with new weights"
        if found is not None:
            seconds = time.perf_counter() - began_s
            origin = f"with version {version}, read from {found.source} in {seconds:.2f} s"
        print(f"{world_size} rank(s) begin {origin}", flush=True)

    handle = default_handle("save")
    batches = torch.Generator().manual_seed(os.getpid())
    while version < steps:
        batch = torch.randn(256, 64, generator=batches)
        loss = (model(batch) - truth(batch)).square().mean()
        loss.backward()
        handle.unpublish()  # from here on nobody reads what the optimizer writes
        optimizer.step()
        optimizer.zero_grad()
        version += 1
        dcp.save({"model": model.state_dict()}, storage_writer=ROSWriter(version))
        if rank == 0:
            print(f"version {version}: loss {loss.item():.3f}", flush=True)
        # What nobody else has would be lost with us.
        handle.wait(lambda available, version=version: len(available.get(version, ())) > 1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
