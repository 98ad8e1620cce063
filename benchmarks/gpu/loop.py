"""An FSDP2 trainer of one rank and a rollout in another process on the same card."""

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from card import Card, Row, outcome
from harness import Actors, Child, seconds, started
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torch_ros

STEPS, WARM_UP = 10, 2
WAIT_S = 60.0
LEASE_S = 10.0  # the default of `open(ttl_s=...)`
DELAY_S = 0.005  # from telling a rollout to read until it is killed
GPU = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "head_dim": 128}
GPU |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000}  # 1.5 billion
CPU = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16}
CPU |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}


def build(card: Card, seed: int) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config  # noqa: PLC0415  # seconds

    torch.manual_seed(seed)
    config = Qwen3Config(**GPU if card.is_gpu else CPU, bos_token_id=None, eos_token_id=None)
    with torch.device(card.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def tokens(model: Any) -> list[int]:
    prompt = torch.arange(40, 56, device=model.device)[None]
    whole = torch.ones_like(prompt)
    said = model.generate(prompt, attention_mask=whole, max_new_tokens=16, do_sample=False)
    return [*map(int, said[0])]


def batch(model: Any) -> list[list[int]]:
    """Continuous batching, with a manager that stays, and with it whatever it has captured."""
    from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: PLC0415

    greedy = GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256)
    made = model.generate_batch(
        [[*range(40, 56)], [*range(60, 80)]],
        generation_config=greedy,
        continuous_batching_config=small,
        persistent_manager=True,
        progress_bar=False,
    )
    return [made[name].generated_tokens for name in sorted(made)]


def bits(model: torch.nn.Module) -> int:
    """A sum over all weights, which another weight changes."""
    shards = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    words = (shard.detach().reshape(-1).view(torch.int16) for shard in shards)
    return sum(int(each.sum(dtype=torch.int64)) * (n + 1) for n, each in enumerate(words))


class Rollout:
    """In a process that has begun nothing on the card when it is made."""

    def __init__(self, card: Card, name: str) -> None:
        self._card, self._name = card, name
        self._model: Any = None
        self._handle: torch_ros.ShardHandle | None = None

    def begin(self, replica: str) -> None:
        self._model = build(self._card, seed=1)  # not the trainer's weights
        self._handle = torch_ros.open(self._name, replica=replica, rank=0, world_size=1)
        self._handle.register(self._model)
        self._card.peak_bytes()

    def update(self, version: int) -> dict[str, float]:
        handle = self._handle
        assert handle is not None
        handle.wait(lambda there: version in there, timeout_s=WAIT_S)
        elapsed_s = seconds(lambda: handle.update(version, timeout_s=WAIT_S))
        report = handle.last_read
        assert report is not None
        return {"elapsed_s": elapsed_s, **report.stages_s}

    def follow(self, last: int) -> list[dict[str, float]]:
        """Go to the newest version again and again, until this one; the times of each."""
        handle = self._handle
        assert handle is not None
        found = []
        for version in handle.follow("latest"):
            report = handle.last_read
            assert report is not None
            found.append({"elapsed_s": report.elapsed_s, **report.stages_s})
            if version == last:
                break
        return found

    def says(self) -> tuple[list[int], int]:
        return tokens(self._model), bits(self._model)

    def batch(self) -> list[list[int]]:
        return batch(self._model)

    def peak_bytes(self) -> int:
        return self._card.peak_bytes()

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()


@dataclass
class Training:
    """A model in training."""

    card: Card
    model: Any
    optimizer: torch.optim.Optimizer
    step_s: list[float] = field(default_factory=list)
    version: int = 0

    @classmethod
    def of(cls, card: Card) -> "Training":
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        model = build(card, seed=0)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        return cls(card, model, torch.optim.AdamW(model.parameters(), lr=1e-5))

    def step(self) -> None:
        batch = torch.randint(1000, (8, 512 if self.card.is_gpu else 16), device=self.card.device)
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, published: Callable[[], object] = lambda: None) -> float:
        """The usual time of a step, and of publishing after it."""

        def both() -> None:
            self.step()
            published()

        taken_s = [self.card.seconds(both) for _ in range(WARM_UP + STEPS)]
        return median(taken_s[WARM_UP:])


def children(card: Card, name: str) -> dict[str, Callable[[], Actors]]:
    def rollout() -> Actors:
        return {"it": Rollout(card, name)}

    return {"first": rollout, "second": rollout}


