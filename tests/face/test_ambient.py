"""Modes that a program sets for torch as a whole, or around a call, change nothing of ours."""
# needs features deltas, streams, transforms

import contextlib
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_ros
import torch_ros.bucket
from torch_ros.bucket.archive import Archiver, Form
from torch_ros.dcp import ROSReader, ROSWriter
from torch_ros.errors import UsageError

COUNT = 5000


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Overriding(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def put_back(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def default_dtype(dtype):
    return put_back(torch.get_default_dtype, torch.set_default_dtype, dtype)


def default_device():
    return put_back(lambda: None, torch.set_default_device, "meta")


def deterministic():
    """As `torch.use_deterministic_algorithms(True)`, which imports torch's compiler for that."""
    return put_back(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, "error")


MODES = {
    "device": lambda: torch.device("meta"),
    "default device": default_device,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "dispatch": Passing,
    "function": Overriding,
    "one thread": lambda: put_back(torch.get_num_threads, torch.set_num_threads, 1),
}


def tensors(value):
    """Those of a version, each element another number."""
    numbers = torch.arange(COUNT, dtype=torch.float32, device="cpu") + value
    return {
        "w": numbers.clone().requires_grad_(),
        "m": numbers[:1024].reshape(32, 32).clone(),
        "h": numbers.to(torch.bfloat16),
        "b": numbers[:1024].reshape(32, 32).to(torch.uint8),
        "0d": numbers[0].clone(),
        "empty": numbers[:0].clone(),
    }


def targets(of):
    made = {fqn: torch.zeros_like(tensor, device="cpu") for fqn, tensor in of.items()}
    for fqn in ("m", "b"):  # through staging
        made[fqn] = torch.zeros(32, 64, dtype=of[fqn].dtype, device="cpu")[:, ::2]
    return made


def same(got, want):
    return all(torch.equal(got[fqn].detach(), want[fqn].detach()) for fqn in want)


def in_place(trainer, rollout, modes):
    got = targets(tensors(0))
    for version, mode in enumerate(modes, 1):
        source = tensors(version)
        with mode():
            trainer.unpublish()
            trainer.unregister()
            trainer.register(source)
            trainer.publish(version)
            if version == 1:
                rollout.register(got)
                rollout.replicate(version)
            else:
                assert rollout.update("latest")
        assert same(got, source)


def made_within(trainer, rollout, mode):
    with mode():
        in_place(trainer, rollout, [contextlib.nullcontext] * 2)


def first_within(trainer, rollout, mode):
    """Buffers that the first call made are used in a second one, outside of the mode."""
    modes = [mode, *[contextlib.nullcontext] * 2]
    in_place(trainer, rollout, modes[:2])
    deltas(trainer, rollout, modes)
    checkpoints(trainer, rollout, modes)


def twice(call, **options):
    def called(trainer, rollout, mode):
        call(trainer, rollout, [mode] * 3, **options)

    return called


def copies(trainer, rollout, mode):
    source = tensors(1)
    transform = [torch_ros.Float8(["m"]), torch_ros.Cast(torch.float16)]
    with mode():
        trainer.publish_copy(1, source, transform=transform)
        fqns = ["w", "m", "m_scale", "h"]
        got = {fqn: tensor.clone() for fqn, tensor in rollout.stream(1, fqns, buffer_bytes=1 << 20)}
    assert torch.equal(got["w"], source["w"].detach().half())
    assert torch.equal(got["m"].float(), (source["m"] / got["m_scale"]).to(got["m"].dtype).float())


def deltas(trainer, rollout, modes):
    base = trainer.version or 0
    source = tensors(base)
    got = targets(source)
    for version, mode in enumerate(modes, base + 1):
        with torch.no_grad():
            source["w"][version] = -1
        with mode():
            trainer.publish_copy(version, source, deltas=2)
            if version == base + 1:
                rollout.unpublish()
                rollout.unregister()
                rollout.register(got)
                rollout.replicate(version)
            else:
                assert rollout.update("latest")
        assert same(got, source)


def reads(trainer, rollout, mode):
    source = tensors(1)
    got = targets(source)
    with mode():
        trainer.register(source)
        trainer.publish(1)
        rollout.read(1, got)
    assert same(got, source)


def retained(trainer, rollout, mode):
    source = tensors(1)
    got = targets(source)
    with mode():
        trainer.register(source)
        trainer.publish(1)
        trainer.unpublish()
        rollout.register(got)
        rollout.replicate("latest")
    assert same(got, source)


def checkpoints(trainer, rollout, modes, *, is_own=True):
    base = trainer.version or 0
    got = {"model": targets(tensors(0)), "step": 0, "betas": (0.0, 0.0), "t": torch.zeros(3)}
    sd = {"model": tensors(0), "t": torch.ones(3)}
    for version, mode in enumerate(modes, base + 1):
        sd |= {"step": version, "betas": (0.9, version)}
        with mode():
            trainer.unpublish()
            writer = ROSWriter(version, handle=trainer)
            planner = writer.planner() if is_own else None
            dcp.save(sd, storage_writer=writer, planner=planner, no_dist=True)
            reader = ROSReader(version, handle=rollout)
            planner = reader.planner() if is_own else None
            dcp.load(got, storage_reader=reader, planner=planner, no_dist=True)
        assert same(got["model"], sd["model"])
        assert (got["step"], got["betas"]) == (version, (0.9, version))


def bucket(trainer, rollout, mode):
    pytest.importorskip("obstore")
    store = torch_ros.bucket.open(tempfile.mkdtemp(), trainer.model)
    archiver = Archiver(rollout, store, keep=5, form=Form(deltas=4))
    source = {"large": torch.zeros(20_000)} | tensors(0)
    got = {"large": torch.zeros(20_000)} | targets(source)
    trainer.register(source)
    for version in (1, 2):
        with mode():
            trainer.unpublish()
        with torch.no_grad():
            source["large"][version] = -1
        with mode():
            trainer.publish(version)
            archiver.archive(lambda *_: None)
            assert store.load(got) == version
        assert same(got, source)
    assert store.list() == {1: "full", 2: "delta"}
    with mode():
        assert [patch.name for patch in store.patches(1, 2)] == ["large"]


CALLS = {
    "bucket": bucket,
    "in place": twice(in_place),
    "made within": made_within,
    "first within": first_within,
    "copies": copies,
    "deltas": twice(deltas),
    "reads": reads,
    "retained": retained,
    "checkpoints": twice(checkpoints),
    "checkpoints of dcp": twice(checkpoints, is_own=False),
}


@pytest.fixture
def pair():
    options = {"endpoint": f"memory://{uuid.uuid4().hex}", "timeout_s": 10, "digests": "full"}
    handles = [torch_ros.open("m", retain=("latest",), **options) for _ in range(2)]
    yield handles
    for handle in handles:
        handle.close(linger_s=0)


OFTEN = {"device", "default device", "inference"}  # those that have changed bytes


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=() if m in OFTEN else pytest.mark.long) for m in MODES]
)
def test_a_mode_of_torch_changes_no_byte(pair, mode, call):
    CALLS[call](*pair, MODES[mode])


