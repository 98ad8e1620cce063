"""Readers that are behind their source, and those that only wait for it."""

import contextlib
import math
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import torch_ros
from torch_ros.costs import NIXL_COSTS
from torch_ros.features.pace import rates
from torch_ros.features.pace.judging import PacedRead
from torch_ros.features.pace.rates import (
    CAUGHT_UP_BYTES,
    LANDINGS,
    PACE_BYTES,
    PACE_S,
    WINDOW_S,
    Landings,
    Pace,
)
from torch_ros.transfer import reading
from torch_ros.transfer.feed import Arrivals, FeedSource
from torch_ros.transfer.mailbox import Mailbox
from torch_ros.transfer.peers import Peers

GB = 1 << 30


def looks(judge, *points):
    return [judge.is_behind(*point) for point in points]


def test_a_reader_that_gets_a_tenth_is_behind():
    assert looks(Pace(), (0, 0, GB), (PACE_S, GB // 10, 2 * GB)) == [False, True]


def test_a_reader_that_gets_as_much_is_not_however_late_it_came():
    assert looks(Pace(), (0, 0, 9 * GB), (PACE_S, GB, 10 * GB), (1, 8 * GB, 17 * GB)) == [False] * 3


def test_a_source_that_waits_for_its_own_proves_nothing():
    came = PACE_BYTES - 1
    assert looks(Pace(), (0, 0, GB), (PACE_S, 0, GB + came), (9, 0, GB + came)) == [False] * 3


def test_who_has_caught_up_is_judged_anew():
    judge, up = Pace(), (1, 2 * GB - CAUGHT_UP_BYTES, 2 * GB)
    assert looks(judge, (0, 0, GB), up, (1 + PACE_S, 2 * GB, 4 * GB)) == [False] * 3


def test_so_little_time_proves_nothing():
    assert looks(Pace(), (0, 0, GB), (0.9 * PACE_S, 0, 3 * GB)) == [False, False]


def test_a_full_source_is_compared_with_the_rate_of_another():
    first = Pace()
    looks(first, (0, 0, GB), (PACE_S, 0, 2 * GB))
    assert first.rate == GB / PACE_S
    second = Pace(first.rate)
    assert looks(second, (0, 0, 9 * GB), (PACE_S, GB // 4, 9 * GB)) == [False, True]
    assert looks(Pace(), (0, 0, 9 * GB), (PACE_S, GB // 4, 9 * GB)) == [False, False]
    assert rates.PACE_SHARE == 3


MB = 1 << 20


def landed(landings, now_s, *, takes_s, looks=20, size_bytes=4 * MB, count=LANDINGS):
    """So many landings, one after the other. Returns whether the last ends a window, and when."""
    for _ in range(count):
        for number in range(looks):
            landings.look(now_s + takes_s * number / looks)
        now_s += takes_s
        is_window = landings.land(now_s, size_bytes)
    return is_window, now_s


def test_the_rate_of_a_window_is_known_from_both_sides():
    landings = Landings(5.0)
    assert (landings.told, landings.last) == (0.0, math.inf)
    assert landed(landings, 5.0, takes_s=0.01, count=LANDINGS - 1)[0] is False
    assert landed(landings, 5.07, takes_s=0.01, count=1)[0] is True
    rate = 4 * MB / 0.01
    assert 0.99 * rate < landings.told < 1.01 * rate < landings.last < 1.06 * rate


def test_a_window_has_time_and_bytes_enough_to_say_something():
    short = 0.55 * WINDOW_S / LANDINGS
    assert landed(Landings(), 0.0, takes_s=short)[0] is False
    assert landed(Landings(), 0.0, takes_s=short, count=2 * LANDINGS - 1)[0] is True
    assert landed(Landings(), 0.0, takes_s=0.01, size_bytes=MB)[0] is False
    assert landed(Landings(), 0.0, takes_s=0.01, size_bytes=MB, count=4 * LANDINGS)[0] is True


def test_a_wait_for_the_source_is_no_time_on_the_way():
    landings, now_s = Landings(), 0.0
    for _ in range(LANDINGS):
        landings.resume(now_s + 9.0)
        _, now_s = landed(landings, now_s + 9.0, takes_s=0.01, count=1)
    rate = 4 * MB / 0.01
    assert 0.99 * rate < landings.told < landings.last < 1.06 * rate


def test_who_stood_still_once_in_a_window_is_not_slow_and_tells_less():
    landings = Landings()
    _, now_s = landed(landings, 0.0, takes_s=0.01, count=LANDINGS - 1)
    landed(landings, now_s, takes_s=3.0, count=1)
    rate = 4 * MB / 0.01
    assert rate < landings.last < 1.06 * rate
    assert landings.told < rate / 30


def test_the_slowest_window_is_told_and_the_last_one_is_judged():
    landings, now_s = Landings(), 0.0
    for takes_s in (0.01, 0.04, 0.02):
        _, now_s = landed(landings, now_s, takes_s=takes_s)
    assert 0.99 < landings.told / (4 * MB / 0.04) < 1.01
    assert 1.0 < landings.last / (4 * MB / 0.02) < 1.06


def test_who_finds_all_landed_at_the_first_look_is_too_fast_to_be_measured():
    landings = Landings()
    landed(landings, 0.0, takes_s=0.01, looks=1)
    assert landings.last == math.inf


def test_who_lands_less_than_a_quarter_twice_is_slower():
    assert rates.RATE_SHARE == 4
    judge = Pace()
    assert [judge.is_slower(2.4, 10.0), judge.is_slower(2.6, 10.0)] == [False, False]
    assert [judge.is_slower(2.4, 10.0), judge.is_slower(2.4, 10.0)] == [False, True]
    assert judge.rate == 10.0


def test_a_window_in_which_the_relay_tells_nothing_is_passed_over():
    judge = Pace()
    windows = ((2.4, 10.0), (2.4, 0.0), (2.4, 10.0))
    assert [judge.is_slower(*each) for each in windows] == [False, False, True]
    assert [Pace().is_slower(1e-9, 0.0) for _ in range(3)] == [False] * 3


def test_who_is_too_fast_to_be_measured_is_not_slower():
    judge = Pace()
    windows = ((2.4, 10.0), (math.inf, math.inf), (2.4, 10.0))
    assert [judge.is_slower(*each) for each in windows] == [False] * 3


def test_a_near_relay_is_asked_for_its_rate_once_a_window_and_nobody_else_is():
    pace, asked, left = Pace(), [], []
    source = FeedSource("r", 1, False, *[lambda *_: True] * 3)
    relay = SimpleNamespace(
        is_near=False, feed=SimpleNamespace(source=source), rate=lambda _: asked.append(1) or 10.0
    )
    full = SimpleNamespace(
        is_near=False, feed=SimpleNamespace(source=replace(source, is_full=True))
    )

    def window(pace, following, last=2.4):
        read = PacedRead(pace, lambda rate, _: left.append(rate), following, Arrivals(1))
        read.landings.last = last
        read.compare([0])

    for _ in range(2):
        window(pace, relay)
    assert (asked, left) == ([1, 1], [10.0])
    window(pace, full)
    window(None, relay)
    window(pace, relay, math.inf)
    assert (asked, left) == ([1, 1], [10.0])


def test_a_clock_that_stands_still_makes_no_rate_of_nothing():
    landings = Landings(0.0)
    assert landings.add(WINDOW_S, GB, 0.0, 0.0) is False
    for _ in range(LANDINGS):
        landings.add(WINDOW_S, GB, 0.0, 0.0)
    assert landings.told > GB


@pytest.mark.long
def test_a_relay_over_tcp_tells_its_readers_how_fast_bytes_land(etcd_endpoint, monkeypatch):
    """It stops after a few windows, until its reader has asked it."""
    model, told, asked = "m-" + uuid.uuid4().hex[:8], {}, []
    is_relaying, was_asked = threading.Event(), threading.Event()
    tell_rate, rate = Mailbox.tell_rate, Peers.rate

    def telling(self, bytes_per_s):
        tell_rate(self, bytes_per_s)
        told.setdefault(self, []).append(bytes_per_s)
        if len(told[self]) == 3 and not is_relaying.is_set():
            is_relaying.set()
            was_asked.wait(20)

    def asking(self, *args):
        asked.append(rate(self, *args))
        was_asked.set()
        return asked[-1]

    monkeypatch.setattr(Mailbox, "tell_rate", telling)
    monkeypatch.setattr(Peers, "rate", asking)
    monkeypatch.setattr(reading, "STEPS_FLIGHT", 2)  # all of a flight land together
    options = {
        "endpoint": etcd_endpoint,
        "transport": "ucx-tcp",
        "timeout_s": 60,
        "costs": NIXL_COSTS,
    }
    content = torch.arange(1 << 26, dtype=torch.int32)
    with contextlib.ExitStack() as stack:
        trainer, relay, reader = (
            stack.enter_context(torch_ros.open(model, replica=name, **options))
            for name in ("trainer", "relay", "reader")
        )
        trainer.register({"w": content})
        trainer.publish(1)
        for handle in (relay, reader):
            handle.register({"w": torch.zeros_like(content)})
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(relay.replicate)
            assert is_relaying.wait(30)
            reader.replicate()
            call.result()
        assert reader.last_read.source == "relay"
    of_relay = next(rates for rates in told.values() if any(rates))
    print(f"told {of_relay}, asked {asked}")
    assert all(1e6 < each < 1e11 for each in of_relay[1:-1])
    assert of_relay[0] == of_relay[-1] == 0
    assert of_relay[1:-1] == sorted(of_relay[1:-1], reverse=True)
    assert asked[0] in of_relay[1:-1]
    assert set(asked) <= set(of_relay)
