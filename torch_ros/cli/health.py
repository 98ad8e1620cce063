"""The health of an etcd, as its members say it: one question to each, and their metrics."""

import re
import ssl
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPException

from torch_ros.errors import TorchRosError
from torch_ros.store.credentials import Tls
from torch_ros.store.endpoint import located, opened
from torch_ros.store.etcd import EtcdKV
from torch_ros.store.kv import KV

QUOTA = "etcd_server_quota_backend_bytes"
SYNC = "etcd_disk_wal_fsync_duration_seconds"
SYNCS_MIN = 100  # fewer say nothing of one in a hundred
METRICS_BYTES_MAX = 8 << 20


@dataclass(frozen=True, slots=True)
class MemberHealth:
    """One member of an etcd.

    Attributes:
        problem: Why it says nothing; "": it does.
        answer_s: The time that its answer took.
        quota_bytes: The size that its database may have; None: its metrics are not to be had.
        sync_s: The time within which 99 of 100 of its writes were on disk; None: likewise, or it
            has written little, or waits for no disk.
    """

    host: str
    problem: str = ""
    version: str = ""
    has_leader: bool = True
    answer_s: float = 0.0
    size_bytes: int = 0
    quota_bytes: int | None = None
    sync_s: float | None = None


@dataclass(frozen=True, slots=True)
class EtcdHealth:
    """All members, and the alarms of their cluster; None: they cannot be asked for."""

    members: Sequence[MemberHealth] = ()
    alarms: Sequence[str] | None = ()


def health(endpoint: str, *, timeout_s: float) -> EtcdHealth:
    """Ask all members at the same time; nobody is waited for longer than `timeout_s`, twice.

    Raises: UsageError: `endpoint` is none, or names a file that cannot be used.
    """
    stores = _members(endpoint)
    if not stores:
        return EtcdHealth()
    with ThreadPoolExecutor(len(stores)) as pool:
        asked = [pool.submit(_asked, host, kv, timeout_s) for host, kv in stores.items()]
        answers = [each.result() for each in asked]
    alarms = next((alarms for _, alarms in answers if alarms is not None), None)
    return EtcdHealth([member for member, _ in answers], alarms)


def _asked(host: str, kv: KV, timeout_s: float) -> tuple[MemberHealth, Sequence[str] | None]:
    assert isinstance(kv, EtcdKV)
    with closing(kv):
        try:
            kv.status(timeout_s=timeout_s)  # connects
            began_s = time.perf_counter()
            status = kv.status(timeout_s=timeout_s)
            answer_s = time.perf_counter() - began_s
        except TorchRosError as error:
            return MemberHealth(host, str(error)), None
        metrics = _metrics(host, kv.tls, timeout_s)
        quota = re.search(rf"^{QUOTA} (\S+)$", metrics, re.MULTILINE)
        said = MemberHealth(
            host,
            version=status.version,
            has_leader=status.has_leader,
            answer_s=answer_s,
            size_bytes=status.size_bytes,
            quota_bytes=int(float(quota[1])) if quota else None,
            sync_s=within_s(metrics, SYNC, 0.99),
        )
        try:
            return said, kv.alarms(timeout_s=timeout_s)
        except TorchRosError:  # without a leader, or a role
            return said, None


def within_s(metrics: str, name: str, share: float) -> float | None:
    """The bound below which that share of what a histogram of Prometheus has counted lies."""
    rows = re.findall(rf'^{name}_bucket{{le="([^"]+)"}} (\S+)$', metrics, re.MULTILINE)
    counts = [(float(bound), float(count)) for bound, count in rows]  # "+Inf" is a float's name
    if not counts or counts[-1][1] < SYNCS_MIN:
        return None
    return next(bound for bound, count in counts if count >= share * counts[-1][1])


def _metrics(host: str, tls: Tls | None, timeout_s: float) -> str:
    """The metrics of a member, as text; "": it does not show them to us."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    try:
        if tls:
            context = ssl.create_default_context(cafile=tls.ca or None)
            if tls.cert:
                context.load_cert_chain(tls.cert, tls.key, password="")
            handlers.append(urllib.request.HTTPSHandler(context=context))
        scheme = "https" if tls else "http"
        opener = urllib.request.build_opener(*handlers)
        with opener.open(f"{scheme}://{host}/metrics", timeout=timeout_s) as reply:
            found: bytes = reply.read(METRICS_BYTES_MAX)
    except (OSError, HTTPException, ValueError):
        return ""
    return found.decode(errors="replace")


def _members(endpoint: str) -> dict[str, KV]:
    """A store for each member that `endpoint` names, by "host:port"; none of them was asked.

    The caller closes them. Empty where there is no etcd: "memory://".
    """
    whole = opened(located(endpoint))
    hosts = whole.endpoint.partition("://")[2].split(",") if isinstance(whole, EtcdKV) else ()
    whole.close()
    scheme, _, rest = located(endpoint).partition("://")
    query = rest.partition("?")[2]
    return {host: opened(f"{scheme}://{host}?{query}") for host in hosts}
