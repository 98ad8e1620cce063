"""A version as files: safetensors as Hugging Face has them, or torch's own checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import torch_ros
from torch_ros.checkpoints.mapped import INDEX, SUFFIX
from torch_ros.errors import UsageError

FILE_BYTES = 5 * 10**9  # of a file, unless one tensor is larger; as Hugging Face has it
BUFFER_BYTES = 64 << 20
BUFFER_S, READ_S = 300.0, 3600.0  # that one buffer, or all at once, may take
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

OnBytes = Callable[[int, int], None]  # told how many are written, and of how many
Tensors = Mapping[str, tuple[torch.dtype, torch.Size]]


def selected(contents: torch_ros.Contents, patterns: Sequence[str]) -> Tensors:
    """The tensors whose names match one of the shell patterns; all of them without any.

    Raises:
        UsageError: A pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in contents.tensors):
            raise UsageError(f"no tensor of version {contents.version} matches {pattern!r}")
    return {
        name: tensor for name, tensor in contents.tensors.items() if is_selected(name, patterns)
    }


def is_selected(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """A folder to write to, which gets its name when all of it is on disk; or is removed.

    What a process that was killed has left under another name is removed by the next one.

    Raises:
        UsageError: There is something of that name already.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} is there already: name another folder, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}.*.part"):
        if not Path("/proc", left.name.split(".")[-2]).exists():
            shutil.rmtree(left, ignore_errors=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    unfinished.mkdir()
    try:
        yield unfinished
        for path in (*unfinished.rglob("*"), unfinished):
            _sync(path)
        unfinished.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    place = os.open(path, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def write_safetensors(
    handle: torch_ros.ShardHandle,
    contents: torch_ros.Contents,
    tensors: Tensors,
    folder: Path,
    progress: OnBytes,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write tensors of a version as they come, through two buffers of 64 MiB.

    Raises:
        UsageError: The format has no name for a dtype.
    """
    odd = next((name for name, (dtype, _) in tensors.items() if dtype not in NAMES), None)
    if odd is not None:
        raise UsageError(f"{odd!r} is {tensors[odd][0]}, which safetensors has no name for")
    files = _files(tensors, file_bytes)
    about = {"format": "pt", "torch_ros.model": handle.model, "torch_ros.run": contents.run}
    about["torch_ros.version"] = str(contents.version)
    total, done = sum(map(_size, tensors.values())), 0
    wanted = list(tensors)
    with handle.stream(
        contents.version, wanted, buffer_bytes=BUFFER_BYTES, timeout_s=BUFFER_S
    ) as stream:
        for file, names in files.items():
            with (folder / file).open("wb") as out:
                _write_header(out, {name: tensors[name] for name in names}, about)
                for name, (fqn, tensor) in zip(names, stream, strict=False):
                    assert name == fqn
                    if tensor.numel():
                        done += out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
                    progress(done, total)
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _files(tensors: Tensors, file_bytes: int) -> Mapping[str, Sequence[str]]:
    """The names in each file, in their order; a file ends before it would be too large."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if groups[-1] and filled + _size(tensor) > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += _size(tensor)
    if len(groups) == 1:
        return {f"model{SUFFIX}": groups[0]}
    count = len(groups)
    return {f"model-{n:05d}-of-{count:05d}{SUFFIX}": names for n, names in enumerate(groups, 1)}


def _size(tensor: tuple[torch.dtype, torch.Size]) -> int:
    dtype, shape = tensor
    return prod(shape) * dtype.itemsize


def _write_header(out: BinaryIO, tensors: Tensors, about: Mapping[str, str]) -> None:
    """Its length, JSON; behind it come the bytes in this order."""
    ends = [0, *accumulate(map(_size, tensors.values()))]
    described: dict[str, object] = {"__metadata__": dict(about)}
    for (name, (dtype, shape)), begin, end in zip(tensors.items(), ends, ends[1:], strict=False):
        offsets = [begin, end]
        described[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
    header = json.dumps(described).encode()
    header += b" " * (-len(header) % 8)  # tensors begin at a multiple of 8
    out.write(len(header).to_bytes(8, "little") + header)


def write_dcp(
    handle: torch_ros.ShardHandle,
    contents: torch_ros.Contents,
    tensors: Tensors,
    folder: Path,
    progress: OnBytes,
) -> None:
    """Write tensors of a version as `dcp.load` reads them. Takes memory for all of them."""
    state = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in tensors.items()}
    handle.read(contents.version, state, timeout_s=READ_S)
    save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    total = sum(map(_size, tensors.values()))
    progress(total, total)
