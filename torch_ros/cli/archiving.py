"""`torch-ros archive`: a fleet's versions, into a bucket, as they come."""

from __future__ import annotations

import argparse
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

import torch_ros
import torch_ros.bucket
from torch_ros.bucket.archive import Archived, Archiver, Form
from torch_ros.bucket.files import PROBES
from torch_ros.cli.ending import told_to_end
from torch_ros.cli.ls import size
from torch_ros.cli.moving import bar, opened
from torch_ros.cli.output import say
from torch_ros.errors import (
    BackendError,
    DeadlineExceeded,
    Fenced,
    NotAvailable,
    PeerError,
    SeatLost,
    UsageError,
)
from torch_ros.printable import log_of, some

LOOK_S = 5.0  # of a wait for another version: so much later it hears that it is told to end
FLEET_S = 30.0  # between two looks at the fleet: the same number may be published anew, in a moment
RETRY_S, RETRY_MAX_S = 2.0, 60.0  # after a failure, then twice as long each time
DOUBLED_MAX = 6  # times
MISSED_S = 0.2  # after a version that went while it was read: the next one may be there already
log: logging.Logger = log_of(__name__)


def archive(asked: argparse.Namespace, out: TextIO) -> None:
    """Write each version that is the newest when the last one is written, until it is told to end.

    A failed attempt is made again, and the fleet does not notice. Only the arguments, a bucket that
    cannot be written to when this begins, and another archiver of the same name end it.
    """
    figures = _figures(asked)
    bucket = torch_ros.bucket.open(asked.url, asked.model)
    if not bucket.store.probe(f"{bucket.root}/{PROBES}"):
        log.warning(
            "%s overwrites what it should create: versions are safe, by their names", asked.url
        )
    with opened(asked, asked.replica, "archive", spot=True) as handle, told_to_end() as ends:
        form = Form(streams=asked.stream, deltas=asked.deltas, encoding=asked.encoding)
        archiver = Archiver(handle, bucket, keep=asked.keep, grace_s=asked.grace, form=form)
        if not asked.once:
            with _served(figures, archiver, out):
                _follow(archiver, handle, out, ends)
        elif _step(archiver, handle, out) is None and not bucket.list():
            raise UsageError(f"model {asked.model!r} has no version to archive")


def _figures(asked: argparse.Namespace) -> tuple[str, int] | None:
    """Where figures for Prometheus are served, if they are asked for."""
    where = asked.metrics_port
    if where is None:
        return None
    if asked.once:
        raise UsageError(f"--metrics-port {where}: --once ends before anybody asks for figures")
    from torch_ros.metrics.process import address  # noqa: PLC0415  # an extra

    try:
        return address(where)
    except UsageError as error:
        raise UsageError(f"--metrics-port {where!r}: {error}") from error


@contextmanager
def _served(where: tuple[str, int] | None, archiver: Archiver, out: TextIO) -> Iterator[None]:
    if where is None:
        yield
        return
    from torch_ros.metrics.archivers import ArchiveCollector  # noqa: PLC0415  # an extra
    from torch_ros.metrics.server import serving  # noqa: PLC0415

    with serving(ArchiveCollector(archiver), *where) as url:
        say(out, f"{url}: figures of the archiver")
        yield


def _follow(
    archiver: Archiver, handle: torch_ros.ShardHandle, out: TextIO, ends: threading.Event
) -> None:
    failures = 0
    while not ends.is_set():
        try:
            written = _step(archiver, handle, out)
            failures = 0
            if written is None:
                _await_work(handle, archiver, ends)
        except Fenced:
            raise
        except (BackendError, NotAvailable, PeerError, SeatLost) as error:
            archiver.totals.retries[type(error).__name__] += 1
            is_missed = isinstance(error, NotAvailable | PeerError)
            pause_s = MISSED_S if is_missed else min(RETRY_S * 2**failures, RETRY_MAX_S)
            failures = failures if is_missed else min(failures + 1, DOUBLED_MAX)
            log.warning("%s; it tries again in %g s", error, pause_s)
            ends.wait(pause_s)


def _step(archiver: Archiver, handle: torch_ros.ShardHandle, out: TextIO) -> Archived | None:
    is_due = archiver.due_s == 0
    with bar(f"archive {handle.model}") as progress:
        written = archiver.archive(progress)
    if written is not None:
        what = f"version {written.version} of {handle.model!r}: {written.tensor_count} tensors"
        what += f", changes since {written.base}" if written.base is not None else ""
        say(out, f"{what}, {size(written.size_bytes)}, in {written.seconds:.1f} s")
        if written.left_out:
            say(out, f"left out, since only dcp.load reads pickles: {some(written.left_out)}")
    archiver.say()
    if written is not None or is_due:
        archiver.collect()
    return written


def _await_work(handle: torch_ros.ShardHandle, archiver: Archiver, ends: threading.Event) -> None:
    """Returns when there may be something to do: mostly at the watch of another version."""
    seen, is_gone = archiver.seen, False

    def is_other(there: Mapping[int, object]) -> bool:
        nonlocal is_gone
        is_gone = is_gone or seen not in there  # and may come back with another content
        return bool(there) and (is_gone or max(there) != seen)

    until_s = time.monotonic() + min(FLEET_S, archiver.due_s)
    while not ends.is_set() and (left_s := until_s - time.monotonic()) > 0:
        archiver.say()  # again, from another seat
        try:
            handle.archives.wait(is_other, timeout_s=min(LOOK_S, left_s))
        except DeadlineExceeded:
            continue
        return
