"""What a process holds: DTensors of every rank against slices of the whole tensor."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from torch_ros.errors import UsageError
from torch_ros.weights.local import LocalChunk, LocalTensor, build, local_chunks, span_of
from torch_ros.weights.manifest import OBJECT, Manifest, dtype_name


@contextlib.contextmanager
def as_rank(rank, world_size):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def box(chunk):
    sizes = chunk.tensor.shape
    return tuple(slice(o, o + s) for o, s in zip(chunk.offsets, sizes, strict=True))


SHARDINGS = [
    ((2,), [Shard(0)], (1031, 3)),
    ((4,), [Shard(0)], (3, 2)),  # rank 3 has no rows
    ((4,), [Shard(1)], (3, 10)),
    ((4,), [Replicate()], (5,)),
    ((2,), [Replicate()], ()),
    ((2,), [Shard(0)], (0, 4)),
    ((2, 2), [Replicate(), Shard(0)], (7, 3)),
    ((2, 2), [Shard(0), Shard(1)], (5, 7)),
    ((2, 2), [Shard(0), Shard(0)], (9, 2)),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (16, 2)),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (11, 2)),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (3, 2)),
    ((2, 2), [_StridedShard(1, split_factor=2), Shard(1)], (3, 13)),
    ((2, 2), [_StridedShard(0, split_factor=2), Replicate()], (8, 3)),  # two parts per rank
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(1)], (9, 5)),
]


@pytest.mark.parametrize(("mesh_shape", "placements", "shape"), SHARDINGS)
def test_the_chunks_of_all_ranks_are_the_tensor(mesh_shape, placements, shape):
    world_size = torch.tensor(mesh_shape).prod().item()
    whole = torch.arange(1, 1 + torch.tensor(shape).prod().long()).reshape(shape)
    seen = torch.zeros_like(whole)
    for rank in range(world_size):
        with as_rank(rank, world_size):
            mesh = init_device_mesh("cpu", mesh_shape)
            shard = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            (local,) = local_chunks({"w": shard})
            assert (local.fqn, local.dtype, local.shape) == ("w", torch.int64, shape)
            assert local.spread
            held = sum(chunk.tensor.numel() for chunk in local.chunks)
            assert held == shard.to_local().numel()
            for chunk in local.chunks:
                assert chunk.tensor.numel() > 0
                assert torch.equal(chunk.tensor, whole[box(chunk)])
                assert within(chunk.tensor, shard.to_local())
                seen[box(chunk)] += 1
    copies = 1
    for size, placement in zip(mesh_shape, placements, strict=True):
        copies *= size if isinstance(placement, Replicate) else 1
    assert (seen == copies).all()


def within(view, owner):
    first, size = span_of(owner)
    address, reach = span_of(view)
    return first <= address and address + reach <= first + size


def test_fsdp2_parameters_are_views_of_the_live_shards():
    whole = torch.nn.Linear(5, 7).state_dict()
    # One rank, of a mesh no other test has: torch caches operations on DTensors per mesh, with
    # the rank this process had at first.
    with as_rank(2, 3):
        module = torch.nn.Linear(5, 7)
        module.load_state_dict(whole)
        fully_shard(module, mesh=init_device_mesh("cpu", (3,)))
        for local in local_chunks(module.state_dict()):
            (chunk,) = local.chunks
            parameter = module.get_parameter(local.fqn)
            assert chunk.offsets[0] == 6
            assert chunk.tensor.data_ptr() == parameter.to_local().data_ptr()
            assert not chunk.tensor.requires_grad
            assert torch.equal(chunk.tensor, whole[local.fqn][box(chunk)])


def test_fsdp2_over_tensor_parallel_has_the_rows_it_should():
    whole = torch.nn.Linear(5, 13).state_dict()
    with as_rank(4, 6):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        module = torch.nn.Linear(5, 13)
        module.load_state_dict(whole)
        # Three ranks of tp share the rows as 5, 5, 3; two of dp share each of these.
        parallelize_module(module, mesh["tp"], ColwiseParallel(), src_data_rank=None)
        fully_shard(module, mesh=mesh["dp"])
        for local in local_chunks(module.state_dict()):
            (chunk,) = local.chunks
            assert local.shape == whole[local.fqn].shape
            assert (chunk.offsets[0], len(chunk.tensor)) == (8, 2)
            assert torch.equal(chunk.tensor, whole[local.fqn][box(chunk)])


@pytest.mark.parametrize("placement", [Shard(0), _StridedShard(0, split_factor=1)])
def test_a_rank_outside_the_mesh_has_the_tensor_but_no_chunk(placement):
    with as_rank(1, 3):
        mesh = DeviceMesh("cpu", torch.tensor([0, 2]))
        shard = DTensor.from_local(torch.zeros(2, 3), mesh, [placement], run_check=False)
        (local,) = local_chunks({"w": shard})
    assert local.shape == (4, 3)
    assert local.chunks == ()


def test_a_pending_reduction_is_refused():
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        shard = DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False)
        with pytest.raises(UsageError, match=r"'w'.*pending reduction"):
            local_chunks({"w": shard})


@pytest.mark.parametrize("placement", [Shard(0), _StridedShard(0, split_factor=1)])
def test_a_dtensor_that_lies_about_its_local_shape_is_refused(placement):
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        shard = DTensor.from_local(
            torch.zeros(3), mesh, [placement], run_check=False, shape=(10,), stride=(1,)
        )
        with pytest.raises(UsageError, match=r"'w'.*from_local"):
            local_chunks({"w": shard})


@pytest.mark.parametrize("placement", [Shard(0), _StridedShard(0, split_factor=1)])
def test_a_local_tensor_is_as_plain_as_any_other(placement):
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        lazy = torch.ones(2, dtype=torch.complex64).conj()
        shard = DTensor.from_local(lazy, mesh, [placement], run_check=False)
        with pytest.raises(UsageError, match=r"'w'.*resolve_conj"):
            local_chunks({"w": shard})


def test_a_plain_tensor_is_whole_and_a_view():
    for tensor in (torch.zeros(2, 3), torch.nn.Parameter(torch.zeros(4)), torch.tensor(7)):
        (local,) = local_chunks({"w": tensor})
        (chunk,) = local.chunks
        assert not local.spread
        assert local.shape == tuple(tensor.shape) == tuple(chunk.tensor.shape)
        assert chunk.offsets == (0,) * tensor.ndim
        assert chunk.tensor.data_ptr() == tensor.data_ptr()
        assert not chunk.tensor.requires_grad


def test_a_tensor_without_elements_stays_without_a_chunk():
    layout, memory = build(local_chunks({"none": torch.zeros(3, 0)}), {})
    assert [record.shape for record in layout.tensors] == [(3, 0)]
    assert layout.chunks == ()
    assert memory == []


def all_dtypes():
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantized = ("qint", "quint")
    return sorted((d for d in dtypes if not dtype_name(d).startswith(quantized)), key=str)


@pytest.mark.parametrize("dtype", all_dtypes(), ids=dtype_name)
def test_every_dtype_is_taken_as_it_is(dtype):
    tensor = torch.zeros(6 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(2, 3)
    layout, (memory,) = build(local_chunks({"w": tensor}), {})
    assert layout.tensors[0].dtype == dtype_name(dtype)
    assert span_of(memory) == (tensor.data_ptr(), 6 * dtype.itemsize)
    manifest = Manifest(layout, (tensor.data_ptr(),), (-1,), b"")
    assert Manifest.decode(manifest.encode()) == manifest


def emptied():
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED = {
    "sparse": (lambda: torch.ones(3).to_sparse(), "not dense"),
    "csr": (lambda: torch.ones(3, 3).to_sparse_csr(), "not dense"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2)]), "not dense"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        "not dense",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
        "quantized",
    ),
    "meta": (lambda: torch.zeros(3, device="meta"), "without memory"),
    "meta, no elements": (lambda: torch.zeros(0, device="meta"), "without memory"),
    "freed": (emptied, "without memory"),
    "conjugate": (lambda: torch.ones(3, dtype=torch.complex64).conj(), "resolve_conj"),
    "negative": (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "resolve_neg"),
    "wrapper": (lambda: TwoTensor(torch.ones(3), torch.ones(3)), "TwoTensor"),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, "not initialised"),
    "list": (lambda: [1.0], "not a tensor"),
    "number": (lambda: 3, "not a tensor"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_plain_bytes_in_memory_is_refused_by_name(kind):
    make, reason = REFUSED[kind]
    with pytest.raises(UsageError, match=f"layers.0.w.*{reason}"):
        local_chunks({"fine": torch.zeros(2), "layers.0.w": make()})


def test_a_key_that_is_not_a_string_is_refused():
    with pytest.raises(UsageError, match="key 3"):
        local_chunks({3: torch.zeros(2)})


def test_build_sorts_so_that_order_does_not_matter():
    tensors = local_chunks({"b": torch.zeros(2), "a": torch.ones(3), "c": torch.ones(1)})
    objects = {"aa": torch.zeros(9, dtype=torch.uint8), "z": torch.zeros(0, dtype=torch.uint8)}
    paths = {"b": ("b", 0), "aa": ("aa",)}
    layout, memory = build(tensors, objects, paths=paths)
    assert [record.fqn for record in layout.tensors] == ["a", "aa", "b", "c", "z"]
    assert [record.dtype for record in layout.tensors].count(OBJECT) == 2
    assert [record.path for record in layout.tensors] == [None, ("aa",), ("b", 0), None, None]
    assert [layout.tensors[chunk.tensor].shape for chunk in layout.chunks] == [
        tuple(tensor.shape) for tensor in memory
    ]
    for shuffled in itertools.permutations(tensors):
        again, _ = build(shuffled, dict(reversed(objects.items())), paths=paths)
        assert again.digest == layout.digest


def test_build_sorts_chunks_by_offset():
    chunks = tuple(LocalChunk((offset,), torch.full((2,), offset)) for offset in (4, 0, 2))
    layout, memory = build([LocalTensor("t", torch.int64, (6,), chunks, spread=True)], {})
    assert [chunk.offsets for chunk in layout.chunks] == [(0,), (2,), (4,)]
    assert [tensor[0].item() for tensor in memory] == [0, 2, 4]


def test_a_name_for_both_a_tensor_and_an_object_is_refused():
    with pytest.raises(UsageError, match="'x'"):
        build(local_chunks({"x": torch.zeros(1)}), {"x": torch.zeros(1, dtype=torch.uint8)})


def test_tied_tensors_are_two_records_of_one_memory():
    shared = torch.zeros(4, 2)
    layout, memory = build(local_chunks({"head": shared, "embed": shared}), {})
    assert len(layout.tensors) == len(layout.chunks) == 2
    assert memory[0].data_ptr() == memory[1].data_ptr()


@pytest.mark.parametrize(
    ("tensor", "size_bytes"),
    [
        (torch.zeros(4, 6), 96),
        (torch.zeros(4, 6)[1:3, 2:5], 4 * (6 + 3)),
        (torch.zeros(4, 6).t(), 96),
        (torch.zeros(3, 1).expand(3, 5), 12),
        (torch.zeros(10)[::3], 40),
        (torch.tensor(1.5), 4),
        (torch.zeros(0, 3), 0),
    ],
)
def test_a_span_reaches_from_the_first_to_the_last_element(tensor, size_bytes):
    assert span_of(tensor) == (tensor.data_ptr(), size_bytes)
