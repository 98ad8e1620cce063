"""`torch-ros why`: lines of text about who holds a replica up. Pure."""

from collections.abc import Iterator

from torch_ros.protocol.waits import Blamed, Why


def lines(found: Why) -> Iterator[str]:
    """The way to the one that holds it up; then what to type next, where there is a process."""
    for hop in found.hops:
        yield f"{hop.replica}: {hop.text}"
    for process in found.processes:
        yield f"  {_process(process)}"


def _process(process: Blamed) -> str:
    name = f"{process.replica}, rank {process.rank}"
    if not process.host:
        return f"{name}: it has no process here; start it, or look at why it ended"
    where = f"host {process.host}, process {process.pid}"
    return f"{name}: {where}; its stack, there: py-spy dump --pid {process.pid}"
