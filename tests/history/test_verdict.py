"""What the judge says about histories that are wrong on purpose."""

import json

import numpy as np
import pytest
import verdict
from pattern import Pattern
from strikes import plan

QUIET = {"sights": [], "exits": [], "settled": 90.0, "followed": {"r1": 1, "r2": 1, "r3": 1}}


class Writer:
    """Histories of several processes, a call after another."""

    def __init__(self, folder):
        self.folder, self.seats, self.number = folder, {}, 0

    def call(self, seat, call, begin, end, **found):
        entry = {"life": 1, "n": self.number, "call": call, "timeout_s": 5}
        self.number += 1
        lines = self.seats.setdefault(seat, [])
        lines.append({**entry, "at": begin, "event": "begin"})
        if end is not None:
            rest = {"answer": None, "error": "", "text": "", "version": None, "group": None}
            lines.append({**entry, "at": end, "event": "end", **rest, **found})
        return self

    def verified(self, seat, at, **found):
        entry = {"life": 1, "at": at, "event": "verified", "source": "trainer", "reroutes": 0}
        self.seats.setdefault(seat, []).append({**entry, **found})
        return self

    def judged(self, strikes=(), **diary):
        lives = []
        for (who, rank), lines in self.seats.items():
            path = self.folder / f"{who}-{rank}"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"at": 3')
            lives += verdict.read(path, who, rank)
        assert verdict.story(lives, strikes, [])
        return verdict.judge(lives, strikes, {**QUIET, **diary})


@pytest.fixture
def history(tmp_path):
    return Writer(tmp_path)


def strike(kind, who, at, healed):
    return {"kind": kind, "who": who, "at": at, "healed": healed, "what": f"{kind} {who}"}


def sight(at, *runs):
    return {"asked": at, "at": at + 0.01, "runs": runs}


T, R1, R20, R21, R3 = ("trainer", 0), ("r1", 0), ("r2", 0), ("r2", 1), ("r3", 0)


def followed(history):
    """A trainer publishes 1 and 2, r1 follows."""
    history.call(T, "publish 1", 0, 1, answer=True, version=1).call(
        R1, "update", 2, 3, answer=True, version=1
    )
    history.call(T, "unpublish", 4, 5).call(T, "publish 2", 5, 6, answer=True, version=2)
    history.call(T, "wait", 30, 31, version=2)
    return history.call(R1, "update", 7, 8, answer=True, version=2)


def test_a_good_history_is_not_blamed(history):
    assert followed(history).judged(sights=[sight(9, {2: ["trainer", "r1"]})]) == []


def test_torn_content_is_blamed(history):
    history.verified(R1, 3, version=1, torn="word 7 is of version 2")
    assert "torn: version 1 from trainer: word 7" in history.judged()[0]


def test_an_older_version_after_an_update_is_blamed(history):
    wrong = followed(history).call(R1, "update", 9, 10, answer=True, version=1).judged()
    assert any("from 2 back to" in line for line in wrong)


def test_a_version_that_is_older_than_what_was_there_is_blamed(history):
    followed(history).call(R3, "update", 9, 10, answer=True, version=1)
    assert "stale" in history.judged()[0]


def test_who_was_frozen_or_cut_off_does_not_prove_that_a_version_was_there(history):
    followed(history).call(R3, "update", 9, 10, answer=True, version=1)
    assert history.judged([strike("away", "etcd", 8.5, 20)]) == []
    assert history.judged([strike("away", "etcd", 2, 7.5)]) == []
    assert history.judged([strike("away", "etcd", 2, 4.5)]) != []


@pytest.mark.parametrize(("end", "is_hang"), [(26, False), (27, True), (None, True)])
def test_a_call_that_ends_long_after_its_deadline_or_never_is_blamed(history, end, is_hang):
    wrong = history.call(R1, "update", 5, end, answer=False).judged()
    assert [("hang" in line) for line in wrong] == [True] * is_hang


def test_a_process_that_is_killed_or_stopped_is_not_blamed_for_its_call(history):
    history.call(R1, "update", 5, None).call(R3, "update", 5, 31, answer=False)
    strikes = [strike("kill", "r1/0", 6, 7), strike("freeze", "r3/0", 6, 11)]
    assert history.judged(strikes) == []


