"""`torch-ros push` and `torch-ros pull`: checkpoints from disk, and to disk."""

from __future__ import annotations

import argparse
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import TextIO

import torch_ros
from torch_ros.checkpoints.compared import Difference, Named, Shapes, differences, unlike
from torch_ros.checkpoints.mapped import is_named, mapped
from torch_ros.checkpoints.written import (
    BUFFER_BYTES,
    BUFFER_S,
    OnBytes,
    is_selected,
    made_whole,
    require_same,
    selected,
    write_dcp,
    write_safetensors,
)
from torch_ros.cli import asking
from torch_ros.cli.ending import told_to_end
from torch_ros.cli.ls import size
from torch_ros.cli.output import complain, say
from torch_ros.errors import BackendError, StoreUnavailable, UsageError
from torch_ros.face.progress import Bar
from torch_ros.printable import log_of, printable, some
from torch_ros.protocol.records import VersionRef
from torch_ros.protocol.versions import Spec, as_spec
from torch_ros.store.endpoint import located

LOOK_S = 1.0  # between two looks at who has it
AWAY_S = 0.5  # between two questions to an etcd that does not answer
OPEN_S = 20.0  # for etcd to answer, here and in calls that wait for nobody else
DRAIN_S = 20.0  # for readers, when it leaves
log: logging.Logger = log_of(__name__)


def push(asked: argparse.Namespace, out: TextIO) -> None:
    """Publish a checkpoint, and stay until enough others have it, or somebody ends this."""
    tensors = mapped(asked.checkpoint)
    with opened(asked, asked.replica, "push", waits=False) as handle, told_to_end() as ends:
        handle.register(tensors)
        handle.publish(asked.number)
        total = sum(tensor.nbytes for tensor in tensors.values())
        what = f"version {asked.number} of {asked.model!r}"
        say(out, f"{what}: {len(tensors)} tensors, {size(total)}, as {handle.replica!r}")
        _stay(handle, asked, ends, out)
        say(out, f"leaving {what}")
        handle.leave(within_s=DRAIN_S)


def _stay(
    handle: torch_ros.ShardHandle, asked: argparse.Namespace, ends: threading.Event, out: TextIO
) -> None:
    until_s = time.monotonic() + (math.inf if asked.hold is None else asked.hold)
    enough, told = math.inf if asked.until_held is None else asked.until_held, ""
    while not ends.is_set() and time.monotonic() < until_s:
        try:
            fleet = handle.fleet()
        except BackendError as error:  # who reads from it reads on meanwhile, and needs it
            log.warning("%s; it goes on", error)
            ends.wait(LOOK_S)
            continue
        mine = [each for each in fleet.held if each.replica == handle.replica]
        held = {each.replica for ref in mine for each in fleet.holders(ref.ref)} - {handle.replica}
        reading = sorted({name for each in mine for name in each.readers})
        says = f"held by {some(sorted(held)) or 'nobody else'}"
        says += f"; read by {some(reading)}" if reading else ""
        if says != told:
            say(out, f"{says}; Ctrl-C leaves")
            told = says
        if len(held) >= enough and not reading:
            return
        ends.wait(min(LOOK_S, max(0.0, until_s - time.monotonic())))


def pull(asked: argparse.Namespace, out: TextIO) -> None:
    """Write a version to a folder that is there when all of it is on disk."""
    with opened(asked, None, "pull") as handle, made_whole(asked.folder) as folder:
        contents = handle.contents(as_spec(asked.number), timeout_s=asked.timeout)
        tensors = selected(contents, asked.select)
        with bar(f"version {contents.version}") as progress:
            write = write_safetensors if asked.format == "safetensors" else write_dcp
            write(handle, contents, tensors, folder, progress)
    what = f"version {contents.version} of {asked.model!r}: {len(tensors)} tensors"
    say(out, f"{what}, run {contents.run!r}, in {asked.folder}")
    if contents.objects:
        say(out, f"left out, since only dcp.load reads pickles: {some(contents.objects)}")


@dataclass(frozen=True, slots=True)
class Compared:
    """The end of `torch-ros diff`."""

    differences: Sequence[Difference]
    versions: Sequence[str]  # or folders, as they were found
    tensor_count: int
    element_count: int

    def __str__(self) -> str:
        changed = sum(each.changed or 0 for each in self.differences)
        share = f"{changed / max(1, self.element_count):.3%}"
        return (
            f"{len(self.differences)} of {self.tensor_count} tensors differ: "
            f"{changed} of {self.element_count} elements that both have ({share}), "
            f"between {' and '.join(self.versions)}"
        )


