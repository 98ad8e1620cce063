"""Scenes of calls that end on one rank between two parts, and of calls that a rank leaves out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from unittest.mock import patch

from checks import demand, never
from replicas import Process, Struck
from scenes import (
    SCENES,
    Scene,
    _has_call,
    meet,
    publish,
    puts,
    replicate,
    scenes_of,
    strike,
    unpublish,
)

from torch_ros.errors import DeadlineExceeded, TorchRosError, UsageError
from torch_ros.protocol.records import Asked
from torch_ros.protocol.seat import KNOWN_KEPT
from torch_ros.shard.word import OwnWord

SOON_S = 20.0  # the world is a slow one
LONG_S = 200.0


def _train(me: Process) -> None:
    scene = me.world
    publish(me, 1, 1)
    scene.until("r.1/0 has 1", "r.1/1 has 1")
    unpublish(me)
    publish(me, 2, 2)
    scene.reach("2 is there", until="over")


def _begin(me: Process) -> None:
    replicate(me, 1)
    me.world.reach(f"{me} has 1", until="2 is there")


def _end(me: Process) -> None:
    """Both are in step: what comes next is one call for both."""
    meet(me, "goes on")
    _go_to_2(me)


def _go_to_2(me: Process) -> None:
    scene = me.world
    with never(TorchRosError, f"I3: {me} is out of step, and is told"):
        me.handle.update("latest", timeout_s=LONG_S)
    demand(me.handle.version == 2, f"I3: {me} has {me.handle.version}")
    scene.checks.returned(me, 2)
    meet(me, "is done")
    scene.reach("over")


def left_out(scene: Scene) -> None:
    """I3: a rank that left an update out joins the one in which its peers wait for it."""

    def update(me: Process) -> None:
        replicate(me, 1)
        me.world.reach(f"{me} has 0")
        scene.until("r.1/0 has 0", "r.1/1 has 0")
        if me.rank == 1:
            demand(not me.handle.update("latest", timeout_s=LONG_S), "I3: there is nothing newer")
            scene.reach("left out")
        scene.until("left out")
        scene.reach(f"{me} has 1", until="2 is there")
        if me.rank == 0:
            scene.when(lambda: _waits(scene, Asked("update", "latest")), "a peer that waits")
        _go_to_2(me)

    scene.start("t", _train, size=1)
    scene.play(2, r=update)


def far_behind(scene: Scene) -> None:
    """I3: a rank that comes late to many calls is told of each of them what its peer was."""
    late = scene.seed % 2

    def update(me: Process) -> None:
        replicate(me, 1)
        me.world.reach(f"{me} has 0")
        scene.until("r.1/0 has 0", "r.1/1 has 0")
        if me.rank == late:
            scene.reach(f"{me} has 1", until="2 is there")
        for _ in range(2 * KNOWN_KEPT):
            is_new = me.handle.update("latest", timeout_s=LONG_S)
            demand(not is_new, f"I3: {me} is told of 2, and its peer was not")
        scene.reach(f"{me} has 1" if me.rank != late else "level", until=("2 is there", "level"))
        _go_to_2(me)

    scene.start("t", _train, size=1)
    scene.play(2, r=update)


def _waits(scene: Scene, asked: Asked) -> bool:
    calls = [call for (inst, _), call in scene.checks.decided.items() if inst.startswith("r@")]
    return any(call.asked == asked.check for call in calls)


def missing(scene: Scene) -> None:
    """I3: an update for which a rank does not come gives nothing up."""

    def update(me: Process) -> None:
        _begin(me)
        if me.rank == 0:
            try:
                me.handle.update("latest", timeout_s=10)
                demand(False, "I3: it goes without its peer")
            except DeadlineExceeded:
                demand(me.handle.version == 1, "I3: a rank gave up what its peer holds")
            scene.reach("waited")
        scene.until("waited")
        demand(me.handle.version == 1, f"I3: {me} has {me.handle.version}")
        if me.rank == 1:
            try:
                me.handle.update("latest", timeout_s=10)
                demand(False, "I3: it goes without its peer")
            except DeadlineExceeded:  # as its peer was told
                pass
        _end(me)

    scene.start("t", _train, size=1)
    scene.play(2, r=update)


def refused_argument(scene: Scene) -> None:
    """I6: an argument that one rank refuses ends the call for all, soon, whoever comes first."""
    is_first = scene.seed % 4 < 2

    def update(me: Process) -> None:
        _begin(me)
        is_wrong, began_s = me.rank == scene.seed % 2, scene.now_s
        if is_wrong and not is_first:
            scene.when(lambda: _waits(scene, Asked("update", "latest")), "a peer that waits")
        elif is_first and not is_wrong:
            scene.until("refused")
        try:
            me.handle.update("newest" if is_wrong else "latest", timeout_s=LONG_S)
            demand(False, f"I3: {me} goes on without its peer")
        except UsageError as error:
            took_s = scene.now_s - began_s
            demand(took_s < SOON_S, f"I6: {me} was told after {took_s:.0f} s")
            demand("newest" in str(error), f"I3: {me} was told {error!r}")
        except DeadlineExceeded as error:
            demand(False, f"I6: its peer has refused, and {me} waited: {error}")
        if is_wrong:
            scene.reach("refused")
        _end(me)

    scene.start("t", _train, size=1)
    scene.play(2, r=update)


def gives_up_first(scene: Scene) -> None:
    """I6: a rank whose time is over ends the call for a peer that waits for a mute source."""

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t")
        readers = scene.start_named("r").processes
        scene.when(lambda: all(reader.reads_from for reader in readers), "two readers")
        me.mute_until_s = scene.now_s + LONG_S
        scene.reach("mute", until="over")

    def read(me: Process) -> None:
        scene.until("t")
        scene.slow_s[me] = SOON_S
        began_s = scene.now_s
        try:
            replicate(me, timeout_s=LONG_S if me.rank else 2.0)
            demand(False, f"I1: {me} has read from a mute source")
        except DeadlineExceeded:
            took_s = scene.now_s - began_s
            demand(took_s < SOON_S, f"I6: its peer gave up, and {me} waited for {took_s:.0f} s")
        meet(me, "has ended")
        scene.reach("over")

    scene.start("t", train, size=1)
    scene.play(2, r=read)


def struck_while_it_skips(scene: Scene) -> None:
    """I6: Ctrl-C on a rank, as it skips a call of its peer's, ends its own call for the peer."""
    learns_first, waits_already = scene.seed % 2, scene.seed % 4 > 1
    skip = OwnWord.skip

    def struck(word: OwnWord, learn: Callable[[], None]) -> None:
        is_victim = "skips" not in scene.reached
        if is_victim:
            scene.reach("skips", until="next" if waits_already else ())
        if learns_first or not is_victim:
            skip(word, learn)
        if is_victim:
            strike()

    def train(me: Process) -> None:
        if me.rank == 1:
            with suppress(DeadlineExceeded):
                publish(me, 3, timeout_s=2)
                demand(False, "I7: it is offered without one rank")
            scene.reach("failed", until="skips" if waits_already else "struck")
            _publish_for_nothing(scene, me)
        else:
            scene.until("failed")
            with suppress(Struck):
                publish(me, 9)
                demand(False, f"{me} was not struck")
            scene.reach("struck")
        _is_in_step(me)

    with patch.object(OwnWord, "skip", struck):
        scene.play(2, t=train)


