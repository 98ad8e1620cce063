"""What is moved: tensors whose content says which version it is of."""

from collections.abc import Iterator, Mapping
from itertools import cycle
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

VALUES = 251  # versions are written as numbers below this: bfloat16 is exact up to 256
PAGE_BYTES = 4096
MATRICES = ((4096, 4096), (8192, 4096))
LAYERS, WIDTH = 67, 64  # of `nested`
NESTED_COUNT = 9 * LAYERS

Tensors = Mapping[str, torch.Tensor]


def plain(size_bytes: int, count: int) -> dict[str, torch.Tensor]:
    """As equal as they can be."""
    each, left = divmod(size_bytes // 2, count)
    return {f"t{i:04d}": torch.zeros(each + (i < left), dtype=torch.bfloat16) for i in range(count)}


def matrices(size_bytes: int) -> dict[str, torch.Tensor]:
    """Whole ones."""
    return {
        f"t{i:04d}": torch.zeros(shape, dtype=torch.bfloat16)
        for i, shape in enumerate(_shapes(size_bytes))
    }


def sharded(size_bytes: int, mesh: DeviceMesh, dim: int) -> dict[str, DTensor]:
    """This rank's shards of `matrices`, cut along `dim`."""
    tensors = {}
    for i, shape in enumerate(_shapes(size_bytes)):
        here = list(shape)
        here[dim] //= mesh.size()
        local = torch.zeros(here, dtype=torch.bfloat16)
        tensors[f"t{i:04d}"] = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
    return tensors


def _shapes(size_bytes: int) -> Iterator[tuple[int, int]]:
    left = size_bytes // 2
    for rows, columns in cycle(MATRICES):
        if rows * columns <= left:
            left -= rows * columns
            yield rows, columns
        elif left < MATRICES[0][0] * MATRICES[0][1]:
            return


def nested(mesh: DeviceMesh | None, value: float) -> dict[str, Any]:
    """A state dict as FSDP2 makes it: 603 small tensors, and a few objects."""
    shapes = {f"attn.w{name}": (WIDTH, WIDTH) for name in "qkvo"}
    shapes |= {f"mlp.w{name}": (2 * WIDTH, WIDTH) for name in "123"}
    shapes |= {"attn_norm": (WIDTH,), "mlp_norm": (WIDTH,)}
    ranks = mesh.size() if mesh else 1
    model: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        for name, (rows, *columns) in shapes.items():
            tensor = torch.full((rows // ranks, *columns), value)
            if mesh is not None:
                tensor = DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
            model[f"layers.{layer}.{name}"] = tensor
    return {"model": model, "step": 0, "rng": {"seed": 17, "kind": "philox"}, "lr": 3e-4}


def size_bytes(tensors: Tensors) -> int:
    """Of the whole tensors, whatever this rank has of them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def write(tensors: Tensors, version: int) -> None:
    for tensor in tensors.values():
        _local(tensor).fill_(version % VALUES)


def verify(tensors: Tensors, version: int) -> None:
    """Look at every page."""
    for fqn, tensor in tensors.items():
        elements = _local(tensor).flatten()
        of_each_page = elements[:: PAGE_BYTES // elements.element_size()]
        is_there = (of_each_page == version % VALUES).all() and elements[-1] == version % VALUES
        assert is_there, f"{fqn} is not version {version}"


def spans(tensors: Tensors) -> np.ndarray:
    """(address, bytes, device), a row per tensor."""
    rows = [(t.data_ptr(), t.numel() * t.element_size(), 0) for t in tensors.values()]
    return np.array(rows, np.uint64)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def join(directory: str, group: str, rank: int, size: int) -> DeviceMesh:
    """A process group over gloo, within this host."""
    rendezvous = f"file://{directory}/{group}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
    return init_device_mesh("cpu", (size,))
