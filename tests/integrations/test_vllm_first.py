"""An engine comes to its first version, or starts without one: by a clock that does not tick."""

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from ranks import Ranks

from torch_ros.errors import (
    AccessDenied,
    DeadlineExceeded,
    Fenced,
    ManifestMismatch,
    NotAvailable,
    SourceLost,
    StoreUnavailable,
    UsageError,
    VersionNotFound,
)
from torch_ros.integrations.seams import Alone
from torch_ros.integrations.together import Together
from torch_ros.integrations.vllm import first
from torch_ros.integrations.vllm.first import ANSWER_S, FirstVersion

LATE = DeadlineExceeded("contents latest", 1.0, "none is available yet")
GONE = VersionNotFound("m", "3", "no replica holds it now")
LEFT = SourceLost("trainer", "it left", 0, 12)
AWAY = StoreUnavailable("etcd://here", 5.0, "it does not answer")
NAN = ManifestMismatch("a norm", "numbers", "a NaN", "publish another")
MINUTE_S = 60.0


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The time, which goes on only where something waits."""

    class Clock:
        now_s = 100.0

        def monotonic(self):
            return self.now_s

        def sleep(self, wait_s):
            self.now_s += wait_s

    clock = Clock()
    monkeypatch.setattr(first, "time", clock)
    return clock


class Installer:
    """One whose looks and installs end as they are told to, the last of each for good.

    An answer is an error, which takes all the time that it is given, or a version and its content.
    """

    is_slow = True  # to fail

    def __init__(self, clock, looks, installs=(None,), rank=0):
        self._clock, self._looks, self._installs = clock, list(looks), list(installs)
        self.handle = SimpleNamespace(rank=rank, contents=self._contents)
        self.installed, self.looked = [], []

    def _contents(self, version, timeout_s):
        self.looked.append(version)
        answer = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        if isinstance(answer, Exception):
            self._clock.now_s += 0 if answer is GONE else timeout_s
            raise answer
        number, uid = answer
        return SimpleNamespace(version=number, uid=uid)

    def install(self, version, timeout_s):
        self.installed.append(version)
        end = self._installs.pop(0) if len(self._installs) > 1 else self._installs[0]
        if end is not None:
            self._clock.now_s += timeout_s if self.is_slow else 0
            raise end


def alone(wait_s=MINUTE_S, version="latest"):
    return FirstVersion(Together(0, Alone(), None), version, wait_s, 300.0)


def test_a_trainer_between_two_versions_is_waited_for(clock):
    installer = Installer(clock, [LATE, GONE, (4, "d")])
    assert alone().bring(installer) == ""
    assert installer.installed == [4]


@pytest.mark.parametrize("wait_s", [0.0, MINUTE_S])
def test_a_version_that_does_not_come_is_waited_for_no_longer_than_that(wait_s, clock):
    installer, began_s = Installer(clock, [LATE]), clock.now_s
    assert alone(wait_s).bring(installer) == f"DeadlineExceeded: {LATE}"
    assert wait_s <= clock.now_s - began_s <= wait_s + ANSWER_S
    assert installer.installed == []


def test_a_start_that_waits_for_ever_outlives_what_passes_and_what_does_not_fit(clock):
    looks = [LATE] * 90 + [AWAY] * 40 + [(1, "a")] * 9 + [(1, "b")]
    installer = Installer(clock, looks, [LEFT, LEFT, NAN, None])
    assert alone(None).bring(installer) == ""
    assert installer.installed == [1, 1, 1, 1]  # no content twice that does not fit


@pytest.mark.parametrize("wait_s", [0.0, 1.0, MINUTE_S])
def test_all_of_it_has_one_deadline(wait_s, clock):
    """Each read fails as late as it may, and there is another version at once."""
    numbers, began_s = itertools.count(1), clock.now_s
    installer = Installer(clock, [GONE], [LEFT])
    installer.handle.contents = lambda *_, **__: SimpleNamespace(version=next(numbers), uid="a")
    assert alone(wait_s).bring(installer).startswith("SourceLost")
    assert clock.now_s - began_s <= wait_s + 300.0 + ANSWER_S
    assert len(installer.installed) >= (2 if wait_s else 1)


def test_a_read_that_failed_is_followed_by_a_wait_though_the_first_is_over(clock):
    installer = Installer(clock, [(1, "a"), GONE, (2, "b")], [LEFT, None])

    def fail_when_the_wait_is_over(version, timeout_s):
        installer.installed.append(version)
        if version == 1:
            clock.now_s += 2 * MINUTE_S
            raise LEFT

    installer.install = fail_when_the_wait_is_over
    assert alone().bring(installer) == ""
    assert installer.installed == [1, 2]


@pytest.mark.parametrize(
    "error", [Fenced("r", "another start"), AccessDenied("e", "role", "r", "a")]
)
def test_what_is_final_fails_the_start(error, clock):
    with pytest.raises(type(error)):
        alone().bring(Installer(clock, [error]))
    with pytest.raises(type(error)):
        alone().bring(Installer(clock, [(1, "a")], [error]))


def test_a_version_that_cannot_be_fails_the_start(clock):
    with pytest.raises(UsageError, match="expected a number"):
        alone(version="newest").bring(Installer(clock, [UsageError("expected a number")]))


# -- etcd is away


def test_a_start_without_etcd_goes_on_without_a_version(clock):
    undone, began_s = [], clock.now_s

    def open_in_vain():
        clock.now_s += 20.0
        raise AWAY

    lack = alone().open(open_in_vain, lambda: undone.append(True))
    assert lack == f"StoreUnavailable: {AWAY}"
    assert len(undone) == 3
    assert clock.now_s - began_s <= MINUTE_S + 20.0


def test_an_etcd_that_comes_back_is_asked_again(clock):
    ends = [AWAY, LATE, None]

    def open_at_last():
        if (end := ends.pop(0)) is not None:
            raise end

    assert alone().open(open_at_last, lambda: None) == ""
    assert ends == []


def test_a_start_that_is_refused_fails_at_once():
    def refused():
        raise UsageError("no such option")

    with pytest.raises(UsageError, match="no such option"):
        alone().open(refused, lambda: None)


# -- nobody wants it any more


@pytest.mark.parametrize("there", [(), (7, 3), (7, 1)])
def test_an_engine_that_nobody_waits_for_ends_its_start(there, clock, monkeypatch):
    """As after kill -9 of its server alone: it would keep its seat, and wait for ever."""
    found = [(7, 3)]
    monkeypatch.setattr(first, "parents", lambda: found[0])
    waiting, looks = alone(None), itertools.count()
    installer = Installer(clock, [LATE])

    def contents(*_, **__):
        look = next(looks)
        if look == 3:
            found[0] = there
        if look == 1000:
            raise Fenced("r", "the test has waited for long")
        raise LATE

    installer.handle.contents = contents
    ended = Fenced if there == (7, 3) else NotAvailable
    with pytest.raises(ended):
        waiting.bring(installer)


def test_the_engine_core_and_its_server_are_seen_by_a_worker(monkeypatch, tmp_path):
    monkeypatch.setattr(first.multiprocessing, "parent_process", lambda: None)
    assert first.parents() == ()
    monkeypatch.setattr(first.multiprocessing, "parent_process", object)
    assert first.parents() == (first.os.getppid(),)
    monkeypatch.setattr(first, "CORE_TITLE", b"")  # any is one
    mine, server = first.parents()
    assert (mine, server) == (first.os.getppid(), server)
    status = first.Path(f"/proc/{mine}/status").read_text()
    assert f"PPid:\t{server}\n" in status


# -- several ranks


def on_two_ranks(step):
    """The answer or the error of `step(rank, first)` on each."""
    shared = threading.Barrier(2, timeout=10), [None, None]

    def run(rank):
        together = Together(rank, Ranks(rank, *shared), None)
        try:
            return step(rank, FirstVersion(together, "latest", MINUTE_S, 300.0))
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


@pytest.mark.parametrize(
    ("ends", "lack"),
    [
        (([LEFT, None], [LATE, None]), ""),
        (([LEFT, None], [NAN, None]), "ManifestMismatch"),
        (([NAN, None], [LATE, None]), "ManifestMismatch"),
        (([LEFT], [LATE]), "SourceLost"),
    ],
    ids=["passing", "the second is for good", "the first is for good", "never well"],
)
def test_ranks_with_different_errors_go_the_same_way(ends, lack, clock):
    """One that looked again alone would wait for the other for ever."""
    pair = [Installer(clock, [(1, "a")], each, rank) for rank, each in enumerate(ends)]
    for one in pair:
        one.is_slow = False
    said = on_two_ranks(lambda rank, waits: waits.bring(pair[rank]))
    assert said[0] == said[1]
    assert said[0].startswith(lack)
    assert bool(said[0]) == bool(lack)
    assert pair[0].installed == pair[1].installed


def test_what_one_rank_has_opened_is_closed_if_another_has_no_etcd():
    opened, undone = [], []

    def open_first(rank, waits):
        waits._until_s = -math.inf

        def step():
            if rank == 1:
                raise AWAY
            opened.append(rank)

        return waits.open(step, lambda: undone.append(rank))

    assert on_two_ranks(open_first) == [f"StoreUnavailable: {AWAY}"] * 2
    assert (opened, sorted(undone)) == ([0], [0, 1])


def test_ranks_of_which_one_is_refused_all_fail():
    def step(rank):
        raise UsageError("no such option") if rank else AWAY

    said = on_two_ranks(lambda rank, waits: waits.open(lambda: step(rank), lambda: None))
    assert [type(each) for each in said] == [StoreUnavailable, UsageError]
