"""Tensors whose content says of each element which version it is of, and which place it has."""

from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

COUNT, COLUMNS = 100, 1024
VALUES = 251  # bfloat16 is exact up to 256
ROW_STEP, TENSOR_STEP = 11, 17  # from a row, and a tensor, to the next: no multiple of VALUES

Tensors = Mapping[str, torch.Tensor]


def whole(size_bytes: int) -> dict[str, torch.Tensor]:
    """Matrices with an even number of rows, `size_bytes` in all or a little less."""
    rows = max(size_bytes // (COUNT * COLUMNS * 2) // 2 * 2, 2)
    return {
        f"t{number:04d}": torch.zeros(rows, COLUMNS, dtype=torch.bfloat16)
        for number in range(COUNT)
    }


def by_rows(size_bytes: int, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """This rank's rows of them."""
    tensors = {}
    for fqn, tensor in whole(size_bytes // mesh.size()).items():
        tensors[fqn] = DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
    return tensors


def size_bytes(tensors: Tensors) -> int:
    """Bytes of the parts that are here."""
    return sum(_local(tensor).nbytes for tensor in tensors.values())


def write(tensors: Tensors, version: int, rank: int = 0) -> None:
    for number, tensor in enumerate(tensors.values()):
        local = _local(tensor)
        local.copy_(_content(local, number, version, rank * len(local)))


def verify(tensors: Tensors, version: int, rank: int = 0) -> None:
    """Look at every element."""
    for number, (fqn, tensor) in enumerate(tensors.items()):
        local = _local(tensor)
        wanted = _content(local, number, version, rank * len(local))
        assert torch.equal(local, wanted), f"{fqn} is not what version {version} has there"


def _content(local: torch.Tensor, number: int, version: int, first_row: int) -> torch.Tensor:
    """Rows of one tape of numbers, each a step further along than the row before it."""
    rows, columns = local.shape
    begin = (version + TENSOR_STEP * number + ROW_STEP * first_row) % VALUES
    tape = torch.arange(begin + ROW_STEP * rows + columns) % VALUES
    return tape.to(local.dtype).as_strided((rows, columns), (ROW_STEP, 1), begin)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
