"""What the recorded histories prove, and the story of one that proves a fault. Pure.

Availability is only claimed where it is certain: a replica certainly holds a version from the end
of the call that brought it until the beginning of the call that may give it up, or until a strike
on one of its processes, or one that ends leases.
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from strikes import CAST, ETCD, SPOT, TTL_S

# Beyond a call's deadline: a request that is under way (5 s), reads in flight, abort and withdraw
# (5 s each). docs/PROTOCOL.md, "Where they do not hold yet".
SLACK_S = 16.0
CLOSE_S = 8.0  # which has no deadline of its own
CATCH_UP_S = 10.0  # for the ranks of a group to agree again, once etcd is back
# Calls that fail for these reasons may: the caller does the same again.
EXPECTED = {"DeadlineExceeded", "SourceLost", "TransferFailed", "CallAborted", "SeatLost", "Fenced"}
EXPECTED |= {"StoreUnavailable", "Contention", "VersionNotFound"}
ENDS_LEASES = {"away", "hang", "wipe"}
GIVEN_UP = "given up"  # the end of a call for a rank that was cut off, and did not wait for it
RETRY_S = 1.0  # at most, until a lease is renewed again after etcd has come back
# An outage that every lease outlives: it is renewed every third of the TTL.
OUTLIVED_S = TTL_S * 2 / 3 - RETRY_S


@dataclass
class Call:
    """One call of one process, from its history."""

    who: str
    rank: int
    life: int
    call: str
    timeout_s: float
    begin: float
    end: float = math.inf
    answer: object = None
    error: str = ""
    text: str = ""
    version: int | None = None  # held after it
    group: dict | None = None

    @property
    def has_ended(self) -> bool:
        return self.end < math.inf

    def __str__(self) -> str:
        if not self.has_ended:
            return f"{self.call}: no answer"
        what = f"{self.error}: {self.text}" if self.error else f"-> {self.answer}"
        held = "" if self.version is None else f", holds {self.version}"
        return f"{self.call} {what}{held} ({self.end - self.begin:.2f} s)"


@dataclass
class Life:
    """One process from birth to death."""

    who: str
    rank: int
    life: int
    calls: list[Call] = field(default_factory=list)
    notes: list[dict] = field(default_factory=list)  # verified, over
    last: float = 0.0


def read(path: Path, who: str, rank: int) -> list[Life]:
    """The lives in one file. A killed process may have left half a line."""
    lives: dict[int, Life] = {}
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        life = lives.setdefault(entry["life"], Life(who, rank, entry["life"]))
        life.last = entry["at"]
        match entry["event"]:
            case "begin":
                begun = Call(who, rank, entry["life"], entry["call"], entry["timeout_s"], life.last)
                life.calls.append(begun)
            case "end":
                call = life.calls[-1]
                call.end = entry["at"]
                for name in ("answer", "error", "text", "version", "group"):
                    setattr(call, name, entry[name])
            case "verified" | "over":
                life.notes.append(entry)
    return list(lives.values())


@dataclass(frozen=True)
class Hold:
    """A replica certainly holds a version, in these seconds."""

    who: str
    version: int
    begin: float
    end: float


def judge(lives: Sequence[Life], strikes: Sequence[dict], diary: dict) -> list[str]:
    """All that is wrong."""
    holds = list(certain_holds(lives, strikes))
    return [
        *torn(lives),
        *hangs(lives, strikes, {end["who"] for end in diary["exits"] if end["code"]}),
        *unexpected(lives, strikes),
        *different_answers(lives),
        *steps_back(lives),
        *stale(lives, holds),
        *lost(holds, strikes, diary["sights"]),
        *left_behind(diary),
    ]


def torn(lives: Iterable[Life]) -> Iterator[str]:
    for life in lives:
        for note in life.notes:
            if note.get("torn"):
                yield (
                    f"{life.who}/{life.rank} at {note['at']:.2f}: torn: version {note['version']} "
                    f"from {note['source']}: {note['torn']}"
                )


def hangs(
    lives: Iterable[Life], strikes: Sequence[dict], crashed: Collection[str] = ()
) -> Iterator[str]:
    """Calls that ended too late, or never, though their process was not killed."""
    for life in lives:
        name = f"{life.who}/{life.rank}"
        own = [strike for strike in strikes if strike["who"] == name]
        for call in life.calls:
            bound_s = (CLOSE_S if call.call == "close" else call.timeout_s) + SLACK_S
            stopped = [s for s in own if s["kind"] != "kill" and s["healed"] > call.begin]
            bound_s += sum(s["healed"] - max(call.begin, s["at"]) for s in stopped)
            if not call.has_ended and any(
                s["kind"] == "kill" and s["at"] <= call.begin + bound_s and s["healed"] >= life.last
                for s in own
            ):
                continue
            if not call.has_ended and name in crashed:
                continue
            if call.end - call.begin > bound_s:
                yield f"{name} at {call.begin:.2f}: hang: {call}, expected within {bound_s:.0f} s"


def overtime(lives: Iterable[Life]) -> float:
    """By how much the call exceeded its deadline that did so most."""
    ended = (c for life in lives for c in life.calls if c.has_ended and c.call != "close")
    return max((c.end - c.begin - c.timeout_s for c in ended), default=0.0)


def unexpected(lives: Iterable[Life], strikes: Sequence[dict]) -> Iterator[str]:
    """A rank that gave up while etcd was away may not know what its peers have done since."""
    outages = [s for s in strikes if s["who"] == ETCD and _ends_leases(s)]
    for life in lives:
        for call in life.calls:
            if not call.error or call.error in EXPECTED:
                continue
            is_after_outage = any(s["at"] < call.end < s["healed"] + CATCH_UP_S for s in outages)
            if not (call.error == "CallMismatch" and is_after_outage):
                yield f"{life.who}/{life.rank} at {call.begin:.2f}: unexpected: {call}"


def different_answers(lives: Iterable[Life]) -> Iterator[str]:
    """The ranks of a group learn the same end of the same call."""
    known: dict[tuple, tuple] = {}
    for life in lives:
        for call in life.calls:
            for number, *end in call.group["ends"] if call.group else ():
                asked, version, failure = end
                if failure == GIVEN_UP:
                    continue
                end = (asked, failure or version)
                key = (life.who, call.group["family"], number)
                first, other = known.setdefault(key, (life.rank, end))
                if other != end:
                    yield (
                        f"{life.who} at {call.end:.2f}: call {number} ended as {other} for rank "
                        f"{first} and as {end} for rank {life.rank}"
                    )


def steps_back(lives: Iterable[Life]) -> Iterator[str]:
    for life in lives:
        held = None
        for call in life.calls:
            is_back = held is not None and call.version is not None and call.version < held
            if call.call == "update" and is_back:
                yield f"{life.who}/{life.rank} at {call.begin:.2f}: from {held} back to {call}"
            held = call.version


def certain_holds(lives: Iterable[Life], strikes: Sequence[dict]) -> Iterator[Hold]:
    """Of each replica, when all its ranks hold the same version for certain."""
    by_rank: dict[tuple[str, int], list[Hold]] = {}
    for life in lives:
        found = by_rank.setdefault((life.who, life.rank), [])
        for i, call in enumerate(life.calls):
            # A publish or an update that answers False offers nothing yet, or found nothing.
            is_brought = call.version is not None and (
                call.call.startswith("replicate")
                or (call.call.startswith(("publish", "update")) and call.answer is True)
            )
            if is_brought and not call.error:
                end = next((c.begin for c in life.calls[i + 1 :] if _may_give_up(c)), life.last)
                cuts = [s["at"] for s in strikes if _ends_hold(s, life.who) and _cuts(s, call.end)]
                found.append(Hold(life.who, call.version, call.end, min([end, *cuts])))
    for who, ranks in CAST.items():
        together = by_rank.get((who, 0), [])
        for rank in range(1, ranks):
            others = by_rank.get((who, rank), [])
            together = [
                Hold(who, a.version, max(a.begin, b.begin), min(a.end, b.end))
                for a in together
                for b in others
                if a.version == b.version
            ]
        yield from (hold for hold in together if hold.begin < hold.end)


def _may_give_up(call: Call) -> bool:
    finds_nothing = call.call == "update" and call.answer is False and not call.error
    return not finds_nothing and call.call != "wait"


def _ends_hold(strike: dict, who: str) -> bool:
    if strike["who"] == ETCD:
        return _ends_leases(strike)
    return strike["who"].partition("/")[0] == who and strike["kind"] != "pause"


def _ends_leases(strike: dict) -> bool:
    return strike["kind"] in ENDS_LEASES or strike["healed"] - strike["at"] > OUTLIVED_S


def _cuts(strike: dict, since: float) -> bool:
    """A call that ended before all is well again counts for nothing."""
    recovery_s = RETRY_S if strike["who"] == ETCD else 0.0
    return strike["healed"] + recovery_s > since


def stale(lives: Sequence[Life], holds: Sequence[Hold]) -> Iterator[str]:
    """`latest` is never older than what was certainly there all the time."""
    begins: dict[tuple, float] = {}  # of calls of groups: when the first rank asked
    for life in lives:
        for call in life.calls:
            for key in _numbers(call):
                begins[key] = min(begins.get(key, call.begin), call.begin)
    for life in lives:
        for call in life.calls:
            if call.call not in ("update", "replicate") or call.error or call.version is None:
                continue
            begin = min([call.begin, *(begins[key] for key in _numbers(call))])
            for hold in holds:
                is_there = hold.begin < begin and hold.end > call.end
                if is_there and hold.version > call.version:
                    yield (
                        f"{life.who}/{life.rank} at {begin:.2f}: stale: {call}, while "
                        f"{hold.who} held {hold.version}"
                    )
                    break


def _numbers(call: Call) -> Iterator[tuple]:
    for number, *_ in call.group["ends"] if call.group else ():
        yield (call.who, call.group["family"], number)


def lost(holds: Sequence[Hold], strikes: Sequence[dict], sights: Sequence[dict]) -> Iterator[str]:
    """What a replica that is not on a spot has held is there, or a newer version is, until a
    strike has taken each of its certain holders.

    A dead holder counts as one until its lease has ended. So who gives up a copy in that time may
    give up the last one.
    """
    counted = [hold for hold in holds if hold.who not in SPOT]
    ghosts = [
        (strike["at"], strike["at"] + TTL_S + 1)
        for strike in strikes
        if strike["who"] != ETCD and _ends_hold(strike, strike["who"].partition("/")[0])
    ]
    given_up = [hold.end for hold in counted if any(a <= hold.end <= b for a, b in ghosts)]
    turns: list[tuple[float, int, dict]] = []
    turns += [(strike["at"], 0, strike) for strike in strikes]
    turns += [(at, 1, {}) for at in given_up]
    turns += [(hold.begin, 2, {"version": hold.version}) for hold in counted]
    turns += [(sight["asked"], 3, sight) for sight in sights]
    floor = -1
    for at, order, turn in sorted(turns, key=lambda turn: turn[:2]):
        left = max((hold.version for hold in counted if hold.begin < at < hold.end), default=-1)
        match order:
            case 0 if turn["who"] == ETCD:
                floor = -1 if _ends_leases(turn) else floor
            case 0 | 1:
                floor = min(floor, left)
            case 2:
                floor = max(floor, turn["version"])
            case 3:
                newest = max((int(v) for v in (turn["runs"] or [{}])[0]), default=-1)
                is_struck = any(at <= s["at"] <= turn["at"] for s in strikes)
                if newest < floor and not is_struck:
                    yield f"etcd at {at:.2f}: lost: version {floor}; available: {turn['runs']}"
                    floor = newest  # said once


def left_behind(diary: dict) -> Iterator[str]:
    for who in sorted(CAST.keys() - {"trainer"} - diary["followed"].keys()):
        yield f"{who}: left behind: nothing new since all faults are over ({diary['settled']:.2f})"
    for end in diary["exits"]:
        if end["code"] != 0:
            yield f"{end['who']}: ended with {end['code']}, not 0; its log says why"


def story(lives: Sequence[Life], strikes: Sequence[dict], wrongs: Sequence[str]) -> str:
    """What happened, for people; in the order of time, without what was uneventful."""
    lines: list[tuple[float, str]] = []
    for strike in strikes:
        lines.append((strike["at"], f"*** {strike['what']} (struck: {strike['who']})"))
        lines.append((strike["healed"], f"    healed: {strike['kind']} {strike['who']}"))
    for life in lives:
        name = f"{life.who}/{life.rank}"
        name += f" (life {life.life})" if life.life > 1 else ""
        for call in life.calls:
            is_news = call.call != "wait" and not (call.call == "update" and call.answer is False)
            if is_news or not call.has_ended:
                at = call.end if call.has_ended else call.begin
                lines.append((at, f"{name}: {call}"))
        for note in life.notes:
            if note["event"] == "verified":
                how = note["torn"] or "whole"
                from_ = f"from {note['source']}, {note['reroutes']} re-routed"
                lines.append((note["at"], f"{name}: {note['version']} is {how} ({from_})"))
    text = "\n".join(f"{at:10.2f}  {line}" for at, line in sorted(lines))
    return "\n".join([text, "", *(f"WRONG: {wrong}" for wrong in wrongs), ""])
