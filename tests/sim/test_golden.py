"""Scenes go as their stories say. Is a change meant: golden.py --write, and read what differs."""
# needs features deltas, fallback, following, installs, lending, pace, seeding, streams, tcp

import faults  # noqa: F401  # the scenes of all modules
import pytest
from golden import FOLDER, TOLD, path, told


@pytest.mark.parametrize("name", TOLD)
def test_a_scene_goes_as_its_story_says(name):
    assert told(name) == path(name).read_text()


def test_each_story_is_of_a_scene():
    assert set(FOLDER.iterdir()) == set(map(path, TOLD))
