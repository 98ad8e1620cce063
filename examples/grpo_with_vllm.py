"""Reinforcement learning: vLLM engines sample from the model that an FSDP2 trainer improves.

You will see a tiny Qwen3 with random weights learn, by GRPO, to say the tokens that a reward asks
for. Trainer and rollouts do not wait for each other:

    trainer      FSDP2 on two ranks; publishes its weights after every step, where they lie
    rollout 0, 1 vLLM engines; go to the newest version between two batches, and sample from it

Samples come through a queue of bounded length, and say which version they were drawn from; the
trainer drops those that are too old. At the end it draws the curve of its rewards, and compares the
tokens that vLLM finds likeliest with those of a Hugging Face model with the trainer's weights.

The programs to read, in grpo_vllm/: task.py, trainer.py, rollout.py, samples.py.
"""

import argparse
import sys
from pathlib import Path

from grpo_vllm.samples import serve
from launching import TORCHRUN, launched

HERE = Path(__file__).parent / "grpo_vllm"
ENVIRONMENT = {
    "SPT_NOENV": "1",  # vLLM names its processes: not over the environment, by which they are found
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # its processes share the cores with all others
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40, help="of the optimizer")
    parser.add_argument("--rollouts", type=int, default=2, help="engines")
    parser.add_argument("--plot", default="reward.png", help="where the curve goes")
    options = parser.parse_args()
    print(__doc__, flush=True)
    steps, rollouts = str(options.steps), str(options.rollouts)
    with launched("grpo", **ENVIRONMENT, **serve()) as (children, directory):
        trainer = [*TORCHRUN, str(HERE / "trainer.py"), steps, rollouts, options.plot]
        children.start("trainer", trainer)
        for index in range(options.rollouts):
            rollout = [sys.executable, str(HERE / "rollout.py"), steps, str(index)]
            children.start(f"rollout {index}", rollout, log=directory / f"rollout {index}.log")
        children.wait()


if __name__ == "__main__":
    main()