def within(transform):
    """Gives a call the tensor that a function sees within a transform of torch.func."""

    def give(call):
        def seen(tensor):
            call(tensor)
            return tensor.sum()

        transform(seen)(torch.ones(3))

    return give


UNREAL = {
    "fake": lambda call: call(FakeTensorMode().from_tensor(torch.ones(3))),
    "meta": lambda call: call(torch.ones(3, device="meta")),
    "vmap": lambda call: torch.vmap(lambda t: (call(t), t)[1])(torch.ones(2, 3)),
    "grad": within(torch.func.grad),
    "functionalize": within(torch.func.functionalize),
}
TRANSFORMS = {"grad", "functionalize"}  # as "vmap" is one


def save(handle, version, sd, *, is_own=True):
    writer = ROSWriter(version, handle=handle)
    planner = writer.planner() if is_own else None
    dcp.save(sd, storage_writer=writer, planner=planner, no_dist=True)


def load(handle, sd, *, is_own=True):
    reader = ROSReader(handle=handle)
    planner = reader.planner() if is_own else None
    dcp.load(sd, storage_reader=reader, planner=planner, no_dist=True)


TAKES = {  # of a publisher of version 1 and a reader, a tensor
    "register": lambda _, reader, tensor: reader.register({"w": tensor}),
    "read": lambda _, reader, tensor: reader.read(1, {"w": tensor}),
    "copy": lambda trainer, _, tensor: trainer.publish_copy(2, {"w": tensor}),
    "save": lambda trainer, _, tensor: save(trainer, 2, {"w": tensor}),
    "save of dcp": lambda trainer, _, tensor: save(trainer, 2, {"w": tensor}, is_own=False),
    "load": lambda _, reader, tensor: load(reader, {"w": tensor}),
}


