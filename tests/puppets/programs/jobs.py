"""The jobs of `puppets.Jobs`, of ranks or of one process. Run, never imported:

python jobs.py JOB '{"argument": "value"}'
"""

import itertools
import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_ros
from torch_ros import errors
from torch_ros.dcp import ROSReader, ROSWriter, default_handle
from torch_ros.shard import beginnings

UNEVEN = 1031  # rows over two ranks


class Block(nn.Module):
    """Column- and row-parallel linears, uneven rows, a tied weight, a 0-d and an empty buffer."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(UNEVEN, 64)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, UNEVEN, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(1))
        self.register_buffer("steps", torch.tensor(seed))
        self.register_buffer("nothing", torch.empty(0, 3))


def whole(seed):
    return {fqn: tensor.detach().clone() for fqn, tensor in Block(seed).state_dict().items()}


def fsdp(seed, mesh):
    module = Block(seed)
    return fully_shard(module, mesh=mesh)


def tensor_parallel(seed, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(Block(seed), mesh, plan)


def check(state_dict, expected):
    """Every tensor, bit for bit; a DTensor's local shard without any communication."""
    for fqn, tensor in state_dict.items():
        local, full = tensor, expected[fqn]
        if isinstance(tensor, DTensor):
            full = distribute_tensor(
                full, tensor.device_mesh, tensor.placements, src_data_rank=None
            ).to_local()
            local = tensor.to_local()
        assert torch.equal(local, full), fqn


def fill(tensor, full):
    """Write into what a rank has of a tensor."""
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        tensor = tensor.to_local()
        full = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
    tensor.copy_(full)


def open_handle(model, name, **options):
    return torch_ros.open(model, replica=name, timeout_s=30, **options)


def saved(handle, version, state_dict):
    dcp.save(state_dict, storage_writer=ROSWriter(version, handle=handle))


def loaded(handle, version, state_dict, **options):
    reader = ROSReader(version, handle=handle, **options)
    dcp.load(state_dict, storage_reader=reader)
    return reader.version


def close_all(*handles):
    """A rank that closes ends the replica for its peers, so they come here first."""
    dist.barrier()
    for handle in handles:
        handle.close()


def shown(handle):
    """(fqn, address) of every chunk that a handle shows to readers."""
    manifest = handle._shard.mailbox.manifest
    names = [record.fqn for record in manifest.layout.tensors]
    chunks = zip(manifest.layout.chunks, manifest.addresses, strict=True)
    return {(names[chunk.tensor], address) for chunk, address in chunks}


# Jobs of two ranks


def sparse(model, transport):
    """TP(2) follows copies of FSDP(2), in which little changes, by deltas."""
    mesh, options = init_device_mesh("cpu", (2,)), {"digests": "full", "transport": transport}
    trainer = open_handle(model, "trainer", **options)
    far = torch_ros.Costs(read_bytes_per_s=1e6)  # so that deltas are faster
    rollout = open_handle(model, "rollout", costs=far, **options)
    content, state = whole(1), get_model_state_dict(fsdp(1, mesh))
    target = get_model_state_dict(tensor_parallel(0, mesh))
    rollout.register(target)
    for version in range(1, 6):
        for fqn, tensor in state.items():
            content[fqn].view(-1)[version * 37 :: 997] += 1
            fill(tensor, content[fqn])
        trainer.publish_copy(version, state, deltas=2)
        while (making := trainer._deltas.copies._making) is not None and not making.has_ended:
            time.sleep(0.001)
        dist.barrier()
        if version == 1:
            rollout.replicate()
        elif version != 3:
            assert rollout.update()
            read = rollout.last_read
            assert (read.via, read.links) == ("delta", 2 if version == 4 else 1), read
        if version != 3:
            check(target, content)
    close_all(trainer, rollout)


def reshard_elsewhere(model):
    """As `reshard`, between processes of which none is in another's network: all is encrypted."""
    from torch_ros.channels import addresses

    host, _ = addresses.place()
    networks = itertools.count(1000 * os.getpid())
    addresses.place = lambda: (host, next(networks))
    reshard(model)
    assert not any(name.startswith("nixl") for name in sys.modules)


