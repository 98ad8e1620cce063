"""The processes that transfer.py starts: each does what it is told, and says how long it took."""

import logging
import shutil
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_ros

RANKS = 2
SMALL_MIB = 10  # of what is published besides the whole
VALUES = 251  # versions are written as numbers below this: bfloat16 is exact up to 256
LOOKS = 64  # elements of a tensor that are compared
POLL_S = 0.001
MATRICES = ((4096, 4096), (8192, 4096))

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Setup:
    endpoint: str
    model: str  # the beginning of a name that no other run has
    size_bytes: int
    tensor_count: int
    directory: str  # in memory; the parent removes it


@dataclass(frozen=True, slots=True)
class Failure:
    report: str


class Trainer:
    def __init__(self, setup: Setup, group: str, tensors: Tensors) -> None:
        self.tensors = tensors
        # Two handles: what is registered anew, readers have to look up anew.
        self._handle = opened(setup, group, "trainer", tensors)
        self._small = opened(setup, f"{group}-small", "trainer", plain(SMALL_MIB << 20, SMALL_MIB))
        self._version = 0

    def size_bytes(self) -> int:
        """Of the whole tensors, whatever this rank has of them."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def publish(self) -> int:
        """Write a new version where readers read it, and offer it; says its number."""
        self._handle.unpublish()
        self._version += 1
        write(self.tensors, self._version)
        self._handle.publish(self._version)
        return self._version

    def warm(self, count: int) -> dict[str, list[tuple[float, float]]]:
        """Seconds of each of `count` publishes and unpublishes that nobody reads, by size."""
        self._handle.unpublish()
        return {
            "small": self._time(self._small, count),
            "whole": self._time(self._handle, count),
        }

    def _time(self, handle: torch_ros.ShardHandle, count: int) -> list[tuple[float, float]]:
        timed = []
        for _ in range(count + 1):
            self._version += 1
            began_s = time.perf_counter()
            handle.publish(self._version)
            published_s = time.perf_counter()
            handle.unpublish()
            timed.append((published_s - began_s, time.perf_counter() - published_s))
        return timed[1:]  # the first ones come after something else

    def close(self) -> None:
        self._handle.close()
        self._small.close()


class Rollout:
    def __init__(self, setup: Setup, group: str, name: str, tensors: Tensors) -> None:
        self._tensors, self._handle = tensors, opened(setup, group, name, tensors)

    def update(self) -> dict[str, float]:
        began_s = time.perf_counter()
        assert self._handle.update("latest")
        elapsed_s = time.perf_counter() - began_s
        read = self._handle.last_read
        verify(self._tensors, self._handle.version)
        stages_s = {f"{stage}_s": stage_s for stage, stage_s in read.stages_s.items()}
        return {"elapsed_s": elapsed_s, "bytes_read": read.bytes_read, **stages_s}

    def look(self, count: int) -> list[float]:
        """Seconds of each of `count` updates that find nothing newer."""
        timed = []
        for _ in range(count):
            began_s = time.perf_counter()
            assert not self._handle.update("latest")
            timed.append(time.perf_counter() - began_s)
        return timed

    def close(self) -> None:
        self._handle.close()


class RawSource:
    """NIXL by hand, as plain as it gets."""

    def __init__(self, tensors: Tensors) -> None:
        self._agent = raw_agent("source")
        self._rows = rows(tensors)
        self._agent.register_memory(self._rows, "DRAM")
        self._is_read = threading.Event()
        threading.Thread(target=self._progress, daemon=True).start()

    def offer(self) -> tuple[bytes, np.ndarray]:
        return self._agent.get_agent_metadata(), self._rows

    def begin(self) -> None:
        """Make progress: without any, the reader's connection is never made."""
        self._is_read.set()

    def end(self) -> None:
        self._is_read.clear()

    def _progress(self) -> None:
        while self._is_read.wait():
            self._agent.get_new_notifs()
            time.sleep(POLL_S)

    def close(self) -> None:
        self.end()


class RawReader:
    def __init__(self, tensors: Tensors) -> None:
        self._agent, self._tensors = raw_agent("reader"), tensors
        self._agent.register_memory(rows(tensors), "DRAM")
        self._read: Any = None

    def connect(self, metadata: bytes, sources: np.ndarray) -> None:
        peer = self._agent.add_remote_agent(metadata)
        into = self._agent.get_xfer_descs(rows(self._tensors), "DRAM")
        of = self._agent.get_xfer_descs(sources, "DRAM")
        self._read = self._agent.initialize_xfer("READ", into, of, peer)

    def read(self, version: int) -> dict[str, float]:
        began_s = time.perf_counter()
        state = self._agent.transfer(self._read)
        while state == "PROC":
            state = self._agent.check_xfer_state(self._read)
        elapsed_s = time.perf_counter() - began_s
        assert state == "DONE"
        verify(self._tensors, version)
        return {"elapsed_s": elapsed_s}

    def close(self) -> None:
        self._agent.release_xfer_handle(self._read)