def loop(card: Card) -> Iterator[Row]:
    """Ten steps alone, ten that are published and read, ten whose tokens are compared; a kill."""
    name = f"loop-{secrets.token_hex(4)}"
    with started(children(card, name), "fork") as (first, second):
        training = Training.of(card)
        size = sum(p.numel() * p.element_size() for p in training.model.parameters())
        yield Row("weights", f"{size / 2**30:.3f} GiB")
        alone_s = training.steps()
        yield Row("a step alone", f"{1e3 * alone_s:.1f} ms")
        alone_bytes = card.peak_bytes()
        with torch_ros.open(name, replica="trainer") as handle:
            handle.register(training.model)
            handle.guard(training.optimizer)
            first.ask("it", "begin", "first")
            yield from published(training, handle, first, alone_s)
            most = card.peak_bytes()
            grown = (most - alone_bytes) / size
            yield outcome(
                "more memory at the trainer, of the weights",
                f"{grown:.3f}",
                "<= 0.05",
                is_met=grown <= 0.05 if card.is_gpu else None,
            )
            grown = first.ask("it", "peak_bytes") / size
            yield outcome(
                "memory at the rollout, of the weights",
                f"{grown:.3f}",
                "<= 1.05",
                is_met=grown <= 1.05 if card.is_gpu else None,
            )
            yield from same(training, handle, first)
            yield from killed(training, handle, first, second)
        dist.destroy_process_group()


def published(
    training: Training, handle: torch_ros.ShardHandle, child: Child, alone_s: float
) -> Iterator[Row]:
    """Versions are read while the next step computes."""

    def publish() -> None:
        training.version += 1
        handle.publish(training.version)

    child.tell("it", "follow", (WARM_UP + STEPS,))
    with_s = training.steps(publish)
    reads = child.hear()
    yield Row("versions that were read", f"{len(reads)} of {WARM_UP + STEPS}")
    yield Row("a step, published and read", f"{1e3 * with_s:.1f} ms", alone_s / with_s)
    for stage in ("elapsed_s", "read"):
        usual_s = median(each[stage] for each in reads[-STEPS:])
        yield Row(f"update, {stage.removesuffix('_s')}", f"{1e3 * usual_s:.1f} ms")
    for kind in ("PublishReport", "DrainReport"):
        found = [each.elapsed_s for each in handle.reports if type(each).__name__ == kind]
        yield Row(f"{kind}s, usually", f"{1e3 * median(found):.1f} ms")


def same(training: Training, handle: torch_ros.ShardHandle, child: Child) -> Iterator[Row]:
    """Ten versions in place, at each of which both generate."""
    same_tokens = same_bits = 0
    distinct = set()
    for _ in range(STEPS):
        training.step()
        training.version += 1
        handle.publish(training.version)
        child.ask("it", "update", training.version)
        theirs, their_bits = child.ask("it", "says")
        ours, our_bits = tokens(training.model), bits(training.model)
        same_tokens += ours == theirs
        same_bits += our_bits == their_bits
        distinct.add(our_bits)
    aim = f"{STEPS} of {STEPS}"
    for what, count in (("tokens", same_tokens), ("weights, bit for bit", same_bits)):
        yield outcome(f"the same {what}", f"{count} of {STEPS}", aim, is_met=count == STEPS)
    yield outcome("steps that changed weights", len(distinct), aim, is_met=len(distinct) == STEPS)


def killed(
    training: Training, handle: torch_ros.ShardHandle, child: Child, other: Child
) -> Iterator[Row]:
    """Kill -9 of the rollout in the middle of a read; another takes its place."""
    training.step()
    training.version += 1
    handle.publish(training.version)
    before = training.card.used_bytes()
    child.tell("it", "update", (training.version,))
    time.sleep(DELAY_S)
    child.process.kill()
    child.process.join()
    took_s = training.card.seconds(training.step)
    limit_s = LEASE_S + 3
    yield outcome(
        "the step after a kill -9 of the reading rollout",
        f"{took_s:.2f} s",
        f"<= {limit_s:g} s",
        is_met=took_s <= limit_s,
    )
    gone = (before - training.card.used_bytes()) / 2**30
    yield Row("memory that came back", f"{gone:.2f} GiB")
    began_s = time.monotonic()
    other.ask("it", "begin", "second")
    training.version += 1
    handle.publish(training.version)
    other.ask("it", "update", training.version)
    is_same = other.ask("it", "says") == (tokens(training.model), bits(training.model))
    took_s = time.monotonic() - began_s
    yield outcome(
        "another rollout says the same", f"{is_same}, after {took_s:.1f} s", "True", is_met=is_same
    )


def batching(card: Card) -> Iterator[Row]:
    """Continuous batching goes on over weights that are read in place, also by what it captured."""
    name = f"batching-{secrets.token_hex(4)}"

    def rollout() -> Actors:
        return {"it": Rollout(card, name)}

    said = []
    with started({"rollout": rollout}, "fork") as (child,):
        model = build(card, seed=0)
        with torch_ros.open(name, replica="trainer") as handle, torch.no_grad():
            handle.register(model)
            child.ask("it", "begin", "rollout")
            child.ask("it", "batch")  # of other weights
            for version in (1, 2):
                handle.unpublish()
                for parameter in model.parameters():
                    parameter.copy_(torch.randn_like(parameter) * 0.02)
                handle.publish(version)
                child.ask("it", "update", version)
                said.append(batch(model))
                is_met = child.ask("it", "batch") == said[-1]
                yield outcome(f"tokens of version {version}", is_met, "True", is_met=is_met)
        is_met = said[0] != said[1]
        yield outcome("versions say different tokens", is_met, "True", is_met=is_met)
