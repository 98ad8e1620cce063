"""What is trained and followed: a small Qwen3 with random weights whose tokens are bytes.

Its parameters are bfloat16; everybody computes in float32, which is fast on any processor.
"""

import copy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

TEXT = Path(__file__).with_name("alice.txt")
PROMPT = b"Alice was"
SEQUENCE_LENGTH = 64


def build(seed: int) -> PreTrainedModel:
    """8 million parameters in bfloat16, the same for the same seed."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2 * SEQUENCE_LENGTH,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def draw_batch(text: torch.Tensor, generator: torch.Generator, sequences: int) -> torch.Tensor:
    starts = torch.randint(0, len(text) - SEQUENCE_LENGTH, (sequences,), generator=generator)
    return torch.stack([text[start : start + SEQUENCE_LENGTH] for start in starts])


def read_text() -> torch.Tensor:
    """With single spaces: a model this young would learn little but the indentation."""
    return torch.tensor(list(b" ".join(TEXT.read_bytes().split())))


def continue_prompt(model: PreTrainedModel) -> str:
    """What the model finds likeliest after the prompt. With a sharded model: all its ranks call."""
    prompt = torch.tensor([list(PROMPT)])
    computing = copy.deepcopy(model).float()
    tokens = computing.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False
    )
    return bytes(tokens[0].tolist()).decode("ascii", errors="replace")
