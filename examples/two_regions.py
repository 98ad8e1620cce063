"""A trainer in one region, and rollouts in another that share nothing with it but a bucket.

    python examples/two_regions.py trainer s3://weights/demo     # beside etcd; it archives, too
    python examples/two_regions.py rollouts s3://weights/demo    # elsewhere

Two shells of one machine do as well, with a folder in the place of the bucket. Each step changes
about 1 % of the elements, as a step of RL does. The first version crosses in full; whoever has
read it takes what has changed since. The figures are the bytes that came into the rollouts' host.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

import torch_ros
import torch_ros.bucket
from torch_ros.errors import BucketError

MODEL, VERSIONS, ELEMENTS, CHANGED, STEP_S = "two-regions", 4, 12 << 20, 0.01, 3.0


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"layer.{n}": torch.randn(ELEMENTS // 8).to(torch.bfloat16) for n in range(8)}


def step(tensors: dict[str, torch.Tensor], version: int) -> None:
    """The step that leads to a version: the same wherever it is made."""
    torch.manual_seed(version)
    for tensor in tensors.values():
        is_changed = torch.rand(tensor.shape) < CHANGED
        tensor.view(torch.int16).bitwise_xor_(is_changed.short())


def versions(bucket: torch_ros.bucket.Bucket) -> dict[int, str]:
    """Those that the bucket has; none yet where its archiver has still to make the folder."""
    try:
        return {**bucket.list()}
    except BucketError as error:
        print(error, flush=True)
        time.sleep(1.0)
        return {}


def train(url: str) -> None:
    with torch_ros.open(MODEL, replica="trainer", rank=0, world_size=1) as handle:
        command = [sys.executable, "-m", "torch_ros", "archive", MODEL, url]
        archiver = subprocess.Popen([*command, "--keep", str(VERSIONS)])
        bucket, tensors = torch_ros.bucket.open(url, MODEL), weights()
        handle.register(tensors)
        for version in range(1, VERSIONS + 1):
            if version > 1:
                time.sleep(STEP_S)  # a trainer would be in its step
                handle.unpublish()
                step(tensors, version)
            handle.publish(version)
            while version not in versions(
                bucket
            ):  # a trainer need not wait: the archiver skips then
                time.sleep(0.1)
        archiver.terminate()  # it ends when it has done with the version
        archiver.wait()


def received_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split()[1]) for line in lines if not line.lstrip().startswith("lo:"))


def roll_out(url: str) -> None:
    bucket, expected, at = torch_ros.bucket.open(url, MODEL), weights(), 1
    tensors = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    version = 0
    while version < VERSIONS:
        kinds = versions(bucket)
        if max(kinds, default=0) == version:
            time.sleep(0.2)
            continue
        before, began_s, had = received_bytes(), time.monotonic(), version
        version = bucket.load(tensors, "latest")
        took_s, came_mib = time.monotonic() - began_s, (received_bytes() - before) / 2**20
        what = f"changes since {had}" if had else "in full"
        print(f"version {version}, {what}: {came_mib:.2f} MiB in {took_s:.2f} s", flush=True)
        while at < version:
            step(expected, at := at + 1)
        assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", choices=("trainer", "rollouts"))
    parser.add_argument("url")
    asked = parser.parse_args()
    (train if asked.place == "trainer" else roll_out)(asked.url)


if __name__ == "__main__":
    main()
