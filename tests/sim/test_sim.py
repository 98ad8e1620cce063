"""Short runs of the simulator; `make sim` and `make sim-faults` are the long ones."""

import pytest
from faults import FAULTS, planted
from scenes import SCENES, perform
from sim import play, table
from world import EVENTS

QUICK, LONG = range(3), range(3, 50)
BOTH = pytest.mark.parametrize(
    "seeds", [QUICK, pytest.param(LONG, marks=pytest.mark.long)], ids=["quick", "long"]
)
SEEDS_OF_A_SCENE = 17  # with those of the quick tier: 20


@BOTH
def test_nothing_that_must_not_happen_happens_in_a_few_histories(seeds):
    seen, failures = play(seeds.start, len(seeds), workers=1, story=60)
    assert not failures, "\n\n".join(failures.values())
    if seeds is LONG:  # more seeds see all of them: `make sim`
        assert sum(seen[event] > 0 for event in EVENTS) > len(EVENTS) / 2


@BOTH
@pytest.mark.parametrize("scene", SCENES)
def test_a_scene_ends_as_it_should_whoever_moves_first(scene, seeds):
    for seed in seeds[:SEEDS_OF_A_SCENE]:
        perform(scene, seed)


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
