"""What dcp.save and dcp.load cost beside the bytes they move: 603 tensors and some objects.

A step is a warm one of an unchanged job: the trainer takes its weights back and saves the next
version, a rollout of as many ranks in other processes loads it. What of it is DCP's own, its rounds
between the ranks and its planning, is measured with a storage that does nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import tensors as contents
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import Actors, Child, Setup, ask_all, say, seconds, started
from idle_storage import IdleReader, IdleWriter, metadata_of
from ours import opened
from report import Report, Row

import torch_ros
from torch_ros.dcp import ROSReader, ROSWriter

PART = "dcp.save and dcp.load"
RANKS = (1, 2)
STEPS, WARM_UP = 7, 2  # of a turn, in which one way is taken again and again

BARE, OURS, APART, DEFAULT, IDLE, IDLE_DEFAULT = (
    "publish and replicate, no DCP",
    "our planners",
    "our planners, use_collectives=False",
    "DCP's planners",
    "DCP alone, nothing planned or stored",
    "DCP alone, its planners, nothing stored",
)
ALONE = {OURS: IDLE, DEFAULT: IDLE_DEFAULT}
BY_DCP = (DEFAULT, IDLE_DEFAULT)  # planned with its planners
# What is compared follows each other, so that a noisy machine is noisy for both.
WAYS = (BARE, IDLE_DEFAULT, DEFAULT, OURS, IDLE, APART)
MOST_MS = {OURS: 10.0, DEFAULT: 100.0}


def anew(tree: Any) -> Any:
    """The same tensors as new objects, as each `state_dict()` makes them."""
    if isinstance(tree, dict):
        return {key: anew(value) for key, value in tree.items()}
    return tree.detach() if isinstance(tree, torch.Tensor) else tree


class End:
    """A rank of the trainer or of the rollout, with one handle for dcp and one without."""

    def __init__(self, setup: Setup, role: str, ranks: int, rank: int) -> None:
        mesh = contents.join(setup.directory, f"{role}-{ranks}", rank, ranks) if ranks > 1 else None
        self._state = contents.nested(mesh, 0.0)
        model = f"{setup.name}-dcp-{ranks}"
        self._handle = torch_ros.open(model, endpoint=setup.endpoint, replica=role)
        self._bare = opened(setup, f"bare-{ranks}", role, self._state["model"])
        self._metadata = metadata_of(self._state)

    def take_back(self, version: int) -> None:
        """So that the next version can be written, and saved or loaded."""
        self._handle.unpublish()
        self._bare.unpublish()
        self._state["step"] = version % contents.VALUES

    def save(self, version: int, way: str) -> float:
        if way == BARE:
            return self._timed(lambda: self._bare.publish(version))
        saved, meets = anew(self._state), way != APART
        kind = IdleWriter if way in ALONE.values() else ROSWriter
        writer = kind(version, handle=self._handle)
        planner = None if way in BY_DCP else writer.planner()
        return self._timed(
            lambda: dcp.save(saved, storage_writer=writer, planner=planner, use_collectives=meets)
        )

    def load(self, version: int, way: str) -> tuple[float, float]:
        """Seconds of it all, and of that, those in which bytes moved."""
        if way == BARE:
            elapsed_s = self._timed(lambda: self._bare.replicate(version))
            return elapsed_s, self._bare.last_read.stages_s["read"]
        loaded, is_idle = anew(self._state), way in ALONE.values()
        reader: ROSReader
        reader = IdleReader(self._metadata) if is_idle else ROSReader(version, handle=self._handle)
        planner = None if way in BY_DCP else reader.planner()
        loaded["step"] = -1
        elapsed_s = self._timed(lambda: dcp.load(loaded, storage_reader=reader, planner=planner))
        if is_idle:
            return elapsed_s, 0.0
        assert loaded["step"] == version % contents.VALUES
        return elapsed_s, self._handle.last_read.stages_s["read"]

    def _timed(self, call: Callable[[], object]) -> float:
        if dist.is_initialized():
            dist.barrier()
        return seconds(call)

    def close(self) -> None:
        if dist.is_initialized():
            dist.barrier()
        self._handle.close()
        self._bare.close()


class Step(NamedTuple):
    save_s: float  # of the slowest rank, as all of these
    load_s: float
    bytes_s: float

    @property
    def elapsed_s(self) -> float:
        return self.save_s + self.load_s

    @property
    def added_s(self) -> float:
        return self.elapsed_s - self.bytes_s


def end(setup: Setup, role: str, ranks: int, rank: int) -> Actors:
    return {"end": End(setup, role, ranks, rank)}


def measure(setup: Setup, report: Report) -> None:
    for ranks in RANKS:
        builds = {
            f"{role} {rank}": partial(end, setup, role, ranks, rank)
            for role in ("trainer", "rollout")
            for rank in range(ranks)
        }
        with started(builds) as ends:
            trainers, rollouts = ends[:ranks], ends[ranks:]
            found: dict[str, list[Step]] = {way: [] for way in WAYS}
            version = 0
            for number in range(setup.repeat):
                for way in WAYS:
                    # What is remembered is of the last state dict as the last way showed it.
                    for step in range(WARM_UP + STEPS):
                        version += 1
                        taken = _step(trainers, rollouts, version, way)
                        if step >= WARM_UP:
                            found[way].append(taken)
                say(f"  ranks: {ranks}, turn {number + 1} of {setup.repeat}")
        _tell(report, ranks, found)


def _step(trainers: Sequence[Child], rollouts: Sequence[Child], version: int, way: str) -> Step:
    ask_all((*rollouts, *trainers), "end", "take_back", version)
    save_s = max(ask_all(trainers, "end", "save", version, way))
    load_s, bytes_s = max(ask_all(rollouts, "end", "load", version, way))
    return Step(save_s, load_s, bytes_s)


def _tell(report: Report, ranks: int, found: dict[str, list[Step]]) -> None:
    def add(what: str, samples_s: list[float]) -> Row:
        params = {"tensors": contents.NESTED_COUNT, "ranks": ranks}
        samples = [1e3 * one_s for one_s in samples_s]
        row = Row(part=PART, what=what, params=params, unit="ms", samples=samples, has_tail=True)
        return report.add(row)

    for way, steps in found.items():
        add(f"{way}: save", [step.save_s for step in steps])
        add(f"{way}: load", [step.load_s for step in steps])
        if way in ALONE.values():
            continue
        added = {"the bytes": add(f"{way}: all but the bytes", [step.added_s for step in steps])}
        if way != BARE:
            pairs = zip(steps, found[BARE], strict=True)
            by_dcp_s = [step.elapsed_s - bare.elapsed_s for step, bare in pairs]
            added[BARE] = add(f"{way}: more than without DCP", by_dcp_s)
        if way in ALONE:
            by_us_s = [
                step.elapsed_s - bare.elapsed_s - alone.elapsed_s
                for step, bare, alone in zip(steps, found[BARE], found[ALONE[way]], strict=True)
            ]
            add(f"{way}: more than without DCP and DCP alone", by_us_s)
        if ranks == max(RANKS) and way in MOST_MS:
            for to, row in added.items():
                what = f"dcp with {way}, {ranks} ranks: added to {to}"
                report.expect(what, row.median, at_most=MOST_MS[way], unit="ms")
