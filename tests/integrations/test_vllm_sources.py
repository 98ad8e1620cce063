"""Weight sources of vLLM's releases, published on all ranks of a trainer and read whole."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import torch_ros
from torch_ros.errors import UsageError
from torch_ros.integrations.vllm.sources import tensors_of

WHOLE = {"a": torch.arange(35.0).view(7, 5), "b": torch.arange(6.0) + 100, "c": torch.tensor(7.0)}


class Iterated:
    """As of release 0.32."""

    held = None

    def held_names(self):
        return self.held

    def __iter__(self):
        for name, tensor in WHOLE.items():
            yield name, tensor if self.held is None or name in self.held else None


class Modes:
    """As of release 0.33: its rank owns what its metadata say."""

    def __init__(self, rank, metadata, *modes):
        self.rank, self.metadata, self.modes = rank, metadata, modes

    def implements_iter_full(self):
        return "full" in self.modes

    def implements_iter_local(self):
        return "local" in self.modes

    def owned(self):
        return [m for m in self.metadata if m.owners is None or self.rank in m.owners]

    def iter_full(self):
        for meta in self.owned():
            yield meta.name, WHOLE[meta.name].clone()

    def iter_local(self):
        for meta in self.owned():
            yield meta.name, piece(WHOLE[meta.name], meta, self.rank)


def meta(name, owners=None, mesh_shape=None, placements=None):
    shape = tuple(WHOLE[name].shape)
    if owners and mesh_shape is None:
        mesh_shape = (len(owners),)
    places = {"name": name, "shape": shape, "owners": owners, "mesh_shape": mesh_shape}
    return SimpleNamespace(**places, placements=placements)


def shard(dim):
    return SimpleNamespace(dim=dim)


REPLICATE = SimpleNamespace()


def piece(tensor, of, rank):
    """As torch cuts it, by one axis of the mesh after the other."""
    if of.placements:
        coordinates = torch.tensor(of.owners).view(of.mesh_shape).eq(rank).nonzero()[0].tolist()
        for at, size, placement in zip(coordinates, of.mesh_shape, of.placements, strict=True):
            if (dim := getattr(placement, "dim", None)) is not None:
                parts = tensor.chunk(size, dim)
                none = tensor.narrow(dim, 0, 0)
                tensor = parts[at] if at < len(parts) else none
    return tensor.clone()


def published(sources):
    """The tensors that a reader gets of these sources, each of one rank."""
    options = {"endpoint": f"memory://{uuid.uuid4().hex}", "linger_s": 0}

    def publish(rank):
        place = {"replica": "trainer", "rank": rank, "world_size": len(sources)}
        handle = torch_ros.open("m", **options, **place)
        handle.register(dict(tensors_of(sources[rank], rank)))
        handle.publish(1)
        return handle

    with ThreadPoolExecutor(len(sources)) as threads:
        handles = list(threads.map(publish, range(len(sources))))
        with torch_ros.open("m", **options) as reader:
            got = {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}
            reader.register(got)
            reader.replicate(1, timeout_s=30)
        list(threads.map(lambda handle: handle.close(), handles))
    return got


def is_whole(got):
    return all(torch.equal(got[name], tensor) for name, tensor in WHOLE.items())


def test_a_source_that_is_iterated_is_published_by_the_sender():
    assert is_whole(published([Iterated(), Iterated()]))
    assert dict(tensors_of(Iterated(), 1)) == {}


def test_a_source_that_is_iterated_may_be_split():
    first, second = Iterated(), Iterated()
    first.held, second.held = ["a"], ["b", "c"]
    assert sorted(dict(tensors_of(second, 1))) == ["b", "c"]
    assert is_whole(published([first, second]))


def test_full_tensors_are_kept_by_the_first_of_their_owners():
    metas = [meta("a"), meta("b", (1, 2)), meta("c", (2,))]
    sources = [Modes(rank, metas, "full") for rank in range(3)]
    kept = [sorted(dict(tensors_of(source, source.rank))) for source in sources]
    assert kept == [["a"], ["b"], ["c"]]
    assert is_whole(published(sources))


MESHES = [
    ((0, 1, 2, 3), (4,), (shard(0),)),
    ((3, 1, 0, 2), (4,), (shard(1),)),
    ((0, 1, 2, 3), (2, 2), (shard(0), shard(0))),
    ((0, 1, 2, 3), (2, 2), (shard(1), shard(0))),
    ((0, 1, 2, 3), (2, 2), (REPLICATE, shard(0))),
    ((2, 3), (2,), (shard(0),)),
    ((0, 1, 2, 3), (4,), None),
]


@pytest.mark.parametrize("mesh", MESHES, ids=range(len(MESHES)))
@pytest.mark.parametrize("modes", [("local",), ("local", "full")], ids="-".join)
def test_pieces_are_published_as_they_are_cut(mesh, modes):
    metas = [meta("a", *mesh), meta("b", (0, 1, 2, 3), (4,), (shard(0),)), meta("c")]
    assert is_whole(published([Modes(rank, metas, *modes) for rank in range(4)]))


def test_a_piece_of_another_shape_than_its_metadata_say_is_refused():
    class Wrong(Modes):
        def iter_local(self):
            yield "a", WHOLE["a"]

    source = Wrong(1, [meta("a", (0, 1), (2,), (shard(0),))], "local")
    with pytest.raises(UsageError, match=r"'a': iter_local gives \[7, 5\] on rank 1.*\[3, 5\]"):
        dict(tensors_of(source, 1))


def test_a_source_without_a_mode_is_refused():
    with pytest.raises(UsageError, match="Modes has neither iter_full nor iter_local"):
        tensors_of(Modes(0, []), 0)
