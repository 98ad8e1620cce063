"""Whether processes of this host may read each other: a stranger shows memory, and it is read.

As a program this is the stranger. It is no child of the process that reads, because a kernel with
`yama.ptrace_scope` 1 lets parents read their children, and nobody else. No NIXL takes part.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch_ros.p2p.voucher import Neighbour, Process, Unproven, Voucher

AGENT = "torch_ros trial"


def ways(*names: str) -> Mapping[str, str]:
    """The ways by which processes of this host and user read each other, and what closes each.

    "" is said of one that is open. The first one, the voucher, is the condition of all others.

    Args:
        names: Of modules that know other ways. The stranger, an agent, calls a module's `show`,
            which answers what the reader has to be told of it, as JSON can, and what must be kept
            meanwhile. Each function of its `WAYS` gets the stranger and what was told, and says
            whether the reader sees what is shown, or raises OSError or Unproven.
    """
    try:
        with _stranger(*names) as said:
            return _tried(said, names)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"voucher": f"no process could be asked ({error})"}


def _tried(said: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, str]:
    if "problem" in said:
        return {"voucher": said["problem"]}
    try:
        stranger = Neighbour(AGENT, Process(*said["process"]))
    except Unproven as error:
        return {"voucher": str(error)}
    with contextlib.closing(stranger):
        closed = {"voucher": _closed_by(lambda: bool(stranger.vouched()))}
        for name, told in zip(names, said["told"], strict=True):
            for way, is_open in importlib.import_module(name).WAYS.items():
                closed[way] = _closed_by(partial(is_open, stranger, told))
        return closed


def _closed_by(is_open: Callable[[], bool]) -> str:
    try:
        return "" if is_open() else "other bytes came than were shown"
    except (OSError, Unproven) as error:
        return str(error)


@contextlib.contextmanager
def _stranger(*names: str) -> Iterator[Mapping[str, Any]]:
    """A process that shows what these modules show until the block ends."""
    command = [sys.executable, "-m", "torch_ros.cli.trial", *names]
    with subprocess.Popen(  # noqa: S603  # this very program
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout
        line = parent.stdout.readline()  # empty if it has ended
        yield json.loads(line)


def main() -> None:
    """Show memory to whoever started this, until he closes our input or is gone."""
    if os.fork():
        os._exit(0)  # so that nobody is the parent of what follows
    try:
        said, kept = _shown(sys.argv[1:])
    except OSError as error:
        said, kept = {"problem": str(error)}, ()
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    del kept


def _shown(names: Sequence[str]) -> tuple[Mapping[str, Any], object]:
    """The line that the reader is told, and the things that keep it true."""
    voucher = Voucher(AGENT)
    voucher.show([b"trial"])
    shown = [importlib.import_module(name).show(AGENT) for name in names]
    own = voucher.process
    process = own.pid, own.namespace, own.voucher
    return {"process": process, "told": [told for told, _ in shown]}, (voucher, shown)


if __name__ == "__main__":
    main()
