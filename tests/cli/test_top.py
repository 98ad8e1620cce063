"""`torch-ros top` over recorded fleets, and over a real store."""

import asyncio
import cProfile
import threading
from dataclasses import replace

import pytest
from terminal import drawn
from test_ls import ONE, TWO, fleet, held

from torch_ros.cli import lines, main, screen, top
from torch_ros.cli.asking import fleets
from torch_ros.cli.headway import Headway
from torch_ros.errors import StoreUnavailable
from torch_ros.store.endpoint import connect

OLD = fleet(
    held("trainer", ONE, kind="original"), held("r10", ONE), held("r9", ONE), versions=[ONE]
)
SPREADS = fleet(
    held("trainer", kind="original", readers=("r9",)),
    held("r9", state="filling", is_relay=True, sources=("trainer",)),
    held("r9", ONE),
    held("r10", ONE),
)
NEW = fleet(held("trainer", kind="original"), held("r9"), held("r10", state="draining"))


def seen(app):
    """The lines on the screen."""
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip).rstrip() for strip in strips]


def piloted(script, size=(100, 20), why=lambda _: ()):
    """Play a script, which gets the app, its keys, and a way to show a fleet."""

    async def play():
        app = top.Top("etcd://here:2379", why)
        async with app.run_test(size=size) as pilot:

            async def show(found):
                app.post_message(top.Seen(found))
                await pilot.pause()

            await script(app, pilot, show)

    asyncio.run(play())


def test_a_series_of_fleets_is_drawn():
    async def script(app, pilot, show):
        assert "waiting for etcd" in seen(app)[0]
        await show(OLD)
        assert "policy @ etcd://here:2379   revision 7   1" in seen(app)[0]
        await show(SPREADS)
        assert "2 < 1" in seen(app)[0]
        assert "version 2 of 3.0 GiB   held by 1 of 3   1 reading" in seen(app)[1]
        assert (seen(app)[1].count("█"), seen(app)[1].count("▓")) == (13, 14)
        [line] = [line for line in seen(app) if line.strip().startswith("r9 ")]
        assert line.split()[:6] == ["r9", "1", ">", "2", "filling", "trainer"]
        await show(NEW)
        assert "▓" not in seen(app)[1]
        assert "draining" in "".join(seen(app))

    piloted(script)


def test_how_far_reads_are_is_drawn_until_they_have_ended():
    async def script(app, pilot, show):
        async def tell(made):
            app.post_message(top.Headways(made))
            await pilot.pause()
            return "\n".join(seen(app))

        [reading] = [each.inst for each in SPREADS.held if each.state == "filling"]
        assert "GB/s" not in await tell({reading: Headway(1, 2, 5e9)})  # of whom, is not known yet
        await show(SPREADS)
        assert " 61% 4.90 GB/s" in await tell({reading: Headway(61, 100, 4.9e9)})
        await show(SPREADS)
        assert " 61% 4.90 GB/s" in "\n".join(seen(app))
        assert "filling ? " in await tell({reading: Headway(problem="it is stopped")})
        assert "filling  " in await tell({})

    piloted(script)


def test_enter_says_why_the_chosen_replica_waits():
    asked = []

    def why(replica):
        asked.append(replica)
        if len(asked) > 1:
            raise StoreUnavailable("etcd://here:2379", 10.0, "it is away")
        return ["r10: reads \x1b[2J", "  r10, rank 0: host h"]

    async def script(app, pilot, show):
        async def press(key):
            await pilot.press(key)
            await app.workers.wait_for_complete()
            await pilot.pause()
            return "\n".join(seen(app))

        await show(SPREADS)
        assert "rank 0" not in await press("enter")
        assert asked == []  # nobody is chosen
        await pilot.press("down", "down")
        assert "r10: reads \\x1b[2J" in await press("enter")
        assert "it is away" in await press("enter")
        assert asked == ["r10", "r10"]
        assert "it is away" not in await press("escape")

    piloted(script, why=why)


def test_keys_choose_sort_turn_and_filter():
    async def script(app, pilot, show):
        await show(SPREADS)
        names = lambda: [each.replica for each in table.lines]
        table = app.query_one(top.Rows)
        assert names() == ["r9", "r10", "trainer"]
        await pilot.press("down", "down")
        assert table.chosen == "r10"
        await pilot.press("s")
        assert names() == ["trainer", "r9", "r10"]
        assert "VERSION ↓" in "".join(seen(app))
        assert table.chosen == "r10"
        await pilot.press("r")
        assert names() == ["r10", "r9", "trainer"]
        await pilot.press("end")
        assert table.chosen == "trainer"
        await pilot.press("slash", *"fill", "enter")
        assert names() == ["r9"]
        await show(replace(SPREADS, revision=8))
        assert names() == ["r9"]
        await pilot.press("escape")
        assert len(names()) == 3
        await pilot.press("q")
        assert not app.is_running

    piloted(script)


