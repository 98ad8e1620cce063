"""A trainer that two rollouts follow, each in its own way.

You will see a small Qwen3 train on the first half of Alice in Wonderland: FSDP2, two ranks. After
every step it publishes its weights with dcp.save, in place: nothing is copied and nothing is
written to a disk. Two rollouts that torchrun and a shell could have started anywhere follow it:

    rollout group    two ranks, tensor parallel (column and row sharded), through dcp.load
    single rollout   one process, plain tensors, through the handle

Each reads every version from the trainer or from the other one, and compares every tensor, bit
for bit, with what the trainer had. They say what the first and the last version make of a prompt.
At the end stands a table of who read what from whom, and how fast.

The programs to read are trainer.py, rollout_group.py and rollout_single.py in demo/.
"""

import argparse
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from demo.children import Children
from demo.table import print_table

HERE = Path(__file__).parent / "demo"
LIMIT_S = 900.0
ETCD = [sys.executable, "-m", "torch_ros.store.local"]
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run"),
    *("--standalone", "--nproc-per-node", "2"),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16, help="to train, and versions to follow")
    steps: int = parser.parse_args().steps
    print(__doc__, flush=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & has it ignored
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("told to end; everything but etcd has ended"))

    is_local = os.environ.get("TORCH_ROS_ENDPOINT", "local") == "local"
    try:
        if is_local:  # whoever opens a handle would start it as well; so you see where it is
            subprocess.run([*ETCD, "start"], check=True)
        run(steps)
    except KeyboardInterrupt:
        sys.exit("interrupted; everything but etcd has ended")
    finally:
        if is_local:
            print("\netcd runs on, for the next time; this stops it:", *ETCD, "stop")


def run(steps: int) -> None:
    with tempfile.TemporaryDirectory(prefix="torch-ros-demo-") as name:
        environment = {
            "OMP_NUM_THREADS": "1",  # there are more processes than cores
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": name,  # what torchrun leaves behind goes with it
        }
        told = ["--steps", str(steps), "--directory", name]
        # A name of its own, so that two runs on one etcd do not meet.
        mark = f"TORCH_ROS_MODEL=demo-{os.getpid()}-{secrets.token_hex(4)}"
        with Children(mark, environment) as children:
            children.start("trainer", [*TORCHRUN, str(HERE / "trainer.py"), *told])
            children.start("rollout group", [*TORCHRUN, str(HERE / "rollout_group.py"), *told])
            children.start(
                "single rollout", [sys.executable, str(HERE / "rollout_single.py"), *told]
            )
            children.wait(LIMIT_S)
        print_table(Path(name))


if __name__ == "__main__":
    main()
