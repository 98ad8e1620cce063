"""Scenes of reads that a source has to answer: late, in part, or never; and by whom."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from unittest.mock import patch

from checks import demand, never
from replicas import Process
from scenes import SCENES, Scene, publish, replicate, scenes_of, unpublish

from torch_ros import errors
from torch_ros.channels import wire
from torch_ros.features.tcp.reading import TcpTransfer
from torch_ros.spans import Region
from torch_ros.transfer.feed import Following
from torch_ros.transfer.peers import Peers
from torch_ros.transfer.reading import ReadPass
from torch_ros.transfer.registered import LocalState

BLOCK_BYTES = 32


def _streamed(scene: Scene, **shares: float) -> None:
    scene.is_streamed = True
    scene.part_share = scene.early_share = scene.silent_share = 0.0
    for name, share in shares.items():
        setattr(scene, name, share)


def _before(owner: type, name: str, do: Callable, *, count: int = 1):
    """Do something before that method is called, the first times that it says that it did."""
    rule, done = getattr(owner, name), []

    def called(self, *args):
        if len(done) < count and do(self, *args):
            done.append(self)
        return rule(self, *args)

    return patch.object(owner, name, called)


def _is_r(scene: Scene) -> bool:
    return scene.current.process.start.replica == "r"


def _of(scene: Scene, name: str) -> Process:
    return scene.start_named(name).processes[0]


def _shows(me: Process, version: int, content: int) -> None:
    """Other tensors, of another version, are there from now on; a reader sees that."""
    me.handle.unregister()
    me._make_memory()
    me.shard.tensors.show(LocalState(me.tensors, {}, {}))
    publish(me, version, content)


def _demand_no_loss(me: Process) -> None:
    report, suspects = me.handle.last_read, me.world.suspects
    demand(not report.reroutes and not suspects, f"I6: {report.reroutes} re-routes, {suspects}")


def answered_late(scene: Scene) -> None:
    """An answer that comes when its call is over is none to the next call's question."""
    _streamed(scene, early_share=1.0)

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until("gave up")
        unpublish(me)
        _shows(me, 2, 8)
        scene.reach("shows 2", until="read")

    def slow_down(_, __, what: str, *___) -> bool:
        is_it = what == "whole" and _is_r(scene)
        if is_it:
            scene.slow_s[_of(scene, "r")] = 20.0
        return is_it

    def read(me: Process) -> None:
        with suppress(errors.DeadlineExceeded), _before(Peers, "_ask", slow_down):
            replicate(me, 1, timeout_s=3)
        scene.slow_s.clear()
        scene.reach("gave up", until="shows 2")
        replicate(me, 2)
        _demand_no_loss(me)
        scene.reach("read")

    scene.start("t", train, size=1)
    scene.play(r=read)


def answered_in_part(scene: Scene) -> None:
    """A read whose connection ends has not come, however much of it has."""
    _streamed(scene, part_share=1.0)

    def cut(*_) -> bool:
        scene.failing[_of(scene, "r")] = 1
        return True

    def read(me: Process) -> None:
        replicate(me)
        scene.reach("read")

    with _before(ReadPass, "_post", cut):
        scene.start("t", lambda me: (publish(me, 1), scene.until("read")), size=1)
        scene.play(r=read)
    demand(scene.seen["a connection cut"], "it was not cut")


def never_answered(scene: Scene) -> None:
    """I6: a reader gives up a source that stands still, without waiting for what it asked for."""
    _streamed(scene)

    def mute(*_) -> bool:
        _of(scene, "t").mute_until_s = scene.now_s + 60.0
        return True

    def read(me: Process) -> None:
        began_s = scene.now_s
        with suppress(errors.DeadlineExceeded):
            replicate(me, timeout_s=5)
            demand(False, "I6: it has read what was not sent")
        took_s = scene.now_s - began_s
        demand(took_s < 10, f"I6: a mute source held its reader up for {took_s:.0f} s")
        replicate(me)
        scene.reach("read")

    with _before(ReadPass, "_post", mute):
        scene.start("t", lambda me: (publish(me, 1), scene.until("read")), size=1)
        scene.play(r=read)


