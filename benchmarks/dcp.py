"""What dcp.save and dcp.load cost beside the bytes they move: 603 tensors and some objects.

Planners: dcp's own ("default"); ours; ours, and dcp.save with use_collectives=False ("apart"); or
no dcp at all, but publish and replicate of what was registered once ("none").

A step is a warm one of an unchanged job: the trainer takes its weights back, saves the next
version, and a rollout in the same processes loads it. Each step with DCP's own planners is followed
by one with ours, so that a noisy machine is noisy for both. Milliseconds of the slowest rank;
of the same work:

  bytes   reading, from the first byte to the last (`stages_s["read"]`)
  store   in etcd's answers, and waiting for the other ranks
  dcp     in torch's dcp and the planners: flattening, planning, collectives
  ours    the rest
  work    all of it, in processor time of the calling thread: waiting left out; work_dcp: of dcp

Prints a row of JSON per result, then a table.
"""

import argparse
import cProfile
import functools
import json
import multiprocessing
import os
import pickle
import pstats
import secrets
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_ros
from torch_ros.dcp import ROSReader, ROSWriter

LAYERS = 67  # of nine tensors each: 603
WIDTH = 64
WARM_UP = 2  # steps at the beginning of a turn that do not count
PARTS = ("total", "save", "load", "bytes", "store", "ours", "dcp", "work", "work_dcp")