def reshard(model):
    """FSDP(2) to TP(2), to one process, back to FSDP(2), all through dcp."""
    mesh = init_device_mesh("cpu", (2,))
    trainer, rollout = open_handle(model, "trainer"), open_handle(model, "rollout")
    module = fsdp(1, mesh)
    state = get_model_state_dict(module)
    saved(trainer, 1, state)

    in_place = {
        (fqn, (t.to_local() if isinstance(t, DTensor) else t).data_ptr())
        for fqn, t in state.items()
        if (t.to_local() if isinstance(t, DTensor) else t).numel()
    }
    assert shown(trainer) == in_place, "published somewhere else than in place"
    parameters = {p.to_local().data_ptr() for p in module.parameters() if p.to_local().numel()}
    assert parameters <= {address for _, address in shown(trainer)}

    parallel = tensor_parallel(0, mesh)
    before = {
        fqn: p.to_local().data_ptr()
        for fqn, p in parallel.named_parameters()
        if isinstance(p, DTensor)
    }
    assert loaded(rollout, "latest", get_model_state_dict(parallel)) == 1
    assert rollout.version == 1
    check(get_model_state_dict(parallel), whole(1))
    assert loaded(rollout, "latest", get_model_state_dict(parallel)) == 1
    assert rollout.last_read.bytes_read == 0, "what is here already was read again"
    after = {
        fqn: p.to_local().data_ptr()
        for fqn, p in parallel.named_parameters()
        if isinstance(p, DTensor)
    }
    assert before == after, "not loaded in place"
    assert set(rollout.list()[1]) == {"trainer", "rollout"}

    # The trainer leaves; one process reads from the TP rollout, with a sharding of its own.
    close_all(trainer)
    dist.barrier()
    if dist.get_rank() == 0:
        alone = open_handle(model, "alone", rank=0, world_size=1)
        got = {fqn: torch.empty_like(tensor) for fqn, tensor in whole(0).items()}
        alone.register(got)
        assert alone.replicate() == 1
        assert alone.last_read.source == "rollout"
        check(got, whole(1))
        alone.close()
    dist.barrier()

    # TP publishes, FSDP follows.
    back = open_handle(model, "back")
    saved(rollout, 2, get_model_state_dict(tensor_parallel(2, mesh)))
    sharded = fsdp(0, mesh)
    assert loaded(back, 2, get_model_state_dict(sharded)) == 2
    check(get_model_state_dict(sharded), whole(2))
    close_all(rollout, back)


def planned(model):
    """Our planners: FSDP(2) to TP(2) at every step, with new DTensors, changes and refusals."""
    mesh = init_device_mesh("cpu", (2,))
    trainer, rollout = open_handle(model, "trainer"), open_handle(model, "rollout")
    module, parallel = fsdp(0, mesh), tensor_parallel(0, mesh)

    def step(version, state, target, **options):
        writer = ROSWriter(version, handle=trainer)
        dcp.save(state, storage_writer=writer, planner=writer.planner(), **options)
        reader = ROSReader(version, handle=rollout)
        dcp.load(target, storage_reader=reader, planner=reader.planner())

    def saved_state(version):
        return {"model": get_model_state_dict(module), "step": version}

    before = []
    for version in (1, 2, 3):
        trainer.unpublish()
        expected = whole(version)
        for fqn, tensor in get_model_state_dict(module).items():
            fill(tensor, expected[fqn])
        target = {"model": get_model_state_dict(parallel), "step": 0}
        step(version, saved_state(version), target, use_collectives=version != 3)
        check(target["model"], expected)
        assert target["step"] == version
        before.append((trainer.checkpoints.registered, rollout.checkpoints.registered))
    assert before[0][0] is before[1][0] is before[2][0], "registered again"
    assert before[0][1] is before[1][1] is before[2][1]

    # One rank's state dict changes: an error on both, and nothing is given up.
    bad = {"model": get_model_state_dict(parallel), "step": 0}
    if dist.get_rank() == 1:
        bad["model"]["up.bias"] = bad["model"]["up.bias"].double()
    trainer.unpublish()
    try:
        step(4, saved_state(4), bad)
        raise AssertionError("no error")
    except CheckpointException as error:
        kinds = {rank: type(failure[0]) for rank, failure in error.failures.items()}
        assert kinds == {1: errors.ManifestMismatch}, error
    assert rollout.version == 3

    # Other shardings of the same names, shapes and dtypes.
    other = {"model": get_model_state_dict(fsdp(0, mesh)), "step": 0}
    trainer.unpublish()
    step(5, {"model": get_model_state_dict(tensor_parallel(5, mesh)), "step": 5}, other)
    check(other["model"], whole(5))
    close_all(trainer, rollout)


