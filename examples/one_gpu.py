"""A trainer and a rollout on one GPU, which share nothing but the card; without one, on CPUs.

    python examples/one_gpu.py

A small Qwen3 learns to count, by FSDP2. After each step it publishes its weights where they lie; a
process beside it reads them into its own, and generates. Both say the same tokens: that is checked.
"""

import multiprocessing
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import torch_ros

MODEL, STEPS, TOKENS, LENGTH = "one-gpu", 10, 128, 24


def build(seed: int) -> PreTrainedModel:
    torch.set_num_threads(1)  # on CPUs, which two processes share
    torch.manual_seed(seed)
    sizes: Any = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2}
    heads: Any = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return Qwen3ForCausalLM(Qwen3Config(vocab_size=TOKENS, **sizes, **heads))


def count(model: PreTrainedModel) -> list[int]:
    generate: Any = model.generate
    prompt = torch.arange(40, 44, device=model.device)[None]
    said = generate(prompt, attention_mask=prompt > 0, max_new_tokens=12, do_sample=False)
    return [*map(int, said[0, 4:])]


def roll_out(trainer: Connection) -> None:
    model = build(seed=1)  # not the trainer's weights
    with torch_ros.open(MODEL, replica="rollout", rank=0, world_size=1) as handle:
        handle.register(model)
        for version in islice(handle.follow("latest"), STEPS):
            trainer.send((version, count(model)))


def train(rollout: Connection) -> None:
    model = build(seed=0)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(store=store, rank=0, world_size=1)  # NCCL, or gloo
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    counting = torch.arange(LENGTH, device=model.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    with torch_ros.open(MODEL, replica="trainer") as handle:
        handle.register(model)
        handle.guard(optimizer)  # nobody reads what the optimizer writes
        for version in range(1, STEPS + 1):
            batch = torch.randint(TOKENS - LENGTH, (32, 1), device=model.device) + counting
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            handle.publish(version)
            tokens = count(model)
            if rollout.recv() != (version, tokens):
                raise SystemExit(f"version {version}: the rollout has other weights")
            print(f"version {version}: loss {loss:.2f}; both say {tokens}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ours, theirs = context.Pipe()
    context.Process(target=roll_out, args=(theirs,), daemon=True).start()
    theirs.close()  # its end ends our wait
    train(ours)