TORCH = {("meta", "load"), ("vmap", "save"), ("vmap", "save of dcp")}  # its planner raises before


def error_of(call, *arguments):
    with pytest.raises(BaseException) as caught:
        call(*arguments)
    failures = getattr(caught.value, "failures", None)  # of dcp
    return failures[0][0] if failures else caught.value


@pytest.mark.parametrize("take", TAKES)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.long if k in TRANSFORMS else ()) for k in UNREAL],
)
def test_a_tensor_without_memory_is_refused_by_name(pair, kind, take):
    trainer, reader = pair
    save(trainer, 1, {"w": torch.ones(3)})
    load(reader, {"w": torch.zeros(3)})  # what is remembered of it is not taken for true
    reader.unpublish()

    def call(tensor):
        error = error_of(TAKES[take], trainer, reader, tensor)
        if (kind, take) in TORCH:
            return
        assert isinstance(error, UsageError), error
        assert "'w'" in str(error)
        assert "memory" in str(error)

    UNREAL[kind](call)
    load(reader, got := {"w": torch.zeros(3)})
    assert got["w"].tolist() == [1, 1, 1]


INSIDE = {
    "unpublish": lambda trainer, *_: trainer.unpublish(),  # of a version that is retained
    "register": lambda _, reader, got: reader.register(got),
    "publish": lambda trainer, *_: trainer.publish(2),
    "copy": lambda trainer, *_: trainer.publish_copy(2, {"w": torch.ones(3)}),
    "replicate": lambda _, reader, __: reader.replicate(1),
    "update": lambda _, reader, __: reader.update("latest"),
    "read": lambda _, reader, got: reader.read(1, got),
    "stream": lambda _, reader, __: reader.stream(1, ["w"], buffer_bytes=1 << 20).close(),
    "save": lambda trainer, _, got: save(trainer, 2, got),
    "load": lambda _, reader, got: load(reader, got),
    "load of dcp": lambda _, reader, got: load(reader, got, is_own=False),
}


@pytest.mark.parametrize("may_mix", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("call", INSIDE)
def test_a_call_within_fake_tensor_mode_is_refused(pair, call, may_mix):
    trainer, reader = pair
    trainer.register({"w": torch.ones(3)})
    trainer.publish(1)
    got = {"w": torch.zeros(3)}
    if call in {"replicate", "update"}:
        reader.register(got)
    with FakeTensorMode(allow_non_fake_inputs=may_mix):
        error = error_of(INSIDE[call], trainer, reader, got)
    assert isinstance(error, UsageError), error
    assert "outside of FakeTensorMode" in str(error)
    reader.unregister()
    reader.read(1, got)
    assert got["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("call", ["in place", "deltas", "copies"])
def test_the_default_device_of_a_thread_reaches_nothing_of_ours(pair, call):
    def within_a_thread():
        torch.set_default_device("meta")
        CALLS[call](*pair, contextlib.nullcontext)
        assert torch.ones(1).is_meta

    with ThreadPoolExecutor(1) as pool:
        pool.submit(within_a_thread).result(60)