def test_ranks_that_learn_different_ends_of_a_call_are_blamed(history):
    for seat, version in ((R20, 4), (R21, 5)):
        group = {"family": "ab", "ends": [[3, "replicate latest", version, ""]]}
        history.call(seat, "update", 1, 2, answer=True, version=4, group=group)
    assert "call 3 ended as" in history.judged()[0]


def test_a_rank_that_gave_a_call_up_alone_is_not_blamed_for_another_end(history):
    for seat, failure in ((R20, verdict.GIVEN_UP), (R21, "")):
        group = {"family": "ab", "ends": [[3, "update latest", None, failure]]}
        history.call(seat, "update", 1, 2, answer=False, group=group)
    assert history.judged() == []


def test_an_error_that_nothing_excuses_is_blamed(history):
    history.call(R1, "update", 7, 8, error="CallMismatch", text="call 4 is")
    assert "unexpected: update CallMismatch" in history.judged()[0]
    assert history.judged([strike("away", "etcd", 2, 6)]) == []
    assert history.judged([strike("restart", "etcd", 5, 6)]) != []


def test_a_group_is_not_blamed_for_what_came_after_its_first_rank_had_asked(history):
    followed(history)
    group = {"family": "ab", "ends": [[3, "replicate latest", 1, ""]]}
    history.call(R20, "update", 5.5, 9, answer=True, version=1, group=group)
    history.call(R21, "update", 8.5, 9, answer=True, version=1, group=group)
    assert history.judged() == []


def test_who_relies_on_a_holder_that_has_just_died_is_not_blamed(history):
    followed(history).call(R1, "update", 9, 10, error="SourceLost")
    sights = [sight(12, {})]
    assert history.judged([strike("kill", "trainer/0", 8.5, 9)], sights=sights) == []
    assert "lost" in history.judged(sights=sights)[0]


def test_a_version_that_is_not_there_though_a_holder_lives_is_blamed(history):
    wrong = followed(history).judged(sights=[sight(9, {1: ["r3"]})])
    assert "lost: version 2" in wrong[0]


def test_a_version_that_is_held_and_not_offered_yet_is_not_missed(history):
    history.call(T, "publish 1", 0, 1, answer=False, version=1).call(T, "wait", 30, 31, version=1)
    assert history.judged(sights=[sight(9)]) == []


def test_a_version_goes_with_its_last_holder(history):
    history.call(T, "publish 1", 0, 1, answer=True, version=1).call(T, "wait", 30, 31, version=1)
    sights = [sight(9)]
    assert "lost: version 1" in history.judged(sights=sights)[0]
    assert history.judged([strike("kill", "trainer/0", 8, 9)], sights=sights) == []
    assert history.judged([strike("freeze", "trainer/0", 8, 12)], sights=sights) == []
    assert history.judged([strike("wipe", "etcd", 8, 9)], sights=sights) == []
    assert history.judged([strike("restart", "etcd", 7, 8.5)], sights=sights) == []
    for harmless in (strike("restart", "etcd", 8, 9), strike("kill", "r3/0", 8, 9)):
        assert "lost: version 1" in history.judged([harmless], sights=sights)[0]


def test_who_does_not_follow_or_does_not_close_is_blamed(history):
    wrong = history.judged(followed={"r1": 1, "r3": 2}, exits=[{"who": "r3/0", "code": -9}])
    assert [line.partition(":")[0] for line in wrong] == ["r2", "r3/0"]


def test_every_word_says_which_version_it_is_of():
    pattern, tensors = Pattern(4096), {3: np.zeros(4096, np.uint64), 4: np.zeros(4096, np.uint64)}
    pattern.fill(tensors, 7)
    assert pattern.torn(tensors, 7) == ""
    other = {number: words.copy() for number, words in tensors.items()}
    pattern.fill(other, 6)
    tensors[4][4000] = other[4][4000]
    assert "word 4000 of tensor 4 is of version 6" in pattern.torn(tensors, 7)
    tensors[4][4000] = tensors[3][0]
    assert "of no version" in pattern.torn(tensors, 7)


def test_a_seed_is_a_plan():
    assert plan(5, 20) == plan(5, 20)
    assert plan(5, 20)[:7] == plan(5, 7)
    assert plan(5, 20) != plan(6, 20)
    kinds = {strike.kind for seed in range(20) for strike in plan(seed, 10)}
    assert kinds == {"kill", "pause", "freeze", "restart", "away", "hang", "wipe"}
