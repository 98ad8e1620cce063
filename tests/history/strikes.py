"""What goes wrong, and when: chosen by a seed. Pure."""

import random
from dataclasses import dataclass
from typing import Literal

TTL_S = 3
ETCD = "etcd"
CAST = {"trainer": 1, "r1": 1, "r2": 2, "r3": 1}  # replica -> ranks
SPOT = {"r3"}
RETAINING = {"trainer", "r1"}
PROCESSES = [(who, rank) for who, ranks in CAST.items() for rank in range(ranks)]

Kind = Literal["kill", "pause", "freeze", "restart", "away", "hang", "wipe"]
Moment = Literal["any", "reading", "serving", "relaying"]


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault.

    Of a process: "kill" it and start another; "pause" it for less than its lease, or "freeze" it
    for longer. Of etcd: "restart" it with its records; keep it "away", or let it "hang", for
    longer than a lease; "wipe" it.
    """

    kind: Kind
    who: str
    rank: int
    moment: Moment  # what the replica is doing when it is struck, if it does that soon
    lag_s: float  # after that moment
    is_gentle: bool  # etcd is asked to end, instead of killed
    for_s: float  # until it is healed
    pause_s: float  # before it
    overlaps: bool  # the pause begins when the last strike begins, not when all is healed

    def __str__(self) -> str:
        who = self.who if self.who == ETCD else f"{self.who}/{self.rank}"
        when = "" if self.moment == "any" else f" while {self.moment}"
        how = " (SIGTERM)" if self.is_gentle else ""
        return f"{self.kind} {who}{when}{how}, healed after {self.for_s:.1f} s"


def plan(seed: int, count: int) -> list[Strike]:
    """The strikes of one history, in order."""
    rng = random.Random(seed)
    return [_strike(rng, is_first=not number) for number in range(count)]


def _strike(rng: random.Random, *, is_first: bool) -> Strike:
    kinds: list[Kind] = ["kill", "pause", "freeze", "restart", "away", "hang", "wipe"]
    kind = rng.choices(kinds, weights=[10, 3, 4, 2, 1, 1, 1])[0]
    is_process = kind in ("kill", "pause", "freeze")
    who, rank = rng.choice(PROCESSES) if is_process else (ETCD, 0)
    moments: list[Moment] = ["any", "serving"]
    if who != "trainer":
        moments += ["reading", "relaying", "relaying"]
    longest = {"kill": (0.0, 1.0), "pause": (0.2, 1.8), "restart": (0.0, 0.5), "wipe": (0.0, 0.5)}
    overlaps = not is_first and rng.random() < 0.35
    return Strike(
        kind=kind,
        who=who,
        rank=rank,
        moment=rng.choice(moments) if is_process else "any",
        lag_s=rng.choice([0.0, rng.uniform(0.0, 0.05)]),
        is_gentle=kind in ("restart", "away") and rng.random() < 0.5,
        for_s=rng.uniform(*longest.get(kind, (TTL_S + 1.0, TTL_S + 2.0))),
        pause_s=rng.uniform(0.0, 1.5) if overlaps else rng.uniform(0.5, 2.0),
        overlaps=overlaps,
    )
