"""Plays a plan: an etcd, the processes, the strikes, and an observer of etcd from outside."""

import json
import shutil
import signal
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from strikes import CAST, ETCD, PROCESSES, RETAINING, SPOT, TTL_S, Strike

from puppets import Puppet, Puppets
from torch_ros.errors import TorchRosError
from torch_ros.protocol import keys as k
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.versions import offered, spec_ranges
from torch_ros.store.endpoint import connect
from torch_ros.store.txn import Read, whole

PLAYER = Path(__file__).with_name("player.py")
DRAIN_S = 0.8  # shorter than most pauses: a paused reader is left behind
START_S = 60.0
MOMENT_S = 2.0  # how long a moment is waited for, until the strike comes anyway
FOLLOW_S = 30.0  # for all to have news after the last fault is healed, born processes included
END_S = 30.0  # longer than any call may take
OBSERVE_S = 0.15


@dataclass
class Process:
    """One seat of the workload, and the puppet that sits there now."""

    who: str
    rank: int
    lives: int = 0
    puppet: Puppet | None = None
    is_stricken: bool = False


@dataclass
class Diary:
    """What the stage did and saw, in the clock of the histories."""

    strikes: list[dict] = field(default_factory=list)
    sights: list[dict] = field(default_factory=list)
    exits: list[dict] = field(default_factory=list)
    settled: float = 0.0
    followed: dict[str, float] = field(default_factory=dict)  # replica -> seconds


