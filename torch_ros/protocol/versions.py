"""Which versions there are, what `latest` means, and which must not be lost. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch_ros.errors import UsageError, VersionNotFound
from torch_ros.protocol import keys as k
from torch_ros.protocol import legible
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.legible import keyed, readable
from torch_ros.protocol.records import Holding, RunRecord, VersionRecord, VersionRef, in_words
from torch_ros.store.loops import Wait
from torch_ros.store.txn import Range, Ranges, Sample, Unseen, View, one, sample

GLIMPSES_MAX = 8  # versions of which these are looked at, the newest first
HOLDERS_MAX = 8  # that are looked at to see that a version is available


@dataclass(frozen=True, slots=True)
class Spec:
    """Which version: an absolute number, or the `back`-th newest that is available."""

    absolute: int | None = None
    back: int = 0
    floor: VersionRef | None = None  # never an older one
    only: VersionRef | None = None  # this content, or none
    may_miss: bool = False  # where there is none yet, or none any more, that is the answer

    @classmethod
    def at_hand(cls, ref: VersionRef) -> Spec:
        """This very content, if it can be read now: nobody waits for it."""
        return cls(ref.version, only=ref)

    @classmethod
    def parse(cls, version: int | str, floor: VersionRef | None = None) -> Spec:
        if isinstance(version, int) and not isinstance(version, bool):
            return cls(check_version(version), floor=floor)
        if isinstance(version, str) and (m := re.fullmatch(r"latest(?:-([0-9]{1,9}))?", version)):
            return cls(back=int(m[1] or 0), floor=floor)
        raise UsageError(f"version {version!r}: expected a number >= 0, 'latest' or 'latest-<k>'")

    def __str__(self) -> str:
        if self.absolute is not None:
            return str(self.absolute)
        return f"latest-{self.back}" if self.back else "latest"


def as_spec(text: str) -> int | str:
    """A text as `Spec.parse` takes it: "7" is the number 7."""
    # One digit more than a version may have, so that the error names the bound.
    return int(text) if re.fullmatch("[0-9]{1,20}", text) else text


def check_version(version: object) -> int:
    if isinstance(version, bool) or not isinstance(version, int):
        raise UsageError(f"version {version!r}: expected an int, found {type(version).__name__}")
    if not 0 <= version <= k.VERSION_MAX:
        raise UsageError(f"version {in_words(version)}: expected 0 <= version <= {k.VERSION_MAX}")
    return version


@dataclass(frozen=True, slots=True)
class AvailableVersion:
    """A version that can be read now, and from whom."""

    ref: VersionRef
    holdings: Mapping[str, Holding]  # inst -> its full holding, of those that were seen

    def first_key(self, keys: Keys) -> str:
        """The key of one of its holdings."""
        inst = min(self.holdings)
        return keys.holding(self.ref.run, self.ref.version, self.holdings[inst].datacenter, inst)


def shows_all(view: View, keys: Keys, offer: AvailableVersion) -> bool:
    return view.shows(keys.holdings_of(offer.ref.run, offer.ref.version))


def first_holders(keys: Keys, run: str, version: int) -> Sample:
    """The holdings that came first, which are the first to be full."""
    return Sample(keys.holdings_of(run, version), HOLDERS_MAX, is_oldest=True)


def spec_ranges(keys: Keys) -> Ranges:
    return (keys.runs(), keys.versions(), sample(keys.holdings()))


def newer_ranges(keys: Keys, held: VersionRef | None) -> Ranges:
    """The ranges for `newer`. Mostly records say that nothing is new, so few holdings are read."""
    ranges = (keys.runs(), keys.versions(), Sample(keys.holdings(), 1))
    if held is None:
        return ranges
    newer_ones = Range(keys.holdings_of(held.run, held.version).end, keys.holdings(held.run).end)
    return (*ranges, Sample(newer_ones, HOLDERS_MAX, is_oldest=True))  # in the same run


def run_numbers(view: View, keys: Keys) -> dict[str, int]:
    """The runs and their numbers; newer ones have greater numbers."""
    found = readable(view.within(keys.runs()), k.parse_run, RunRecord)
    return {name: number_of(name, {name: run.number}) for _, name, run, _ in found}


def number_of(run: str, numbers: Mapping[str, int]) -> int:
    """The number by which a run is ordered: 0 of the bucket's; 1 if its record cannot be read."""
    return 0 if run == k.OUTSIDE else max(1, numbers.get(run, 1))


def is_passed(view: View, keys: Keys, ref: VersionRef) -> bool:
    """Whether `ref` is of the bucket's run, which has one version: another one by now."""
    if ref.run != k.OUTSIDE:
        return False
    there = keyed(view.within(keys.versions(ref.run)), k.parse_version)
    return any(number != ref.version for _, (_, number), _ in there)


