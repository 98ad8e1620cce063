"""`torch-ros why`: lines of text about who holds a replica up. Pure, but for the time zone."""

import time
from collections.abc import Iterator

from torch_ros.cli.waits import Blamed, Why

DOES = {  # by the state of a process, as `fleet/life.py` names it
    "running": "runs",
    "stopped": "is stopped (state T)",
    "traced": "is held by a debugger (state t)",
    "frozen": "is frozen by its cgroup",
    "closed": "has closed this handle",
    "gone": "is gone",
    "replaced": "is gone, and another one has its number by now",
    "hidden": "is not to be seen by this user",
    "other container": "is in another container of this host",
    "other host": "is on another host",
}


def lines(found: Why) -> Iterator[str]:
    """The way to the one that holds it up; then what to type next, where there is a process."""
    for hop in found.hops:
        yield f"{hop.replica}: {hop.text}"
    for process in found.processes:
        yield f"  {process.replica}, rank {process.rank}: {_process(process)}"


def _process(process: Blamed) -> str:
    if not process.host:
        return "no process has had this seat; start it, or look at why it ended"
    where = f"host {process.host}, process {process.pid}"
    if not process.is_seated:
        since = f", seated since {_moment(process.since_ms)}" if process.since_ms else ""
        where = f"was here: {where}{since}"
    does = DOES.get(process.state, "")
    return f"{where}; {does and f'it {does}; '}{to_type(process.state, process.pid)}"


def to_type(state: str, pid: int) -> str:
    """The next line to type, on the host of a process in that state."""
    match state:
        case "stopped":
            return f"it goes on after: kill -CONT {pid}"
        case "frozen":
            return f"thaw it (docker unpause, systemctl thaw): cat /proc/{pid}/cgroup"
        case "gone" | "replaced":
            return "start it, or look at why it ended"
        case "closed":
            return (
                "its process goes on without it; open it there again, or look at why it was closed"
            )
        case "running" | "traced":
            return f"its stack: py-spy dump --pid {pid}"
        case "hidden" | "other container" | "other host":
            return f"look there: ps -o stat,etime,args -p {pid}; py-spy dump --pid {pid}"
    return f"its stack, there: py-spy dump --pid {pid}"


def _moment(at_ms: int) -> str:
    """Tell the time; with the day, unless that is today."""
    then, today = time.localtime(at_ms / 1000), time.localtime()
    is_today = (then.tm_year, then.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S", then)
