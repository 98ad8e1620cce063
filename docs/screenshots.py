"""Makes the pictures of TOOLS.md from a real fleet: an etcd, a trainer and seven rollouts.

    python docs/screenshots.py

It needs what the Makefile installs, and apt-get install -y chromium chromium-driver. Three rollouts
are stopped in the middle of a read, so that there is something to see.
"""

import asyncio
import os
import pty
import re
import subprocess
import sys
import tempfile
import termios
import time
from contextlib import closing
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent / "tests"), str(DOCS.parent / "tests" / "cli")]

import browsing  # noqa: E402

import puppets  # noqa: E402
from puppets import Actor  # noqa: E402
from torch_ros.cli import asking, top  # noqa: E402
from torch_ros.store.endpoint import connect  # noqa: E402

MODEL, ROLLOUTS, STOPPED, EARLY = "policy", 7, 3, 2
SIZE = {"tensors": 64, "elements": 1 << 20}  # 256 MiB: half of it lasts for a moment
WIDTH = 108  # of the terminal
FONT = re.compile(r"@font-face \{.*?\}", re.DOTALL)  # of another server; there are others


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        puppets.running_etcd(Path(folder) / "etcd") as etcd,
        closing(puppets.Puppets(folder)) as started,
    ):
        endpoint = f"etcd://{etcd.host}"
        options = {"model": MODEL, "endpoint": endpoint, "ttl_s": 60, **SIZE}
        trainer = Actor(started, "trainer", {}, **options)
        rollouts = [Actor(started, f"rollout-{n}", {}, **options) for n in range(ROLLOUTS)]
        for each in (trainer, *rollouts):
            each.hear()
        take(endpoint, trainer, rollouts)


def take(endpoint: str, trainer: Actor, rollouts: list[Actor]) -> None:
    trainer.ask("publish", version=40)
    replicate(rollouts)
    with browsing.page(endpoint, MODEL) as address, browsing.browser() as driver:
        browsing.resize(driver, 1200, 760, scale=1.25)
        driver.get(address)
        time.sleep(8)
        trainer.ask("unpublish")
        trainer.ask("publish", version=41)
        for each in rollouts[:-1]:
            each.ask("unpublish")
        replicate(rollouts[:-1])
        time.sleep(12)
        trainer.ask("unpublish")
        trainer.ask("publish", version=42)
        for each in rollouts[: EARLY + STOPPED]:
            each.ask("unpublish")
        replicate(rollouts[:EARLY])
        stopped = rollouts[EARLY : EARLY + STOPPED]
        for each in stopped:
            each.tell("replicate", at_half="stop")
            each.process.await_stop()
        time.sleep(1)
        driver.save_screenshot(str(DOCS / "web.png"))
        browsing.resize(driver, 1200, 760, "light", 1.25)
        time.sleep(1)
        driver.save_screenshot(str(DOCS / "web-light.png"))
        with closing(connect(endpoint, timeout_s=10)) as kv:
            fleet = asking.fleet(kv, MODEL)
        asyncio.run(draw_top(endpoint, fleet))
        draw(endpoint, "ls", MODEL)
        draw(endpoint, "doctor", "--model", MODEL)
        trainer.tell("unpublish")  # it waits for those that are stopped
        time.sleep(2)
        draw(endpoint, "why", MODEL, trainer.name)


def replicate(rollouts: list[Actor]) -> None:
    """All at once, so that they form a chain."""
    for each in rollouts:
        each.tell("replicate")
    for each in rollouts:
        each.answer_of(each.hear())


async def draw_top(endpoint: str, fleet: top.Fleet) -> None:
    screen = top.Top(endpoint, lambda _: ())
    async with screen.run_test(size=(WIDTH, 17)) as pilot:
        screen.post_message(top.Seen(fleet))
        await pilot.pause()
        await pilot.press("down", "down", "down")
        save("top.svg", screen.export_screenshot(title=f"torch-ros top {MODEL}"))


def draw(endpoint: str, *command: str) -> None:
    """The output of a command, as a terminal shows it."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, WIDTH))
    program = [sys.executable, "-m", "torch_ros", "--endpoint", endpoint]
    subprocess.run([*program, *command], stdout=theirs, check=False)  # `why`: 1, it has found who
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 65536):
            said += part
    except OSError:  # all has been read
        os.close(ours)
    console = Console(record=True, width=WIDTH, file=StringIO())
    console.print(Text.from_ansi(said.decode().replace("\r\n", "\n")))
    save(f"{command[0]}.svg", console.export_svg(title=" ".join(("torch-ros", *command))))


def save(name: str, svg: str) -> None:
    lines = (line.rstrip() for line in FONT.sub("", svg).splitlines())
    (DOCS / name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
