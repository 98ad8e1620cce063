"""May this copy go? The rules by which a retained version is not lost (I4). Pure."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch_ros.errors import UsageError
from torch_ros.protocol import keys as k
from torch_ros.protocol import legible
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.legible import readable, say
from torch_ros.protocol.records import GroupRecord, Holding, VersionRef
from torch_ros.protocol.sources import suspects
from torch_ros.protocol.versions import Spec, run_numbers, spec_ranges
from torch_ros.store.txn import Entry, Guard, NoneNewer, Range, Ranges, Unseen, View, sample


@dataclass(frozen=True, slots=True)
class Keeping:
    """Whether a copy of a version may go, and what makes that true."""

    is_needed: bool  # it is the last one that counts of a version that is retained
    guards: tuple[Guard, ...]  # under which the answer holds
    is_elsewhere: bool = False  # somebody else has it, and counts


def keeping_ranges(keys: Keys, ref: VersionRef) -> Ranges:
    holders = sample(keys.holdings_of(ref.run, ref.version))
    return (*spec_ranges(keys), holders, sample(keys.groups()), keys.suspects())


def keeping(
    view: View,
    keys: Keys,
    ref: VersionRef,
    inst: str,
    *,
    is_leaving: bool = False,
    retain: Iterable[str] = (),
) -> Keeping:
    """Would the version be lost to those that retain it, if `inst` dropped its copy (I4)?

    Args:
        is_leaving: All that `inst` offers goes, copies in host memory included.
        retain: The incarnation of a group which has ended, whose record does not say it any more.
    """
    suspected = suspects(view, keys)
    there = view.seen(keys.holdings_of(ref.run, ref.version))
    for key, where, holding, _ in legible.holdings(there):
        is_own = k.is_of(where.inst, inst) if is_leaving else where.inst == inst
        is_other = not (is_own or where.inst in suspected or k.lingers(where.inst))
        if is_other and _counts(holding) and holding.uid == ref.uid:
            return Keeping(is_needed=False, guards=(view.unchanged(key),), is_elsewhere=True)
    keepers = _keepers(view, keys)
    own = (Spec.parse(as_spec(text)) for text in retain)
    specs = [*retentions(view.within(keys.groups())), *own]
    if not specs:
        return Keeping(is_needed=False, guards=(NoneNewer(keys.groups(), view.rev),))
    refs = sorted({*keepers, ref}, key=lambda r: r.order, reverse=True)
    newest = [r for r in refs if r.run == refs[0].run]
    retained = {newest[s.back] for s in specs if s.absolute is None and s.back < len(newest)}
    absolute = {spec.absolute for spec in specs if spec.absolute is not None}
    retained |= {r for r in newest if r.version in absolute}
    if ref in retained:
        return Keeping(is_needed=True, guards=())
    deepest = max((spec.back for spec in specs), default=0)
    guards: list[Guard] = [NoneNewer(keys.groups(), view.rev)]
    guards += [view.unchanged(keepers[r][0]) for r in newest[: 1 + deepest] if r in keepers]
    if ref in newest[:deepest]:  # newer versions that come would make it `latest-<k>`
        newer_ones = Range(keys.holdings_of(ref.run, ref.version).end, keys.holdings(ref.run).end)
        guards.append(NoneNewer(newer_ones, view.rev))
    return Keeping(is_needed=False, guards=tuple(guards))


def as_spec(text: str) -> int | str:
    return int(text) if re.fullmatch("[0-9]{1,20}", text) else text


def retentions(found: Iterable[tuple[str, Entry]]) -> Iterator[Spec]:
    """Everything that anybody retains, as far as its record can be read."""
    for key, _, group, _ in readable(found, k.parse_group, GroupRecord):
        for text in group.retain:
            try:
                yield Spec.parse(as_spec(text))
            except UsageError as error:
                say(key, f"retain: {error}")


def awaited(view: View, keys: Keys, ref: VersionRef, inst: str) -> list[str]:
    """The replicas that `inst` stays for, which ends and alone has a version that is retained.

    Raises:
        Unseen: Nobody, of those that were seen.
    """
    found = []
    for _, replica, group, _ in readable(view.seen(keys.groups()), k.parse_group, GroupRecord):
        other = k.instance(replica, group.nonce)
        if group.left is not None or group.refusal is not None or group.spot or other == inst:
            continue
        is_successor = replica == k.replica_of(inst)  # it may never come to read the version
        held = keys.holding(ref.run, ref.version, group.datacenter, other)
        if is_successor and view.get(held) is None:
            continue
        found.append(replica)
    if not found and not view.shows(keys.groups()):
        raise Unseen
    return found


def _counts(holding: Holding) -> bool:
    return holding.state == "full" and not holding.spot


def _keepers(view: View, keys: Keys) -> dict[VersionRef, list[str]]:
    """The full holdings that count for retention, by version."""
    numbers = run_numbers(view, keys)
    found: dict[VersionRef, list[str]] = {}
    for key, where, holding, _ in legible.holdings(view.within(keys.holdings())):
        if _counts(holding):
            number = numbers.get(where.run, 0)
            ref = VersionRef(where.run, where.version, holding.uid, number)
            found.setdefault(ref, []).append(key)
    return found
