"""A trainer in a process of its own: publishes versions of a tiny model, and says what they answer.

Reads a line of JSON for each command, and answers with one.
"""

import hashlib
import json
import sys

import reference
import torch
from transformers import AutoModelForCausalLM

import torch_ros
from torch_ros import MXFP8, NVFP4, Float8
from torch_ros.integrations.names import checkpoint_names

PROMPTS = [[5, 17, 200, 999, 3], [11, 12, 13], [400, 401, 402, 403, 404, 405, 406, 7]]
TOKENS = 12


@torch.no_grad()
def step(model, version, share=1.0):
    """Weights that depend on the version alone; or on the last ones, of which a share changes."""
    generator = torch.Generator().manual_seed(version)
    for _, one in sorted(model.state_dict().items()):
        noise = torch.randn(one.shape, generator=generator)
        new = noise * 0.08 if one.ndim >= 2 else 1 + 0.2 * noise
        one.copy_(torch.where(torch.rand(one.shape, generator=generator) < share, new, one))


@torch.no_grad()
def greedy(model):
    """Tokens for each prompt, and the logarithm of the probability of each."""
    found = []
    for prompt in PROMPTS:
        ids, logs = list(prompt), []
        for _ in range(TOKENS):
            log = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            ids.append(int(log.argmax()))
            logs.append(float(log[ids[-1]]))
        found.append([ids[len(prompt) :], logs])
    return found


def digest(tensors):
    found = hashlib.sha256()
    for fqn in sorted(tensors):
        whole = dense(tensors[fqn]).contiguous()
        found.update(fqn.encode())
        found.update(whole.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def dense(tensor):
    if not isinstance(tensor, torch_ros.Chunked):
        return tensor.detach()
    made = torch.zeros(tensor.shape, dtype=tensor.dtype)
    for offsets, box in tensor.chunks.items():
        ends = zip(offsets, box.shape, strict=True)
        made[tuple(slice(at, at + size) for at, size in ends)] = box.detach()
    return made


def tensors_of(model, names, changes):
    """The tensors to publish, perhaps spoilt."""
    named = {
        "parameters": lambda: dict(model.named_parameters()),
        "state_dict": model.state_dict,
        "checkpoint": lambda: checkpoint_names(model),
    }
    tensors = dict(named[names]())
    for fqn in changes.get("drop", ()):
        del tensors[fqn]
    for fqn, shape in changes.get("shape", {}).items():
        tensors[fqn] = torch.randn(shape)
    for fqn, dtype in changes.get("dtype", {}).items():
        tensors[fqn] = tensors[fqn].to(getattr(torch, dtype))
    for fqn in changes.get("nan", ()):
        tensors[fqn] = tensors[fqn].clone().fill_(torch.nan)
    return tensors


def low_precision(asked, tensors):
    """The transform that a command asks for, if it does."""
    if "float8" in asked:
        return Float8(asked["float8"])
    if "mxfp8" in asked:
        return MXFP8(*asked["mxfp8"])
    if "nvfp4" in asked:
        return NVFP4.fitted(tensors, *asked["nvfp4"])
    return None


@torch.no_grad()
def round_as(transform, model):
    """Give it the weights that an engine computes with, by compressed-tensors' own account."""
    kinds = {MXFP8: "MXFP8", NVFP4: "NVFP4A16"}
    if (kind := kinds.get(type(transform))) is None:
        return
    weights = {
        fqn: one
        for fqn, one in model.named_parameters()
        if transform.outputs(fqn, one.dtype, tuple(one.shape))
    }
    scales = {}
    for fqn in weights if kind == "NVFP4A16" else ():
        layer, _, name = fqn.removesuffix("_proj.weight").rpartition(".")
        row = next(row for row in (("q", "k", "v"), ("gate", "up"), (name,)) if name in row)
        fused = [weights[f"{layer}.{one}_proj.weight"] for one in row]
        scales[fqn] = reference.global_scale(*fused)
    made = {fqn: reference.values(kind, one, scales.get(fqn)) for fqn, one in weights.items()}
    for fqn, one in made.items():
        weights[fqn].copy_(one)


def main(path, name, endpoint, options):
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    handle = torch_ros.open(name, endpoint=endpoint, **json.loads(options))
    for line in sys.stdin:
        asked = json.loads(line)
        handle.unpublish()
        handle.unregister()
        answer = {}
        if (version := asked.get("publish")) is not None:
            step(model, asked.get("seed", version), asked.get("share", 1.0))
            tensors = tensors_of(model, asked.get("names", "parameters"), asked)
            transform = low_precision(asked, tensors)
            if transform is not None:
                handle.publish_copy(version, tensors, transform=transform)
                round_as(transform, model)
            else:
                handle.register(tensors)
                handle.publish(version)
            answer = {"version": version}
            if not asked.get("is_quick"):
                answer |= {"answers": greedy(model), "digest": digest(tensors)}
            answer["shapes"] = {fqn: list(one.shape) for fqn, one in tensors.items()}
        print(json.dumps(answer), flush=True)
    handle.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
