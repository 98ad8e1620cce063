"""`torch-ros doctor`: what is wrong with etcd, this host and its processes. Pure.

`torch_ros/cli/examining.py` gathers the facts.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

from torch_ros import environment
from torch_ros.cli import waiting
from torch_ros.cli.health import EtcdHealth
from torch_ros.cli.ls import size
from torch_ros.cli.waits import Blamed
from torch_ros.p2p import rdma
from torch_ros.printable import some

Level = Literal["ok", "warn", "FAIL"]
HERE = "this shell"

LOSES = ((3, 5, 0), (3, 5, 2))  # releases of etcd that may lose a write when they are killed
ENDS = ((3, 4, 23), (3, 5, 7))  # of each minor release: the first that a reader's pause cannot end
FULL_SHARE = 0.8  # of the quota
SYNC_S = 0.01  # as etcd's own documents ask of a disk
AHEAD_S = 1.0  # that clocks may be apart
SHARED = "/dev/shm"  # noqa: S108  # where torch puts tensors that are shared
SHM_BYTES = 256 << 20  # containers get 64 MiB where nobody says more
PINNED_BYTES = 1 << 30
RDMA = {"ib", "rc", "rc_x", "rc_v", "rc_mlx5", "rc_verbs", "dc", "dc_x", "dc_mlx5", "ud", "ud_x"}
RDMA |= {"ud_v", "ud_mlx5", "ud_verbs", "srd"}
COPIES = {"all", "cma", "shm", "sm"}
ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
LOOPBACK = re.compile(r"local|etcds?://(127\.|localhost\b|\[::1\])")


@dataclass(frozen=True, slots=True)
class Finding:
    """One condition: `found` says which, `expected` what is well, `way_out` the line to type."""

    level: Level
    found: str
    expected: str = ""
    way_out: str = ""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """One process of this host, or the shell that asks."""

    who: str
    environ: Mapping[str, str]
    memlock_bytes: int | None = None  # None: no limit


@dataclass(frozen=True, slots=True)
class Examined:
    """One model. `problem`: why its records cannot be read; `closed`: what keeps each process of
    it on this host from being copied from, by its name; "": nothing does.
    """

    name: str
    problem: str = ""
    closed: Mapping[str, str] | None = None
    hosts: Mapping[str, str] = field(default_factory=dict)  # by replica
    ahead_s: Mapping[str, float] = field(default_factory=dict)  # of this clock, by host
    lost: Sequence[Blamed] = ()  # processes of this host that live, and have lost their seats


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that is looked at.

    Attributes:
        silence, advice: Why etcd does not answer, and what to do; "": it does.
        ways: Those by which processes of this host read each other, and what closes each.
        tcp: Addresses at which readers by transport="tcp" look for processes of this host, and why
            none is read so; "".
        ptrace_scope: The value of `yama.ptrace_scope`; "": this kernel has none.
        devices: Network interfaces.
        rdma: RDMA devices of this host.
        has_verbs: This container has them too.
        rdma_libraries: The files of this host's that can be loaded here.
        shm_bytes: The size of /dev/shm, and what is free of it; None: there is none.
        packages: By name, the release that is wanted at least, and the one that is there; "": none.
    """

    endpoint: str = "local"
    silence: str = ""
    advice: str = ""
    etcd: EtcdHealth = field(default_factory=EtcdHealth)
    models: Sequence[Examined] = ()
    processes: Sequence[Surroundings] = ()
    ways: Mapping[str, str] | None = None
    tcp: tuple[Sequence[str], str] | None = None
    ptrace_scope: str = ""
    devices: Collection[str] = ()
    rdma: Collection[str] = ()
    has_verbs: bool = True
    rdma_libraries: Sequence[str] = ()
    has_gpu: bool = False
    shm_bytes: tuple[int, int] | None = None
    packages: Mapping[str, tuple[str, str]] | None = None

    @property
    def is_local(self) -> bool:
        return self.endpoint == "local"


def findings(facts: Facts) -> list[Finding]:
    """All that is well and all that is not, of etcd first."""
    rules = (_etcd, _models, _copying, _tcp, _rdma, _neighbours, _packages, _shared_memory)
    found = list(chain.from_iterable(rule(facts) for rule in rules))
    return [*found, *_joined(facts)]


def is_well(found: Iterable[Finding]) -> bool:
    return all(each.level != "FAIL" for each in found)


