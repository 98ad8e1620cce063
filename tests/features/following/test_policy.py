"""Updates that go where a policy of the user's own says."""

import runpy
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kit import until

import torch_ros
from torch_ros.errors import CallAborted, UsageError, VersionNotFound
from torch_ros.shard import updating

WAIT_S = 20.0


class Chooses:
    """By a function; remembers what it was asked."""

    def __init__(self, of):
        self.of, self.asked = of, []

    def choose(self, available, held):
        self.asked.append((tuple(available), held))
        return self.of(available)


def even():
    return Chooses(lambda available: next((v for v in available if v % 2 == 0), None))


@pytest.fixture
def opened():
    endpoint, handles = f"memory://{uuid.uuid4().hex}", []

    def open_(replica, tensor=None, **options):
        options = {"transport": "memory", "timeout_s": WAIT_S, **options}
        handle = torch_ros.open("m", endpoint=endpoint, replica=replica, **options)
        handles.append(handle)
        handle.register({"w": torch.zeros(4) if tensor is None else tensor})
        return handle

    yield open_
    for handle in reversed(handles):
        handle.close(linger_s=0.0)


@pytest.fixture
def trained(opened):
    """Versions 1, 2 and 3, each held by a trainer of its own; and a way to publish more."""

    def publish(version):
        trainer = opened(f"t{version}", torch.full((4,), float(version)))
        trainer.publish(version)
        return trainer

    trainers = {version: publish(version) for version in (1, 2, 3)}
    return trainers, publish


def test_an_update_goes_to_what_the_policy_has_chosen_and_not_to_the_newest(opened, trained):
    _, publish = trained
    policy, mine = even(), torch.zeros(4)
    rollout = opened("r", mine, policy=policy)
    assert rollout.update()
    assert (rollout.version, mine.tolist()) == (2, [2.0] * 4)
    assert not rollout.update()
    publish(4)
    publish(5)
    assert rollout.update()
    assert (rollout.version, mine.tolist()) == (4, [4.0] * 4)
    assert policy.asked == [((3, 2, 1), None), ((3,), 2), ((5, 4, 3), 2)]


def test_nothing_newer_is_nothing_to_choose_from(opened, trained):
    policy = Chooses(max)
    rollout = opened("r", policy=policy)
    assert rollout.update()
    assert not rollout.update()
    assert policy.asked == [((3, 2, 1), None)]


def test_a_policy_that_chooses_nothing_leaves_a_handle_as_it_is(opened, trained):
    rollout = opened("r", policy=Chooses(lambda _: None))
    assert not rollout.update()
    assert rollout.version is None
    assert not rollout.update(wait_s=0.01)
    rollout.replicate(1)
    assert not rollout.update()
    assert rollout.version == 1


def test_a_number_that_is_asked_for_is_chosen_already(opened, trained):
    policy = Chooses(lambda _: None)
    rollout = opened("r", policy=policy)
    assert rollout.update(3)
    assert rollout.update(1)
    assert rollout.version == 1
    assert policy.asked == []


def test_a_policy_chooses_from_what_is_asked_for_down(opened, trained):
    policy = Chooses(max)
    rollout = opened("r", policy=policy)
    assert rollout.update("latest-1")
    assert rollout.version == 2
    assert policy.asked == [((2, 1), None)]


def test_a_new_run_begins_with_no_version_of_it_held(opened, trained):
    policy = even()
    rollout = opened("r", policy=policy)
    assert rollout.update()
    again = opened("again", torch.ones(4), run="new")
    again.publish(2)
    assert rollout.update()
    assert policy.asked[1:] == [((2,), None)]


def test_a_call_that_waits_hears_of_the_next_one_that_is_chosen(opened, trained):
    _, publish = trained
    mine = torch.zeros(4)
    rollout = opened("r", mine, policy=even())
    stop, seen = threading.Event(), []

    def follow():
        seen.extend((version, mine[0].item()) for version in rollout.follow(stop=stop))

    with ThreadPoolExecutor() as pool:
        done = pool.submit(follow)
        until(lambda: seen == [(2, 2.0)])
        publish(5)
        publish(6)
        until(lambda: len(seen) == 2)
        stop.set()
        done.result(WAIT_S)
    assert seen == [(2, 2.0), (6, 6.0)]


def test_a_version_that_goes_before_it_is_read_is_not_replaced(opened, trained, monkeypatch):
    """Another version is not read: the update says so, and the next one asks again."""
    trainers, _ = trained
    rollout = opened("r", policy=even())
    read = updating.replicate

    def late(*args):
        monkeypatch.undo()
        trainers[2].unpublish()
        return read(*args)

    monkeypatch.setattr(updating, "replicate", late)
    with pytest.raises(VersionNotFound):
        rollout.update()
    assert rollout.version is None
    assert not rollout.update()


@pytest.mark.parametrize("wrong", [7, "3", 2.5, True])
def test_what_is_not_there_cannot_be_chosen(opened, trained, wrong):
    rollout = opened("r", policy=Chooses(lambda _: wrong))
    rollout.replicate(1)
    with pytest.raises(UsageError, match=r"expected one of \[3, 2\]"):
        rollout.update()
    assert rollout.version == 1


def both(opened, first, second):
    """Two ranks of a replica, and a way to make a call on both: each one's answer or error."""
    pool = ThreadPoolExecutor(2)
    options = {"world_size": 2}
    made = [
        pool.submit(opened, "r", None, rank=rank, policy=policy, **options)
        for rank, policy in enumerate((first, second))
    ]
    handles = [each.result(WAIT_S) for each in made]

    def call():
        made = [pool.submit(handle.update) for handle in handles]
        return [each.exception(WAIT_S) or each.result() for each in made]

    return handles, call


def test_one_rank_chooses_for_all(opened, trained):
    handles, call = both(opened, Chooses(max), Chooses(min))
    assert call() == [True, True]
    assert {handle.version for handle in handles} in ({1}, {3})


def test_an_error_of_a_policy_ends_the_update_on_all_ranks(opened, trained):
    def fails(_):
        raise ZeroDivisionError

    handles, call = both(opened, Chooses(fails), Chooses(fails))
    errors = {type(error) for error in call()}
    assert errors in ({ZeroDivisionError, CallAborted}, {ZeroDivisionError})
    assert [handle.version for handle in handles] == [None, None]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": 7}, "expected an object with a method `choose`"),
        ({"policy": even(), "seeding": "host"}, "give one of them"),
    ],
)
def test_a_policy_that_is_none_is_refused(opened, options, said):
    with pytest.raises(UsageError, match=said):
        opened("r", **options)


def test_a_policy_decides_whether_to_skip(opened, trained):
    rollout = opened("r", policy=even())
    with pytest.raises(UsageError, match="given a policy"):
        rollout.update(skip=True)


def test_the_example_does_what_it_says(capsys):
    path = Path(__file__).parents[3] / "examples/even_versions.py"
    runpy.run_path(str(path), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(", ")[0] for line in lines] == [
        f"version {number}: {'passed by' if number % 2 else 'new'}" for number in range(1, 7)
    ]