def state(mesh: DeviceMesh | None, value: float) -> dict[str, Any]:
    """A nested state dict as FSDP2 makes it: 603 tensors, and a few objects."""
    shapes = {f"attn.w{name}": (WIDTH, WIDTH) for name in "qkvo"}
    shapes |= {f"mlp.w{name}": (2 * WIDTH, WIDTH) for name in "123"}
    shapes |= {"attn_norm": (WIDTH,), "mlp_norm": (WIDTH,)}
    model: dict[str, Any] = {}
    for layer in range(LAYERS):
        for name, (rows, *columns) in shapes.items():
            ranks = mesh.size() if mesh else 1
            tensor = torch.full((rows // ranks, *columns), value)
            if mesh is not None:
                tensor = DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
            model[f"layers.{layer}.{name}"] = tensor
    return {"model": model, "step": 0, "rng": {"seed": 17, "kind": "philox"}, "lr": 3e-4}


def anew(tree: Any) -> Any:
    """The same tensors as new objects, as each `state_dict()` makes them."""
    if isinstance(tree, dict):
        return {key: anew(value) for key, value in tree.items()}
    return tree.detach() if isinstance(tree, torch.Tensor) else tree


class Clock:
    """Seconds spent in some calls; calls within calls count once."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = defaultdict(float)
        self.worked_s: dict[str, float] = defaultdict(float)  # of that, on a processor
        self.calls: dict[str, int] = defaultdict(int)
        self._depth: dict[str, int] = defaultdict(int)

    def clear(self) -> None:
        self.spent_s.clear()
        self.worked_s.clear()
        self.calls.clear()

    def on(self, thing: object, method: str, name: str) -> None:
        inner = getattr(thing, method)

        @functools.wraps(inner)
        def timed(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return inner(*arguments, **options)  # a handle's own threads wait all the time
            self._depth[name] += 1
            self.calls[name] += 1
            began_s, began_work_s = time.perf_counter(), time.thread_time()
            try:
                return inner(*arguments, **options)
            finally:
                self._depth[name] -= 1
                if not self._depth[name]:
                    self.spent_s[name] += time.perf_counter() - began_s
                    self.worked_s[name] += time.thread_time() - began_work_s

        setattr(thing, method, timed)


class Bare:
    """The same without dcp, and without its objects: registered once, published, replicated."""

    def __init__(self, endpoint: str, model: str, saved: Any, got: Any) -> None:
        self.trainer, self.rollout = (
            torch_ros.open(f"{model}-bare", endpoint=endpoint, replica=name)
            for name in ("trainer", "rollout")
        )
        self.trainer.register(saved)
        self.rollout.register(got)


class Job:
    def __init__(self, endpoint: str, model: str, mesh: DeviceMesh | None) -> None:
        self._trainer, self._rollout = (
            torch_ros.open(model, endpoint=endpoint, replica=name)
            for name in ("trainer", "rollout")
        )
        self._saved, self._got = state(mesh, 1.0), state(mesh, 0.0)
        self._bare = Bare(endpoint, model, self._saved["model"], self._got["model"])
        self._version, self._clock = 0, Clock()
        for handle in (self._trainer, self._rollout, self._bare.trainer, self._bare.rollout):
            for method in ("_save", "_load", "_inspect"):
                self._clock.on(handle, method, "handle")
            for method in ("read", "commit", "wait"):
                self._clock.on(handle._group.kv, method, "store")  # noqa: SLF001  # it looks inside

    def step(self, planner: str) -> dict[str, float]:
        self._version += 1
        return self._without_dcp() if planner == "none" else self._with_dcp(planner)

    def _without_dcp(self) -> dict[str, float]:
        trainer, rollout = self._bare.trainer, self._bare.rollout
        trainer.unpublish()
        if dist.is_initialized():
            dist.barrier()
        self._clock.clear()
        began_s, began_work_s = time.perf_counter(), time.thread_time()
        trainer.publish(self._version)
        saved_s = time.perf_counter()
        rollout.update(self._version)
        loaded_s, worked_s = time.perf_counter(), time.thread_time() - began_work_s
        store_s, bytes_s = self._clock.spent_s["store"], rollout.last_read.stages_s["read"]
        return {
            "total": loaded_s - began_s,
            "save": saved_s - began_s,
            "load": loaded_s - saved_s,
            "bytes": bytes_s,
            "store": store_s,
            "ours": loaded_s - began_s - store_s - bytes_s,
            "dcp": 0.0,
            "work": worked_s,
            "work_dcp": 0.0,
            "requests": self._clock.calls["store"],
        }

    def _with_dcp(self, planner: str) -> dict[str, float]:
        self._trainer.unpublish()
        self._saved["step"] = self._version % 256
        saved, got = anew(self._saved), anew(self._got)
        writer = ROSWriter(self._version, handle=self._trainer)
        reader = ROSReader(self._version, handle=self._rollout)
        ours = planner != "default"
        if dist.is_initialized():
            dist.barrier()
        self._clock.clear()
        began_s, began_work_s = time.perf_counter(), time.thread_time()
        dcp.save(
            saved,
            storage_writer=writer,
            planner=writer.planner() if ours else None,
            use_collectives=planner != "apart",
        )
        saved_s = time.perf_counter()
        dcp.load(got, storage_reader=reader, planner=reader.planner() if ours else None)
        loaded_s, worked_s = time.perf_counter(), time.thread_time() - began_work_s
        assert got["step"] == self._version % 256
        spent_s, stages_s = self._clock.spent_s, self._rollout.last_read.stages_s
        return {
            "total": loaded_s - began_s,
            "save": saved_s - began_s,
            "load": loaded_s - saved_s,
            "bytes": stages_s["read"],
            "store": spent_s["store"],
            "ours": spent_s["handle"] - spent_s["store"] - stages_s["read"],
            "dcp": loaded_s - began_s - spent_s["handle"],
            "work": worked_s,
            "work_dcp": worked_s - self._clock.worked_s["handle"],
            "requests": self._clock.calls["store"],
        }

    def close(self) -> None:
        if dist.is_initialized():
            dist.barrier()
        for handle in (self._rollout, self._trainer, self._bare.rollout, self._bare.trainer):
            handle.close()


def work(
    given: argparse.Namespace, model: str, ranks: int, rank: int, results: "SimpleQueue[Any]"
) -> None:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    torch.set_num_threads(1)
    mesh = None
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{given.directory}/{ranks}", rank=rank, world_size=ranks
        )
        mesh = init_device_mesh("cpu", (ranks,))
    job = Job(given.endpoint, model, mesh)
    samples = []
    for _ in range(given.turns):
        for planner in given.planners:
            # What is remembered is of the last state dict as the last planner showed it.
            steps = [job.step(planner) for _ in range(WARM_UP + given.rounds)]
            samples += [(planner, step) for step in steps[WARM_UP:]]
    if given.profile and rank == 0:
        profile(functools.partial(job.step, given.planners[-1]))
    elif given.profile:
        for _ in range(10):
            job.step(given.planners[-1])
    results.put((rank, samples))
    job.close()
    if ranks > 1:
        dist.destroy_process_group()


def coordinator(ranks: int) -> dict[str, Any]:
    """What one step's plans cost the rank that dcp sends them to, collectives left out."""
    planners = (ROSWriter(1).planner(), ROSReader().planner())
    stubs = [(planner, pickle.dumps(planner.create_local_plan())) for planner in planners]
    took_s = []
    for _ in range(20):
        began_s = time.perf_counter()
        for planner, stub in stubs:
            made = planner.create_global_plan([pickle.loads(stub) for _ in range(ranks)])
            for plan in made[0] if isinstance(made, tuple) else made:
                pickle.dumps(plan)
        took_s.append(time.perf_counter() - began_s)
    bytes_each = max(len(stub) for _, stub in stubs)
    return {"coordinator_of": ranks, "min_ms": 1e3 * min(took_s), "bytes_per_rank": bytes_each}


def profile(call: Callable[[], object]) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(10):
        call()
    profiler.disable()
    pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(100)


def measure(given: argparse.Namespace, ranks: int) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    model = f"bench-dcp-{secrets.token_hex(4)}"
    processes = [
        context.Process(target=work, args=(given, model, ranks, rank, results), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    by_rank = [results.get()[1] for _ in processes]
    for process in processes:
        process.join()
    rows = []
    for planner in given.planners:
        steps = [
            max((samples[n][1] for samples in by_rank), key=lambda sample: sample["total"])
            for n in range(len(by_rank[0]))
            if by_rank[0][n][0] == planner
        ]
        parts = {
            part: {
                "median_ms": 1e3 * statistics.median(step[part] for step in steps),
                "min_ms": 1e3 * min(step[part] for step in steps),
            }
            for part in PARTS
        }
        requests = statistics.median(step["requests"] for step in steps)
        row = {"ranks": ranks, "planner": planner, "steps": len(steps), "etcd_requests": requests}
        rows.append({**row, **parts})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", default="local", help='"local", or "etcd://host:port"')
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7, help="steps in a turn")
    parser.add_argument("--planners", nargs="+", default=["none", "default", "ours", "apart"])
    parser.add_argument("--profile", action="store_true", help="of rank 0 and the last planner")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    with tempfile.TemporaryDirectory(prefix="torch-ros-bench-") as given.directory:
        for ranks in given.ranks:
            rows += measure(given, ranks)
    plans = [coordinator(ranks) for ranks in (1, 64, 1024)]
    for row in (*rows, *plans):
        print(json.dumps(row))
    heads = "".join(f"{part:>15}" for part in (*PARTS, "requests"))
    print(f"\n{'median / min, ms':20}{heads}")
    for row in rows:
        figures = (f"{row[part]['median_ms']:.1f} / {row[part]['min_ms']:.1f}" for part in PARTS)
        name = f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}, {row['planner']}"
        print(f"{name:20}" + "".join(f"{f:>15}" for f in (*figures, f"{row['etcd_requests']:.0f}")))
    for plan in plans:
        print(
            f"plans of {plan['coordinator_of']} ranks at one: {plan['min_ms']:.2f} ms a step, "
            f"{plan['bytes_per_rank']} bytes each"
        )


if __name__ == "__main__":
    main()
