"""A version as files of safetensors: what goes in which file, and the bytes around it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod

import torch

from torch_ros.errors import UsageError

SUFFIX = ".safetensors"
INDEX = f"model{SUFFIX}.index.json"
ABOUT = "__metadata__"  # of a file, in its header, where the names of tensors are
FILE_BYTES = 5 * 10**9  # of a file, unless one tensor is larger; as Hugging Face has it
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}

Tensors = Mapping[str, tuple[torch.dtype, torch.Size]]


def files(tensors: Tensors, file_bytes: int = FILE_BYTES) -> Mapping[str, Tensors]:
    """The tensors in each file, in their order; a file ends before it would be too large.

    Raises:
        UsageError: One has the name under which safetensors has something else.
    """
    if ABOUT in tensors:
        raise UsageError(
            f"no file of safetensors has a tensor called {ABOUT!r}: publish it under another name"
        )
    groups: list[dict[str, tuple[torch.dtype, torch.Size]]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if groups[-1] and filled + size_bytes(tensor) > file_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = tensor
        filled += size_bytes(tensor)
    if len(groups) == 1:
        return {f"model{SUFFIX}": groups[0]}
    count = len(groups)
    return {f"model-{n:05d}-of-{count:05d}{SUFFIX}": group for n, group in enumerate(groups, 1)}


def described(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def size_bytes(tensor: tuple[torch.dtype, torch.Size]) -> int:
    dtype, shape = tensor
    return prod(shape) * dtype.itemsize


def header(tensors: Tensors, about: Mapping[str, str]) -> bytes:
    """A file's beginning: a length, JSON; behind it come the bytes in this order."""
    ends = [0, *accumulate(map(size_bytes, tensors.values()))]
    described: dict[str, object] = {ABOUT: dict(about)}
    for (name, (dtype, shape)), begin, end in zip(tensors.items(), ends, ends[1:], strict=False):
        offsets = [begin, end]
        described[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def contents(tensors: Tensors, stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[memoryview]:
    """The bytes of a file's tensors as they come, in this order; the next one may take their place.

    Takes no more of the stream than these tensors.
    """
    for name, (fqn, tensor) in zip(tensors, stream, strict=False):
        assert name == fqn
        if tensor.numel():
            yield tensor.reshape(-1).view(torch.uint8).numpy().data


def index(by_file: Mapping[str, Sequence[str] | Tensors], total_bytes: int) -> bytes:
    """The file that names the file of each tensor, where there are several."""
    weight_map = {name: file for file, names in by_file.items() for name in names}
    found = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    return json.dumps(found, indent=2).encode() + b"\n"