def given_up_midway(scene: Scene) -> None:
    """What is still to come of an answer that nobody waits for is no part of the next one."""
    _streamed(scene, early_share=1.0)

    def slow_down(*_) -> bool:
        scene.slow_s[_of(scene, "r")] = 8.0
        return True

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until("gave up")
        unpublish(me)
        publish(me, 2, 8)
        scene.reach("has 2", until="read")

    def read(me: Process) -> None:
        with suppress(errors.DeadlineExceeded):
            replicate(me, 1, timeout_s=3)
            demand(False, "it was not given up")
        scene.slow_s.clear()
        scene.reach("gave up", until="has 2")
        replicate(me, 2)
        _demand_no_loss(me)
        scene.reach("read")

    with _before(ReadPass, "_post", slow_down):
        scene.start("t", train, size=1)
        scene.play(r=read)


def _reads(scene: Scene) -> None:
    """Play a read from a source that is struck in the midst of it; another one has the version."""

    def train(me: Process) -> None:
        scene.until(*(["t"] if me.start.replica == "u" else []))
        publish(me, 1)
        scene.reach(me.start.replica, until="read")

    def read(me: Process) -> None:
        scene.until("t", "u")
        replicate(me)
        demand(me.handle.last_read.reroutes, "it was read from a source that was struck")
        scene.reach("read")

    scene.start("t", train, size=1)
    scene.start("u", train, size=1)
    scene.play(r=read)


def _ends(scene: Scene, name: str) -> None:
    scene.at(scene.now_s, scene.kill_process, _of(scene, name))


def ends_before_the_word(scene: Scene) -> None:
    """I1: bytes do not count whose source writes, and ends before it is asked for its word."""
    _streamed(scene)

    def write(*_) -> bool:
        source = _of(scene, "t")
        source.shard.mailbox.void()
        source.cells[:] = -1
        return True

    def end(*_) -> bool:
        _ends(scene, "t")
        return True

    with _before(ReadPass, "_post", write), _before(Following, "ask", end):
        _reads(scene)


def another_at_the_address(scene: Scene) -> None:
    """I7: who connects anew to a source that has ended meets no other process in its place."""
    _streamed(scene)

    def replace(*_) -> bool:
        _ends(scene, "t")
        scene.start("v", lambda _: scene.reach("v", until="read"), size=1)
        scene.until("v")
        return True

    with _before(Following, "ask", replace):
        _reads(scene)
    demand(scene.seen["a stranger at the address"], "nobody was at its address")


def _make_small(*_) -> bool:
    """A block takes several requests from here on."""
    wire.BYTES_MAX = BLOCK_BYTES // 2
    return True


def _let_go(scene: Scene, *, comes_back: bool = False) -> None:
    """What unregistering the tensors does first; then they may be there again, under another id."""
    source = _of(scene, "t")
    endpoint = scene.wires[f"agent-{source.number}"]
    for each in [*endpoint.registrations]:
        if any(start <= source.base < end for start, end in each.bounds):
            each.close()
            if comes_back:
                endpoint.register([Region(start, end - start) for start, end in each.bounds])


def lets_go_between_requests(scene: Scene) -> None:
    """I2: what a source lets go of between two requests of a read is not sent any more."""
    _streamed(scene)

    def let_go(read: TcpTransfer, _, rows) -> bool:
        is_second = read.size_bytes == BLOCK_BYTES and rows[0][1] != read._rows[0][1]
        if is_second:
            _let_go(scene, comes_back=True)
        return is_second

    with _before(ReadPass, "_post", _make_small), _before(TcpTransfer, "_asked", let_go):
        _reads(scene)


def lets_go_within_an_answer(scene: Scene) -> None:
    """I2: what a source lets go of while its answer is half sent is not sent any more."""
    _streamed(scene, part_share=1.0)
    saw, begun = scene.saw, []

    def told(what: str) -> None:
        saw(what)
        if what == "sent in part" and begun:
            begun.clear()
            scene.at(scene.now_s, _let_go, scene)

    scene.saw = told
    with _before(ReadPass, "_post", lambda *_: begun.append("tensors") or True):
        _reads(scene)


def made_anew(scene: Scene) -> None:
    """I6: a connection that ends between two answers is made anew, and that is no loss."""
    _streamed(scene)
    used = set()

    def cut(_, channel, __) -> bool:
        if channel in used:
            channel.sock.cut()
        used.add(channel)
        return False

    def read(me: Process) -> None:
        with never(errors.SourceLost, "I6: its source is there"):
            replicate(me)
        _demand_no_loss(me)
        scene.reach("read")

    with _before(ReadPass, "_post", _make_small), _before(TcpTransfer, "_asked", cut):
        scene.start("t", lambda me: (publish(me, 1), scene.until("read")), size=1)
        scene.play(r=read)
    demand(scene.seen["a connection cut"], "none was cut")


SCENES |= scenes_of(__name__)
