"""May this copy go? The rules by which a retained version is not lost (I4). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch_ros.errors import UsageError
from torch_ros.protocol import keys as k
from torch_ros.protocol import legible
from torch_ros.protocol.keeping import GivenUp, Keeping
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.legible import readable, say
from torch_ros.protocol.records import GroupRecord, Holding, RetainRecord, VersionRef
from torch_ros.protocol.sources import suspects
from torch_ros.protocol.versions import Spec, number_of, run_numbers, spec_ranges
from torch_ros.store.txn import (
    Entry,
    Guard,
    NoneNewer,
    Range,
    Ranges,
    Sample,
    Unseen,
    View,
    sample,
)

HERE = "@here"  # behind a spec: in the datacenter of who says so


@dataclass(frozen=True, slots=True)
class Wish:
    """A version that shall not be lost; `is_here`: in the datacenter of who says so."""

    spec: Spec
    is_here: bool = False

    @classmethod
    def parse(cls, version: int | str) -> Wish:
        spec = as_spec(version.removesuffix(HERE)) if isinstance(version, str) else version
        is_here = isinstance(version, str) and version.endswith(HERE)
        try:
            return cls(Spec.parse(spec), is_here)
        except UsageError as error:
            reason = f"{error}; with {HERE!r} behind it: in this datacenter"
            raise UsageError(f"retain: {version!r}: {reason}") from None

    def __str__(self) -> str:
        return f"{self.spec}{HERE if self.is_here else ''}"


def keeping_ranges(keys: Keys, ref: VersionRef, datacenter: str) -> Ranges:
    holders = sample(keys.holdings_of(ref.run, ref.version))
    wishes = keys.retains(datacenter)
    return (*spec_ranges(keys), holders, sample(keys.groups()), wishes, keys.suspects())


def keeping(view: View, keys: Keys, ref: VersionRef, given_up: GivenUp) -> Keeping:
    """Would the version be lost to those that retain it, if that copy went (I4)?"""
    datacenter = given_up.datacenter
    same: tuple[Guard, ...]
    witnesses = _witnesses(view, keys, ref, given_up)
    if datacenter in witnesses:
        same = (view.unchanged(witnesses[datacenter]),)
        return Keeping(is_needed=False, guards=same, is_elsewhere=True)
    own = [*map(Wish.parse, given_up.retain)]
    here = [*retained_here(view, keys, datacenter), *(w.spec for w in own if w.is_here)]
    if here:
        _see_near(view, keys.holdings_in(ref.run, ref.version, datacenter))
    same = tuple(map(view.unchanged, [*witnesses.values()][:1]))
    is_elsewhere = bool(same)
    guards: tuple[Guard, ...] = (*same, NoneNewer(keys.retains(datacenter), view.rev))
    if not is_elsewhere:
        everywhere = [wish.spec for wish in own if not wish.is_here]
        everywhere += retentions(view.within(keys.groups()))
        superseded = _superseded(view, keys, ref, everywhere)
        if superseded is None:
            return Keeping(is_needed=True, guards=())
        guards = (*guards, NoneNewer(keys.groups(), view.rev), *superseded)
    if here:
        superseded = _superseded(view, keys, ref, here, datacenter)
        if superseded is None:
            return Keeping(
                is_needed=True, guards=same, is_elsewhere=is_elsewhere, only_in=datacenter
            )
        guards = (*guards, *superseded)
    return Keeping(is_needed=False, guards=guards, is_elsewhere=is_elsewhere)


def _witnesses(view: View, keys: Keys, ref: VersionRef, given_up: GivenUp) -> dict[str, str]:
    """Another holding that counts in each datacenter, of those that were seen."""
    suspected, found = suspects(view, keys), dict[str, str]()
    there = view.seen(keys.holdings_of(ref.run, ref.version))
    for key, where, holding, _ in legible.holdings(there):
        is_own = where.inst == given_up.inst
        is_own = is_own or (given_up.is_leaving and k.is_of(where.inst, given_up.inst))
        is_other = not (is_own or where.inst in suspected or k.lingers(where.inst))
        if is_other and _counts(holding) and holding.uid == ref.uid:
            found.setdefault(where.datacenter, key)
    return found


def _see_near(view: View, near: Range) -> None:
    """Among many, a witness that is here may not have been seen."""
    if not view.has(sample(near)):
        samples = (asked for asked in view.asked if isinstance(asked, Sample))
        raise Unseen(*samples, sample(near))
    if not view.shows(near):
        raise Unseen


def _superseded(
    view: View, keys: Keys, ref: VersionRef, specs: Sequence[Spec], datacenter: str | None = None
) -> list[Guard] | None:
    """The guards under which none of these specs means `ref`. None: one does.

    Args:
        datacenter: Where they look; None: anywhere.
    """
    holders, doubtful = _that_count(view, keys, datacenter)
    refs = sorted({*holders, ref}, key=lambda r: r.order, reverse=True)
    newest = [r for r in refs if r.run == refs[0].run]
    backs = [spec.back for spec in specs if spec.absolute is None]
    deepest, is_newest = max(backs, default=-1), ref in newest
    if is_newest:
        fewest = newest.index(ref)  # that are newer
        most = fewest + sum(r.run == ref.run and r.order > ref.order for r in doubtful)
        is_named = any(spec.absolute == ref.version for spec in specs)
        if is_named or any(fewest <= back <= most for back in backs):
            return None
    guards: list[Guard] = [
        view.unchanged(holders[r][0]) for r in newest[: 1 + deepest] if r in holders
    ]
    if is_newest and most < deepest:  # newer versions that come would make it `latest-<k>`
        above = _above(view, keys, ref, datacenter)
        guards += [NoneNewer(range_, view.rev) for range_ in above]
    return guards


def _above(view: View, keys: Keys, ref: VersionRef, datacenter: str | None) -> list[Range]:
    """Where the holdings of newer versions of its run are, or come with a record of theirs."""
    if datacenter is None:
        return [Range(keys.holdings_of(ref.run, ref.version).end, keys.holdings(ref.run).end)]
    records = keys.versions_above(ref.run, ref.version)
    known = [number for _, (_, number), _ in legible.keyed(view.within(records), k.parse_version)]
    return [records, *(keys.holdings_in(ref.run, number, datacenter) for number in known)]


def as_spec(text: str) -> int | str:
    return int(text) if re.fullmatch("[0-9]{1,20}", text) else text


def retentions(found: Iterable[tuple[str, Entry]]) -> Iterator[Spec]:
    """Everything that anybody retains, wherever that is, as far as its record can be read."""
    for key, _, group, _ in readable(found, k.parse_group, GroupRecord):
        yield from (wish.spec for wish in _wishes(key, group.retain) if not wish.is_here)


def retained_here(view: View, keys: Keys, datacenter: str) -> Iterator[Spec]:
    """Everything that those of a datacenter retain there."""
    for key, _, record, _ in readable(
        view.seen(keys.retains(datacenter)), k.parse_retain, RetainRecord
    ):
        yield from (wish.spec for wish in _wishes(key, record.here))


def _wishes(key: str, texts: Iterable[str]) -> Iterator[Wish]:
    for text in texts:
        try:
            yield Wish.parse(text)
        except UsageError as error:
            say(key, str(error))


def _counts(holding: Holding) -> bool:
    return holding.state == "full" and not holding.spot


def _that_count(
    view: View, keys: Keys, datacenter: str | None
) -> tuple[dict[VersionRef, list[str]], set[VersionRef]]:
    """The full holdings that count for retention, by version; in that datacenter, or anywhere.

    And the other versions that are there, but whose holders are about to go, since they linger, or
    may be gone, since they are suspected. An older version has to stay whether these do or not.
    """
    numbers, suspected = run_numbers(view, keys), suspects(view, keys)
    stay: dict[VersionRef, list[str]] = {}
    doubtful: set[VersionRef] = set()
    for key, where, holding, _ in legible.holdings(view.within(keys.holdings())):
        if not _counts(holding) or datacenter not in (None, where.datacenter):
            continue
        number = number_of(where.run, numbers)
        ref = VersionRef(where.run, where.version, holding.uid, number)
        if k.lingers(where.inst) or where.inst in suspected:
            doubtful.add(ref)
        else:
            stay.setdefault(ref, []).append(key)
    return stay, doubtful - stay.keys()