def hsdp(model):
    """Copies that dcp would leave to one rank are published too, in place."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    trainer, rollout = open_handle(model, "trainer"), open_handle(model, "rollout")
    module = fsdp(1, mesh)
    saved(trainer, 1, get_model_state_dict(module))
    mine = {p.to_local().data_ptr() for p in module.parameters()}
    assert mine <= {address for _, address in shown(trainer)}
    flat = init_device_mesh("cpu", (2,))
    parallel = tensor_parallel(0, flat)
    loaded(rollout, 1, get_model_state_dict(parallel))
    check(get_model_state_dict(parallel), whole(1))
    close_all(trainer, rollout)


def everything(model):
    """Optimizer state, objects, nested dicts; a part of it; the default handles."""
    os.environ["TORCH_ROS_MODEL"] = model
    mesh = init_device_mesh("cpu", (2,))
    module = fsdp(1, mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.125)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {
        "model": get_model_state_dict(module),
        "optimizer": get_optimizer_state_dict(module, optimizer),
        "step": 17,
        "note": {"by": ["a", 1, 2.5]},
    }
    dcp.save(state, storage_writer=ROSWriter(7))

    other = fsdp(0, mesh)
    part = {"model": get_model_state_dict(other)}
    dcp.load(part, storage_reader=ROSReader("latest"))
    assert default_handle("load").version is None, "a part must not be served"
    for fqn, tensor in state["model"].items():
        got = part["model"][fqn]
        if isinstance(tensor, DTensor):
            tensor, got = tensor.to_local(), got.to_local()
        assert torch.equal(tensor, got), fqn

    again = fsdp(0, mesh)
    fresh = torch.optim.AdamW(again.parameters(), lr=0.5)
    for parameter in again.parameters():
        parameter.grad = torch.zeros_like(parameter)
    fresh.step()
    copy = {
        "model": get_model_state_dict(again),
        "optimizer": get_optimizer_state_dict(again, fresh),
        "step": 0,
        "note": {"by": ["", 0, 0.0]},
    }
    dcp.load(copy, storage_reader=ROSReader("latest"))
    assert (copy["step"], copy["note"]) == (17, {"by": ["a", 1, 2.5]})
    assert copy["optimizer"]["param_groups"][0]["lr"] == 0.125
    fqn = "up.weight"
    theirs = state["optimizer"]["state"][fqn]["exp_avg"].to_local()
    assert torch.equal(copy["optimizer"]["state"][fqn]["exp_avg"].to_local(), theirs)
    assert default_handle("load").version == 7
    assert default_handle("save").version == 7
    dist.barrier()


def refused(model):
    """Errors have our types on every rank, change nothing, and leave the handles usable."""
    rank = dist.get_rank()
    trainer, rollout = open_handle(model, "trainer"), open_handle(model, "rollout")
    mesh = init_device_mesh("cpu", (2,))
    state = lambda seed: get_model_state_dict(fsdp(seed, mesh))
    saved(trainer, 5, state(5))
    target = state(0)
    loaded(rollout, 5, target)

    def kinds(call):
        try:
            call()
        except CheckpointException as error:
            return {who: type(failure[0]) for who, failure in error.failures.items()}
        raise AssertionError("no error")

    assert kinds(lambda: saved(trainer, 4, state(4))) == dict.fromkeys(
        (0, 1), errors.VersionConflict
    )
    assert trainer.version == 5, "an old version must not cost the one that is held"
    late = lambda: loaded(rollout, 9, target, timeout_s=1)
    assert kinds(late) == dict.fromkeys((0, 1), errors.DeadlineExceeded)
    assert kinds(lambda: loaded(rollout, 3, target)) == dict.fromkeys(
        (0, 1), errors.VersionNotFound
    )
    other = {fqn: t.double() if t.is_floating_point() else t for fqn, t in state(0).items()}
    assert set(kinds(lambda: loaded(rollout, 5, other)).values()) == {errors.ManifestMismatch}
    more = {**target, "missing": torch.zeros(3)}
    assert set(kinds(lambda: loaded(rollout, 5, more)).values()) == {RuntimeError}, "DCP's own"
    assert rollout.version == 5, "a refused load must change nothing"
    check(target, whole(5))

    # One rank's bad input reaches the other one as the same error.
    bad = state(6)
    if rank == 1:
        bad["up.bias"] = torch.zeros(3).to_sparse()
    found = kinds(lambda: saved(trainer, 6, bad))
    assert set(found.values()) == {errors.UsageError}, found
    assert trainer.version == 5

    # On another group than the handle's ranks.
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    wrong = lambda: dcp.save(
        {"a": torch.ones(1)}, storage_writer=ROSWriter(9, handle=trainer), process_group=alone
    )
    assert set(kinds(wrong).values()) == {errors.UsageError}
    saved(trainer, 7, state(7))
    assert loaded(rollout, "latest", target) == 7
    check(target, whole(7))
    close_all(trainer, rollout)


def out_of_step(model):
    """A hook fails on one rank: that save or load fails on both, and the next one works."""
    beginnings.PATIENCE_S = 1.0
    trainer, rollout = open_handle(model, "trainer"), open_handle(model, "rollout")
    mine = f"of {dist.get_rank()}"  # or dcp leaves all to one rank
    state = lambda v: {"w": torch.full((1000,), float(v)), mine: torch.full((10,), float(v))}

    def failing(thing, hook):
        def raising(*args, **options):
            raise ArithmeticError(hook)

        if dist.get_rank() == 1:
            setattr(thing, hook, raising)

    def fails(call, **options):
        began_s = time.monotonic()
        try:
            call(**options)
        except CheckpointException as error:
            kinds = {rank: type(failure[0]) for rank, failure in error.failures.items()}
            assert kinds.pop(1) is ArithmeticError
            assert set(kinds.values()) <= {errors.CallAborted}, error
        else:
            raise AssertionError("no error")
        assert time.monotonic() < began_s + 25, "not before a deadline"

    version = 0
    for hook in ("create_local_plan", "finish_plan", "write_data"):
        writer, planner = ROSWriter(version, handle=trainer), DefaultSavePlanner()
        failing(planner if hasattr(planner, hook) else writer, hook)
        fails(partial(dcp.save, state(version)), storage_writer=writer, planner=planner)
        saved(trainer, version + 1, state(version + 1))
        version += 2
    for hook in ("prepare_local_plan", "read_data"):
        reader, planner, got = ROSReader(handle=rollout), DefaultLoadPlanner(), state(0)
        failing(planner if hasattr(planner, hook) else reader, hook)
        fails(partial(dcp.load, got), storage_reader=reader, planner=planner)
        assert loaded(rollout, "latest", got) == version - 1
        check(got, state(version - 1))
    close_all(trainer, rollout)


def own_failure(model):
    """handle calls: what one rank does wrong is an error on both, at once."""
    handle = open_handle(model, "r")
    if dist.get_rank() == 0:
        handle.register({"w": torch.ones(3)})
    started = time.monotonic()
    try:
        handle.publish(1)
        raise AssertionError("no error")
    except errors.UsageError as error:
        assert "no tensors" in str(error)
    assert time.monotonic() - started < 10
    dist.barrier()  # a rank that comes late, to a peer that has begun anew, goes on with that
    if dist.get_rank() == 1:
        handle.register({"w": torch.ones(3)})
    handle.publish(1)
    assert handle.version == 1
    close_all(handle)


def staged(model):
    """async_save publishes dcp's copy; a stager that would overwrite it is refused."""
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    handle, reader = open_handle(model, "trainer"), open_handle(model, "reader")
    state = {"w": torch.full((1000,), 1.0)}
    dcp.async_save(state, storage_writer=ROSWriter(1, handle=handle)).result()
    state["w"].fill_(2.0)  # the live tensor may change at once
    got = {"w": torch.zeros(1000)}
    loaded(reader, 1, got)
    assert torch.equal(got["w"], torch.full((1000,), 1.0))
    dcp.async_save(state, storage_writer=ROSWriter(2, handle=handle)).result()
    loaded(reader, 2, got)
    assert torch.equal(got["w"], torch.full((1000,), 2.0))

    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    stager.state_dict_cache = {"w": torch.zeros(1000)}  # else it wants pinned memory, and CUDA
    save = lambda version: dcp.async_save(
        state, storage_writer=ROSWriter(version, handle=handle), async_stager=stager
    ).result()
    save(3)
    try:
        save(4)
        raise AssertionError("no error")
    except CheckpointException as error:
        assert {type(f[0]) for f in error.failures.values()} == {errors.ContractBroken}
    assert handle.version is None
    save(5)
    handle.unpublish()
    save(6)
    close_all(handle, reader)


