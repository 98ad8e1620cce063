"""What happened, for people."""

from __future__ import annotations

import re

from torch_ros.store.txn import Commit, Delete, Put, Range, Read, Sample, Watch


def short(what: object) -> str:
    """A request in one line."""
    match what:
        case Read(ranges):
            return "read " + ", ".join(map(_sample, ranges))
        case Commit(txn):
            guards = ", ".join(type(guard).__name__ for guard in txn.guards)
            return f"commit [{guards}] " + "; ".join(map(_op, txn.ops))
        case Watch(ranges, rev, reason):
            where = ", ".join(_key(range_.start) for range_ in ranges)
            return f"watches {where} after {rev}: {reason}"
    return str(what)


def _sample(range_: Range | Sample) -> str:
    if isinstance(range_, Range):
        return _key(range_.start)
    which = "oldest" if range_.is_oldest else "youngest"
    before = f" before {range_.before}" if range_.before else ""
    return f"{_key(range_.range.start)} ({range_.most} {which}{before})"


def _key(text: str) -> str:
    return text.removeprefix("/torch-ros/m/").replace("0000000000000000", "").rstrip("\0")


def _op(op: object) -> str:
    match op:
        case Put(name, value, lease_id):
            text = re.sub(r'"host".*"card":"[^"]*"', "...", value.decode(errors="replace"))
            cut = text if len(text) < 200 else f"...{text[-180:]}"
            return f"put {_key(name)} {cut} ({lease_id})"
        case Delete(range_):
            return f"delete {_key(range_.start)}"
    return f"{type(op).__name__.lower()} {_sample(op.range)}"
