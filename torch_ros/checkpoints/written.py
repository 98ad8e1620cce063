"""A version as files: safetensors as Hugging Face has them, or torch's own checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import torch_ros
from torch_ros.checkpoints import framing
from torch_ros.checkpoints.framing import FILE_BYTES, INDEX, NAMES, Tensors, size_bytes
from torch_ros.errors import UsageError

BUFFER_BYTES = 64 << 20
BUFFER_S, READ_S = 300.0, 3600.0  # that one buffer, or all at once, may take

OnBytes = Callable[[int, int], None]  # told how many are written, and of how many


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
    files = framing.files(tensors, file_bytes)
    about = {"format": "pt", "torch_ros.model": handle.model, "torch_ros.run": contents.run}
    about["torch_ros.version"] = str(contents.version)
    total, done = sum(map(size_bytes, tensors.values())), 0
    with handle.stream(
        contents.version, list(tensors), buffer_bytes=BUFFER_BYTES, timeout_s=BUFFER_S
    ) as stream:
        for file, inside in files.items():
            with (folder / file).open("wb") as out:
                out.write(framing.header(inside, about))
                for content in framing.contents(inside, stream):
                    done += out.write(content)
                    progress(done, total)
    if len(files) > 1:
        (folder / INDEX).write_bytes(framing.index(files, total))


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
    total = sum(map(size_bytes, tensors.values()))
    progress(total, total)