def _records(view: View, keys: Keys) -> Iterator[tuple[VersionRef, VersionRecord]]:
    numbers = run_numbers(view, keys)
    found = readable(view.within(keys.versions()), k.parse_version, VersionRecord)
    for _, (run, number), record, _ in found:
        yield VersionRef(run, number, record.uid, number_of(run, numbers)), record


def offered(view: View, keys: Keys) -> list[list[AvailableVersion]]:
    """The available versions: runs from the newest, versions from the newest, none empty."""
    full: dict[tuple[str, int], dict[str, Holding]] = {}
    for _, where, holding, _ in legible.holdings(view.within(keys.holdings())):
        if holding.state == "full":
            full.setdefault((where.run, where.version), {})[where.inst] = holding
    by_run: dict[str, list[AvailableVersion]] = {}
    for ref, record in _records(view, keys):
        there = full.get((ref.run, ref.version), {})
        holdings = {inst: held for inst, held in there.items() if held.uid == record.uid}
        if holdings:
            by_run.setdefault(ref.run, []).append(AvailableVersion(ref, holdings))
    runs = sorted(by_run.values(), key=lambda offers: offers[0].ref.order, reverse=True)
    return [sorted(offers, key=lambda offer: offer.ref.order, reverse=True) for offers in runs]


def listing(view: View, keys: Keys, *, of_trainers: bool = False) -> dict[int, set[str]]:
    """The available versions of the newest run that has one, and the replicas that hold them.

    Args:
        of_trainers: Versions that no replica published, but a bucket had, do not count.
    """
    runs = (run for run in offered(view, keys) if not of_trainers or run[0].ref.run != k.OUTSIDE)
    return {o.ref.version: {k.replica_of(inst) for inst in o.holdings} for o in next(runs, [])}


def resolve(view: View, keys: Keys, spec: Spec) -> AvailableVersion | Wait:
    """The version that `spec` means now.

    Raises: VersionNotFound: An absolute version that is gone; waiting would not bring it back.
    """
    offer = _resolve(view, keys, spec)
    if spec.only is not None and (isinstance(offer, Wait) or offer.ref != spec.only):
        raise VersionNotFound(keys.model, str(spec), "no replica holds it any more")
    return offer


def _resolve(view: View, keys: Keys, spec: Spec) -> AvailableVersion | Wait:
    """As `resolve`, whatever `spec.only` says. The table is in docs/PROTOCOL.md#which-version."""
    if not view.shows(keys.holdings()):  # a sample of many, of which a few may be enough
        glimpsed = _glimpsed(view, keys, spec)
        if isinstance(glimpsed, Wait):
            return glimpsed
        if glimpsed and (spec.floor is None or glimpsed.ref.order >= spec.floor.order):
            return glimpsed
    runs = offered(view, keys)
    newest = next(iter(runs), [])
    if spec.absolute is None:
        return _relative(keys, spec, runs, _ended_at(view, keys, _newest_run(view, keys)))
    for offer in newest:
        if offer.ref.version == spec.absolute:
            return offer
    newest_run = _newest_run(view, keys)
    # Versions from a bucket say nothing of the numbers that a trainer will publish.
    run = newest[0].ref.run if newest and newest[0].ref.run != k.OUTSIDE else newest_run
    VersionRecord.at(view, keys.version(run, spec.absolute))  # raises if it cannot be read
    there = published(view, keys, run)
    holders = view.within(keys.holdings_of(run, spec.absolute))
    filling = [
        key for key, _, holding, _ in legible.holdings(holders) if holding.state == "filling"
    ]
    if filling or spec.absolute > max(there, default=-1):
        return _wait_for_version(
            keys, runs, _not_yet(spec, _ended_at(view, keys, run)), *filling[:1]
        )
    available = sorted(offer.ref.version for offer in newest)
    found = available or "none"
    reason = f"it was published before and no replica holds it now; available: {found}"
    raise VersionNotFound(keys.model, str(spec.absolute), reason)


def newest_record(view: View, keys: Keys) -> VersionRef | None:
    """The newest version that was ever published in full: none above it can be available."""
    refs = (ref for ref, record in _records(view, keys) if record.layout)
    return max(refs, key=lambda ref: ref.order, default=None)


def newer_refs(
    view: View, keys: Keys, held: VersionRef, newest: VersionRef | None = None
) -> list[VersionRef]:
    """The versions published in full after `held`; if `newest` is given, of its run and up to it.

    `newest` is one of them even with the number of `held`: then that was published anew.
    """
    refs = [ref for ref, record in _records(view, keys) if record.layout]
    if newest is not None:
        refs = [ref for ref in refs if ref.run == newest.run and ref.order <= newest.order]
    found = [ref for ref in refs if ref.order > held.order or ref == newest]
    return sorted(found, key=lambda ref: ref.order, reverse=True)


