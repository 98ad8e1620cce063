"""The facts for `torch-ros doctor`: of etcd, its models, this host and the processes on it."""

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import msgspec

from torch_ros import environment
from torch_ros.cli import asking, trial
from torch_ros.cli.doctor import HERE, SHARED, Examined, Facts, Surroundings
from torch_ros.cli.health import EtcdHealth, health
from torch_ros.cli.waits import Blamed
from torch_ros.deadline import wall_ms
from torch_ros.errors import (
    AccessDenied,
    BackendError,
    StoreAlarm,
    StoreUnavailable,
    TransferFailed,
)
from torch_ros.features.shortcuts.trial import closed_to  # feature shortcuts
from torch_ros.features.tcp import trial as tcp  # feature tcp
from torch_ros.fleet import seen
from torch_ros.p2p import rdma
from torch_ros.p2p.ucx import has_gpu
from torch_ros.printable import some
from torch_ros.protocol.keys import Keys, owner_of, parse_rank, parse_shard, replica_of
from torch_ros.protocol.legible import readable
from torch_ros.protocol.records import ShardRecord
from torch_ros.protocol.schema import require_own
from torch_ros.store.endpoint import connect, located
from torch_ros.store.kv import KV
from torch_ros.store.txn import Read, View, one
from torch_ros.transfer.card import Card

ANSWER_S = 2.0  # for one question to etcd
DISTRIBUTION = "torch-ros"
WAYS: list[str] = []  # modules for `trial.ways`
WAYS += ["torch_ros.features.shortcuts.trial"]  # feature shortcuts
WAYS += ["torch_ros.features.lending.trial"]  # feature lending
CHECKED = ("torch", "nixl", "numpy", "msgspec", "cryptography")


def examine(endpoint: str, model: str | None) -> Facts:
    """Look at everything. Nothing is written, and no NIXL is loaded.

    Args:
        model: The one to look at; None: all.

    Raises: UsageError: There is no such model, or the endpoint is none.
    """
    silence = advice = ""
    etcd, models = EtcdHealth(), list[Examined]()
    processes = [Surroundings(HERE, os.environ, _locked("self"))]
    try:
        etcd = health(endpoint, timeout_s=ANSWER_S)
        with closing(connect(located(endpoint), timeout_s=ANSWER_S)) as kv:
            for name in _models(kv, model):
                examined, there = _examine(kv, name)
                models.append(examined)
                processes += there
    except StoreAlarm as error:
        silence, advice = f"etcd at {error.endpoint} refuses requests", error.advice
    except StoreUnavailable as error:
        silence = str(error)
        advice = "is it running, and is the name right? docs/OPERATIONS.md, Endpoints"
    except AccessDenied as error:
        silence, advice = f"no access to etcd: {error.what}: {error.reason}", error.advice
    return Facts(
        endpoint=endpoint,
        silence=silence,
        advice=advice,
        etcd=etcd,
        models=models,
        processes=processes,
        ways=trial.ways(*WAYS),
        tcp=tcp.tried(environment.value(environment.LISTEN)),  # feature tcp
        ptrace_scope=_text("/proc/sys/kernel/yama/ptrace_scope"),
        devices=[name for _, name in socket.if_nameindex()],
        rdma=_listed("/sys/class/infiniband"),
        has_verbs=rdma.has_devices(),
        rdma_libraries=rdma.libraries(),
        has_gpu=has_gpu(),
        shm_bytes=_room(SHARED),
        packages=_packages(),
    )


def _models(kv: KV, model: str | None) -> Sequence[str]:
    if model is None:
        return asking.models(kv)
    asking.require(kv, model)
    return [model]


def _examine(kv: KV, model: str) -> tuple[Examined, Sequence[Surroundings]]:
    keys, closed, there = Keys(model), dict[str, str](), list[Surroundings]()
    try:
        wanted = (one(keys.schema()), keys.every_shard(), keys.seen())
        view = kv.read(Read(wanted), timeout_s=asking.ANSWER_S)
        require_own(view, keys)
    except BackendError as error:
        return Examined(model, str(error)), ()
    hosts = dict[str, set[str]]()
    found = readable(view.within(keys.every_shard()), parse_shard, ShardRecord)
    for key, inst, shard, _ in found:
        hosts.setdefault(replica_of(owner_of(inst)), set()).add(shard.host)
        reason = _closed_to(shard)
        if reason is None:
            continue
        name = f"{replica_of(inst)}/{parse_rank(key)}"
        closed[name] = reason
        if not reason and shard.host == socket.gethostname():  # else the number is another one's
            with suppress(OSError):
                environ = dict(_environ(shard.pid))
                there.append(Surroundings(name, environ, _locked(str(shard.pid))))
    ahead_s = dict[str, float]()
    for held in asking.fleet(kv, model).held:
        for host in hosts.get(held.replica, ()):
            ahead = ((held.since_ms or 0) - wall_ms()) / 1e3
            ahead_s[host] = max(ahead, ahead_s.get(host, 0.0))
    of = {replica: some(sorted(names)) for replica, names in hosts.items()}
    return Examined(model, "", closed, of, ahead_s, [*_lost(view, keys)]), there


def _lost(view: View, keys: Keys) -> Iterator[Blamed]:
    """The processes of this host that live, and have lost their seats."""
    for (replica, rank), record in sorted(seen.lost(view, keys).items()):
        state = asking.state_of(record)
        if state in {"running", "stopped", "traced", "frozen"}:
            where = (record.host, record.pid)
            yield Blamed(replica, rank, *where, is_seated=False, since_ms=record.at_ms, state=state)


def _closed_to(shard: ShardRecord) -> str | None:
    """The reason for which no process copies out of this one; "": it may; None: nobody tries."""
    try:
        card = Card.decode(shard.card)
        descriptor, reason = card.mailbox, None
        reason = closed_to(card.agent, descriptor, card.mailbox_address)  # feature shortcuts
    except (msgspec.MsgspecError, UnicodeDecodeError, TransferFailed):
        return None
    return reason


def _environ(pid: int) -> Iterator[tuple[str, str]]:
    for each in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0"):
        name, _, value = each.partition("=")
        yield name, value


def _locked(process: str) -> int | None:
    found = re.search(r"^Max locked memory +(\S+)", _text(f"/proc/{process}/limits"), re.MULTILINE)
    return int(found[1]) if found and found[1].isdecimal() else None


def _text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _listed(path: str) -> Sequence[str]:
    with suppress(OSError):
        return sorted(each.name for each in Path(path).iterdir())
    return ()


def _room(path: str) -> tuple[int, int] | None:
    with suppress(OSError):
        found = os.statvfs(path)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return None


def _packages() -> Mapping[str, tuple[str, str]]:
    """The lower bounds that this distribution names, and what is there."""
    found = {}
    with suppress(PackageNotFoundError):
        for line in requires(DISTRIBUTION) or ():
            named = re.fullmatch(r"([\w.-]+)>=([\w.]+)", line)
            if named and named[1] in CHECKED:
                found[named[1]] = (named[2], _version(named[1]))
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