class Alone:
    """What one process does with the same tensors."""

    def __init__(self, setup: Setup, targets: Tensors) -> None:
        self._sources, self._targets = plain(setup.size_bytes, setup.tensor_count), targets
        self._directory, self._version = setup.directory, 0

    def copy(self) -> dict[str, float]:
        self._change()
        began_s = time.perf_counter()
        for fqn, target in self._targets.items():
            target.copy_(self._sources[fqn])
        elapsed_s = time.perf_counter() - began_s
        verify(self._targets, self._version)
        return {"elapsed_s": elapsed_s}

    def through_files(self) -> dict[str, float]:
        self._change()
        path = tempfile.mkdtemp(dir=self._directory)  # a directory per version, as trainers do
        began_s = time.perf_counter()
        dcp.save(dict(self._sources), storage_writer=FileSystemWriter(path), no_dist=True)
        written_s = time.perf_counter()
        dcp.load(dict(self._targets), storage_reader=FileSystemReader(path), no_dist=True)
        loaded_s = time.perf_counter()
        verify(self._targets, self._version)
        shutil.rmtree(path)
        return {
            "elapsed_s": loaded_s - began_s,
            "write_s": written_s - began_s,
            "load_s": loaded_s - written_s,
        }

    def _change(self) -> None:
        self._version += 1
        write(self._sources, self._version)

    def close(self) -> None:
        self._sources = self._targets = {}


# The four kinds of processes


def pair_source(setup: Setup) -> dict[str, Any]:
    tensors = plain(setup.size_bytes, setup.tensor_count)
    return {"trainer": Trainer(setup, "pair", tensors), "raw": RawSource(tensors)}


def pair_reader(setup: Setup) -> dict[str, Any]:
    targets = plain(setup.size_bytes, setup.tensor_count)
    kept = plain(setup.size_bytes, setup.tensor_count)  # a replica's memory is not to be changed
    return {
        "rollout": Rollout(setup, "pair", "rollout", kept),
        "raw": RawReader(targets),
        "alone": Alone(setup, targets),
    }


def fsdp_rank(setup: Setup, rank: int) -> dict[str, Any]:
    mesh = join(setup, "fsdp", rank)
    return {"trainer": Trainer(setup, "sharded", sharded(setup.size_bytes, mesh, 0))}


def tp_rank(setup: Setup, rank: int) -> dict[str, Any]:
    mesh = join(setup, "tp", rank)
    return {
        name: Rollout(setup, "sharded", name, sharded(setup.size_bytes, mesh, dim))
        for name, dim in (("rows", 0), ("columns", 1))
    }


def serve(pipe: Connection, build: Callable[..., dict[str, Any]], *arguments: object) -> None:
    """Do as told until told to end, or until the parent has ended."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    torch.set_num_threads(1)
    try:
        actors = build(*arguments)
        pipe.send(sorted(actors))
        while told := pipe.recv():
            actor, method, given = told
            pipe.send(getattr(actors[actor], method)(*given))
        logging.getLogger("torch_ros").setLevel(logging.ERROR)  # ranks do not leave at one instant
        for actor in actors.values():
            actor.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    except EOFError:
        return
    except Exception:  # noqa: BLE001  # the parent shows it, and ends the run
        pipe.send(Failure(traceback.format_exc()))


def opened(setup: Setup, group: str, name: str, tensors: Tensors) -> torch_ros.ShardHandle:
    handle = torch_ros.open(f"{setup.model}-{group}", endpoint=setup.endpoint, replica=name)
    handle.register(tensors)
    return handle


# Tensors


def plain(size_bytes: int, count: int) -> dict[str, torch.Tensor]:
    element_count = size_bytes // count // 2
    return {f"t{i}": torch.zeros(element_count, dtype=torch.bfloat16) for i in range(count)}


def sharded(size_bytes: int, mesh: DeviceMesh, dim: int) -> dict[str, DTensor]:
    placement, tensors = Shard(dim), {}
    for i, shape in enumerate(_shapes(size_bytes)):
        here = list(shape)
        here[dim] //= RANKS
        local = torch.zeros(here, dtype=torch.bfloat16)
        tensors[f"t{i}"] = DTensor.from_local(local, mesh, [placement], run_check=False)
    return tensors


def _shapes(size_bytes: int) -> Iterator[tuple[int, int]]:
    left = size_bytes // 2
    for rows_, columns in cycle(MATRICES):
        if rows_ * columns <= left:
            left -= rows_ * columns
            yield rows_, columns
        elif left < MATRICES[0][0] * MATRICES[0][1]:
            return


def write(tensors: Tensors, version: int) -> None:
    for tensor in tensors.values():
        _local(tensor).fill_(version % VALUES)


def verify(tensors: Tensors, version: int) -> None:
    for fqn, tensor in tensors.items():
        elements = _local(tensor).flatten()
        looked_at = torch.cat([elements[:: max(1, len(elements) // LOOKS)], elements[-1:]])
        assert bool((looked_at == version % VALUES).all()), f"{fqn} is not version {version}"


def rows(tensors: Tensors) -> np.ndarray:
    """(address, bytes, device), a row per tensor."""
    spans = [(t.data_ptr(), t.numel() * t.element_size(), 0) for t in tensors.values()]
    return np.array(spans, np.uint64)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def join(setup: Setup, group: str, rank: int) -> DeviceMesh:
    rendezvous = f"file://{setup.directory}/{group}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    return init_device_mesh("cpu", (RANKS,))


def raw_agent(name: str) -> Any:
    # Here, because torch_ros says how loud it may be before it loads it.
    from nixl import nixl_agent, nixl_agent_config  # noqa: PLC0415

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
