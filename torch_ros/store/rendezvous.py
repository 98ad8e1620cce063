"""``torch.distributed.init_process_group(init_method="etcd://host:port[,host:port]/JOB")``.

Importing this module makes torch know the scheme.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import parse_qs, unquote, urlsplit

from torch.distributed import Store  # type: ignore[attr-defined]  # at run time only
from torch.distributed.rendezvous import register_rendezvous_handler

from torch_ros.store.torch_store import TIMEOUT, TTL_S, EtcdStore

SCHEME = "etcd"
OPTIONS = {"rank", "world_size", "timeout_s", "ttl_s"}

_registered = False


def register() -> None:
    """Make torch know ``etcd://``. Idempotent.

    This is about `init_method` alone: the rendezvous backends of torchrun, of which one is named
    "etcd" as well, are another registry.

    Raises:
        RuntimeError: Someone else has registered the scheme.
    """
    global _registered  # noqa: PLW0603  # torch's registry is global too
    if not _registered:
        register_rendezvous_handler(SCHEME, open_store)  # type: ignore[no-untyped-call]
        _registered = True


def open_store(
    url: str, timeout: timedelta = TIMEOUT, **_: object
) -> Iterator[tuple[Store, int, int]]:
    """What torch calls for ``etcd://host:port[,host:port]/JOB[?timeout_s=..][&ttl_s=..]``.

    All processes that name the same JOB are one group; a job that starts again within `ttl_s` must
    have another name. Rank and world size are arguments of `init_process_group`, or the environment
    variables RANK and WORLD_SIZE.

    Options:
        timeout_s: How long etcd may take to answer at first; without it, the group's timeout.
        ttl_s: How long the job's keys stay without any process.

    Raises:
        ValueError: The URL has no job or an unknown option, or rank or world size is missing.
        DistNetworkError: etcd did not answer.
    """
    parts = urlsplit(url)
    job = unquote(parts.path.strip("/"))
    if not job:
        raise _error(url, "the name of the job is missing; it stands behind the hosts and a slash")
    options = _options(url, parts.query)
    rank, world_size = _place(url, options, "rank"), _place(url, options, "world_size")
    limit = timeout
    if "timeout_s" in options:
        limit = timedelta(seconds=_seconds(url, "timeout_s", options["timeout_s"]))
    ttl_s = _whole(url, "ttl_s", options.get("ttl_s", str(TTL_S)))
    store = EtcdStore(f"{SCHEME}://{parts.netloc}", job, timeout=limit, ttl_s=ttl_s)
    store.set_timeout(timeout)
    yield store, rank, world_size
    raise RuntimeError("Unable to perform re-rendezvous using etcd:// method")


def _options(url: str, query: str) -> dict[str, str]:
    found = parse_qs(query, keep_blank_values=True)
    unknown = sorted(found.keys() - OPTIONS)
    if unknown:
        raise _error(url, f"{unknown[0]!r} is no option; these are: {', '.join(sorted(OPTIONS))}")
    return {name: values[-1] for name, values in found.items()}


def _place(url: str, options: dict[str, str], name: str) -> int:
    text = options.get(name) or os.environ.get(name.upper())
    if not text:
        raise _error(url, f"{name} is neither an argument nor {name.upper()} in the environment")
    return _whole(url, name, text)


def _whole(url: str, name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise _error(url, f"{name} is {text!r}, not a whole number") from error


def _seconds(url: str, name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise _error(url, f"{name} is {text!r}, not a number") from error


def _error(url: str, reason: str) -> ValueError:
    return ValueError(f"Error initializing torch.distributed using {url!r}: {reason}")


register()
