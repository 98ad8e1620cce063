"""Records of others, as far as they can be read (docs/protocol/unreadable.md).

One's own records, which nothing can be done without, are read with `Record.at`, which raises.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import TypeVar

from torch_ros.errors import BackendError
from torch_ros.printable import log_of
from torch_ros.protocol.keys import HoldingKey, parse_holding
from torch_ros.protocol.records import Holding, Record, deletion
from torch_ros.store.txn import Empty, Entry, NoneNewer, Range, View

W = TypeVar("W")
R = TypeVar("R", bound=Record)
log: logging.Logger = log_of(__name__)

SAID_MAX = 1024  # records that were named in the log


def keyed(
    found: Iterable[tuple[str, Entry]], parse: Callable[[str], W | None]
) -> Iterator[tuple[str, W, Entry]]:
    """The records whose keys can be read, with what the keys say; others are logged."""
    for key, entry in found:
        where = parse(key)
        if where is None:
            say(key, "no such key is ever written")
        else:
            yield key, where, entry


def readable(
    found: Iterable[tuple[str, Entry]], parse: Callable[[str], W | None], kind: type[R]
) -> Iterator[tuple[str, W, R, Entry]]:
    """The records that can be read, with what their keys and values say; others are logged."""
    for key, where, entry in keyed(found, parse):
        try:
            record = kind.decode(entry.value, key)
        except BackendError as error:
            say(key, str(error.__cause__))
        else:
            yield key, where, record, entry


def holdings(
    found: Iterable[tuple[str, Entry]],
) -> Iterator[tuple[str, HoldingKey, Holding, Entry]]:
    """The holdings that can be read, and that name the datacenter of their keys."""
    for key, where, holding, entry in readable(found, parse_holding, Holding):
        if where.datacenter == holding.datacenter:
            yield key, where, holding, entry
        else:
            say(key, f"its value names the datacenter {holding.datacenter!r}")


def nobody(view: View, range_: Range) -> Empty | NoneNewer:
    """The guard that nobody is in a range in which the view shows nothing that can be read.

    If something unreadable is there, it says that nothing has come since. A store that was wiped
    counts from 1 again, and passes it: it stands beside a guard that fails then.
    """
    is_empty = not any(True for _ in view.within(range_))
    return Empty(range_) if is_empty else NoneNewer(range_, view.rev)


@lru_cache(SAID_MAX)
def say(key: str, found: str) -> None:
    """Log that a record is passed over: once for each key and for what was found there."""
    log.warning(
        "a record in etcd cannot be read and counts as not there: %r: %s; "
        "if no process of yours wrote it: %s",
        key,
        found[:200],
        deletion(key),
    )
