"""An engine with an MTP layer: what becomes of the draft when the engine goes to another version.

In these weights attention and MLPs add nothing, so the next token is a function of the last one and
of the final norm, which each version has anew; the MTP layer finds the same token by the same norm.
So vLLM accepts all drafts of a layer of the engine's own version, and hardly one of another.
"""

import json

import pytest
import torch
from rollouts import running_engine

import torch_ros
from torch_ros.errors import InstallRejected, ManifestMismatch, NotSupported, UsageError
from torch_ros.integrations.vllm import attach

SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MTP = "model.mtp_layers.0"
PROMPTS = [[5, 17, 200], [11, 12, 13], [400, 401, 402, 403]]
TOKENS = 24


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mimo")
    kind = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "hidden_act": "silu"}
    rest = {"num_nextn_predict_layers": 1, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512}
    config = SIZES | HEADS | kind | rest | ends
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(
    scope="module",
    params=[(1, True), (1, False), (2, True)],
    ids=["in place", "staged", "two workers"],
)
def engine(request, path):
    ranks, plain = request.param
    spec = {"method": "mtp", "num_speculative_tokens": 1}
    with running_engine(
        path, ranks=ranks, plain=plain, speculative_config=spec, disable_log_stats=False
    ) as engine:
        yield engine


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
    for number in range(SIZES["num_hidden_layers"]):
        found |= layer(f"model.layers.{number}", random)
    found |= layer(MTP, random)
    found["model.norm.weight"] = found[f"{MTP}.final_layernorm.weight"] = norm
    found |= {f"{MTP}.{name}_layernorm.weight": torch.ones(size) for name in ("token", "hidden")}
    found[f"{MTP}.input_proj.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], 1)
    return found


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


@pytest.fixture
def following(engine, etcd_endpoint, request):
    """A trainer, and an engine that follows it as is asked for."""
    opened = []
    name = request.node.name

    def follow(draft, **how):
        options = {"endpoint": etcd_endpoint}
        policy = attach(engine.llm, model=name, replica="vllm", options=options, draft=draft, **how)
        opened.append(policy)
        return policy

    with torch_ros.open(name, endpoint=etcd_endpoint, linger_s=0) as trainer:
        yield trainer, follow
        for policy in opened:
            policy.close()


def test_an_engine_whose_draft_would_be_left_behind_is_refused_by_name(following):
    _, follow = following
    with pytest.raises(NotSupported, match=r"MiMoMTP, the draft of this engine \(mtp\).*follow"):
        follow(None)
    with pytest.raises(UsageError, match="draft"):
        follow("eagle")


def test_mtp_layers_come_with_each_version(engine, following):
    trainer, follow = following
    policy = follow("follow")
    for version in range(1, 11):
        trainer.publish_copy(version, weights(version))
        assert policy.update()
        assert accepted(engine, version) >= 0.99


def test_a_draft_that_is_kept_is_accepted_ever_more_rarely(engine, following):
    trainer, follow = following
    policy = follow("follow")
    trainer.publish_copy(1, weights(1))
    policy.update()
    policy.close()
    policy = follow("keep")
    trainer.publish_copy(2, weights(2))
    policy.update()
    assert accepted(engine, 2) < 0.5


@pytest.mark.parametrize("spoilt", ["lacks the layer", "has a NaN"])
def test_a_version_whose_draft_does_not_fit_changes_nothing(engine, following, spoilt):
    trainer, follow = following
    policy = follow("follow")
    trainer.publish_copy(1, weights(1))
    policy.update()
    bad = weights(2)
    name = f"{MTP}.input_proj.weight"
    if spoilt == "lacks the layer":
        del bad[name]
    else:
        bad[name][3, 4] = torch.nan
    trainer.publish_copy(2, bad)
    with pytest.raises(ManifestMismatch, match="mtp_layers"):
        policy.update()
    assert policy.version == 1
    with pytest.raises(InstallRejected, match="mtp_layers"):
        trainer.wait_installed(2, timeout_s=60)
    assert accepted(engine, 1) >= 0.99
    trainer.publish_copy(3, weights(3))
    assert policy.update()
    assert accepted(engine, 3) >= 0.99