def struck_while_it_ends_a_step(scene: Scene) -> None:
    """I6: as above, in place of a skip: as it ends the step of a peer that is one behind."""

    def train(me: Process) -> None:
        if me.rank == 1:
            with suppress(TorchRosError):
                publish(me, 8)
                demand(False, "I7: it is offered without one rank")
            scene.until("struck")
            _publish_for_nothing(scene, me)
        else:
            scene.when(lambda: _has_call("t", scene, Asked("publish", 8)), "a peer that waits")
            scene.hold("ends it", me, puts("/decisions/"), strike, is_reply=True)
            with suppress(Struck):
                publish(me, 9)
                demand(False, f"{me} was not struck")
            scene.reach("struck")
        _is_in_step(me)

    scene.play(2, t=train)


def _publish_for_nothing(scene: Scene, me: Process) -> None:
    """Publish 9, of which the other rank's call was interrupted."""
    scene.reach("next")
    began_s = scene.now_s
    with suppress(TorchRosError):
        publish(me, 9, timeout_s=LONG_S)
        demand(False, "I7: it is offered without one rank")
    took_s = scene.now_s - began_s
    demand(took_s < SOON_S, f"I6: its peer was interrupted, and {me} waited for {took_s:.0f} s")


def _is_in_step(me: Process) -> None:
    meet(me, "goes on")
    with never(TorchRosError, f"I3: {me} is out of step, and is told"):
        publish(me, 10, timeout_s=LONG_S)
    meet(me, "is done")


SCENES |= scenes_of(__name__)