def lines(found: Iterable[Finding]) -> Iterator[str]:
    for each in found:
        wanted = f"; expected {each.expected}" if each.expected else ""
        yield f"{each.level:<5} {each.found}{wanted}"
        if each.way_out:
            yield f"      -> {each.way_out}"


# etcd


def _etcd(facts: Facts) -> Iterator[Finding]:
    if facts.silence:
        yield Finding("FAIL", facts.silence, "an etcd that answers this user", facts.advice)
    elif not facts.etcd.members:
        yield Finding("ok", f"{facts.endpoint}: a store within one process")
    if any(not each.problem for each in facts.etcd.members):
        found = [finding for rule in ETCD for finding in rule(facts, facts.etcd)]
        yield from found or [_well(facts.etcd)]


def _well(etcd: EtcdHealth) -> Finding:
    member = max(etcd.members, key=lambda each: each.answer_s)
    count = len(etcd.members)
    quota = "" if member.quota_bytes is None else f" of {size(member.quota_bytes)}"
    return Finding(
        "ok",
        f"etcd {member.version}, {count} member{'s' if count > 1 else ''}, answers in "
        f"{member.answer_s * 1e3:.1f} ms, database {size(member.size_bytes)}{quota}"
        + (", no alarm" if etcd.alarms is not None else ""),
    )


def _silent(_: Facts, etcd: EtcdHealth) -> Iterator[Finding]:
    for each in etcd.members:
        if each.problem:
            way_out = "start it again, or take its name out of the endpoint"
            yield Finding("warn", f"member {each.host}: {each.problem}", "an answer", way_out)


def _leaderless(_: Facts, etcd: EtcdHealth) -> Iterator[Finding]:
    alone = [each.host for each in etcd.members if not each.has_leader]
    if alone:
        found = f"etcd at {some(alone)} has no leader: nothing can be read or written"
        yield Finding(
            "FAIL", found, "a majority of the members", "etcdctl endpoint status -w table"
        )


def _alarms(_: Facts, etcd: EtcdHealth) -> Iterator[Finding]:
    for alarm in etcd.alarms or ():
        found = f"etcd's alarm {alarm}"
        if alarm == "NOSPACE":
            way_out = "etcdctl compact, etcdctl defrag, etcdctl alarm disarm"
            yield Finding("FAIL", f"{found}: it refuses reads and writes", "none", way_out)
        else:
            yield Finding("FAIL", found, "none", "etcdctl alarm list, and etcd's log")


def _releases(facts: Facts, etcd: EtcdHealth) -> Iterator[Finding]:
    if facts.is_local:  # nothing in it outlives the processes that wrote it
        return
    hosts_of = defaultdict[str, list[str]](list)
    for each in etcd.members:
        if each.version:
            hosts_of[each.version].append(each.host)
    for version, hosts in hosts_of.items():
        number, found = _number(version), f"etcd {version} at {some(hosts)}"
        best = "3.5.7 or newer, or 3.4.23 or newer of 3.4"
        if LOSES[0] <= number <= LOSES[1]:
            # What it loses is put again by the processes that are there: weights are in those.
            yield Finding("warn", f"{found} may lose a write when it is killed", best, "upgrade it")
        elif any(number[:2] == first[:2] and number < first for first in ENDS):
            yield Finding("warn", f"{found} may end when a reader gives up", best, "upgrade it")
        elif number < ENDS[0]:
            yield Finding("FAIL", f"{found} is older than any that was tried", best, "upgrade it")


def _filling_up(_: Facts, etcd: EtcdHealth) -> Iterator[Finding]:
    for each in etcd.members:
        if each.quota_bytes and each.size_bytes > FULL_SHARE * each.quota_bytes:
            used = f"{size(each.size_bytes)} of {size(each.quota_bytes)}"
            yield Finding(
                "warn",
                f"etcd's database at {each.host} is nearly full: {used}",
                f"at most {FULL_SHARE:.0%}",
                "--auto-compaction-mode periodic --auto-compaction-retention 1m; etcdctl defrag",
            )


def _slow_disk(_: Facts, etcd: EtcdHealth) -> Iterator[Finding]:
    for each in etcd.members:
        if each.sync_s is not None and each.sync_s > SYNC_S:
            found = (
                f"etcd's disk at {each.host}: 1 write of 100 takes up to {each.sync_s * 1e3:g} ms"
            )
            wanted = f"{SYNC_S * 1e3:g} ms"
            yield Finding("warn", found, wanted, "a faster disk, or one that nothing else uses")