def _newest_run(view: View, keys: Keys) -> str:
    """The newest run of trainers; "": there is none."""
    numbers = run_numbers(view, keys)
    trained = [run for run in numbers if run != k.OUTSIDE]
    return max(trained, key=lambda run: (numbers[run], run), default="")


def _not_yet(spec: Spec, ended: str = "") -> str:
    return f"version {spec.absolute} is not published yet{ended}"


def _ended_at(view: View, keys: Keys, run: str) -> str:
    """Words, for who waits, on versions that were lost before this run began; "": none was."""
    records = readable(view.within(keys.runs()), k.parse_run, RunRecord)
    last = next((record.ended_at for _, name, record, _ in records if name == run), None)
    if last is None:
        return ""
    return f"; a job that has ended had versions up to {last}, and nobody holds one any more"


def _glimpsed(view: View, keys: Keys, spec: Spec) -> AvailableVersion | Wait | None:
    """The version that `spec` means, if a few holdings are enough to tell; None: they are not.

    The run of the newest record is the one that counts if anything of it is available.

    Raises: Unseen: These few, which it names, were not read.
    """
    newest = newest_record(view, keys)
    if newest is None or spec.back:  # for `latest-<k>` all that is available has to be counted
        return None
    number = newest.version if spec.absolute is None else spec.absolute
    refs = [ref for ref, _ in _records(view, keys)]
    if len({ref.run for ref in refs}) == 1 and number > max(ref.version for ref in refs):
        return Wait(_not_yet(spec), (keys.versions(),))  # its record comes first
    some = [ref for ref in refs if (ref.run, ref.version) == (newest.run, number)]
    if spec.absolute is None:  # the newest may have gone with its trainer, while many hold another
        full = [ref for ref, record in _records(view, keys) if record.layout]
        some = sorted(full, key=lambda ref: ref.order, reverse=True)[:GLIMPSES_MAX]
    firsts = [first_holders(keys, ref.run, ref.version) for ref in some]
    for ref in some:
        holders = keys.holdings_of(ref.run, ref.version)
        holdings = {
            where.inst: holding
            for _, where, holding, _ in legible.holdings(view.seen(holders))
            if holding.state == "full" and holding.uid == ref.uid
        }
        if holdings:
            return AvailableVersion(ref, holdings)
        if not view.shows(holders):  # the holders that were seen are not all
            raise Unseen(*firsts)
    return None


def published(view: View, keys: Keys, run: str) -> list[int]:
    """The versions of a run, less those of publications that never came to be."""
    held = {
        where.version for _, where, _ in keyed(view.within(keys.holdings(run)), k.parse_holding)
    }
    found = readable(view.within(keys.versions(run)), k.parse_version, VersionRecord)
    return [number for _, (_, number), record, _ in found if record.layout or number in held]


def _relative(
    keys: Keys, spec: Spec, runs: list[list[AvailableVersion]], ended: str
) -> AvailableVersion | Wait:
    """The `spec.back`-th newest version of the first run, if that is not below `spec.floor`."""
    newest = next(iter(runs), [])
    if len(newest) <= spec.back:
        have = f"{len(newest)} available" if newest else f"none is available yet{ended}"
        return _wait_for_version(keys, runs, f"{spec} of model {keys.model!r}: {have}")
    offer = newest[spec.back]
    if spec.floor is not None and offer.ref.order < spec.floor.order:
        reason = f"{spec}: version {spec.floor.version} is not available again"
        return _wait_for_version(keys, runs, reason)
    return offer


def _wait_for_version(
    keys: Keys, runs: list[list[AvailableVersion]], reason: str, *because: str
) -> Wait:
    """Wait until a version becomes available: that writes its record, so records are watched.

    Args:
        because: Keys of holdings that the wait depends on: when one goes, `spec` may mean another.
    """
    if len(runs) > 1:  # the newest run counts for as long as it has this one
        offer = runs[0][0]
        because = (*because, offer.first_key(keys))
    return Wait(reason, (keys.versions(), *map(one, because)))


def newer(view: View, keys: Keys, spec: Spec, held: VersionRef) -> AvailableVersion | None:
    """The version that `spec` means now, if newer than `held` (absolute: another). Never waits."""
    if spec.absolute == held.version and held.run != k.OUTSIDE:
        return None  # a number of a bucket's may be a trainer's by now
    if spec.absolute is None and newest_record(view, keys) == held:
        return None
    try:
        offer = resolve(view, keys, spec)
    except VersionNotFound:
        if spec.absolute == held.version:
            return None  # trainers are past that number of a bucket's: it stays
        raise
    if isinstance(offer, Wait):
        return None
    # Equal in number and not in content: it was published again after the store had forgotten it.
    is_wanted = offer.ref.order >= held.order if spec.absolute is None else True
    return offer if is_wanted and offer.ref != held else None
