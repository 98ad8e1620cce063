"""May this copy go? The rules by which a retained version is not lost (I4). Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch_ros.errors import UsageError
from torch_ros.protocol import keys as k
from torch_ros.protocol import legible
from torch_ros.protocol.keeping import GivenUp, Keeping
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.legible import readable, say
from torch_ros.protocol.records import GroupRecord, Holding, RetainRecord, VersionRef
from torch_ros.protocol.sources import suspects
from torch_ros.protocol.versions import Spec, as_spec, number_of, run_numbers, spec_ranges
from torch_ros.store.txn import Entry, Guard, NoneNewer, Range, Ranges, Sample, Unseen, View, sample

HERE = "@here"  # behind a spec: in the datacenter of who says so


@dataclass(frozen=True, slots=True)
class Wish:
    """A version that shall not be lost; `is_here`: in the datacenter of who says so."""

    spec: Spec
    is_here: bool = False

    @classmethod
    def parse(cls, version: int | str) -> Wish:
        """Raises: UsageError: It names no version, as `open(retain=...)` takes them."""
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
    """All that `keeping` is decided from."""
    holders = sample(keys.holdings_of(ref.run, ref.version))
    wishes = keys.retains(datacenter)
    return (*spec_ranges(keys), holders, sample(keys.groups()), wishes, keys.suspects())


def keeping(view: View, keys: Keys, ref: VersionRef, given_up: GivenUp) -> Keeping:
    """Would the version be lost to those that retain it, if that copy went (I4)?

    Those that retain it anywhere need a witness anywhere; those that retain it `@here` need one in
    the datacenter of the copy. "No" comes with guards on what makes it true: of two that go at
    once, each the other's witness, one fails and asks again.
    """
    here = given_up.datacenter
    witnesses = _witnesses(view, keys, ref, given_up)  # by datacenter, the key of a holding
    if here in witnesses:  # enough for both
        return Keeping(
            is_needed=False, guards=(view.unchanged(witnesses[here]),), is_elsewhere=True
        )
    own = [*map(Wish.parse, given_up.retain)]
    specs_here = [*retained_here(view, keys, here), *(w.spec for w in own if w.is_here)]
    if specs_here:  # a sample may show none of the witnesses here
        _see_all_of(view, keys.holdings_in(ref.run, ref.version, here))
    witness: tuple[Guard, ...] = tuple(map(view.unchanged, [*witnesses.values()][:1]))
    is_elsewhere = bool(witness)
    guards: tuple[Guard, ...] = (*witness, NoneNewer(keys.retains(here), view.rev))
    if not is_elsewhere:  # no witness anywhere: needed if anybody's spec names the version
        specs = [w.spec for w in own if not w.is_here] + [*retentions(view.within(keys.groups()))]
        unnamed = _guards_if_unnamed(view, keys, ref, specs)
        if unnamed is None:  # a spec names it
            return Keeping(is_needed=True, guards=())
        guards = (*guards, NoneNewer(keys.groups(), view.rev), *unnamed)
    if specs_here:  # no witness here, or this had returned above
        unnamed = _guards_if_unnamed(view, keys, ref, specs_here, here)
        if unnamed is None:  # a spec names it
            return Keeping(is_needed=True, guards=witness, is_elsewhere=is_elsewhere, only_in=here)
        guards = (*guards, *unnamed)
    return Keeping(is_needed=False, guards=guards, is_elsewhere=is_elsewhere)


def _witnesses(view: View, keys: Keys, ref: VersionRef, given_up: GivenUp) -> dict[str, str]:
    """By datacenter, the key of one holding that keeps the version there when that copy goes.

    One that is about to go itself does not count. Not all holders have to be seen: few are enough.
    """
    suspected, found = suspects(view, keys), dict[str, str]()
    holders = view.seen(keys.holdings_of(ref.run, ref.version))
    for key, where, holding, _ in legible.holdings(holders):
        goes_too = given_up.is_leaving and k.is_of(where.inst, given_up.inst)
        if where.inst == given_up.inst or goes_too or _may_go(where.inst, suspected):
            continue
        if _counts(holding) and holding.uid == ref.uid:
            found.setdefault(where.datacenter, key)
    return found


def _counts(holding: Holding) -> bool:
    """Whether it can be read whole, and its replica does not vanish at any moment (spot)."""
    return holding.state == "full" and not holding.spot


def _may_go(inst: str, suspected: Collection[str]) -> bool:
    """Whether a holder is about to close (it lingers), or may be dead already (it is suspected)."""
    return k.lingers(inst) or inst in suspected


def _see_all_of(view: View, here: Range) -> None:
    """Make the loop read all holdings of this datacenter, where the view is a sample of all.

    A witness that is here may not be among a few of thousands, and a copy for nothing is dear.

    Raises: Unseen: They are not all in this view.
    """
    if not view.has(sample(here)):
        asked_before = (asked for asked in view.asked if isinstance(asked, Sample))
        raise Unseen(*asked_before, sample(here))
    if not view.shows(here):
        raise Unseen


def _guards_if_unnamed(
    view: View, keys: Keys, ref: VersionRef, specs: Sequence[Spec], datacenter: str | None = None
) -> list[Guard] | None:
    """The guards under which none of these specs names `ref`. None: one does.

    Specs name versions of the newest run that is held, and `latest-<k>` is the one with k newer
    ones above it. A newer one that may go counts both ways: if 9 lingers above 8, then 8 is
    `latest-1` while 9 is there and `latest` as soon as it is not, so both keep 8.

    Args:
        datacenter: Where holdings count; None: anywhere.
    """
    staying, doubtful = _held_versions(view, keys, datacenter)
    newest_first = sorted({*staying, ref}, key=lambda r: r.order, reverse=True)
    newest_run = [r for r in newest_first if r.run == newest_first[0].run]
    if ref in newest_run and any(spec.absolute == ref.version for spec in specs):
        return None
    # A number means the newest run's version, too: while there is such a run, not this older one.
    deepest = max((s.back for s in specs if s.absolute in (None, ref.version)), default=-1)
    above = newest_run[: 1 + deepest]  # one that goes would make each below it one newer
    guards: list[Guard] = [view.unchanged(staying[r][0]) for r in above if r in staying]
    if ref not in newest_run:  # no spec means an older run, as long as those above stay
        return guards
    # The doubtful ones may stay or go: `ref` is `latest-<k>` for some k from fewest to most.
    fewest_newer = newest_run.index(ref)
    most_newer = fewest_newer + sum(r.run == ref.run and r.order > ref.order for r in doubtful)
    if any(s.absolute is None and fewest_newer <= s.back <= most_newer for s in specs):
        return None
    if most_newer < deepest:  # newer versions that come would make it `latest-<k>`
        guards += [NoneNewer(r, view.rev) for r in _ranges_of_newer(view, keys, ref, datacenter)]
    return guards


def _held_versions(
    view: View, keys: Keys, datacenter: str | None
) -> tuple[dict[VersionRef, list[str]], set[VersionRef]]:
    """The versions that are held for good, with their holdings' keys; and the doubtful ones.

    All holders of a doubtful version may go: it neither counts for certain, nor is it left out.

    Args:
        datacenter: Where holdings count; None: anywhere.
    """
    numbers, suspected = run_numbers(view, keys), suspects(view, keys)
    staying: dict[VersionRef, list[str]] = {}
    doubtful: set[VersionRef] = set()
    for key, where, holding, _ in legible.holdings(view.within(keys.holdings())):
        if not _counts(holding) or datacenter not in (None, where.datacenter):
            continue
        number = number_of(where.run, numbers)
        ref = VersionRef(where.run, where.version, holding.uid, number)
        if _may_go(where.inst, suspected):
            doubtful.add(ref)
        else:
            staying.setdefault(ref, []).append(key)
    return staying, doubtful - staying.keys()


def _ranges_of_newer(
    view: View, keys: Keys, ref: VersionRef, datacenter: str | None
) -> list[Range]:
    """The ranges in which something changes when a newer version of its run comes to be held.

    In one datacenter there is a range for each version: those of all that have a record, and the
    records themselves, since one comes with each further version.
    """
    if datacenter is None:
        return [Range(keys.holdings_of(ref.run, ref.version).end, keys.holdings(ref.run).end)]
    records = keys.versions_above(ref.run, ref.version)
    known = [number for _, (_, number), _ in legible.keyed(view.within(records), k.parse_version)]
    return [records, *(keys.holdings_in(ref.run, number, datacenter) for number in known)]


def retentions(found: Iterable[tuple[str, Entry]]) -> Iterator[Spec]:
    """Everything that anybody retains, wherever it is held, as far as its record can be read."""
    for key, _, group, _ in readable(found, k.parse_group, GroupRecord):
        yield from (wish.spec for wish in _wishes(key, group.retain) if not wish.is_here)


def retained_here(view: View, keys: Keys, datacenter: str) -> Iterator[Spec]:
    """Everything that those of a datacenter retain there."""
    found = view.seen(keys.retains(datacenter))
    for key, _, record, _ in readable(found, k.parse_retain, RetainRecord):
        yield from (wish.spec for wish in _wishes(key, record.here))


def _wishes(key: str, texts: Iterable[str]) -> Iterator[Wish]:
    """The wishes of one record; one that cannot be read is named in the log, and passed over."""
    for text in texts:
        try:
            yield Wish.parse(text)
        except UsageError as error:
            say(key, str(error))
