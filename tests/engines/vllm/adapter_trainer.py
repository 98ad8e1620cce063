"""A trainer of a tiny model and of its adapters, in a process of its own; it says what they answer.

Reads a line of JSON for each command, and answers with one. Each adapter is a model by its name,
behind that of the base.
"""

import json
import sys

import torch
from lora import Adapted, config
from trainer import greedy, step
from transformers import AutoModelForCausalLM

import torch_ros
from torch_ros.integrations.adapters import adapter_tensors, publish_adapter

TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


class Base:
    """The base's own parameters, under the names that they had before the adapters came."""

    def __init__(self, model):
        self.tensors = dict(model.named_parameters())

    def state_dict(self):
        return {name: one.detach() for name, one in self.tensors.items()}


def spoilt(handle, version, model, adapter, changes):
    """The adapter, with other tensors in the place of some, past what `publish_adapter` checks."""
    publish_adapter(handle, version, model, adapter=adapter)
    with torch_ros.open(handle.model, **changes.pop("options"), spot=True) as reader:
        names = reader.contents(version).tensors
        with reader.stream(version, names, buffer_bytes=1 << 20) as stream:
            tensors = {name: one.clone() for name, one in stream}
    for name in list(adapter_tensors(model, adapter)):
        if "nan" in changes and name.endswith("lora_B.weight"):
            tensors[name].fill_(torch.nan)
        if "renamed" in changes:
            tensors[name.replace("model.layers.", changes["renamed"])] = tensors.pop(name)
        if "narrow" in changes:
            tensors[name] = (
                tensors[name][: changes["narrow"]] if "lora_B" in name else tensors[name]
            )
    handle.publish_copy(version + 1, tensors)


def main(path, name, endpoint, options):
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    base, options = Base(model), {"endpoint": endpoint, **json.loads(options)}
    own = torch_ros.open(name, **options)
    handles, adapted = {}, Adapted(model)
    for line in sys.stdin:
        asked, answer = json.loads(line), {}
        if (version := asked.get("publish")) is not None:
            step(base, version)
            own.publish_copy(version, base.state_dict())
        if (adapter := asked.get("adapter")) is not None:
            if adapter not in handles:
                handles[adapter] = torch_ros.open(f"{name}-{adapter}", **options)
                adapted.add(adapter, config(TARGETS, **asked.get("config", {})))
            adapted.step(adapter, asked["version"])
            adapted.activate(adapter)
            handle, version = handles[adapter], asked["version"]
            if "spoil" in asked:
                spoilt(handle, version, adapted, adapter, asked["spoil"] | {"options": options})
            else:
                fits = own.contents(asked["fits"]) if "fits" in asked else None
                publish_adapter(handle, version, adapted, adapter=adapter, base=fits)
        answers = {}
        for one in asked.get("answers", ()):
            adapted.activate(one)
            answers[one or ""] = greedy(adapted)
        print(json.dumps({"answers": answers} | answer), flush=True)
    for handle in (own, *handles.values()):
        handle.close(linger_s=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
