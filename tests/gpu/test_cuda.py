"""Weights in CUDA memory. Skipped where there is no GPU."""

import multiprocessing
import threading
import uuid
from contextlib import closing

import numpy as np
import pytest
import torch
from kit import until

import torch_ros
from torch_ros import MXFP8, NVFP4, Cast, Float8
from torch_ros.channels.addresses import Listen, place
from torch_ros.copies import buffers as copy_buffers
from torch_ros.copies.buffers import CopyBuffers, Copying
from torch_ros.copies.crossing import cuda
from torch_ros.copies.ferry import Ferry
from torch_ros.copies.turns import HostBuffers
from torch_ros.errors import NotSupported
from torch_ros.features.tcp.transport import TcpTransport
from torch_ros.spans import Region
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.digest import digest
from torch_ros.weights.local import local_chunks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

BLOCKS = Float8(["*"], block=(128, 128))


def tensors(device, fill):
    made = {
        "matrix": torch.full((512, 1000), fill, device=device),
        "half": torch.full((300, 77), fill, device=device, dtype=torch.bfloat16),
        "column": torch.full((256, 64), fill, device=device)[:, 5:21],
        "scalar": torch.tensor(fill, device=device),
        "blocks": torch.full((300, 128), fill, device=device),
        "empty": torch.empty(0, 3, device=device),
    }
    return made | {"host": torch.full((100,), fill)}


def follow(model, endpoint, versions, results, device, options):
    got = tensors(device, -1.0)
    with torch_ros.open(model, endpoint=endpoint, replica="rollout", **options) as rollout:
        rollout.register(got)
        for version in versions:
            rollout.wait(lambda there, version=version: version in there, timeout_s=60)
            rollout.update(version, timeout_s=60)
            is_right = all(bool((t == float(version)).all()) for t in got.values())
            results.put((version, is_right))


def publish_to_a_follower(endpoint, here, there, count, **options):
    """Publish so many versions from one device to a process that follows on another one."""
    model = "m-" + uuid.uuid4().hex[:8]
    context = multiprocessing.get_context("spawn")
    results, versions = context.Queue(), range(1, count + 1)
    told = (model, endpoint, versions, results, there, options)
    child = context.Process(target=follow, args=told)
    child.start()
    source = tensors(here, 0.0)
    side = torch.cuda.Stream()
    with torch_ros.open(model, endpoint=endpoint, replica="trainer", **options) as trainer:
        trainer.register(source)
        for version in versions:
            trainer.unpublish()
            with torch.cuda.stream(side):  # publish has to wait for kernels of any stream
                torch.cuda._sleep(50_000_000)
                for tensor in source.values():
                    tensor.fill_(float(version))
            trainer.publish(version)
            assert results.get(timeout=60) == (version, True)
    child.join(30)
    assert child.exitcode == 0


def test_another_process_follows_what_kernels_write(etcd_endpoint):
    publish_to_a_follower(etcd_endpoint, "cuda", "cuda", 5)


@pytest.mark.parametrize("endpoint", ["cuda to host", "host to cuda"])
def test_between_devices_and_hosts(etcd_endpoint, endpoint):
    model = "m-" + uuid.uuid4().hex[:8]
    here, there = ("cuda", "cpu") if endpoint == "cuda to host" else ("cpu", "cuda")
    source, target = tensors(here, 7.0), tensors(there, 0.0)
    with (
        torch_ros.open(model, endpoint=etcd_endpoint, replica="trainer") as trainer,
        torch_ros.open(model, endpoint=etcd_endpoint, replica="rollout") as rollout,
    ):
        trainer.register(source)
        trainer.publish(1)
        rollout.register(target)
        rollout.replicate()
    assert all(torch.equal(target[fqn].cpu(), source[fqn].cpu()) for fqn in source)


def test_a_retained_version_goes_from_device_to_host_memory(etcd_endpoint):
    model = "m-" + uuid.uuid4().hex[:8]
    source, target = tensors("cuda", 3.0), tensors("cuda", 0.0)
    with (
        torch_ros.open(
            model, endpoint=etcd_endpoint, replica="trainer", retain=("latest",)
        ) as trainer,
        torch_ros.open(model, endpoint=etcd_endpoint, replica="rollout") as rollout,
    ):
        trainer.register(source)
        trainer.publish(1)
        trainer.unpublish()
        for tensor in source.values():
            tensor.fill_(-1.0)
        rollout.register(target)
        assert rollout.replicate() == 1
        trainer.close(linger_s=0)
    assert all(bool((tensor == 3.0).all()) for tensor in target.values())


