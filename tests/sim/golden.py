"""The stories of some scenes: each record that is written, each word that is shown, in order.

They show the protocol at work; `tests/sim/stories` has them, and a test that they still happen so.

    python tests/sim/golden.py --write
"""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import wraps
from pathlib import Path

from planting import changed
from scenes import SCENES, Scene

from torch_ros.protocol.records import Decisions
from torch_ros.store.txn import Commit, Delete, Put
from torch_ros.transfer.card import ALL_BLOCKS

FOLDER = Path(__file__).with_name("stories")
ALL = 1_000_000  # lines
TOLD = (
    "claimed meanwhile",
    "comes back",
    "comes back with a copy",
    "dies",
    "drain",
    "expelled meanwhile",
    "last offer",
    "last version",
    "lingers",
    "lost replies",
    "no witness",
    "other bytes",
    "prefetched",
    "published again",
    "relay dies",
    "replaced reader",
    "retained meanwhile",
    "second source",
    "serves",
    "slow relay",
    "trainer restarts",
    "waits for versions",
)
# These differ from one machine, or one try, to the next.
NOISE = {
    "at_ms", "boot", "by", "caller", "card", "endpoint", "ended_at", "host", "namespace", "nonce",
    "pid", "published_ms", "release", "sign", "started", "traceparent",
}  # fmt: skip
HEX = re.compile(r"\b[0-9a-f]{16,}\b")


def told(name: str) -> str:
    """The story of that scene, as its first seed has it."""
    scene = Scene(0, story=ALL)
    with ExitStack() as stack:
        for rule in ("serve", "void"):
            stack.enter_context(changed(f"Mailbox.{rule}", lambda of: _telling(scene, of)))
        with scene.inhabited():
            SCENES[name](scene)
    names: dict[str, str] = {}
    lines = [
        f"{at_s - 1000:7.1f}  {who!s:12} {_renamed(line, names)}".rstrip()
        for at_s, who, what, fault in scene.told
        for line in _lines(what, fault)
    ]
    return "\n".join([name, "", *_contract(name), "", *lines, ""])


def _contract(name: str) -> list[str]:
    return [line.strip() for line in (SCENES[name].__doc__ or "").strip().splitlines()]


def _telling(scene: Scene, rule):
    @wraps(rule)
    def telling(mailbox, *args):
        before = mailbox.word
        rule(mailbox, *args)
        word = mailbox.word
        if word.mark != before.mark:
            there = "all" if word.position == ALL_BLOCKS else f"{word.position} blocks"
            text = f"shows {there} of {word.mark:016x}" if word.mark else "shows nothing"
            scene.tell(scene.current, text)

    return telling


def _lines(what: object, fault: str) -> Iterator[str]:
    """None for what is only asked."""
    if isinstance(what, Commit):
        for op in what.txn.ops:
            if isinstance(op, Put | Delete) and (line := _op(op)):
                yield f"{line} {f'({fault})' if fault else ''}".rstrip()
    elif isinstance(what, str) and not what.startswith(("keep alive", "grant")):
        yield what


def _op(op: Put | Delete) -> str:
    if isinstance(op, Delete):
        return "" if "/seen/" in op.range.start else f"deletes {_key(op.range.start)}"
    if "/decisions/" in op.key:
        call = Decisions.decode(op.value, op.key).calls[-1]
        ref = f" of version {call.ref.version}" if call.ref else ""
        sources = f", from {', '.join(call.sources)}" if call.sources else ""
        end = call.outcome
        ends = "" if end is None else f": {end.failure.kind}" if end.failure else ": done"
        return f"puts {_key(op.key)}: call {call.number}, '{call.asked}'{ref}{sources}{ends}"
    return f"puts {_key(op.key)} {_said(op.value)}".rstrip()


def _key(key: str) -> str:
    key = re.sub(r"seen/[0-9a-f]{4}/", "seen/", key.removeprefix("/torch-ros/m/"))
    return key.rstrip("\0").replace("0" * 12, "")


def _said(value: bytes) -> str:
    """A record's fields but for those that tell of this machine."""
    try:
        fields = json.loads(value)
    except ValueError:
        return ""
    kept = {key: field for key, field in fields.items() if key not in NOISE}
    return ", ".join(f"{key} {json.dumps(field)}" for key, field in kept.items())


def _renamed(line: str, names: dict[str, str]) -> str:
    """The line, with #1 for the first name that is a number, #2 for the next."""
    return HEX.sub(lambda found: names.setdefault(found[0], f"#{len(names) + 1}"), line)


def path(name: str) -> Path:
    return FOLDER / f"{name.replace(' ', '_').replace(',', '')}.txt"


if __name__ == "__main__":
    import faults  # noqa: F401  # the scenes of all modules

    for each in TOLD:
        if sys.argv[1:] == ["--write"]:
            path(each).write_text(told(each))
        else:
            print(told(each))
