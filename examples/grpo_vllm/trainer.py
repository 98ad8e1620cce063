"""Learn from samples by GRPO, and publish the weights of every step. torchrun runs two ranks."""

import os
import sys
from queue import Queue
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from samples import connect
from task import CONFIG, GROUPS, NEW_TOKENS, PROBES, PROMPT_TOKENS
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

import torch_ros
from torch_ros.integrations.names import checkpoint_names

STALENESS = 2  # versions that a sample may be older than the weights that learn from it
PATIENCE_S = 600.0  # for a sample; engines take a while to start
LEARNS = 0.5  # that the mean reward rises by, at least
AVERAGED = 5  # steps at either end, for that

Group = dict[str, Any]  # the samples of one prompt, see rollout.py


def take_fresh(samples: "Queue[Group]", version: int) -> tuple[list[Group], int]:
    """The groups of one step of this rank; and how many were too old, and dropped."""
    taken, dropped = [], 0
    while len(taken) < GROUPS:
        group = samples.get(timeout=PATIENCE_S)
        if version - group["version"] <= STALENESS:
            taken.append(group)
        else:
            dropped += 1
    return taken, dropped


def policy_loss(model: PreTrainedModel, groups: list[Group]) -> torch.Tensor:
    """A policy gradient: a sample's advantage is its reward, normalised within its group."""
    rewards = torch.tensor([group["rewards"] for group in groups])
    better = rewards - rewards.mean(1, keepdim=True)
    advantages = (better / (rewards.std(1, keepdim=True) + 1e-4)).reshape(-1, 1)
    tokens = torch.tensor(
        [group["prompt"] + sampled for group in groups for sampled in group["sampled"]]
    )
    logits = model(input_ids=tokens).logits[:, PROMPT_TOKENS - 1 : -1]
    logs = logits.log_softmax(-1).gather(-1, tokens[:, PROMPT_TOKENS:, None]).squeeze(-1)
    return -(advantages * logs).mean()


def report(step: int, groups: list[Group], dropped: int) -> float:
    """Print how a step went. Returns the mean reward of its samples, those of all ranks."""
    rows = [
        (mean(group["rewards"]), step - group["version"], group["pause_ms"], dropped)
        for group in groups
    ]
    dist.all_reduce(means := torch.tensor(rows).mean(0))
    reward, age, pause_ms, dropped_by_one = (means / dist.get_world_size()).tolist()
    if dist.get_rank() == 0:
        print(
            f"step {step:3}: reward {reward:.2f} | samples {age:.1f} versions old, "
            f"{dropped_by_one * dist.get_world_size():.0f} groups dropped | "
            f"an update paused generation {pause_ms:.0f} ms | published version {step + 1}",
        )
    return reward


def last_answers(samples: "Queue[Group]", rollouts: int) -> list[list[list[int]]]:
    """The tokens of each engine with the last version. Samples that come before are too late."""
    answers = []
    while len(answers) < rollouts:
        got = samples.get(timeout=PATIENCE_S)
        if "answers" in got:
            answers.append(got["answers"])
    return answers


def likeliest(weights: dict[str, Any]) -> list[list[int]]:
    """The likeliest tokens by a Hugging Face model that nothing has sharded."""
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    model.load_state_dict(weights)
    tokens = model.generate(torch.tensor(PROBES), max_new_tokens=NEW_TOKENS, do_sample=False)
    return tokens[:, PROMPT_TOKENS:].tolist()


def draw(curve: list[float], path: str) -> None:
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    axes.plot(curve)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="GRPO: FSDP2 and vLLM")
    figure.savefig(path)


def check(curve: list[float], answers: list[list[list[int]]], expected: list[list[int]]) -> None:
    before, after = mean(curve[:AVERAGED]), mean(curve[-AVERAGED:])
    print(f"the mean reward went from {before:.2f} to {after:.2f}")
    assert after - before >= LEARNS, "it learned less than it should"
    for index, said in enumerate(answers):
        assert said == expected, f"rollout {index} says {said}, Hugging Face's model {expected}"
    print("with the last version, vLLM says what Hugging Face's model says")


def main() -> None:
    steps, rollouts, plot = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    samples, curve = connect(), []

    with torch_ros.open(os.environ["TORCH_ROS_MODEL"], replica="trainer") as handle:
        handle.register(checkpoint_names(model))  # this rank's shards, where they lie
        handle.guard(optimizer)  # a step first waits for those who read what it writes to
        handle.publish(0)
        if rank == 0:
            print("published version 0; waits for samples, until the engines have started")
        for step in range(steps):
            groups, dropped = take_fresh(samples, version=step)
            policy_loss(model, groups).backward()
            optimizer.step()
            optimizer.zero_grad()
            handle.publish(step + 1)
            curve.append(report(step, groups, dropped))

        answers = last_answers(samples, rollouts) if rank == 0 else []
        # All of it, once, to check the answers. It also keeps rank 1 here, with its shards.
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=whole)
    dist.destroy_process_group()
    if rank == 0:
        draw(curve, plot)
        check(curve, answers, likeliest(weights))


if __name__ == "__main__":
    main()