class Stage:
    """One history. `play` it, then read the diary and the histories in `folder`.

    Args:
        etcd: A running server of its own, as tests/conftest.py has it.
        surroundings: The environment of its processes, which says how bytes come.
    """

    def __init__(self, etcd, folder: Path, surroundings: dict[str, str]) -> None:
        self.etcd, self.folder = etcd, folder
        self.endpoint = f"etcd://{etcd.host}"
        self.model = "m-" + uuid.uuid4().hex[:8]
        self.keys = Keys(self.model)
        self.diary = Diary()
        self.processes = {seat: Process(*seat) for seat in PROCESSES}
        self.puppets = Puppets(folder, **surroundings)
        self.heals: list[tuple[float, dict, object]] = []
        self.kv = connect(self.endpoint, timeout_s=5)
        self.is_over = threading.Event()
        self.observer = threading.Thread(target=self.observe, daemon=True)

    def play(self, strikes: list[Strike]) -> Diary:
        try:
            for process in self.processes.values():
                self.start(process)
            self.observer.start()
            self.await_followers(START_S, since=time.monotonic())
            for strike in strikes:
                self.strike(strike)
            self.await_healed()
            self.diary.settled = time.monotonic()
            self.diary.followed = self.await_followers(FOLLOW_S, since=self.diary.settled)
            self.is_over.set()
            self.observer.join()
            self.end()
        finally:
            self.is_over.set()
            self.puppets.close()
            self.kv.close()
        return self.diary

    # Processes

    def start(self, process: Process) -> None:
        process.lives += 1
        part = {
            "who": process.who,
            "rank": process.rank,
            "ranks": CAST[process.who],
            "life": process.lives,
            "model": self.model,
            "endpoint": self.endpoint,
            "folder": str(self.folder),
            "retain": ["latest"] if process.who in RETAINING else [],
            "spot": process.who in SPOT,
            "ttl_s": TTL_S,
            "drain_s": DRAIN_S,
            "huge_pages": (process.rank + process.lives) % 2 == 1,
        }
        name = f"{process.who}-{process.rank}"
        process.puppet = self.puppets.start(PLAYER, json.dumps(part), name=name)

    def end(self) -> None:
        """Ask all to close; what they answer is in the diary."""
        for process in self.processes.values():
            process.puppet.signal(signal.SIGTERM)
        deadline = time.monotonic() + END_S
        for process in self.processes.values():
            try:
                process.puppet.wait(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                process.puppet.signal(signal.SIGUSR1)
                time.sleep(1)  # to write it down
            name, code = f"{process.who}/{process.rank}", process.puppet.returncode
            self.diary.exits.append({"who": name, "code": code})

    # Strikes

    def strike(self, strike: Strike) -> None:
        if not strike.overlaps:
            self.await_healed()
        self.sleep(strike.pause_s)
        if strike.who == ETCD:
            self.await_healed(ETCD)
            who, act, heal = ETCD, *self.on_etcd(strike)
        else:
            process = self.await_moment(strike)
            time.sleep(strike.lag_s)
            who, act, heal = f"{process.who}/{process.rank}", *self.on_process(strike, process)
        entry = {"what": str(strike), "kind": strike.kind, "who": who, "at": time.monotonic()}
        act()
        self.diary.strikes.append(entry)
        self.heals.append((entry["at"] + strike.for_s, entry, heal))

    def on_process(self, strike: Strike, process: Process):
        process.is_stricken = True
        puppet = process.puppet

        def kill():
            puppet.kill()

        def replace():
            process.is_stricken = False
            self.start(process)

        def resume():
            process.is_stricken = False
            puppet.signal(signal.SIGCONT)

        if strike.kind == "kill":
            return kill, replace
        return lambda: puppet.signal(signal.SIGSTOP), resume

    def on_etcd(self, strike: Strike):
        etcd = self.etcd

        def stop():
            if strike.is_gentle:
                etcd.process.terminate()
                etcd.process.wait()
            else:
                etcd.kill()

        def wipe():
            etcd.kill()
            shutil.rmtree(etcd.directory / "records")

        if strike.kind == "hang":
            return etcd.suspend, lambda: etcd.process.send_signal(signal.SIGCONT)
        return (wipe if strike.kind == "wipe" else stop), etcd.start

    def await_moment(self, strike: Strike) -> Process:
        """The process to be struck, once its replica does what it shall be doing."""
        deadline = time.monotonic() + MOMENT_S
        wanted = self.processes[strike.who, strike.rank]
        while True:
            self.heal_due()
            free = [process for process in self.processes.values() if not process.is_stricken]
            wanted = wanted if wanted in free else free[0]
            if strike.moment == "any" or time.monotonic() > deadline:
                return wanted
            busy = self.busy(strike.moment)
            if strike.moment == "relaying":  # whoever does: that is rare enough
                relays = [process for process in free if process.who in busy]
                if relays:
                    return wanted if wanted in relays else relays[0]
            elif wanted.who in busy:
                return wanted
            time.sleep(0.002)

    def busy(self, moment: str) -> set[str]:
        try:
            view = self.kv.read(Read((self.keys.readers(),)), timeout_s=0.5)
        except TorchRosError:
            return set()
        pairs = [k.parse_reader(key) for key in view.entries]
        readers = {k.replica_of(reader) for _, reader, rank in pairs if rank != "group"}
        sources = {k.replica_of(source) for source, _, rank in pairs if rank != "group"}
        found = {"reading": readers, "serving": sources, "relaying": readers & sources}
        return found[moment]

    def heal_due(self) -> None:
        for heal in sorted(self.heals, key=lambda heal: heal[0]):
            due_s, entry, undo = heal
            if time.monotonic() >= due_s:
                self.heals.remove(heal)
                undo()
                entry["healed"] = time.monotonic()

    def await_healed(self, who: str | None = None) -> None:
        while any(who in (None, entry["who"]) for _, entry, _ in self.heals):
            self.sleep(0.02)

    def sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            self.heal_due()
            time.sleep(min(0.02, left_s))

    # Looking from outside

    def observe(self) -> None:
        kv = connect(self.endpoint, timeout_s=5)
        while not self.is_over.wait(OBSERVE_S):
            asked_s = time.monotonic()
            try:
                view = kv.read(Read(whole(spec_ranges(self.keys))), timeout_s=1.0)
            except TorchRosError:
                continue
            runs = [
                {o.ref.version: sorted(map(k.replica_of, o.holdings)) for o in offers}
                for offers in offered(view, self.keys)
            ]
            sight = {"asked": asked_s, "at": time.monotonic(), "runs": runs}
            self.diary.sights.append(sight)
        kv.close()

    def await_followers(self, timeout_s: float, since: float) -> dict[str, float]:
        """Seconds until each rollout had a version that was not there before; those that did."""
        seen = [v for sight in self.diary.sights for run in sight["runs"] for v in run]
        before = max(seen, default=0)
        followed: dict[str, float] = {}
        rollouts = set(CAST) - {"trainer"}
        while rollouts - followed.keys() and time.monotonic() < since + timeout_s:
            time.sleep(OBSERVE_S)
            for sight in list(self.diary.sights):
                for version, holders in sight["runs"][0].items() if sight["runs"] else ():
                    if sight["asked"] >= since and int(version) > before:
                        for who in rollouts & set(holders):
                            followed.setdefault(who, sight["at"] - since)
        return followed
