"""What programs do with `torch_ros` here: trainers, rollouts, and how they take what happens.

The handles are real. A program calls them as a user's would, and writes over its tensors at the
first moment at which it may, with something that no version contains.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch

from torch_ros.copies.buffers import Copying
from torch_ros.costs import Costs
from torch_ros.errors import Fenced, NotAvailable, SeatLost, TorchRosError
from torch_ros.face import opening
from torch_ros.features.deltas.copies import DeltaOptions
from torch_ros.features.reading.reads import ReadTensors
from torch_ros.features.retention.flow import Retention
from torch_ros.shard.checkpoint import LoadRequest, SaveRequest
from torch_ros.shard.collective import collectively
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.local import LocalChunk, LocalTensor

TTL_S = 10
PROBE = 10_000  # the version that must get through once all faults are over
BLOCK_CELLS = 4  # of 8 bytes; tensors have 12 or more
CONTENT = 1000  # a cell says which content it is of, and where in it
# Rows so short that they are staged, although there are few of them.
CHEAP_COPIES = Costs(copy_s=0.0)
RELEASE_S = 1e-6  # until one that is not suspended any more is let go on
WAIT_S = 3.0  # of an update that waits
PATIENCE_S = 600  # of a program, once all faults are over


class Breaks(Exception):
    """An engine's own loader fails."""


class Struck(BaseException):
    """Ctrl-C."""


@dataclass(frozen=True)
class Task:
    """One call that all ranks of an incarnation make."""

    kind: str
    version: int | str = 0
    content: int = 0
    timeout_s: float = 20.0


@dataclass(eq=False)
class Start:
    """The processes of a replica from one start to its end, and the calls that they make."""

    world: object
    replica: str
    is_trainer: bool
    size: int
    sharding: str  # "rows", "whole" or "stages"; "gap": as rows, of which a cell is missing
    nonce: str | None = None
    run: str | None = None
    spot: bool = False
    retain: tuple = ()
    bucket: str | tuple[str | None, ...] | None = None  # of all ranks, or of each
    datacenter: str = "default"
    drain_s: float = 60.0
    linger_s: float = 0.0
    digests: str | tuple[str, ...] = "off"  # of all ranks, or of each
    borrow_bytes: int = 0  # more: it publishes copies
    deltas: int = 0  # more: it publishes copies
    delta_bytes: int | None = None
    installs: bool = False
    seeding: str = "foreground"
    seeding_bytes: int | None = None
    policy: Callable[[int], object] | None = None  # of a rank
    is_probe: bool = False
    loads: bool = False  # uses what dcp uses: save, and load
    store_wait_s: float | None = None  # of what it publishes
    script: Callable | None = None  # instead of tasks: what each of its processes does
    tasks: list[Task] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    is_replaced: bool = False  # another one with its name was started
    number: int = 0

    def task(self, index: int) -> Task:
        while len(self.tasks) <= index:
            self.tasks.append(self.world.next_task(self))
        return self.tasks[index]

    @property
    def publishes_copies(self) -> bool:
        return bool(self.borrow_bytes or self.deltas)

    @property
    def is_intact(self) -> bool:
        """Whether nothing has happened to it that it need not survive."""
        return not self.is_replaced and not any(p.is_gone or p.gave_up for p in self.processes)

    def __str__(self) -> str:
        return f"{self.replica}.{self.number}"


def chunk_of(sharding: str, number: int, shape: tuple[int, ...], rank: int, size: int):
    """Offsets and sizes of what a rank has of a tensor; None: nothing."""
    whole = (0,) * len(shape), shape
    if sharding == "whole":
        return whole
    if sharding == "stages":
        return whole if number % size == rank else None
    dim = len(shape) - 1  # columns of what has two dimensions: those rows are short and strided
    part = shape[dim] // size
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = rank * part, part - (sharding == "gap" and (rank, number) == (0, 0))
    return tuple(offsets), tuple(sizes)


@dataclass
class AllTensors:
    """Loads go into these, whatever the sources' layouts."""

    state: LocalState

    def fill(self, layouts) -> LocalState:
        return self.state

    def vet(self) -> None:
        pass


