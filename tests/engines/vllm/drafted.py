"""Weights of engines that draft, which tell a draft of the engine's own version from another's.

Attention and MLPs add nothing, so the next token is a function of the last one and of the final
norm, which each version has anew; a draft finds the same token by the same norm. So vLLM accepts
all drafts of a layer of the engine's own version, and hardly one of another.
"""

import json

import torch

SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MTP = "model.mtp_layers.0"
PROMPTS = [[5, 17, 200], [11, 12, 13], [400, 401, 402, 403]]
TOKENS = 24


def folder(path, architecture, model_type, **more):
    """A folder with a configuration alone."""
    kind = {"architectures": [architecture], "model_type": model_type, "hidden_act": "silu"}
    rest = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512}
    (path / "config.json").write_text(json.dumps(SIZES | HEADS | kind | rest | ends | more))
    return str(path)


def layer(prefix, random):
    size, wide = SIZES["hidden_size"], SIZES["intermediate_size"]
    kv = size * HEADS["num_key_value_heads"] // HEADS["num_attention_heads"]
    found = {
        f"{prefix}.self_attn.{name}_proj.weight": random(rows, size)
        for name, rows in {"q": size, "k": kv, "v": kv}.items()
    }
    found |= {
        f"{prefix}.self_attn.{name}_proj.bias": random(rows)
        for name, rows in {"q": size, "k": kv, "v": kv}.items()
    }
    found |= {f"{prefix}.mlp.{name}_proj.weight": random(wide, size) for name in ("gate", "up")}
    found[f"{prefix}.self_attn.o_proj.weight"] = torch.zeros(size, size)
    found[f"{prefix}.mlp.down_proj.weight"] = torch.zeros(size, wide)
    norms = ("input_layernorm", "post_attention_layernorm")
    return found | {f"{prefix}.{name}.weight": torch.ones(size) for name in norms}


def weights(version):
    """All tensors of a version, the MTP layer's too."""
    generator = torch.Generator().manual_seed(version)
    random = lambda *shape: torch.randn(*shape, generator=generator)
    size = SIZES["hidden_size"]
    norm = random(size).sign()
    found = {
        f"{name}.weight": random(SIZES["vocab_size"], size)
        for name in ("model.embed_tokens", "lm_head")
    }
    rows = found["model.embed_tokens.weight"]
    rows *= rows.square().mean(1, keepdim=True).rsqrt()
    for number in range(SIZES["num_hidden_layers"]):
        found |= layer(f"model.layers.{number}", random)
    found |= layer(MTP, random)
    found["model.norm.weight"] = found[f"{MTP}.final_layernorm.weight"] = norm
    found |= {f"{MTP}.{name}_layernorm.weight": torch.ones(size) for name in ("token", "hidden")}
    found[f"{MTP}.input_proj.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], 1)
    return found


def of_llama(tensors):
    """Those that a Llama has."""
    return {fqn: one for fqn, one in tensors.items() if MTP not in fqn and "bias" not in fqn}


def head(version):
    """An EAGLE head for a version of a Llama: one layer, and what it makes of the last token."""
    generator = torch.Generator().manual_seed(version)
    found = of_llama(layer("layers.0", lambda *shape: torch.randn(*shape, generator=generator)))
    del found["layers.0.input_layernorm.weight"]
    norm = weights(version)["model.norm.weight"]
    return found | {"fc.weight": torch.cat([norm.diag(), torch.zeros(len(norm), len(norm))], 1)}


def expected(version):
    """The tokens that a version answers with."""
    there = weights(version)
    embedding = there["model.embed_tokens.weight"]
    hidden = embedding * embedding.square().mean(1, keepdim=True).rsqrt()
    following = (hidden * there["model.norm.weight"] @ there["lm_head.weight"].T).argmax(1)
    answers = []
    for prompt in PROMPTS:
        tokens = [int(following[prompt[-1]])]
        while len(tokens) < TOKENS:
            tokens.append(int(following[tokens[-1]]))
        answers.append(tokens)
    return answers


def drafted(engine):
    """Tokens that were drafted since the engine has started, and those that were accepted."""
    there = {one.name: one.value for one in engine.llm.get_metrics() if hasattr(one, "value")}
    names = ("draft", "accepted")
    return [there[f"vllm:spec_decode_num_{name}_tokens"] for name in names]


def accepted(engine, version):
    """The share of drafts that is accepted in answers of this version, which are right."""
    from vllm import SamplingParams, TokensPrompt

    before = drafted(engine)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, ignore_eos=True)
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
    found = [
        one.outputs[0].token_ids for one in engine.llm.generate(prompts, params, use_tqdm=False)
    ]
    assert [list(tokens) for tokens in found] == expected(version)
    drafts, taken = (now - then for now, then in zip(drafted(engine), before, strict=True))
    assert drafts > 0
    return taken / drafts
