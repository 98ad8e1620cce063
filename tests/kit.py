"""Steps that many tests take: have a store, wait for something, call several ranks at once."""

import contextlib
import mmap
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch

T = TypeVar("T")

LIMIT_S = 60.0


def memory() -> str:
    """The endpoint of a store in memory. For a module: `endpoint = pytest.fixture(memory)`."""
    return f"memory://{uuid.uuid4().hex}"


STORES = [pytest.param("memory", marks=pytest.mark.long), "etcd"]
both_stores = pytest.mark.parametrize("endpoint", STORES, indirect=True)


def store(request: pytest.FixtureRequest) -> str:
    """Where a store is: in memory, or in a real etcd. For a module: `pytest.fixture(store)`."""
    is_etcd = getattr(request, "param", "memory") == "etcd"
    return request.getfixturevalue("etcd_endpoint") if is_etcd else memory()


def read_only(path: Path, *shape: int) -> torch.Tensor:
    """Zeros in a file that is mapped with PROT_READ: a write to them ends the process."""
    path.write_bytes(torch.zeros(shape).numpy().tobytes())
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch knows no such tensors
        found = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return torch.frombuffer(found, dtype=torch.float32).view(shape)


def inside(handle):
    """The shard behind a handle, for what no call shows: its group, mailbox, copies and tallies."""
    return handle._shard


def until(
    holds: Callable[[], T], limit_s: float = LIMIT_S, *, by=None, pause_s: float = 0.005
) -> T:
    """Wait until `holds()` is true, and return it.

    Args:
        by: The puppet that is to bring it about: its log is shown where it has ended, or is late.
    """
    end_s = time.monotonic() + limit_s
    while not (found := holds()):
        assert by is None or by.poll() is None, by.end_of_log()
        assert time.monotonic() < end_s, by.end_of_log() if by else "it never came"
        time.sleep(pause_s)
    return found


def at_once(*calls: Callable[[], T]) -> list[T]:
    """Make each call in a thread, and return all results; the first error is raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def publisher(opened, tensors, version=1, name="trainer", **options):
    """A handle that has published these tensors."""
    handle = opened(name, tensors, **options)
    handle.publish(version)
    return handle


def published(handle, version, value=None, size=4):
    """Publish a tensor "w" of one value, that of the version, in the place of what was there."""
    handle.unpublish()
    handle.unregister()
    handle.register({"w": torch.full((size,), float(version if value is None else value))})
    handle.publish(version)


def feature(handle, kind: type[T]) -> T:
    """The feature of that class that is attached to the handle's shard."""
    return next(each for each in inside(handle).features if isinstance(each, kind))


def write_files(folder, **files):
    """Write texts into files below `folder`; the first "_" of a name stands for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


FREEZERS = ["cgroup", "cgroup2"]


@contextlib.contextmanager
def freezer(kind: str, pid: int) -> Iterator[list[Callable[[], int]]]:
    """Calls that freeze a process by a cgroup of its own, and thaw it; it goes back at the end."""
    mounted, file, words = {
        "cgroup": ("freezer", "freezer.state", ("FROZEN", "THAWED")),
        "cgroup2": ("", "cgroup.freeze", ("1", "0")),
    }[kind]
    tops = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
    tops = [Path("/sys/fs/cgroup", mounted)] if mounted else tops
    for folder in (top / f"torch-ros-{pid}" for top in tops):
        try:
            folder.mkdir()
            (folder / file).read_text()
            (folder / "cgroup.procs").write_text(str(pid))
        except OSError:
            with contextlib.suppress(OSError):
                folder.rmdir()
        else:
            break
    else:
        pytest.skip(f"no {kind} that can be frozen can be made here")
    try:
        yield [partial((folder / file).write_text, word) for word in words]
    finally:
        (folder / file).write_text(words[1])
        with contextlib.suppress(ProcessLookupError):
            (folder.parent / "cgroup.procs").write_text(str(pid))
        folder.rmdir()