@pytest.mark.parametrize("to", [None, "cpu"])
@pytest.mark.parametrize(
    "transforms",
    [
        [],
        [Cast(torch.bfloat16)],
        [Float8(["*"]), Cast(torch.bfloat16)],
        [BLOCKS],
        [MXFP8(["blocks"]), Cast(torch.bfloat16)],
        [NVFP4(["blocks"]), Cast(torch.bfloat16)],
    ],
)
def test_a_device_makes_the_copies_that_a_host_makes(monkeypatch, etcd_endpoint, transforms, to):
    monkeypatch.setattr(copy_buffers, "PIECE_BYTES", 100_000)
    model = "m-" + uuid.uuid4().hex[:8]
    source = {fqn: torch.randn_like(t) for fqn, t in tensors("cpu", 0.0).items()}
    expected = CopyBuffers(HostBuffers()).fill(
        LocalState(local_chunks(source), {}, {}), Copying.asked(transforms, None, None)
    )
    target = {t.fqn: torch.zeros(t.shape, dtype=t.dtype) for t in expected.tensors}
    on_device = {fqn: tensor.cuda() for fqn, tensor in source.items()}
    with (
        torch_ros.open(model, endpoint=etcd_endpoint, replica="trainer") as trainer,
        torch_ros.open(model, endpoint=etcd_endpoint, replica="rollout") as rollout,
    ):
        rollout.register(target)
        for version in (1, 2, 3):
            trainer.publish_copy(version, on_device, transform=transforms, to=to)
            shown = trainer.checkpoints.registered
            assert bool(shown.cuda_devices) is (to is None)
            if to is not None:
                for tensor in on_device.values():  # a trainer gives its device memory back
                    tensor.fill_(-1)
                torch.cuda.synchronize()
            assert rollout.update() is True
            for made in expected.tensors:
                for chunk in made.chunks:
                    pair = [
                        t.reshape(-1).view(torch.uint8) for t in (target[made.fqn], chunk.tensor)
                    ]
                    assert torch.equal(*pair), made.fqn
            on_device = {fqn: tensor.cuda() for fqn, tensor in source.items()}


