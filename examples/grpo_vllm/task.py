"""The task: a tiny Qwen3, prompts of random tokens, and the reward for what follows."""

from collections.abc import Sequence

from transformers import Qwen3Config

CONFIG = Qwen3Config(
    architectures=["Qwen3ForCausalLM"],  # for vLLM
    vocab_size=256,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=None,
)
PROMPT_TOKENS, NEW_TOKENS = 8, 16
GROUPS, GROUP_SIZE = 4, 8  # prompts of a batch, of a trainer's rank or an engine; samples of each
PROBES = [[start + token for token in range(PROMPT_TOKENS)] for start in (0, 70, 140, 210)]


def reward(tokens: Sequence[int]) -> float:
    """The share of multiples of four: a quarter of what a random model says."""
    return sum(token % 4 == 0 for token in tokens) / len(tokens)
