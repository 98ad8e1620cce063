"""Read a version over NIXL, which `auto` takes where RDMA or a GPU is; here it is asked for.

A job has the two handles in two processes, on two hosts.
"""

import torch

import torch_ros

MODEL = "over-nixl"


def main() -> None:
    weights, mine = torch.randn(16, 1 << 20), torch.zeros(16, 1 << 20)
    try:
        trainer = torch_ros.open(MODEL, replica="trainer", transport="nixl")
    except torch_ros.UsageError as error:
        print(f"NIXL does not work on this host, and is not needed: {error}")
        return
    with trainer, torch_ros.open(MODEL, replica="rollout", transport="nixl") as rollout:
        trainer.register({"weight": weights})
        trainer.publish(1)
        rollout.register({"weight": mine})
        rollout.replicate("latest")
        assert torch.equal(mine, weights)
        read = rollout.last_read
        speed = read.bytes_read / read.stages_s["read"] / 1e9
        print(
            f"{read.bytes_read / 1e6:.0f} MB over NIXL, by {', '.join(read.ways)}: {speed:.1f} GB/s"
        )


if __name__ == "__main__":
    main()