@pytest.mark.parametrize("to", [None, "cpu"])
def test_a_copy_waits_for_kernels_of_any_stream(to):
    source, side = torch.zeros(1 << 20, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        source.fill_(7.0)
    state = LocalState(local_chunks({"w": source}), {}, {})
    [made] = CopyBuffers(HostBuffers()).fill(state, Copying(to=to)).tensors
    assert bool((made.chunks[0].tensor == 7).all())


def lend(model, endpoint, told, said):
    source = {"w": torch.full((1000,), 3.0, device="cuda")}
    with torch_ros.open(model, endpoint=endpoint, replica="lender", borrow_bytes=1 << 20) as lender:
        for version, to in ((1, None), (2, "cpu")):
            lender.publish_copy(version, source, to=to)
            said.put(version)
            told.get(timeout=60)


def test_a_copy_on_a_device_is_lent_from_host_memory_only(etcd_endpoint):
    model = "m-" + uuid.uuid4().hex[:8]
    context = multiprocessing.get_context("spawn")
    told, said = context.Queue(), context.Queue()
    child = context.Process(target=lend, args=(model, etcd_endpoint, told, said))
    child.start()
    with torch_ros.open(model, endpoint=etcd_endpoint, replica="borrower") as borrower:
        assert said.get(timeout=60) == 1
        with pytest.raises(NotSupported, match="on a GPU"):
            borrower.borrow(1).__enter__()
        told.put("the next")
        assert said.get(timeout=60) == 2
        with borrower.borrow(2) as tensors:
            assert torch.equal(tensors["w"], torch.full((1000,), 3.0))
        told.put("end")
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.parametrize("is_pinned", [True, False])
def test_pieces_land_in_memory_that_is_pinned_and_in_other(is_pinned):
    made = [torch.randn(1000, 77, device="cuda"), torch.randn(3, device="cuda")]
    places = [torch.zeros(each.shape, pin_memory=is_pinned) for each in made]
    ferry = Ferry()
    torch.cuda._sleep(50_000_000)
    ferry.bring([each.add_(1) for each in made], places)
    ferry.land()
    assert all(map(torch.equal, places, [each.cpu() for each in made]))


def test_a_version_on_a_device_is_streamed_to_host_memory_and_read_into_boxes(etcd_endpoint):
    model = "m-" + uuid.uuid4().hex[:8]
    source = {fqn: torch.randn_like(t) for fqn, t in tensors("cuda", 0.0).items()}
    fused = torch.zeros(2, 512, 1000, device="cuda")  # as in an engine
    with (
        torch_ros.open(model, endpoint=etcd_endpoint) as trainer,
        torch_ros.open(model, endpoint=etcd_endpoint) as engine,
    ):
        trainer.register(source)
        trainer.publish(1)
        for fqn, tensor in engine.stream(1, sorted(source), buffer_bytes=100_000):
            assert torch.equal(tensor, source[fqn].cpu())
        half = torch_ros.Chunked((512, 1000), torch.float32, {(0, 0): fused[1]})
        engine.read(1, {"matrix": half})
    assert torch.equal(fused[1], source["matrix"])
    assert not fused[0].any()


@pytest.mark.parametrize("depth", ["sampled", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_device_computes_the_digests_that_a_host_does(depth, dtype):
    for shape, offsets in (((300, 1001), (3, 5)), ((100_000,), (7,))):
        size = torch.Size(shape).numel() * dtype.itemsize
        content = torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)
        whole = tuple(size + offset for size, offset in zip(shape, offsets, strict=True))
        found = [
            digest(chunk, global_shape=whole, offsets=offsets, depth=depth)
            for chunk in (content, content.cuda())
        ]
        assert found[0] == found[1]


def test_tensors_of_one_allocation_are_one_registration():
    made = {f"t{number}": torch.zeros(1000, device="cuda") for number in range(100)}
    state = LocalState(local_chunks(made), {}, {})
    regions = state.regions
    assert len(regions) < 10  # small tensors come from segments of 2 MiB
    for tensor in made.values():
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        assert any(r.address <= start and end <= r.address + r.size_bytes for r in regions)


# By sockets of our own


@pytest.mark.parametrize(("here", "there"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_another_process_follows_by_sockets(etcd_endpoint, here, there):
    options = {"transport": "tcp", "listen": "127.0.0.1"}
    publish_to_a_follower(etcd_endpoint, here, there, 3, **options)


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def read(request):
    """A read over sockets from a device to itself, 33 MiB; with its source, and its target."""
    where = (place()[0], -1 if request.param else place()[1])
    with (
        closing(TcpTransport(listen=Listen(("127.0.0.1",)), place=where)) as source,
        closing(TcpTransport()) as reader,
    ):
        held = torch.randint(0, 256, (33 << 20,), dtype=torch.uint8, device="cuda")
        target = torch.zeros_like(held)
        torch.cuda.synchronize()
        places = [Region(t.data_ptr(), t.nbytes, t.get_device()) for t in (held, target)]
        peer = reader.connect(source.connection)
        peer.attach(source.register(places[:1]).descriptor)
        reader.register(places[1:])
        rows = np.array([(places[0].address, places[1].address, held.nbytes)], np.uint64)
        devices = {"source_device": places[0].device, "target_device": places[1].device}
        yield peer.prepare(rows, **devices), held, target


def done(made):
    made.post()
    until(made.is_done, 60, pause_s=0)


def test_sockets_bring_every_byte_from_a_device_to_a_device(read):
    made, held, target = read
    for _ in range(3):
        done(made)
        assert torch.equal(target, held)
        target.zero_()
        torch.cuda.synchronize()
    assert len(cuda()._pinned) >= 4  # two of each end: all could be pinned


def test_sockets_wait_for_no_kernel(read):
    made, held, target = read
    done(made)
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000_000)  # some seconds
        done(made)
        assert not stream.query()
        torch.cuda.synchronize()
    assert torch.equal(target, held)


def test_a_capture_goes_on_beside_sockets(read):
    made, held, target = read
    done(made)
    source, result = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    result.add_(source)
    for tensor in (target, result):
        tensor.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    reads = threading.Thread(target=done, args=(made,))
    with torch.cuda.graph(graph, capture_error_mode="global"):
        result.add_(source)
        reads.start()
        reads.join(60)
        result.add_(source)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, torch.full_like(result, 2.0))
    assert torch.equal(target, held)


def test_sockets_leave_the_thread_on_its_device(read):
    made, _, _ = read
    before = torch.cuda.current_device(), torch.cuda.current_stream()
    done(made)
    assert (torch.cuda.current_device(), torch.cuda.current_stream()) == before