def test_trouble_is_a_line_until_it_is_over():
    async def script(app, pilot, show):
        await show(OLD)
        await show(StoreUnavailable("etcd://here:2379", 5.0, "it [does] not answer"))
        assert "it [does] not answer" in "".join(seen(app))
        assert "trainer" in "".join(seen(app))
        await show(NEW)
        assert "not answer" not in "".join(seen(app))

    piloted(script)


@pytest.mark.parametrize("width", [20, 40, 63, 64, 200])
def test_it_fits(width):
    async def script(app, pilot, show):
        await show(SPREADS)
        assert all(len(line) <= width for line in seen(app))
        assert "r9" in "".join(seen(app))
        await pilot.resize_terminal(40, 8)
        assert "r9" in "".join(seen(app))
        await until(pilot, lambda: "WHERE" not in "".join(seen(app)))
        await pilot.resize_terminal(100, 8)
        await until(pilot, lambda: "WHERE" in "".join(seen(app)))

    piloted(script, (width, 12))


def test_without_colour_nothing_is_lost(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    async def script(app, pilot, show):
        await show(SPREADS)
        assert "r9" in "".join(seen(app))
        for line in app.screen._compositor.render_strips():
            for segment in line:
                if segment.style and segment.style.color and segment.style.color.triplet:
                    red, green, blue = segment.style.color.triplet
                    assert red == green == blue

    piloted(script)


def test_a_name_cannot_move_the_cursor():
    evil = "\x1b[2J\x1b]0;owned\x07\n[bold]r"

    async def script(app, pilot, show):
        await show(fleet(held(evil)))
        text = "".join(seen(app))
        assert "\x1b" not in text
        assert r"\x1b[2J\x1b]0;owned\x07\n[bold]r" in text

    piloted(script, (200, 20))


@pytest.mark.long
def test_of_ten_thousand_the_chosen_one_is_on_the_screen():
    many = fleet(*(held(f"r{number}") for number in range(10_000)), versions=[TWO])

    async def script(app, pilot, show):
        await show(many)
        assert [line for line in seen(app) if " r0 " in line]
        await pilot.press("end")
        await pilot.pause()
        assert [line for line in seen(app) if " r9999 " in line]
        await pilot.press("slash", *"r77", "enter")
        assert len(app.query_one(top.Rows).lines) == 111

    piloted(script)


@pytest.mark.long
def test_a_frame_of_ten_thousand_is_little_work():
    """Work, not time, which other tests take too: some 50 ms of a processor."""
    many = fleet(*(held(f"r{number}") for number in range(10_000)), versions=[TWO])
    counted = cProfile.Profile()

    async def script(app, pilot, show):
        await show(many)
        with counted:
            await show(many)

    piloted(script)
    calls = sum(each.callcount for each in counted.getstats())
    assert calls < 40 * 10_000


@pytest.mark.parametrize(
    ("held_", "filling", "total", "width", "expected"),
    [
        (0, 0, 0, 4, ("", "", "░░░░")),
        (1, 1, 3, 9, ("███", "▓▓▓", "░░░")),
        (3, 0, 3, 5, ("█████", "", "")),
        (999, 1, 1000, 10, ("██████████", "", "")),
        (0, 1, 1000, 10, ("", "▓", "░░░░░░░░░")),
        (1, 1, 2, 0, ("", "", "")),
    ],
)
def test_a_bar_has_its_width(held_, filling, total, width, expected):
    assert screen.bar(lines.Spread(held_, filling, total), width) == expected


def test_it_follows_a_real_fleet(opened, endpoint):
    trainer, kv = opened("trainer"), connect(endpoint, timeout_s=10)
    over = threading.Event()

    async def script(app, pilot, show):
        watch = lambda: [app.post_message(top.Seen(f)) for f in fleets(kv, trainer.model, over)]
        threading.Thread(target=watch, daemon=True).start()
        await until(pilot, lambda: "no version is offered   1 replicas" in seen(app)[1])
        await asyncio.to_thread(published, trainer)
        await until(pilot, lambda: "version 7 of 16 B   held by 1 of 1" in seen(app)[1])
        over.set()

    piloted(script)
    kv.close()


def published(handle):
    import torch

    handle.register({"w": torch.ones(4)})
    handle.publish(7)


async def until(pilot, is_so):
    async with asyncio.timeout(30):
        while not is_so():
            await pilot.pause(0.02)


def test_it_is_for_terminals(opened, endpoint, capsys):
    assert main.main(["--endpoint", endpoint, "top", "policy"]) == 2
    assert "torch-ros --json ls" in capsys.readouterr().err


@pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
@pytest.mark.long
def test_a_process_draws_on_a_terminal_and_quits(opened, endpoint):
    trainer = opened("trainer")
    published(trainer)
    assert drawn(endpoint, trainer.model, b"version 7") == 0


def test_names_are_in_the_order_of_their_numbers_however_long_those_are():
    names = ["r9", "r10", "r010", "r" + "9" * 5000, "s"]
    assert sorted([*names[3:], *names[:3]], key=screen.natural) == ["r9", "r10", "r010", *names[3:]]
