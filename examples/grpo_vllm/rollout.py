"""Sample with vLLM from the newest version of the policy. One process for each engine."""

import os
import sys
import tempfile
import time

import torch
from samples import connect
from task import CONFIG, GROUP_SIZE, GROUPS, NEW_TOKENS, PROBES, PROMPT_TOKENS, reward
from vllm import LLM, SamplingParams, TokensPrompt

from torch_ros.integrations.vllm import Attached, attach


def start_engine(seed: int) -> LLM:
    """An engine of the right shape, whose weights nobody has trained."""
    CONFIG.save_pretrained(directory := tempfile.mkdtemp())
    return LLM(
        directory,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        seed=seed,
        enforce_eager=True,
        max_model_len=CONFIG.max_position_embeddings,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=True,
        weight_transfer_config={"backend": "torch_ros"},
    )


def follow(policy: Attached) -> float:
    """Go to the newest version. Returns the ms for which nothing was generated."""
    began_s = time.perf_counter()
    policy.update("latest")
    return 1e3 * (time.perf_counter() - began_s)


def generate(llm: LLM, prompts: list[list[int]], **how: float) -> list[list[list[int]]]:
    """For each prompt, `n` continuations."""
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, **how)
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    outputs = llm.generate(asked, params, use_tqdm=False)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


def main() -> None:
    last, index = int(sys.argv[1]), int(sys.argv[2])
    print("vLLM is imported; its engine starts: half a minute, on a busy machine some", flush=True)
    llm, samples = start_engine(seed=index), connect()
    generator = torch.Generator().manual_seed(index)
    model, replica = os.environ["TORCH_ROS_MODEL"], f"rollout-{index}"
    with attach(llm, model=model, replica=replica) as policy:
        print("the engine has started, and follows the trainer", flush=True)
        is_first = True
        while policy.version != last:
            pause_ms = follow(policy)
            if is_first:
                print(f"has version {policy.version}, and samples from it", flush=True)
                is_first = False
            shape = (GROUPS, PROMPT_TOKENS)
            prompts = torch.randint(CONFIG.vocab_size, shape, generator=generator).tolist()
            for prompt, sampled in zip(prompts, generate(llm, prompts, n=GROUP_SIZE), strict=True):
                samples.put(
                    {
                        "version": policy.version,
                        "prompt": prompt,
                        "sampled": sampled,
                        "rewards": [reward(tokens) for tokens in sampled],
                        "pause_ms": pause_ms,
                    }
                )
        answers = [only for (only,) in generate(llm, PROBES, temperature=0)]
        samples.put({"answers": answers})


if __name__ == "__main__":
    main()
