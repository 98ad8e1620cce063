"""Short runs of the simulator; `make sim` and `make sim-faults` are the long ones."""
# needs features deltas, fallback, following, installs, lending, pace, seeding, streams, tcp

from collections import Counter

import pytest
from checks import Checks
from faults import FAULTS, planted
from golden import TOLD
from msgspec.structs import replace
from scenes import SCENES, perform
from sim import play, table
from world import EVENTS

from torch_ros.errors import VersionNotFound
from torch_ros.fleet.fleet import Fleet
from torch_ros.protocol import legible
from torch_ros.protocol.keys import replica_of
from torch_ros.protocol.versions import Spec, listing, resolve
from torch_ros.store.loops import Wait
from torch_ros.store.txn import View

QUICK, LONG = range(3), range(3, 50)
SLOW = {  # each takes as long as ten others
    *("all become slow", "leaves a loop", "mute among many", "often asked", "peer rests"),
    *("rests once", "seed rests not", "settled leaf", "slow behind a slow one"),
}


def seeds_of_scenes():
    """Each scene plants what it is about: any seed meets it. Stories have the first seed, too."""
    for scene in SCENES:
        is_later = scene in SLOW or scene in TOLD
        if not is_later:
            yield pytest.param(scene, range(1), id=f"{scene}-quick")
        seeds = range(0 if is_later else 1, 4)
        yield pytest.param(scene, seeds, marks=pytest.mark.long, id=f"{scene}-long")
        yield pytest.param(scene, range(4, 20), marks=pytest.mark.nightly, id=f"{scene}-nightly")


@pytest.mark.parametrize(("scene", "seeds"), [*seeds_of_scenes()])
def test_a_scene_ends_as_it_should_whoever_moves_first(scene, seeds):
    for seed in seeds:
        perform(scene, seed)


def readers_get(view, keys, version):
    """The instances of which a reader of that number is given one; none: it waits, or fails."""
    try:
        offer = resolve(view, keys, Spec.parse(version))
    except VersionNotFound:
        return set()
    return set() if isinstance(offer, Wait) else {*offer.holdings}


def moments(view, keys):
    """The view, and as it would be with a full holding of another content, or without record.

    Histories have those seldom: a publisher that was cut off and comes back with something else.
    """
    yield view
    for key, where, holding, _ in legible.holdings(view.within(keys.holdings())):
        if holding.state == "full":
            value = replace(holding, uid="other").encode()
            other = replace(view.entries[key], value=value)
            yield View(view.rev, {**view.entries, key: other})
            record = keys.version(where.run, where.version)
            yield View(view.rev, {k: each for k, each in view.entries.items() if k != record})
            return


def assert_told_as_given(view, keys):
    """A fleet says "full" of what readers are given, of nothing else, and of all of it."""
    fleet = Fleet.of(view, keys)
    given: dict[int, set[str]] = {}
    for each in fleet.held:
        is_newest = fleet.latest is not None and each.ref.run == fleet.latest.run
        if each.is_offered and is_newest:
            given.setdefault(each.ref.version, set()).add(replica_of(each.inst))
        assert set(each.sources) <= fleet.replicas.keys() - {each.replica}
    assert given == listing(view, keys)
    for each in fleet.versions:
        if fleet.latest is not None and each.ref.run == fleet.latest.run:
            said = {held.inst for held in fleet.holders(each.ref)}
            assert said == readers_get(view, keys, each.ref.version)
            assert each.is_offered == bool(said)
    return fleet


@pytest.mark.parametrize(
    "seeds", [QUICK, pytest.param(LONG, marks=pytest.mark.long)], ids=["quick", "long"]
)
def test_a_few_histories_end_well_and_a_fleet_tells_what_readers_are_given(seeds, monkeypatch):
    """Nothing that must not happen happens; and the fleet is looked at, at every moment."""
    changed, counted = Checks.changed, Counter()

    def look(self, keys, what):
        changed(self, keys, what)
        world = self.world
        there = View(world.store.rev, dict(world.store.entries))
        for view in moments(there, world.keys):
            fleet = assert_told_as_given(view, world.keys)
            counted.update((each.state, each.is_offered) for each in fleet.held)

    monkeypatch.setattr(Checks, "changed", look)
    seen, failures = play(seeds.start, len(seeds), workers=1, story=60)
    assert not failures, "\n\n".join(failures.values())
    if seeds is LONG:  # more seeds see all of them: `make sim`
        assert sum(seen[event] > 0 for event in EVENTS) > len(EVENTS) / 2
    assert counted["full", True]
    assert counted["full", False]
    assert counted["filling", False]
    assert not counted["filling", True] + counted["draining", True]


def test_planted_faults_fit_the_code():
    for what in FAULTS:
        with planted(what):
            pass


def test_the_table_of_planted_faults_names_each_and_its_scene():
    rows = table()
    assert list(rows) == list(FAULTS)
    for what, fault in FAULTS.items():
        assert ("scene" in rows[what]) == bool(fault.scenario), what
        assert fault.scenario in rows[what], what
