"""Which versions of a bucket count, what a new one is called, and which go. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch_ros.bucket.files import InBucket
from torch_ros.errors import UsageError, VersionNotFound

READ_MAX = 64  # links of a chain


def living(there: Iterable[InBucket]) -> list[InBucket]:
    """The versions of the newest run that has some, newest first.

    A trainer that died at 101 and starts again at 95 publishes 99 anew. 99 is younger than 101
    then, so 101 is of a lineage that has ended, as everything is that is older than a lower number.
    """
    found = list(there)
    newest_run = max(((each.run_number, each.run) for each in found), default=(0, ""))
    alive: list[InBucket] = []
    ordered = sorted(found, key=_age, reverse=True)
    for each in ordered:
        if (each.run_number, each.run) == newest_run and (
            not alive or each.version < alive[-1].version
        ):
            alive.append(each)
    return alive


def _age(of: InBucket) -> tuple[int, int, str, str]:
    return of.born_ms, of.version, of.uid, of.nonce


def needed(there: Iterable[InBucket], of: InBucket) -> list[InBucket] | int:
    """What is read for a version: a full one, then deltas, the last of which makes this one.

    Returns:
        An int: the version that is missing.
    """
    by_name = {(each.run_number, each.run, each.version, each.nonce): each for each in there}
    chain = [of]
    while (base := chain[-1].base) is not None:
        found = by_name.get((of.run_number, of.run, *base))
        # A base is older, so that no chain is a circle.
        if found is None or found.version >= chain[-1].version or len(chain) > READ_MAX:
            return base[0]
        chain.append(found)
    return chain[::-1]


def is_short(delta_bytes: Sequence[int], full_bytes: int, most: int) -> bool:
    """Whether a version may be a delta, too, of so many bytes, after those behind a full one.

    Args:
        delta_bytes: Of each delta behind it, the new one the last.
        most: Deltas behind a full one.
    """
    return len(delta_bytes) <= most and sum(delta_bytes) <= full_bytes // 2


def chosen(there: Collection[InBucket], model: str, version: int | str) -> list[InBucket]:
    """The links that are read for a number, "latest" or "latest-<k>"; of the newest run.

    A delta of something that is gone cannot be read: "latest" is none of these.

    Raises:
        UsageError: It is none of these.
        VersionNotFound: The bucket has no such version, or not all that it needs. Names those that
            it has.
    """
    alive = living(there)
    readable = [each for each in alive if isinstance(needed(there, each), list)]
    if isinstance(version, int) and not isinstance(version, bool):
        found = [each for each in alive if each.version == version]
    elif isinstance(version, str) and (m := re.fullmatch(r"latest(?:-([0-9]{1,9}))?", version)):
        found = readable[int(m[1] or 0) :]
    else:
        raise UsageError(f"version {version!r}: expected a number, 'latest' or 'latest-<k>'")
    names = ", ".join(str(each.version) for each in readable[:10]) or "nothing"
    if not found:
        raise VersionNotFound(model, str(version), f"the bucket has {names}")
    links = needed(there, found[0])
    if isinstance(links, int):
        lacks = f"it is a delta, and of what it needs version {links} is gone"
        raise VersionNotFound(model, str(version), f"{lacks}; the bucket has {names}")
    return links


def run_number(there: Iterable[InBucket], run: str, known: Mapping[str, int]) -> int:
    """The number by which a bucket orders this run, among those that have `known` numbers in etcd.

    An etcd that was wiped counts from 1 again. Its runs come after those that it does not know, and
    after its own older ones, which came after others once that somebody has deleted since.
    """
    numbers = {each.run: each.run_number for each in there}
    mine = known.get(run, 0)
    unknown = [n for name, n in numbers.items() if name not in {*known, run}]
    older = [n for name, n in numbers.items() if known.get(name, mine) < mine]
    return numbers.get(run, max(mine + max(unknown, default=0), 1 + max(older, default=-1)))


def born_ms(there: Iterable[InBucket], run: str, version: int, uid: str, at_ms: int) -> int:
    """The time that orders a version that is read from a replica now.

    Its number has two contents: then the one in the bucket is of a lineage that has ended,
    whatever the clocks say. Lower numbers came before it, likewise.
    """
    mine = [each for each in there if each.run == run]
    lower = [each.born_ms for each in mine if each.version < version]
    replaced = [each for each in mine if each.version == version and each.uid != uid]
    ended = [each.born_ms + 1 for each in mine if replaced and each.version >= version]
    return max(at_ms, *lower, *ended, 0)


def behind(
    newest: InBucket | None, run: str, version: int, at_ms: int, now_ms: int
) -> tuple[int, float]:
    """By how many numbers and seconds a bucket is behind a version that was published at `at_ms`.

    Seconds lie between two publications, by the publisher's clock. If the bucket has nothing of the
    run, it is behind by all its numbers, and until now.
    """
    if newest is None or newest.run != run:
        return version + 1, max(0, now_ms - at_ms) / 1000
    return max(0, version - newest.version), max(0, at_ms - newest.born_ms) / 1000


def to_collect(there: Sequence[InBucket], keep: int, known: Collection[str]) -> list[InBucket]:
    """The manifests to delete, so that `keep` versions stay, and what these are deltas of.

    Of runs that etcd knows.

    A lineage that has ended goes as its numbers come again: until then a clock may be wrong.
    """
    mine = [each for each in there if each.run in known]
    kept_: list[InBucket] = []
    reached: dict[str, int] = {}
    for run in sorted({(each.run_number, each.run) for each in mine}, reverse=True):
        alive = living(each for each in mine if (each.run_number, each.run) == run)
        reached[alive[0].run] = max(alive[0].version, reached.get(alive[0].run, 0))
        kept_ += alive[: max(0, keep - len(kept_))]
    for each in [*kept_]:
        bases = needed(mine, each)
        kept_ += bases if isinstance(bases, list) else ()
    kept_keys = {each.key for each in kept_}
    return [
        each for each in mine if each.key not in kept_keys and each.version <= reached[each.run]
    ]
