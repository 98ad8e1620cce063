"""`torch-ros trace`: a file for Perfetto, from a watch or from journals of processes."""

import argparse
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from torch_ros.cli import asking, merging, timeline, watching
from torch_ros.cli.ending import told_to_end
from torch_ros.cli.output import complain, say_raw
from torch_ros.cli.recording import NOBODY, FleetRecording, is_everywhere
from torch_ros.cli.timeline import Timeline
from torch_ros.errors import BackendError, ClosedError, UsageError
from torch_ros.printable import some
from torch_ros.protocol.fleet import Fleet
from torch_ros.protocol.journal import SUFFIX, Journal, parsed
from torch_ros.store.kv import KV

FOR_S = 60.0
PERIOD_S = 0.01  # between two fleets
SLICES_MAX = 500_000  # some 300 MB of memory; then it ends
Told = Mapping[str, Any]


def trace(asked: argparse.Namespace) -> Told:
    """Write the trace; what is to be told of it.

    Raises:
        UsageError: No such model, folder or journals; or the trace cannot be written.
    """
    with _writing(asked.out) as write:
        made, told = _merged(asked.merge, asked.model) if asked.merge else _recorded(asked)
        rows = len({each.row for each in made.slices})
        told = {"slices": len(made.slices), "rows": rows, "arrows": len(made.arrows), **told}
        write(msgspec.json.encode(timeline.trace(made, told)))
    return told


@contextmanager
def _writing(out: Path | None) -> Iterator[Callable[[bytes], object]]:
    """A function that writes the file, which is there when all of it is; None: to the output.

    It is known at once whether it can be written, not when a minute was recorded.
    """
    if out is None:
        yield partial(say_raw, sys.stdout)
        return
    part = out.parent / f".{out.name}.{secrets.token_hex(4)}"

    def write(text: bytes) -> None:
        with _written(out):
            part.write_bytes(text)
            part.replace(out)

    try:
        with _written(out):
            if out.exists() and not out.is_file():
                raise OSError("it is a folder or a device")
            part.touch(exist_ok=False)
        yield write
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


@contextmanager
def _written(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"the trace cannot be written to {out}: {error}") from error


def _merged(folder: Path, model: str | None) -> tuple[Timeline, Told]:
    journals = list(_journals(folder))
    calls = merging.calls(journals, model)
    if not calls:
        _refuse(folder, model, journals)
    aligned = merging.aligned(calls)
    moved = [
        {
            "hosts": sorted({call.author.host for call in calls if call.clock == clock}),
            "ms": ns / 1e6,
        }
        for clock, ns in sorted(aligned.moved_ns.items())
        if ns
    ]
    cut = [journal.name for journal in journals if journal.cut]
    return merging.timeline(calls, aligned.moved_ns), {
        "files": len(journals),
        "calls": len(calls),
        "cut": cut,
        "unreadable": sum(journal.unreadable for journal in journals),
        "moved": moved,
        "out_of_order_ms": aligned.left_ns / 1e6,
    }


def _journals(folder: Path) -> Iterator[Journal]:
    try:
        files = sorted(each for each in folder.iterdir() if each.suffix == SUFFIX)
        for file in files:
            yield parsed(readable(file.name), file.read_bytes())
    except OSError as error:
        raise UsageError(f"no journals can be read in {folder}: {error}") from error


def readable(path: Path | str) -> str:
    """The path, in which bytes that are no UTF-8 have been replaced."""
    return os.fsencode(path).decode(errors="replace")


def _refuse(folder: Path, model: str | None, journals: list[Journal]) -> None:
    there = sorted({done.model for journal in journals for done in journal.done})
    if model is not None and there:
        raise UsageError(f"no call of model {model!r} in {folder}{asking.meant(model, there)}")
    found = f"{len(journals)} files without a call" if journals else f"no file *{SUFFIX}"
    raise UsageError(
        f"{found} in {folder}: expected those of processes that were started with "
        f"TORCH_ROS_TRACE={folder}, and have published or read"
    )


def _recorded(asked: argparse.Namespace) -> tuple[Timeline, Told]:
    """Until the time is over, the version is everywhere, or somebody ends it."""
    since_ns = time.time_ns() - time.monotonic_ns()  # one clock, whatever happens to the other
    recording, hosts, is_cut = FleetRecording(asked.number), dict[str, str](), threading.Event()
    for_s = FOR_S if asked.for_s is None and asked.number is None else asked.for_s
    with ExitStack() as stack:
        kv = stack.enter_context(closing(asking.connected(asked.endpoint)))
        fleet = asking.fleet_of(kv, asked.model)
        if asked.number is not None:
            _require_to_come(fleet, asked.number)
        ends = stack.enter_context(told_to_end())  # before, Ctrl-C means that nothing is written

        def end() -> None:
            ends.wait(for_s)
            is_cut.set()
            kv.close()  # whatever waits there returns

        threading.Thread(target=end, name="torch_ros trace ends", daemon=True).start()
        errors, is_away = 0, False
        for found in watching.fleets(kv, asked.model, is_cut, PERIOD_S):
            if isinstance(found, BackendError):
                errors += not is_away
                if not is_away:
                    complain(f"{found}; it goes on")
                is_away = True
                continue
            is_away = False
            recording.see(found, since_ns + time.monotonic_ns())
            _learn(hosts, kv, found)
            if asked.number is not None and is_everywhere(found, asked.number):
                break
            if len(recording) >= SLICES_MAX:
                complain(f"it ends here, with {SLICES_MAX} slices")
                break
        ends.set()
    made = recording.end(since_ns + time.monotonic_ns(), hosts)
    return made, {"errors": errors}


def _require_to_come(fleet: Fleet, number: int) -> None:
    """Raises: UsageError: The version has come already, to all, and there is nothing to see."""
    if is_everywhere(fleet, number):
        raise UsageError(
            f"each replica of model {fleet.model!r} has version {number} already, or a newer one; "
            "begin before it is published"
        )
    is_there = any(each.ref.version == number for each in fleet.versions)
    if not is_there and fleet.latest is not None and fleet.latest.version > number:
        raise UsageError(
            f"model {fleet.model!r} has no version {number} any more; its newest is "
            f"{fleet.latest.version}"
        )


def _learn(hosts: dict[str, str], kv: KV, fleet: Fleet) -> None:
    """Ask for the hosts of replicas that are new. One that joins has not told all of them yet."""
    new = [each.name for each in fleet.replicas.values() if each.state != "joining"]
    if hosts.keys() >= {*new}:
        return
    with suppress(BackendError, ClosedError):  # again with the next fleet
        found = asking.hosts(kv, fleet.model)
        hosts |= {name: found.get(name, NOBODY) for name in new if name not in hosts}


def lines(told: Told, out: Path | None) -> Iterator[str]:
    """For people."""
    to = "" if out is None else f": {out}"
    yield (
        f"{told['slices']} slices and {told['arrows']} arrows in {told['rows']} rows{to}; "
        "https://ui.perfetto.dev opens it"
    )
    if cut := told.get("cut"):
        yield f"{len(cut)} last lines are not whole, and left out: {some(cut)}"
    if unreadable := told.get("unreadable"):
        yield f"{unreadable} lines cannot be read, and are left out"
    for each in told.get("moved", ()):
        yield f"the clock of {some(each['hosts'])} was moved by {each['ms']:+.3f} ms"
    if out_of_order_ms := told.get("out_of_order_ms"):
        yield (
            f"calls are out of order by {out_of_order_ms:.3f} ms all the same: "
            "a clock has changed meanwhile"
        )
