"""Faults to plant in what falls back to a bucket."""

import dataclasses
import math

import msgspec
from faults import answers, edited, fault, instead, without

from torch_ros import errors
from torch_ros.features.fallback import rules
from torch_ros.protocol import versions
from torch_ros.protocol.keys import OUTSIDE
from torch_ros.store.txn import Created, Empty, NoneNewer

fault(
    "two replicas that nobody has anything for read the bucket",
    "fall_back",
    scenario="decided at once",
)(edited(without(Empty, NoneNewer)))


fault(
    "a bucket is read as soon as nobody holds anything",
    "Unheld.has_lasted",
    scenario="killed in a publication",
)(lambda _: lambda self, view, seat, now_s: not rules.is_held(view, seat))


@instead(
    "time in which somebody has held something counts for the bucket",
    "Unheld.has_lasted",
    scenario="trained while corrupt",
)
def _(has_lasted, self, view, seat, now_s):
    self._written = math.inf
    if rules.is_held(view, seat):
        return False
    was_begun = self._rev > 0
    lasted = has_lasted(self, view, seat, now_s) if was_begun else False
    if not was_begun:
        self._since_s, self._seen_s, self._rev = now_s, now_s, view.rev
    return lasted


@instead(
    "time without a seat, or without a store, counts for the bucket",
    "FallingBack._unheld_of",
    scenario="store away, and a bucket",
)
def _(unheld_of, self, seat, number):
    self._inst = seat.inst
    unheld = unheld_of(self, seat, number)
    if self._unheld is None:
        self._unheld = unheld = rules.Unheld(seat, number, 10)
    unheld._ttl_s = math.inf
    return unheld


fault("the bucket's run is the newest", "number_of", scenario="opens beside a bucket's")(
    lambda number_of: lambda run, numbers: 10**6 if run == OUTSIDE else number_of(run, numbers)
)


@instead(
    "a trainer publishes in the bucket's run", "choose_run", scenario="opens beside a bucket's"
)
def _(choose_run, view, who):
    key = who.keys.run(OUTSIDE)
    if who.run is None and (entry := view.get(key)):
        return OUTSIDE, [], (Created(key, entry.create_rev),)
    return choose_run(view, who)


@instead(
    "a run that only archivers are in is taken for one that trains",
    "_live_runs",
    scenario="only an archiver is left",
)
def _(live_runs, view, who):
    live, _ = live_runs(view, who)
    return live, live - {OUTSIDE}


answers(
    "a run has the name of the bucket's, of which etcd has versions",
    "_is_known",
    value=False,
    scenario="only an archiver is left",
)


@instead(
    "a run that has the name of the bucket's begins below its number",
    "choose_run",
    scenario="trainer restarts",
)
def _(choose_run, view, who):
    return choose_run(view, dataclasses.replace(who, former_run=(0, who.former_run[1])))


@instead("a number below the bucket's is gone", "_resolve", scenario="opens beside a bucket's")
def _(resolve, view, keys, spec):
    offers = versions.offered(view, keys)
    ref = offers[0][0].ref if offers else None
    if ref and ref.run == OUTSIDE and (spec.absolute or ref.version) < ref.version:
        raise errors.VersionNotFound(keys.model, str(spec), "it is gone")
    return resolve(view, keys, spec)


@instead(
    "the bucket's version of a number is taken for the trainer's",
    "newer",
    scenario="trainer restarts",
)
def _(newer, view, keys, spec, held):
    return None if spec.absolute == held.version else newer(view, keys, spec, held)


@instead(
    "where a version may be missing, no bucket is waited for",
    "FallingBack.__init__",
    scenario="killed in a publication",
)
def _(init, self, shard, below, spec, deadline):
    init(self, shard, below, spec, deadline)
    self._spec = spec


fault(
    "what the dead have left is held",
    "Unheld.outlasts_the_dead",
    scenario="killed in a publication",
)(lambda _: lambda self, now_s: self._held_s is not None)


@instead(
    "a bucket that does not answer has nothing",
    "FallingBack._ask",
    scenario="all corrupt in a bucket",
)
def _(ask, self, call):
    try:
        ask(self, call)
    except errors.BucketError:
        self._has_none = True


@instead(
    "a version of a bucket that could not be read is tried again",
    "FallingBack.is_passed_over",
    scenario="corrupt in a bucket",
)
def _(is_passed_over, self, decided, error):
    is_again = is_passed_over(self, decided, error)
    self._avoided.clear()
    return is_again


@instead(
    "who could not read a version of a bucket waits again before the next",
    "FallingBack.is_passed_over",
    scenario="corrupt in a bucket",
)
def _(is_passed_over, self, decided, error):
    is_again = is_passed_over(self, decided, error)
    if self._unheld is not None:
        self._unheld.begin()
    return is_again


@instead(
    "who could not read a version does not look who has published meanwhile",
    "Unheld.has_lasted",
    scenario="trained while corrupt",
)
def _(has_lasted, self, view, seat, now_s):
    was_over, lasted = self.is_over, has_lasted(self, view, seat, now_s)
    self.is_over = self.is_over or was_over
    return lasted or (was_over and not rules.is_held(view, seat))


answers(
    "a rank reads a bucket on when its peer has given up",
    "FallingBack._require_wanted",
    scenario="corrupt in a bucket",
)


answers(
    "who comes back with a bucket's older choice brings that, too",
    "is_passed",
    value=False,
    scenario="dead lineage",
)


fault("a bucket's newest number is its newest version", "_age", "living", scenario="dead lineage")(
    lambda was: (
        (lambda of: of.version)
        if was.__name__ == "_age"
        else (lambda there: sorted(there, key=lambda of: of.version, reverse=True))
    )
)


answers(
    "who has held a trainer's version goes back to the bucket",
    "may_fall_back",
    value=True,
    scenario="goes back",
)


@instead(
    "a version of a bucket is shown before it is there", "FallingBack.fill", scenario="cold start"
)
def _(fill, self, call, meter):
    self._shard.word.serve(call.mark)
    return fill(self, call, meter)


fault(
    "archivers are stayed for with what comes from a bucket",
    "archives:behind",
    scenario="nothing to archive",
)(
    lambda behind: (
        lambda view, keys, ref: behind(view, keys, msgspec.structs.replace(ref, run="another"))
    )
)


answers(
    "a rank goes on in a call that asks for what it was not given",
    "_require_known",
    scenario="a bucket of one rank",
)