# Jobs of one process, which meet through files and through torch_ros


def publisher(model, folder, megabytes=1, seconds=60):
    """Publish version 1; leave when told so, having waited for the readers."""
    handle = open_handle(model, "trainer", ttl_s=3)
    handle.register({"w": pattern(megabytes)})
    handle.publish(1)
    Path(folder, "published").write_text(str(os.getpid()))
    wait_for(Path(folder, "leave"), seconds)
    handle.unpublish()
    handle.close()
    Path(folder, "left").touch()


def follower(model, folder, name, megabytes=1, serve_until=None, expect=None):
    handle = open_handle(model, name, ttl_s=3)
    got = torch.zeros_like(pattern(megabytes))
    handle.register({"w": got})
    Path(folder, f"{name}-ready").touch()
    try:
        handle.replicate("latest")
    except errors.TorchRosError as error:
        report = {"error": type(error).__name__, "at": time.time(), "text": str(error)}
        Path(folder, name).write_text(json.dumps(report))
        handle.close()
        assert type(error).__name__ == expect, error
        return
    assert expect is None, "no error"
    assert torch.equal(got, pattern(megabytes))
    Path(folder, name).write_text(json.dumps({"source": handle.last_read.source}))
    if serve_until is not None:
        wait_for(Path(folder, serve_until), 60)
    handle.close()


