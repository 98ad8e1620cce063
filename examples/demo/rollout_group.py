"""Follow the trainer with tensor parallelism, through dcp.load. torchrun runs it on two ranks."""

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model import build, continue_prompt
from scaffold import Scaffold
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import torch_ros
from torch_ros.dcp import ROSReader, default_handle

PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def wait_for_newer(handle: torch_ros.ShardHandle, held: int) -> None:
    """On each rank: all ranks then load, and get the same version."""
    handle.wait(lambda available: max(available, default=0) > held)


def wait_for_the_end(handle: torch_ros.ShardHandle, held: int, trainer: str) -> None:
    """The trainer waits until it sees that we hold its last version: leave after it."""
    handle.wait(lambda available: trainer not in available.get(held, ()))


def main() -> None:
    scaffold = Scaffold("rollout group")
    scaffold.say("builds the model")
    dist.init_process_group("gloo")
    model = build(seed=1)  # not the trainer's weights
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), PLAN)
    handle = default_handle("load")
    scaffold.say("waits for the first version")

    held = 0
    while held < scaffold.steps:
        wait_for_newer(handle, held)
        reader = ROSReader("latest")
        dcp.load({"model": model.state_dict()}, storage_reader=reader)
        is_first, held = held == 0, reader.version

        scaffold.check_digests(held, model.state_dict())
        scaffold.report_read(handle.replica, handle.last_read)
        if is_first or held == scaffold.steps:
            scaffold.say(f"version {held} says {continue_prompt(model)!r}")
    wait_for_the_end(handle, held, scaffold.trainer)
    dist.barrier()  # a rank that leaves takes its replica away from the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
