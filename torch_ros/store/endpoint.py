"""From the text that says where the store is to the `KV` that it means."""

from __future__ import annotations

import re

from torch_ros.errors import NotSupported, UsageError
from torch_ros.store import local, memory
from torch_ros.store.etcd import EtcdKV
from torch_ros.store.kv import KV
from torch_ros.store.txn import Read, one

ANSWER_S_MAX = 10.0
HOST = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})")
FORMS = '"etcd://host:port[,host:port]", "local" or "memory://[name]"'


def connect(endpoint: str, *, timeout_s: float) -> KV:
    """The store at `endpoint`; it has answered.

    Args:
        endpoint: "etcd://host:port[,host:port]", members of one cluster; "local", an etcd on this
            host, started if need be; "memory://[name]", the same for all of this process.

    Raises:
        UsageError: `endpoint` is none of these, or there is no etcd to start.
        NotSupported: It asks for TLS or a password.
        StoreUnavailable: Nothing answered within `timeout_s`, or 10 s, or not as etcd does.
    """
    kv = _open(endpoint)
    try:
        kv.read(Read((one("/"),)), timeout_s=min(timeout_s, ANSWER_S_MAX))
    except BaseException:
        kv.close()
        raise
    return kv


def _open(endpoint: str) -> KV:
    if endpoint == "local":
        return EtcdKV([local.ensure()])
    scheme, _, rest = endpoint.partition("://")
    if scheme == "etcds":
        raise NotSupported("TLS (etcds://)", "use etcd:// on a network that you trust")
    if scheme == "etcd" and "@" in rest:
        raise NotSupported("a user and password in the endpoint", "use an etcd without users")
    if scheme == "etcd" and all(map(_is_host, rest.split(","))):
        return EtcdKV(rest.split(","))
    if endpoint.startswith("memory://"):
        return memory.named(rest)
    # What stands before an @ may be a password, and this ends up in logs.
    found = re.sub(r".*@", "...@", endpoint, flags=re.DOTALL)
    raise UsageError(f"the endpoint is {found!r}; it has to be {FORMS}")


def _is_host(text: str) -> bool:
    found = HOST.fullmatch(text)
    return found is not None and 0 < int(found[2]) < 65536