ETCD = (_silent, _leaderless, _alarms, _releases, _filling_up, _slow_disk)


def _models(facts: Facts) -> Iterator[Finding]:
    for model in facts.models:
        if model.problem:
            yield Finding("FAIL", model.problem)
        for host, ahead_s in model.ahead_s.items():
            if ahead_s > AHEAD_S:
                found = f"the clock of {host} is at least {ahead_s:.0f} s ahead of the one here"
                yield Finding("warn", found, f"{AHEAD_S:g} s", "timedatectl at both; NTP")
        for each in model.lost:
            yield Finding(
                "warn",
                f"model {model.name!r}: process {each.pid} of rank {each.rank} of "
                f"{each.replica!r} has lost its seat; it {waiting.DOES[each.state]}",
                "a seat, or no process",
                waiting.to_type(each.state, each.pid),
            )


# This host


def _copying(facts: Facts) -> Iterator[Finding]:
    """Whether processes of one user copy from each other here."""
    if facts.ways is None:
        return
    closed = {way: reason for way, reason in facts.ways.items() if reason}
    if not closed:
        yield Finding("ok", f"the co-located way: pass ({', '.join(facts.ways)})")
        return
    scope = facts.ptrace_scope
    is_denied = scope not in {"", "0"} and "cma" in closed
    reasons = "; ".join(f"{way} ({reason})" for way, reason in closed.items())
    yield Finding(
        "warn",
        f"the co-located way: blocked by {reasons}; reads within this host are slower"
        + (f", yama.ptrace_scope is {scope}" if is_denied else ""),
        "pass",
        "sysctl -w kernel.yama.ptrace_scope=0"
        if is_denied
        else "docs/OPERATIONS.md, When reads are slow",
    )


def _tcp(facts: Facts) -> Iterator[Finding]:
    """Whether transport="tcp" works here, and from where."""
    if facts.tcp is None:
        return
    found, (told, problem) = 'transport="tcp"', facts.tcp
    way_out = f"{environment.LISTEN}, or open(listen=...)"
    if problem:
        yield Finding("warn", f"{found} does not work here: {problem}", "pass", way_out)
    elif not told:
        yield Finding(
            "warn", f"{found} reaches this host alone", "an address that others reach", way_out
        )
    else:
        yield Finding("ok", f"{found}: pass, and others find this host at {', '.join(told)}")


def _rdma(facts: Facts) -> Iterator[Finding]:
    if facts.rdma or facts.rdma_libraries:
        devices, libraries = (
            ", ".join(seen) or "none" for seen in (facts.rdma, facts.rdma_libraries)
        )
        yield Finding("ok", f"RDMA: devices {devices}; libraries of this host {libraries}")
    if not facts.rdma and not facts.has_gpu:
        yield Finding("ok", "neither RDMA nor a GPU: bytes from other hosts come over TCP")
    if facts.rdma and not facts.has_verbs:
        found = f"{rdma.DEVICES} has no device of {', '.join(facts.rdma)}: bytes come over TCP"
        yield Finding("warn", found, "uverbs*", f"docker run --device={rdma.DEVICES}")


def _neighbours(facts: Facts) -> Iterator[Finding]:
    """Processes of the models on this host that this one cannot copy from."""
    for model in facts.models:
        closed = {name: reason for name, reason in (model.closed or {}).items() if reason}
        by_reason: dict[str, list[str]] = {}
        for name, reason in closed.items():
            by_reason.setdefault(re.sub(r"\b\d+\b", "N", reason), []).append(name)
        for names in by_reason.values():
            yield Finding(
                "warn",
                f"model {model.name!r}: this user and container cannot copy from {some(names)}: "
                f"{closed[names[0]]}",
                "one user, and one pid namespace, for all processes of a host",
                "docker run --pid=host, or shareProcessNamespace; the same user",
            )
        if model.closed and not closed:
            count = len(model.closed)
            yield Finding("ok", f"model {model.name!r}: {count} processes here, copied from")