def adapter_of_shards(model):
    """Each rank has its rows of the matrices, and nothing is gathered."""
    from torch_ros.integrations.adapters import adapter_tensors, publish_adapter, read_adapter

    layer = nn.Linear(64, UNEVEN, bias=False)
    layer.lora_A = nn.ModuleDict({"default": nn.Linear(64, 3, bias=False)})
    layer.lora_B = nn.ModuleDict({"default": nn.Linear(3, UNEVEN, bias=False)})
    module = nn.ModuleDict({"up": layer})
    for parameter in module.parameters():
        dist.broadcast(parameter.data, 0)
    module.peft_config = {"default": PeftConfig(peft_type="LORA", r=3, target_modules={"up", "a"})}
    expected = {name: one.clone() for name, one in adapter_tensors(module).items()}
    fully_shard(layer)
    module._tp_size = 2  # as transformers notes a tp_plan: DTensors know which part they are
    assert all(isinstance(one, DTensor) for one in adapter_tensors(module).values())
    trainer = open_handle(model, "trainer")
    publish_adapter(trainer, 1, module)
    reader = torch_ros.open(model, rank=0, world_size=1)
    found = read_adapter(reader, reader.contents(1)).tensors
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    dist.barrier()
    close_all(trainer, reader)


class PeftConfig(dict):
    """A configuration, and the one method of PEFT's that is asked."""

    def to_dict(self):
        return dict(self)


def idle(model, seconds=6):
    """Two handles, one serving: what that takes of a core."""
    trainer, rollout = open_handle(model, "trainer"), open_handle(model, "rollout")
    trainer.register({"w": pattern(1)})
    trainer.publish(1)
    rollout.register({"w": torch.zeros_like(pattern(1))})
    rollout.replicate()
    time.sleep(1)
    started, used = time.monotonic(), time.process_time()
    time.sleep(seconds)
    share = (time.process_time() - used) / (time.monotonic() - started)
    assert share <= 0.02, f"{100 * share:.1f} % of a core"
    trainer.close()
    rollout.close()


def pattern(megabytes):
    return torch.arange(megabytes << 18, dtype=torch.int32)


def wait_for(path, seconds):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


if __name__ == "__main__":
    torch.set_num_threads(1)
    job, arguments = globals()[sys.argv[1]], json.loads(sys.argv[2])
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    job(**arguments)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    print("done", flush=True)
