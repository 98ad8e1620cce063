"""A short run of the simulator; `make sim` and `make sim-faults` are the long ones."""

import pytest
from scenes import SCENES, perform
from sim import play
from world import EVENTS

SEEDS = 50


def test_nothing_that_must_not_happen_happens_in_a_few_histories():
    seen, failures = play(0, SEEDS, workers=1, story=60)
    assert not failures, "\n\n".join(failures.values())
    # More seeds see all of them: `make sim`.
    assert sum(seen[event] > 0 for event in EVENTS) > len(EVENTS) / 2


@pytest.mark.parametrize("scene", SCENES)
def test_a_scene_ends_as_it_should_whoever_moves_first(scene):
    for seed in range(20):
        perform(scene, seed)