def _packages(facts: Facts) -> Iterator[Finding]:
    for name, (wanted, there) in (facts.packages or {}).items():
        if not there:
            yield Finding(
                "FAIL", f"{name} is not installed", wanted, f"pip install '{name}>={wanted}'"
            )
        elif _number(there) < _number(wanted):
            found = f"{name} {there} is older than the oldest that was tried"
            yield Finding("FAIL", found, wanted, f"pip install '{name}>={wanted}'")


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    if facts.shm_bytes is not None and facts.shm_bytes[1] < SHM_BYTES:
        whole, free = facts.shm_bytes
        yield Finding(
            "warn",
            f"{SHARED} has {size(free)} free of {size(whole)}: shared tensors may not fit",
            size(SHM_BYTES),
            "docker run --shm-size=..., or an emptyDir with medium: Memory at /dev/shm",
        )


# Its processes


def _joined(facts: Facts) -> Iterator[Finding]:
    """The findings about processes; one of several is said once, with their names."""
    whose: dict[Finding, list[str]] = {}
    for process in facts.processes:
        for rule in (_transports, _devices, _allocator, _one_host, _memlock):
            for finding in rule(facts, process):
                whose.setdefault(finding, []).append(process.who)
    for finding, names in whose.items():
        yield replace(finding, found=f"{finding.found} ({some(names)})")


def _transports(facts: Facts, process: Surroundings) -> Iterator[Finding]:
    value = process.environ.get("UCX_TLS", "")
    if not value:
        return
    names, is_negated = set(value.lstrip("^").split(",")), value.startswith("^")
    has_tcp = is_negated != bool(names & {"all", "tcp"})
    has_rdma = is_negated != bool(names & {"all", *RDMA}) and bool(facts.rdma)
    copies = is_negated != bool(names & COPIES)
    found = f"UCX_TLS={value} leaves no way to other "
    is_alone = process.environ.get(environment.TRANSPORT, "").startswith("ucx")
    if is_alone and not (has_tcp or has_rdma or copies):
        yield Finding("FAIL", f"{found}processes", "tcp, or what RDMA takes", "unset UCX_TLS")
    elif is_alone and not (has_tcp or has_rdma):
        yield Finding("warn", f"{found}hosts", "tcp, or what RDMA takes", "unset UCX_TLS")
    elif not copies:
        found = f"UCX_TLS={value}: nothing is copied within a host, which is slower"
        yield Finding("warn", found, "cma", "unset UCX_TLS")


def _devices(facts: Facts, process: Surroundings) -> Iterator[Finding]:
    value = process.environ.get("UCX_NET_DEVICES", "")
    named = [name.partition(":")[0] for name in value.split(",") if name and name != "all"]
    there = {*facts.devices, *facts.rdma}
    lacking = [name for name in named if name not in there]
    if lacking:
        found = f"UCX_NET_DEVICES={value}: this host has no {some(lacking)}"
        level: Level = "FAIL" if lacking == named else "warn"
        yield Finding(level, found, f"some of {', '.join(sorted(there))}", "unset UCX_NET_DEVICES")


def _allocator(facts: Facts, process: Surroundings) -> Iterator[Finding]:
    for name in ALLOCATORS:
        value = process.environ.get(name, "")
        if facts.has_gpu and re.search("expandable_segments: *true", value, re.IGNORECASE):
            found = f"{name}={value}: NIXL reads GPU memory of such segments very slowly"
            yield Finding("FAIL", found, "expandable_segments:False", f"unset {name}")


def _one_host(facts: Facts, process: Surroundings) -> Iterator[Finding]:
    environ = process.environ
    endpoint = environ.get(environment.ENDPOINT) or facts.endpoint
    ranks, here = (environ.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if (
        LOOPBACK.match(endpoint)
        and ranks.isdecimal()
        and here.isdecimal()
        and int(ranks) > int(here)
    ):
        found = f"endpoint {endpoint!r} is of one host, and {int(ranks) - int(here)} ranks are not"
        way_out = f"an etcd that all hosts reach: export {environment.ENDPOINT}=etcd://HOST:2379"
        yield Finding("FAIL", found, "one etcd for all ranks", way_out)


def _memlock(facts: Facts, process: Surroundings) -> Iterator[Finding]:
    limit = process.memlock_bytes
    if facts.rdma and limit is not None and limit < PINNED_BYTES:
        found = f"memory that may be locked: {size(limit)}, and RDMA locks all that is registered"
        yield Finding(
            "warn", found, "no limit", "ulimit -l unlimited, or docker --ulimit memlock=-1"
        )


def _number(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