def diff(asked: argparse.Namespace) -> Compared:
    """Compare two versions, or a version and a checkpoint on disk, through buffers of 64 MiB.

    Both versions are what is meant by them at one moment.

    Raises: VersionNotFound: One of them has gone since, or was published anew.
    """
    is_on_disk = is_named(asked.other)
    if not is_on_disk:
        _require_version(asked.other)
    with opened(asked, None, "diff") as handle:
        texts = [asked.one] if is_on_disk else [asked.one, asked.other]
        versions = list(map(as_spec, texts))
        refs = asking.resolved(located(asked.endpoint), asked.model, versions, asked.timeout)
        sides = [_readable(handle, ref, asked) for ref in refs]
        one, other = [*sides, _on_disk(Path(asked.other))] if is_on_disk else sides
        shapes = [
            {name: found for name, found in each.shapes.items() if is_selected(name, asked.select)}
            for each in (one, other)
        ]
        found = list(unlike(*shapes))
        odd = {each.name for each in found}
        names = [name for name in shapes[0] if name not in odd]
        found += differences(one.read(names), other.read(names))
        elements = sum(shapes[0][name][1].numel() for name in names)
        count = len(shapes[0].keys() | shapes[1].keys())
    found.sort(key=lambda each: each.name)
    return Compared(found, [one.name, other.name], count, elements)


@dataclass(frozen=True, slots=True)
class _Side:
    name: str
    shapes: Shapes
    read: Callable[[Sequence[str]], Iterable[Named]]


def _readable(handle: torch_ros.ShardHandle, ref: VersionRef, asked: argparse.Namespace) -> _Side:
    contents = handle.contents(ref.version, timeout_s=asked.timeout)
    require_same(handle.model, contents, ref.uid)

    def read(names: Sequence[str]) -> Iterator[Named]:
        with handle.stream(
            ref.version, names, buffer_bytes=BUFFER_BYTES, timeout_s=BUFFER_S
        ) as stream:
            require_same(handle.model, contents, stream.uid)
            yield from stream

    return _Side(str(ref.version), contents.tensors, read)


def _on_disk(checkpoint: Path) -> _Side:
    there = mapped(checkpoint)
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in there.items()}
    return _Side(str(checkpoint), shapes, lambda names: ((name, there[name]) for name in names))


def _require_version(text: str) -> None:
    try:
        Spec.parse(as_spec(text))
    except UsageError as error:
        raise UsageError(f"{text!r} is no file or folder that is there; {error}") from error


@contextmanager
def opened(
    asked: argparse.Namespace,
    replica: str | None,
    what: str,
    *,
    spot: bool = False,
    waits: bool = True,
) -> Iterator[torch_ros.ShardHandle]:
    """A handle on an etcd that is there; none is started. If it waits, the model is there too."""
    # Containers with one host name may have the same numbers of processes.
    name = replica or f"{what}-{socket.gethostname()}-{os.getpid()}-{token_hex(3)}"
    where = located(asked.endpoint)
    if waits:
        _await_model(where, asked.model, asked.timeout)
    with torch_ros.open(
        asked.model,
        endpoint=where,
        replica=name,
        rank=0,
        world_size=1,
        spot=spot,
        bucket="",  # whatever the environment says to trainers
        timeout_s=OPEN_S,
    ) as handle:
        yield handle


def _await_model(endpoint: str, model: str, timeout_s: float) -> None:
    """Return when somebody has the model. A name that nobody uses leaves no record.

    Raises: UsageError: Nobody has it in time; names the one that may be meant.
    """
    until_s, is_told = time.monotonic() + timeout_s, False
    with closing(asking.connected(endpoint)) as kv:
        while True:
            try:
                rev = asking.revision(kv)
                asking.fleet_of(kv, model)
            except StoreUnavailable:
                if time.monotonic() >= until_s:
                    raise
                time.sleep(AWAY_S)
            except UsageError as error:
                if (left_s := until_s - time.monotonic()) <= 0:
                    raise
                if not is_told:
                    complain(f"{error}; waiting for it, {timeout_s:.0f} s")
                is_told = True
                asking.await_change(kv, model, rev, left_s)
            else:
                return


@contextmanager
def bar(what: str) -> Iterator[OnBytes]:
    """A line of progress on a terminal."""
    with closing(Bar(printable(what))) as line:
        yield line.show
