"""Train with FSDP2 and publish the weights after every step. torchrun runs it on two ranks."""

import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model import build, draw_batch, read_text
from scaffold import Scaffold
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torch_ros
from torch_ros.dcp import ROSWriter, default_handle

REPLICAS = 3  # this one and the two rollouts
SEQUENCES = 8  # of a batch, on each rank


def wait_for_rollouts(handle: torch_ros.ShardHandle, version: int) -> None:
    """So that they see every version on a machine of two cores. Training itself need not wait."""
    handle.wait(lambda available: len(available.get(version, ())) == REPLICAS)


def main() -> None:
    scaffold = Scaffold("trainer")
    scaffold.say("builds the model")
    dist.init_process_group("gloo")
    model = build(seed=0)
    computing = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=computing)
    fully_shard(model, mp_policy=computing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)

    text, generator = read_text(), torch.Generator().manual_seed(dist.get_rank())
    handle = default_handle("save")
    scaffold.say("has its place in etcd; the first step is the slowest")

    for step in range(1, scaffold.steps + 1):
        batch = draw_batch(text, generator, SEQUENCES)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()

        # The optimizer writes where others read: from here on, nobody does.
        began_s = time.perf_counter()
        handle.unpublish()
        unpublish_s = time.perf_counter() - began_s
        optimizer.step()
        optimizer.zero_grad()
        scaffold.write_digests(handle.replica, step, model.state_dict())

        began_s = time.perf_counter()
        dcp.save({"model": model.state_dict()}, storage_writer=ROSWriter(step))
        publish_s = time.perf_counter() - began_s

        dist.all_reduce(mean_loss := loss.detach() / dist.get_world_size())
        scaffold.say(
            f"step {step}: loss {mean_loss:.2f}, published in {1e3 * publish_s:.0f} ms (rank 0)"
        )
        scaffold.report(
            handle.replica,
            step,
            loss=mean_loss.item(),
            publish_s=publish_s,
            unpublish_s=unpublish_s,
        )
        wait_for_rollouts(handle, step)
    dist.barrier()  # a rank that leaves takes its replica away from the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
