"""``torch.distributed.init_process_group(init_method="etcd://host:port[,host:port]/JOB")``.

`docs/DISTRIBUTED.md` ("init_method") has the form of the URL, and what importing this module does.
"""

import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from torch.distributed import Store  # type: ignore[attr-defined]  # at run time only
from torch.distributed.rendezvous import register_rendezvous_handler

from torch_ros import environment
from torch_ros.store import endpoint as endpoints
from torch_ros.store.distributed.store import TIMEOUT, TTL_S, EtcdStore

T = TypeVar("T")
SCHEMES = ("etcd", "etcds")
OPTIONS = {"rank", "world_size", "timeout_s", "ttl_s", *endpoints.OPTIONS}


def url_of(endpoint: str, job: str) -> str:
    """The URL for `init_method` of the store that `job` has in the etcd at `endpoint`."""
    return urlsplit(endpoint)._replace(path=quote(job)).geturl()


def open_store(
    url: str, timeout: timedelta = TIMEOUT, **_: object
) -> Iterator[tuple[Store, int, int]]:
    """Called by torch for a URL of which `docs/DISTRIBUTED.md` ("init_method") has the form.

    Raises:
        ValueError: The URL has no job or an unknown option, or rank or world size is missing.
        DistNetworkError: etcd did not answer.
    """
    parts, options = _parsed(url)
    if unknown := sorted(options.keys() - OPTIONS):
        raise _error(url, f"{unknown[0]!r} is no option; these are: {', '.join(sorted(OPTIONS))}")
    job = unquote(parts.path.strip("/"))
    if not job:
        raise _error(url, "the name of the job is missing; it stands behind the hosts and a slash")
    rank, world_size = _place(url, options, "rank"), _place(url, options, "world_size")
    limit = timeout
    if (seconds := options.pop("timeout_s", None)) is not None:
        limit = timedelta(seconds=_number(url, "timeout_s", seconds, float))
    ttl_s = _number(url, "ttl_s", options.pop("ttl_s", str(TTL_S)), int)
    endpoint = parts._replace(path="", query=urlencode(options), fragment="").geturl()
    store = EtcdStore(endpoint, job, timeout=limit, ttl_s=ttl_s)
    store.set_timeout(timeout)  # the URL's timeout is for the opening only
    yield store, rank, world_size
    raise RuntimeError("Unable to perform re-rendezvous using etcd:// method")


def _parsed(url: str) -> tuple[SplitResult, dict[str, str]]:
    """The parts of a URL, and its options; one without hosts stands for that of the environment."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if parts.netloc or parts.path:
        return parts, options
    found = environment.value(environment.INIT_METHOD)
    if not found:
        reason = f"it names no hosts, and {environment.INIT_METHOD} is not set; torchrun sets it"
        raise _error(url, reason)
    parts = urlsplit(found)
    return parts, dict(parse_qsl(parts.query, keep_blank_values=True)) | options


def _place(url: str, options: dict[str, str], name: str) -> int:  # rank, or world size
    text = options.pop(name, None) or os.environ.get(name.upper())
    if not text:
        raise _error(url, f"{name} is neither an argument nor {name.upper()} in the environment")
    return _number(url, name, text, int)


def _number(url: str, name: str, text: str, kind: Callable[[str], T]) -> T:
    try:
        return kind(text)
    except ValueError as error:
        found = "a whole number" if kind is int else "a number"
        raise _error(url, f"{name} is {text!r}, not {found}") from error


def _error(url: str, reason: str) -> ValueError:
    # What stands before an @, or behind a ?, may be a password.
    shown = re.sub(r"//.*@", "//...@", url, flags=re.DOTALL)
    shown = re.sub(r"\?.*", "?...", shown, flags=re.DOTALL)
    return ValueError(f"Error initializing torch.distributed using {shown!r}: {reason}")


for _scheme in SCHEMES:
    register_rendezvous_handler(_scheme, open_store)  # type: ignore[no-untyped-call]
