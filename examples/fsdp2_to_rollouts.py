"""A trainer that two rollouts follow, each in its own way.

You will see a small Qwen3 train on the first half of Alice in Wonderland: FSDP2, two ranks. After
every step it publishes its weights with dcp.save, in place: nothing is copied and nothing is
written to a disk. Two rollouts that torchrun and a shell could have started anywhere follow it:

    rollout group    two ranks, tensor parallel (column and row sharded), through dcp.load
    single rollout   one process, plain tensors, through the handle

Each reads every version from the trainer or from the other one, and compares every tensor, bit
for bit, with what the trainer had. They say what the first and the last version make of a prompt.
At the end stand a table of who read what from whom, and how fast, and a read over NIXL.

The programs to read are trainer.py, rollout_group.py and rollout_single.py in demo/.
"""

import argparse
import sys
from pathlib import Path

from demo.table import print_table
from launching import TORCHRUN, launched

HERE = Path(__file__).parent / "demo"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16, help="to train, and versions to follow")
    steps: int = parser.parse_args().steps
    print(__doc__, flush=True)
    with launched("demo") as (children, directory):
        told = ["--steps", str(steps), "--directory", str(directory)]
        print("Five processes start: each imports torch and transformers first.", flush=True)
        children.start("trainer", [*TORCHRUN, str(HERE / "trainer.py"), *told])
        children.start("rollout group", [*TORCHRUN, str(HERE / "rollout_group.py"), *told])
        children.start("single rollout", [sys.executable, str(HERE / "rollout_single.py"), *told])
        children.wait()
        print_table(directory)
        children.start("NIXL", [sys.executable, str(HERE / "nixl_pair.py")])
        children.wait()


if __name__ == "__main__":
    main()