class Process:
    def __init__(self, world, start: Start, rank: int, number: int) -> None:
        self.world, self.start, self.rank, self.number = world, start, rank, number
        self.actors: list = []
        self.held_up: list = []
        self.suspended_until_s = self.cut_until_s = self.unlinked_until_s = 0.0
        self.mute_until_s = 0.0  # what is read of it comes then
        self.unsure_until_s = 0.0
        self.hindered_s = 0.0  # how long it was suspended or cut off, in all
        self.died_s: float | None = None
        self.is_gone = False  # its memory cannot be read any more
        self.gave_up = False  # its program ended before the end
        self.handle = None
        self.task: Task | None = None
        self.made = 0  # tasks
        self.is_called = False  # its program has called it, and may be interrupted
        self.loaded: int | None = None  # by the last load
        self.engine: int | None = None  # the content that it uses; None: a mixture
        self.heard: set[str] = set()  # replicas that it has waited for
        self.closing_s: float | None = None  # when it began to
        # When its own holding was made, from whom, and when that one's was; for each source.
        self.reads_from: list[tuple] = []
        self._make_memory()

    @property
    def shard(self):
        return self.handle._shard

    def _make_memory(self) -> None:
        pieces, index = [], []
        for number, (fqn, shape) in enumerate(self.world.shapes):
            start = self.start
            chunk = chunk_of(start.sharding, number, shape, self.rank, start.size)
            if chunk is None:  # a rank of a pipeline does not know the tensors of the others
                continue
            offsets, sizes = chunk
            of_all = np.arange(math.prod(shape)).reshape(shape)
            mine = of_all[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            index.append(mine.reshape(-1) + 100 * number)
            pieces.append((fqn, shape, offsets, sizes))
        self.ends = []  # of the blocks, in cells
        for part in index:
            begin = self.ends[-1] if self.ends else 0
            cells = range(BLOCK_CELLS, len(part), BLOCK_CELLS)
            self.ends += [begin + cell for cell in (*cells, len(part))]
        self.index = np.concatenate(index) if index else np.zeros(0, np.int64)
        self.memory = torch.full((len(self.index),), -1, dtype=torch.int64)
        self.cells = self.memory.numpy()
        self.base = self.memory.data_ptr()
        self.tensors, begin = [], 0
        for fqn, shape, offsets, sizes in pieces:
            end = begin + math.prod(sizes)
            chunks = (LocalChunk(offsets, self.memory[begin:end].view(sizes)),)
            begin = end
            spread = self.start.sharding in {"rows", "gap"}
            self.tensors.append(LocalTensor(fqn, torch.int64, shape, chunks, spread=spread))

    def __str__(self) -> str:
        return f"{self.start}/{self.rank}"

    @property
    def is_suspended(self) -> bool:
        return self.suspended_until_s > self.world.now_s

    @property
    def is_unreachable(self) -> bool:
        return self.is_gone or self.unlinked_until_s > self.world.now_s

    @property
    def is_hindered(self) -> bool:
        return max(self.suspended_until_s, self.cut_until_s) > self.world.now_s - RELEASE_S

    # Memory

    def expected(self, content: int):
        return self.world.cells(self.index, content)

    def fill(self, content: int) -> None:
        self.cells[:] = self.expected(content)
        self.world.checks.wrote(self)

    def content(self) -> int | None:
        """Of all that was ever published, what its cells are; None: they are torn."""
        there = {*self.world.checks.truth.values()}
        return next((c for c in there if np.array_equal(self.cells, self.expected(c))), None)

    def scribble_if_free(self) -> None:
        """The most eager owner."""
        if self.handle is None or self.handle.version is None:
            self.cells[:] = -self.world.number()
            self.world.checks.wrote(self)

    # Life

    def live(self) -> None:
        try:
            self._live()
        except SeatLost as fenced:
            self.world.tell(self, f"is fenced for good: {fenced.reason}")
            self.world.saw("fenced for good")
            self._take_back()
        self.gave_up = self.gave_up or not self.world.is_calm
        if self.handle is not None:
            self._close()
            assert not self.copies or self._has_keepers, "copies are left after close"
            self.cells[:] = -self.world.number()
        self.is_gone = True
        self.reads_from = []
        self.world.tell(self, "ends")

    def _hindered(self) -> float:
        """How long the actor that asks was kept from moving, in all: that is no call's doing."""
        return self.hindered_s + self.world.current.stood_s

    def _close(self) -> None:
        world, hindered_s = self.world, self._hindered()
        self.closing_s, most_s = world.now_s, self.start.linger_s
        # Drawn apart, so that each seed stays much what it was.
        draw = Random(f"leaves/{world.seed}/{self.number}").random()
        if draw < 0.2 and self.start.script is None:
            most_s = self.start.linger_s = 4.0
            self.handle.leave(within_s=most_s)
            world.saw("left")
        else:
            self.handle.close()
        took_s = world.now_s - self.closing_s - (self._hindered() - hindered_s)
        world.checks.closed(self, most_s, took_s)

    @property
    def _has_keepers(self) -> bool:
        return any(actor.role.startswith("keeps") for actor in self.actors)

    def _live(self) -> None:
        start, world = self.start, self.world
        try:
            self.handle = opening.open(
                "m",
                endpoint=f"sim://{self.number}",
                replica=start.replica,
                rank=self.rank,
                world_size=start.size,
                run=start.run,
                bucket=start.bucket[self.rank] if isinstance(start.bucket, tuple) else start.bucket,
                retain=start.retain,
                datacenter=start.datacenter,
                spot=start.spot,
                timeout_s=120 if start.is_probe else 20,
                ttl_s=TTL_S,
                drain_s=start.drain_s,
                linger_s=start.linger_s,
                digests=start.digests
                if isinstance(start.digests, str)
                else start.digests[self.rank],
                borrow_bytes=start.borrow_bytes,
                installs=start.installs,
                policy=start.policy and start.policy(self.rank),
                seeding=start.seeding,
                seeding_bytes=start.seeding_bytes,
                costs=CHEAP_COPIES,
            )
        except (TorchRosError, Struck) as error:
            world.saw(f"open: {type(error).__name__}")
            world.tell(self, f"open raises {error}")
            assert not start.is_probe, f"I6: with all faults over, open fails: {error}"
            self.gave_up = True
            return
        world.saw("opened")
        world.checks.seated(self)
        if not start.loads:
            self.shard.tensors.show(LocalState(self.tensors, {}, {}))
        if start.script is not None:
            start.script(self)
            return
        while not world.is_calm:
            task = self.task = start.task(self.made)
            self.made += 1
            if task.kind == "close":
                world.saw("closed")
                self.gave_up = True
                return
            self._attempt(task)
        if start.sharding == "gap":  # it never gets anywhere
            self.gave_up = True
            return
        self._finale()

    def _attempt(self, task: Task) -> Exception | None:
        world, began_s, hindered_s = self.world, self.world.now_s, self._hindered()
        error, self.is_called = None, True
        try:
            answer = getattr(self, task.kind)(task)
            world.tell(self, f"{task.kind} {task.version} -> {answer}")
            world.saw(f"{task.kind}: {'ok' if answer is None else answer}")
        except SeatLost as fenced:
            world.tell(self, f"{task.kind} {task.version} raises {fenced}")
            world.saw(f"{task.kind}: SeatLost")
            if isinstance(fenced, Fenced):
                raise
            error = fenced
        except TorchRosError as failed:
            world.tell(self, f"{task.kind} {task.version} raises {failed!r}")
            world.saw(f"{task.kind}: {type(failed).__name__}")
            world.checks.withdrew(self)
            error = failed
        except Struck:  # its program catches that, and goes on
            world.tell(self, f"{task.kind} {task.version} is interrupted")
            world.checks.withdrew(self)
        finally:
            self.is_called = False
        took_s = world.now_s - began_s - (self._hindered() - hindered_s)
        world.checks.took(self, task, took_s)
        if task.kind not in {"unpublish", "idle", "stream"}:
            self.scribble_if_free()
        return error

    def _take_back(self) -> None:
        """Fenced for good, its owner gets the tensors back all the same."""
        if self.handle is not None and self.world.random() < 0.7:
            self.handle.unpublish(timeout_s=30)
            assert self.handle.version is None, "I2: unpublish returned, and a version is held"
            self.scribble_if_free()

    @property
    def forerunner(self):
        """The shard of its forerunner, if that is open."""
        return self.ahead and self.ahead._shard

    @property
    def copies(self):
        """The copies in host memory that it has put aside."""
        return next(each for each in self.shard.features if isinstance(each, Retention)).copies

    @property
    def ahead(self):
        """Its forerunner, if it has one."""
        return self.handle and getattr(self.shard.policy, "forerunner", None)

    # Calls

    def publish(self, task: Task) -> None:
        if self.start.publishes_copies:
            self._publish_copy(task)
            return
        if self.handle.version is not None and self.world.random() < 0.9:
            self.handle.unpublish(timeout_s=task.timeout_s)  # before it trains
        if self.handle.version is None:
            self.fill(task.content)
        elif self.start.loads or self.shard.group.ledger.unfinished:
            return  # it would publish the old content again
        if self.start.loads:
            is_offered = self.handle.checkpoints.save(
                SaveRequest(
                    task.version,
                    LocalState(self.tensors, {}, {}),
                    timeout_s=task.timeout_s,
                    store_wait_s=self.start.store_wait_s,
                )
            )
        else:
            is_offered = self.handle.publish(
                task.version, timeout_s=task.timeout_s, store_wait_s=self.start.store_wait_s
            )
        if is_offered:
            self.world.checks.returned(self, task.version)
        else:
            assert self.handle.version == task.version, "it returned, and nothing is held"
            self.world.saw("not waited for")

    def _publish_copy(self, task: Task) -> None:
        self.cells[:] = self.expected(task.content)
        copying = Copying().along(DeltaOptions(self.start.deltas, self.start.delta_bytes))
        request = SaveRequest(
            task.version,
            LocalState(self.tensors, {}, {}),
            copier=self.handle.copies.copier(copying),
            timeout_s=task.timeout_s,
        )
        self.handle.checkpoints.save(request)
        self.world.checks.returned(self, task.version)

    def unpublish(self, task: Task) -> None:
        self.handle.unpublish(timeout_s=task.timeout_s)
        assert self.handle.version is None, "I2: unpublish returned, and a version is held"
        self.scribble_if_free()

    def replicate(self, task: Task):
        if self.start.loads:
            return self.load(task)
        version = self.handle.replicate(task.version, timeout_s=task.timeout_s)
        self.world.checks.returned(self, version)
        return None

    def begin(self, task: Task):
        """As a trainer that begins again: go on with the newest there is, if there is any."""
        version = self.handle.replicate(task.version, missing_ok=True, timeout_s=task.timeout_s)
        if version is None:
            return "none"
        self.world.checks.returned(self, version)
        return None

    def _follow(self, task: Task) -> None:
        """Each rank is told to stop by its own clock."""
        world, until_s = self.world, self.world.now_s + WAIT_S
        is_told = lambda: world.now_s > until_s
        for version in self.handle.follow(task.version, stop=is_told, timeout_s=task.timeout_s):
            world.checks.returned(self, version)
            world.saw("followed")
        world.saw("stopped")

    def update(self, task: Task):
        if self.start.loads:
            return self.load(task)
        # Drawn apart, so that each seed stays much what it was.
        draw = Random(f"waits/{self.world.seed}/{self.start.number}/{self.made}").random()
        wait_s = WAIT_S if draw < 0.3 and task is self.task else 0.0  # which all ranks make
        if wait_s and draw < 0.1 and not isinstance(task.version, int):
            return self._follow(task)
        is_new = self.handle.update(task.version, wait_s=wait_s, timeout_s=task.timeout_s)
        if is_new:
            self._saw_deltas()
        if wait_s:
            self.world.saw(f"waited for {'something' if is_new else 'nothing'}")
        if self.handle.version is not None:  # else its end was learned, and then forgotten
            self.world.checks.returned(self, self.handle.version)
        return None if is_new else False

    def _saw_deltas(self) -> None:
        read = self.handle.last_read
        if read is not None and read.via == "delta":
            self.world.saw("read by deltas")
            if read.links > 1:
                self.world.saw("read by deltas of several versions")
            if read.prefetched:
                self.world.saw("read by deltas that were prefetched")

    def load(self, task: Task):
        checkpoints = self.handle.checkpoints
        if self.start.number % 3 == 0:
            self.read_and_serve(task)
            return
        report = checkpoints.load(
            LoadRequest(
                task.version,
                checkpoints.inspect(task.version, task.timeout_s),
                AllTensors(LocalState(self.tensors, {}, {})),
                timeout_s=task.timeout_s,
            )
        )
        self.world.saw("loaded")
        self.loaded = report.version
        self.world.checks.returned(self, report.version)

    def read(self, version: int | str, timeout_s: float):
        state = LocalState(self.tensors, {}, {})
        request = LoadRequest(
            version,
            None,
            AllTensors(state),
            is_served=False,
            timeout_s=timeout_s,
            verb="read",
        )
        flow = lambda deadline: ReadTensors(self.shard, request, deadline).run()
        report = collectively(self.shard, request.asked, flow, timeout_s)
        assert self.handle.version is None, "a read serves"
        self.world.checks.returned(self, report.version)
        return report

    def read_and_serve(self, task: Task) -> None:
        """Read, and offer that when it has been looked at, as engines do."""
        self.loaded = self.read(task.version, task.timeout_s).version
        self.world.saw("read")
        if Random(f"{self.world.seed}/{self.start.number}/{self.made}").random() < 0.6:
            version = self.handle.serve(timeout_s=task.timeout_s)
            self.world.saw("served")
            self.world.checks.returned(self, version)

    def stream(self, task: Task) -> None:
        """Look at all tensors, in no hurry; and now and then leave in the middle."""
        world = self.world
        draw = Random(f"stream/{world.seed}/{self.number}/{self.made}")
        slow, leaves = draw.random() < 0.3, draw.random() < 0.2
        self.streamed(
            task.version,
            draw.choice([96, 200, 1 << 20]),
            timeout_s=task.timeout_s,
            pause_s=lambda: draw.random() * (20 if slow else 0.1),
            leave_after=draw.randrange(3) if leaves else len(world.shapes),
        )

    def streamed(
        self,
        version: int | str,
        buffer_bytes: int = 96,  # the smallest tensor
        *,
        timeout_s: float = 100.0,
        pause_s: Callable = lambda: 0.0,
        leave_after: int = 1 << 30,
    ) -> list[str]:
        """The names that came, each with the version's content for as long as it is good."""
        world, shapes = self.world, dict(self.world.shapes)
        stream = self.handle.stream(
            version, list(shapes), buffer_bytes=buffer_bytes, timeout_s=timeout_s
        )
        world.saw("stream begun")
        came, good = [], []
        while len(came) < leave_after:
            world.checks.handed_out(self, stream, good)  # nobody writes there until it is asked
            began_s, hindered_s = world.now_s, self._hindered()
            try:
                if stream.left_in_buffer == 0:
                    good = []
                fqn, tensor = next(stream)
            except StopIteration:
                break
            finally:
                took_s = world.now_s - began_s - (self._hindered() - hindered_s)
                world.checks.took(self, Task("next", timeout_s=timeout_s), took_s)
            came.append(fqn)
            good.append((fqn, tensor))
            world.checks.handed_out(self, stream, good)
            world.sleep(pause_s())
        world.checks.handed_out(self, stream, good)
        world.saw("stream left" if len(came) < len(shapes) else "streamed")
        stream.close()
        world.checks.stream_ended(self, stream)
        return came

    def install(self, task: Task) -> None:
        """Bring a version into an engine; now and then that fails on a rank, or on all."""
        draw = Random(f"install/{self.world.seed}/{self.number}/{self.made}")
        fails, pause_s = draw.random() < 0.15, draw.choice([0.0, 0.0, 3.0])
        before = self.engine
        try:
            self.installed(task.version, task.timeout_s, pause_s=pause_s, fails=fails)
        except (Breaks, Struck, TorchRosError) as error:
            self.engine = before  # its owner puts the old weights back, by hand
            self.world.checks.uses(self)
            if not isinstance(error, Breaks):
                raise

    def installed(
        self, version: int | str, timeout_s: float = 100, *, pause_s: float = 0.0, fails=False
    ) -> None:
        with self.handle.installing(version, timeout_s=timeout_s) as ref:
            if self.engine != self.world.checks.truth[ref.uid]:  # else the same bytes come again
                self.engine = None
            self.world.checks.uses(self)
            if self.start.loads:
                self.loaded = self.read(ref.version, timeout_s).version
            elif self.handle.version is None:
                self.handle.replicate(ref.version, timeout_s=timeout_s)
            else:
                self.handle.update(ref.version, timeout_s=timeout_s)
            self.world.sleep(pause_s)
            if fails:
                raise Breaks
            self._saw_deltas()
            self.engine = self.content()

    def await_installed(self, task: Task) -> None:
        began_s = self.world.now_s
        found = self.handle.wait_installed(task.version, timeout_s=task.timeout_s)
        self.world.checks.waited(self, task.version, found, began_s)

    def wait(self, task: Task) -> None:
        self.handle.wait(bool, timeout_s=task.timeout_s)

    def list(self, task: Task) -> None:
        self.handle.list(timeout_s=task.timeout_s)

    def idle(self, task: Task) -> None:
        if self.world.makes_deltas and not (self.start.is_trainer or self.start.loads):
            self.world.spawn(self, "prefetches", self._prefetch, (task.timeout_s,))
        if self.world.is_lending and not self.start.is_trainer:
            self._borrow(task.timeout_s)
        else:
            self.world.sleep(task.timeout_s)

    def _prefetch(self, longest_s: float) -> None:
        """Beside whatever the program does: it may idle, update, or close by then."""
        world = self.world
        draw = Random(f"prefetch/{world.seed}/{self.number}/{self.made}")
        world.sleep(draw.random() * longest_s)
        with contextlib.suppress(TorchRosError):
            staged = self.handle.prefetch("latest", timeout_s=20)
            world.saw(f"prefetched {'nothing' if staged is None else 'a version'}")

    def _borrow(self, lasts_s: float) -> None:
        world = self.world
        try:
            with self.handle.borrow(timeout_s=5) as tensors:
                world.checks.borrowed(self, tensors)
                world.sleep(lasts_s)
                world.checks.borrowed(self, tensors)
        except NotAvailable as error:
            world.saw(f"borrow: {type(error).__name__}")

    # The end, when all faults are over

    def _finale(self) -> None:
        world = self.world
        if self.start.is_probe:
            self._insist(Task("publish", PROBE, world.content(PROBE), 120), PROBE)
        else:
            if self.start.is_trainer:
                self._insist(Task("unpublish", timeout_s=120), None)
            kind = "install" if self.start.installs else "update"
            self._insist(Task(kind, "latest", timeout_s=60), PROBE)
        world.meet("has the probe", self)
        self._await_release()
        self._insist(Task("unpublish", timeout_s=120), None)
        world.meet("has nothing", self)
        if self.start.retain:
            return
        world.meet("nobody retains", self)
        until_s = world.now_s + 2 * TTL_S + self.start.drain_s + 30
        while self.copies and world.now_s < until_s:
            world.sleep(4.0)
        left = self.copies and self.start.is_intact
        assert not left, f"I6: {self} keeps {len(self.copies)} copies that nobody retains"

    def _await_release(self) -> None:
        """A copy that was fetched is let go of when a replica has the version."""
        ahead, world = self.ahead, self.world
        until_s = world.now_s + 2 * TTL_S + self.start.drain_s + 30
        while ahead and ahead._room and world.now_s < until_s and self.handle.version == PROBE:
            world.sleep(4.0)
        is_kept = ahead and ahead._room and self.start.is_intact and self.handle.version == PROBE
        assert not is_kept, f"I15: {self} keeps a copy that nobody needs"

    def _insist(self, task: Task, wanted: int | None) -> None:
        """What a program does that wants to get on: it calls again."""
        world, until_s = self.world, self.world.now_s + PATIENCE_S
        errors: list[Exception] = []
        while not self._has(wanted):
            error = self._attempt(task)
            if error is not None:
                errors.append(error)
            if len(errors) > 3 and not self.start.is_intact:
                raise Fenced(self.start.replica, "its peers are gone")
            is_late = world.now_s > until_s and self.start.is_intact
            assert not is_late, (
                f"I6: with all faults over, {self} cannot {task.kind}: {errors[-3:]}"
            )
            if world.now_s > until_s:
                raise Fenced(self.start.replica, "its peers are gone")
            if not self._has(wanted):
                world.sleep(0.5 if error is not None else 5.0)

    def _has(self, wanted: int | None) -> bool:
        if self.start.loads and wanted is not None and not self.start.is_probe:
            return self.loaded == wanted
        return self.handle.version == wanted
