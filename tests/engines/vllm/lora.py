"""Adapters as PEFT puts them into a model: its names and its configuration, without PEFT.

A `Linear` computes what its base's merged weight would: base(x) + scaling * B(A(x)).
"""

import torch
from torch import nn


class Config(dict):
    """Fields of PEFT's configuration, and the one method of it that is asked."""

    def to_dict(self):
        return dict(self)


def config(targets, rank=4, alpha=8, **more):
    found = {"peft_type": "LORA", "task_type": None, "inference_mode": False, "r": rank}
    found |= {"lora_alpha": alpha, "target_modules": set(targets), "bias": "none"}
    return Config(found | {"use_dora": False, "modules_to_save": None} | more)


class Linear(nn.Module):
    """PEFT's layer in the place of a linear one."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.active, self.scaling = base, None, {}
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()

    def add(self, name, rank, scaling):
        both = {"dtype": self.base_layer.weight.dtype, "bias": False}
        self.lora_A[name] = nn.Linear(self.base_layer.in_features, rank, **both)
        self.lora_B[name] = nn.Linear(rank, self.base_layer.out_features, **both)
        self.scaling[name] = scaling

    def forward(self, x):
        found = self.base_layer(x)
        if (name := self.active) in self.lora_A:
            found = found + self.scaling[name] * self.lora_B[name](self.lora_A[name](x))
        return found


class Adapted(nn.Module):
    """A model with adapters, as `peft.PeftModel` names all that is in it."""

    def __init__(self, model):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        self.peft_config, self.active_adapters = {}, []

    def add(self, name, asked):
        """An adapter with random matrices; those of B are none but zeros in PEFT."""
        self.peft_config[name] = asked
        model = self.base_model.model
        for path, module in list(model.named_modules()):
            if path.rpartition(".")[2] not in asked["target_modules"]:
                continue
            if not isinstance(module, Linear):
                module = Linear(module)
                model.set_submodule(path, module)
            module.add(name, asked["r"], asked["lora_alpha"] / asked["r"])

    def activate(self, name):
        self.active_adapters = [name] if name else []
        for module in self.modules():
            if isinstance(module, Linear):
                module.active = name

    def forward(self, *args, **named):
        return self.base_model.model(*args, **named)

    @torch.no_grad()
    def step(self, name, seed):
        """Matrices that depend on the name and the seed alone."""
        generator = torch.Generator().manual_seed(1000 * seed + sum(name.encode()))
        for path, one in sorted(self.named_parameters()):
            if f".{name}." in path and "lora_" in path:
                one.copy_(0.1 * torch.randn(one.shape, generator=generator))
