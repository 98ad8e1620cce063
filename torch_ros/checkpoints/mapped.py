"""A Hugging Face checkpoint as tensors that lie in its mapped files."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from torch_ros.checkpoints.framing import INDEX, SUFFIX
from torch_ros.errors import UsageError

INDEX_BYTES_MAX = 256 << 20  # of a million tensors it has 100 MB
PATTERN = re.compile(r"[*?[]")
NUMBERED = re.compile(rf"(.+)-([0-9]+)-of-([0-9]+){re.escape(SUFFIX)}")


def mapped(checkpoint: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a checkpoint, by name; no byte of them is read here.

    They are views of the files' pages, private to this process: as long as one of them is there,
    its file must keep its content. One that lies at an odd address for its dtype is copied.

    Args:
        checkpoint: A folder or a file of safetensors, or a pattern of files: `folder/model-*`.

    Raises:
        UsageError: There is no such checkpoint, it cannot be read, it may be one of several, two of
            its files have the same name, or a file lacks one that the index says it has.
    """
    found: dict[str, torch.Tensor] = {}
    where: dict[str, Path] = {}
    try:
        index = _index(checkpoint / INDEX) if checkpoint.is_dir() else {}
        paths = _files(checkpoint, {*index.values()})
    except OSError as error:
        raise UsageError(f"{checkpoint} cannot be read: {error.strerror}") from error
    for path in paths:
        for name, tensor in _tensors(path).items():
            if name in found:
                found_twice = f"{name!r} is in {where[name]} and in {path}: expected it once"
                raise UsageError(f"{found_twice}; name one file, or a pattern of files")
            is_odd = tensor.data_ptr() % max(tensor.element_size(), 1) != 0
            found[name], where[name] = tensor.clone() if is_odd else tensor, path
    for name, file in index.items():
        if name not in found:
            raise UsageError(f"{checkpoint / INDEX} says that {name!r} is in {file}: it is not")
    return found


def is_named(text: str) -> bool:
    """Whether this names a checkpoint, and not a version: something of that name, or a pattern."""
    try:
        return bool(PATTERN.search(text)) or Path(text).exists()
    except (OSError, ValueError) as error:
        raise UsageError(f"{text!r} is no version, and no file can have that name") from error


def _files(checkpoint: Path, named: Collection[str]) -> Sequence[Path]:
    if checkpoint.is_dir():
        paths = [checkpoint / file for file in sorted(named)] or _the_only(checkpoint)
    elif PATTERN.search(checkpoint.name) and not checkpoint.exists():
        paths = sorted(checkpoint.parent.glob(checkpoint.name))
    elif checkpoint.exists():
        paths = [checkpoint]
    else:
        raise UsageError(f"{checkpoint}: expected a folder or a file of safetensors, found neither")
    if not paths:
        raise UsageError(f"{checkpoint} has no file that ends in {SUFFIX}")
    for path in paths:
        if not path.is_file():  # to open a FIFO would wait for who writes to it
            found = "which is no file" if path.exists() else "which is not there"
            raise UsageError(f"{path} cannot be read: expected a file of safetensors, {found}")
    return paths


def _the_only(folder: Path) -> Sequence[Path]:
    """All files of a folder without an index.

    Raises: UsageError: Some are numbered, as parts of one checkpoint, and not all of that, or not
        all files are: "consolidated" beside "model-00001-of-00002" has the same weights again.
    """
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    groups: dict[str, list[str]] = {}
    for path in paths:
        part = NUMBERED.fullmatch(path.name)
        group = f"{part[1]}-*-of-{part[3]}{SUFFIX}" if part else path.name
        groups.setdefault(group, []).append(path.name)
    numbered = [group for group in groups if "*" in group]
    if numbered and len(groups) > 1:
        some = " and ".join(repr(group) for group in sorted(groups)[:3])
        how = f"name those that are meant: {str(folder / numbered[0])!r}, with the quotes"
        raise UsageError(f"{folder} has {some}, and no {INDEX} that says which belong: {how}")
    for group in numbered:
        there, expected = len(groups[group]), int(group.rpartition("-of-")[2][: -len(SUFFIX)])
        if there != expected:
            raise UsageError(f"{folder / group}: expected {expected} files, found {there}")
    return paths


def _index(path: Path) -> Mapping[str, str]:
    """The file of each tensor; nothing if the checkpoint has no index."""
    if not path.exists():
        return {}
    try:
        if not path.is_file() or path.stat().st_size > INDEX_BYTES_MAX:
            raise ValueError(f"expected a file of at most {INDEX_BYTES_MAX >> 20} MiB")
        found = json.loads(path.read_text("utf-8"), object_pairs_hook=_once, parse_constant=_refuse)
        index: dict[str, str] = found["weight_map"]
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise ValueError("expected its weight_map to name a file for each tensor")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} is no index of safetensors: {error!r}") from error
    odd = {"", ".", ".."}
    if outside := [file for file in index.values() if file in odd or Path(file).name != file]:
        raise UsageError(f"{path} names {outside[0]!r}: expected files of its own folder")
    return index


def _once(pairs: Sequence[tuple[str, Any]]) -> Mapping[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _tensors(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
