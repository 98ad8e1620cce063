"""Fills tensors from the files of a version, in any sharding, by checked ranges."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread

import numpy as np
import torch

from torch_ros.allocation import allocating
from torch_ros.bucket.files import PART_BYTES, StoredFile, StoredVersion, is_part
from torch_ros.bucket.objects import ObjectStore
from torch_ros.weights.columns import Ints, numbered
from torch_ros.weights.local import build, local_chunks, span_of
from torch_ros.weights.manifest import Layout
from torch_ros.weights.plan import ReadPlan, plan
from torch_ros.weights.staging import StagedCopy, copy_staged
from torch_ros.weights.writable import require_none, unwritable

WINDOW_BYTES = 16 * PART_BYTES  # of a file, that one thread fetches, checks and copies out
THREADS = 4  # each has two windows of memory
COPY_S = 0.001  # between two looks whether windows are copied
LOOK_S = 1.0  # who waits for a window looks this often whether to go on

Look = Callable[[int], object]
_Came = tuple[int, int]  # of a window: bytes that were wanted, and that came
"""Told how many more bytes have been filled, and asked whether to go on: it raises if not."""


@dataclass(slots=True)
class Window:
    """A stretch of a file, and the bytes that are wanted of it; one may end in the next window."""

    file: int
    direct: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Offset in the file, bytes, target chunk, offset there in bytes."""
    staged: list[tuple[int, StagedCopy]] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """The bytes that are wanted of it."""
        return sum(each[1] for each in self.direct) + sum(c.size_bytes for _, c in self.staged)

    def parts(self) -> Sequence[int]:
        wanted = [(start, size) for start, size, _, _ in self.direct]
        wanted += [(start, copy.size_bytes) for start, copy in self.staged]
        found: set[int] = set()
        for start, size in wanted:
            found.update(range(start // PART_BYTES, (start + size - 1) // PART_BYTES + 1))
        return sorted(found)


class _Gate:
    """Threads write within it. When it has been shut, none does, whatever it still waits for.

    Without a lock, which Ctrl-C might leave taken: each side writes before it looks at the other's.
    """

    def __init__(self) -> None:
        self._inside, self.is_shut = set[int](), False

    def __enter__(self) -> None:
        self._inside.add(threading.get_ident())
        if self.is_shut:
            self.__exit__()
            raise _Shut

    def __exit__(self, *_: object) -> None:
        self._inside.discard(threading.get_ident())

    def await_empty(self) -> None:
        """Returns when nobody writes, whatever interrupts it: copying a window is soon done."""
        interrupted: BaseException | None = None
        while self._inside:
            try:
                time.sleep(COPY_S)
            except (KeyboardInterrupt, SystemExit) as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted


class _Shut(Exception):
    """It came too late."""


def fill(
    store: ObjectStore, folder: str, stored: StoredVersion, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Fill these tensors, or this process's shards of them. Their content is undefined on an error.

    Otherwise as `fill_chunks`.

    Raises:
        UsageError: No plain tensors, or some that may not be written to. Nothing was read.
    """
    found = local_chunks(tensors)
    require_none("load", unwritable((t.fqn, chunk.tensor) for t in found for chunk in t.chunks))
    layout, memory = build(found, {})
    fill_chunks(store, folder, stored, (layout, memory))
    torch.autograd.graph.increment_version([t for t in memory if not t.is_inference()])


def fill_chunks(
    store: ObjectStore,
    folder: str,
    stored: StoredVersion,
    target: tuple[Layout, Sequence[torch.Tensor]],
    look: Look = lambda _: None,
) -> int:
    """Fill chunks of memory; how many bytes came for that, in whole parts of files.

    Nothing is written to them after the return, or an error: requests that are under way then end
    by themselves, and what they bring is dropped. An interpreter that exits waits for none.

    Takes 512 MiB of memory at most, and reads the parts of files that have something for them.

    Args:
        target: The chunks, and the memory of each.
        look: Called by this thread, with the bytes of each window that are wanted, and with 0 while
            it waits. What it raises ends it.

    Raises:
        ManifestMismatch: A name, shape or dtype that the version does not have. Nothing was read.
        UnreadableVersion: A file is gone, or has other bytes than were archived.
        BucketError: The store refuses, or does not answer.
    """
    layout, memory = target
    planned = plan([file.layout for file in stored.files], layout, staging_bytes=PART_BYTES)
    # The threads that write to them are in nobody's inference mode.
    with torch.inference_mode(mode=False), torch.no_grad():
        targets = [_bytes_of(chunk) for chunk in memory]

    gate, size_bytes, held = _Gate(), 0, [targets, memory]

    def load(window: Window) -> _Came:
        file, came_bytes = stored.files[window.file], 0
        with torch.no_grad():
            for first, content in landed(store, f"{folder}/{file.name}", file, window.parts()):
                with gate:
                    _copy_out(window, first, content, *held)
                came_bytes += content.numel()
        return window.size_bytes, came_bytes

    todo = windows(planned, stored.files)
    jobs, replies = SimpleQueue[Window](), SimpleQueue[_Came | BaseException]()
    for window in todo:
        jobs.put(window)

    def work() -> None:
        while not gate.is_shut:
            try:
                replies.put(load(jobs.get_nowait()))
            except Empty:
                return
            except BaseException as error:  # noqa: BLE001  # raised by who waits for it
                replies.put(error)

    try:
        for _ in todo[:THREADS]:  # daemons, or the process would not end before their requests
            Thread(target=work, name="torch_ros bucket", daemon=True).start()
        for _ in todo:
            filled_bytes, window_bytes = _reply(replies, look)
            size_bytes += window_bytes
            look(filled_bytes)
    finally:
        gate.is_shut = True  # first, and no call: the next Ctrl-C finds it done
        gate.await_empty()
        held.clear()  # a request that still waits keeps no memory of the caller's
    return size_bytes


def _reply(replies: SimpleQueue[_Came | BaseException], look: Look) -> _Came:
    """Of the next window that is filled, in whatever order they come."""
    while True:
        try:
            reply = replies.get(timeout=LOOK_S)
        except Empty:
            look(0)
        else:
            if isinstance(reply, BaseException):
                raise reply
            return reply


def windows(planned: ReadPlan, files: Sequence[StoredFile]) -> Sequence[Window]:
    """The stretches of files that the plan needs, in the order of the files."""
    found: dict[tuple[int, int], Window] = {}

    def window(file: int, start: int) -> Window:
        return found.setdefault((file, start // WINDOW_BYTES), Window(file))

    starts = [np.asarray(file.starts, np.int64) for file in files]
    direct = planned.direct
    first: Ints = np.fromiter(
        (starts[f][c] for f, c in zip(direct.source_rank, direct.source_chunk, strict=True)),
        np.int64,
        len(direct.source_rank),
    )
    first += direct.source_offset_bytes
    end = first + direct.size_bytes
    owner, ordinal = numbered((end - 1) // WINDOW_BYTES - first // WINDOW_BYTES + 1)
    at = (first[owner] // WINDOW_BYTES + ordinal) * WINDOW_BYTES
    begins, ends = np.maximum(first[owner], at), np.minimum(end[owner], at + WINDOW_BYTES)
    columns = (
        direct.source_rank[owner],
        begins,
        ends - begins,
        direct.target_chunk[owner],
        direct.target_offset_bytes[owner] + begins - first[owner],
    )
    for file, start, size, chunk, to in zip(*(column.tolist() for column in columns), strict=True):
        window(file, start).direct.append((start, size, chunk, to))
    for copy in planned.staged:
        start = int(starts[copy.source_rank][copy.source_chunk]) + copy.source_offset_bytes
        window(copy.source_rank, start).staged.append((start, copy))
    return [found[key] for key in sorted(found)]


def landed(
    store: ObjectStore, key: str, file: StoredFile, parts: Sequence[int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Stretches of whole parts, each checked: its offset in the file, and its bytes."""
    numbers = np.asarray(parts, np.int64)
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    runs = [run.tolist() for run in np.split(numbers, cuts)]
    begins = [run[0] * PART_BYTES for run in runs]
    ends = [min((run[-1] + 1) * PART_BYTES, file.size_bytes) for run in runs]
    for run, begin, found in zip(runs, begins, store.get_ranges(key, begins, ends), strict=True):
        with allocating("a stretch of a file", found.nbytes):
            content = torch.empty(found.nbytes, dtype=torch.uint8, device="cpu")
        landing = content.numpy()
        landing[:] = np.frombuffer(found, np.uint8)
        for number in run:
            at = (number - run[0]) * PART_BYTES
            if not is_part(file, number, landing[at : at + PART_BYTES].data):
                first = number * PART_BYTES
                store.refuse(key, f"its bytes from {first} on are not those that were archived")
        yield begin, content


def _copy_out(
    window: Window,
    first: int,
    content: torch.Tensor,
    targets: Sequence[torch.Tensor],
    memory: Sequence[torch.Tensor],
) -> None:
    """Copy what begins in this stretch. It ends there too: a stretch has all parts of its spans."""
    end = first + content.numel()
    for start, size, chunk, to in window.direct:
        if first <= start < end:
            targets[chunk][to : to + size].copy_(content[start - first : start - first + size])
    for start, copy in window.staged:
        if first <= start < end:
            span = content[start - first : start - first + copy.size_bytes].clone()  # it is aligned
            target = memory[copy.target_chunk]
            copy_staged(span.to(target.device), copy, target)


def _bytes_of(chunk: torch.Tensor) -> torch.Tensor:
    """The memory from the chunk's first element to the end of its last."""
    _, reach = span_of(chunk)
    view = torch.empty(0, dtype=torch.uint8, device=chunk.device)
    start = chunk.storage_offset() * chunk.element_size()
    return view.set_(chunk.untyped_storage(), start, (reach,), (1,))
