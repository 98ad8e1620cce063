"""A Hugging Face checkpoint as tensors that lie in its mapped files."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from torch_ros.checkpoints.framing import INDEX, SUFFIX
from torch_ros.errors import UsageError


def mapped(checkpoint: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a file or a folder of safetensors, by name; no byte of them is read here.

    They are views of the files' pages, private to this process: as long as one of them is there,
    its file must keep its content. One that lies at an odd address for its dtype is copied.

    Raises:
        UsageError: There is no such checkpoint, it cannot be read, two of its files have the same
            name, or a file lacks one that the index says it has.
    """
    found: dict[str, torch.Tensor] = {}
    where: dict[str, Path] = {}
    for path in _files(checkpoint):
        for name, tensor in _tensors(path).items():
            if name in found:
                raise UsageError(f"{name!r} is in {where[name]} and in {path}: expected it once")
            is_odd = tensor.data_ptr() % max(tensor.element_size(), 1) != 0
            found[name], where[name] = tensor.clone() if is_odd else tensor, path
    for name, file in _index(checkpoint).items():
        if name not in found:
            raise UsageError(f"{checkpoint / INDEX} says that {name!r} is in {file}: it is not")
    return found


def _files(checkpoint: Path) -> list[Path]:
    if checkpoint.is_file():
        return [checkpoint]
    if not checkpoint.is_dir():
        raise UsageError(f"{checkpoint}: expected a folder or a file of safetensors, found neither")
    files = {*_index(checkpoint).values()}
    paths = sorted(checkpoint / file for file in files) or sorted(checkpoint.glob(f"*{SUFFIX}"))
    if not paths:
        raise UsageError(f"{checkpoint} has no file that ends in {SUFFIX}")
    return paths


def _index(checkpoint: Path) -> Mapping[str, str]:
    """The file of each tensor; nothing if the checkpoint has no index."""
    path = checkpoint / INDEX
    if not path.is_file():
        return {}
    try:
        index: dict[str, str] = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no index of safetensors: {error!r}") from error
    if outside := [file for file in index.values() if Path(file).name != file]:
        raise UsageError(f"{path} names {outside[0]!r}: expected files of its own folder")
    return index


def _tensors(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
