"""Scenes of lenders and borrowers: I11. Files and locks are real ones, of this very process."""

from __future__ import annotations

import fcntl
from contextlib import suppress
from functools import partial
from unittest.mock import patch

from checks import are_of, demand
from replicas import Process
from scenes import SCENES, Scene, scenes_of

from torch_ros.copies import transforms
from torch_ros.copies.buffers import Copying
from torch_ros.errors import LoanBroken, LoanRefused, VersionNotFound
from torch_ros.features.lending import borrowing
from torch_ros.features.lending.memory import Loan
from torch_ros.shard.checkpoint import SaveRequest
from torch_ros.transfer.registered import LocalState

SHARD_BYTES = 8 * 36  # of a lender of one rank


def lend(me: Process, version: int) -> None:
    """Publish a copy. Its content is what its number says."""
    me.world.contents[version] = version
    me.cells[:] = me.expected(version)
    state = LocalState(me.tensors, {}, {})
    request = SaveRequest(version, state, copier=me.handle.copies.copier(Copying()), timeout_s=100)
    me.handle.checkpoints.save(request)
    files = [b for t in me.handle.copies._turns.values() for b in t.buffers]
    room = 2 * SHARD_BYTES // me.start.size + me.start.borrow_bytes
    taken = sum(each.lent.content_bytes for each in files)
    demand(taken <= room, f"I11: {me} has {taken} bytes of copies, {room} are allowed")


def shows(me: Process, tensors, version: int) -> bool:
    """Whether all of these tensors are those of a version."""
    return are_of(me.world, tensors, version)


def borrow(me: Process, version: int | str, *, until: str = "", reach: str = "") -> None:
    """Look at a version from beginning to end, while others do what they do."""
    with me.handle.borrow(version, timeout_s=60) as tensors:
        number = tensors.version
        demand(shows(me, tensors, number), f"I1: {me} borrowed something else than {version}")
        if reach:
            me.world.reach(reach)
        if until:
            me.world.until(until)
        demand(shows(me, tensors, number), f"I11: {me} has {version}, and it was written to")


def lose_lock(loans: list[Loan]) -> None:
    """As a forked child can do."""
    for loan in loans:
        fcntl.flock(loan._fd, fcntl.LOCK_UN)
        loan.is_unlocked = True


def stays(scene: Scene) -> None:
    """I11: a version is borrowed while its lender publishes on; it waits for nobody."""

    def train(me: Process) -> None:
        lend(me, 1)
        scene.until("has 1")
        for version in range(2, 7):
            began_s = scene.now_s
            lend(me, version)
            demand(scene.now_s - began_s < 20, "I11: a lender waits for its borrower")
            if version == 3:
                scene.reach("3 is there", until="has 3")
        scene.reach("published")

    def first(me: Process) -> None:
        borrow(me, 1, reach="has 1", until="published")

    def second(me: Process) -> None:
        scene.until("3 is there")
        borrow(me, 3, reach="has 3", until="published")

    scene.start("t", train, borrow_bytes=SHARD_BYTES)
    scene.play(r1=first, r2=second)
    demand({"has 1", "has 3"} <= scene.reached, "a version was not borrowed")


def locked_late(scene: Scene) -> None:
    """I11: a buffer that was found, and locked when something else was in it."""

    def train(me: Process) -> None:
        lend(me, 1)
        scene.until("found")
        for version in (2, 3):
            lend(me, version)
        scene.reach("published", until="borrowed")

    def read(me: Process) -> None:
        scene.when(lambda: 1 in scene.contents and me.handle.list(), "publication")
        scene.before_lock[me] = lambda: (scene.reach("found"), scene.until("published"))
        with suppress(VersionNotFound):
            borrow(me, 1)
        borrow(me, 3)
        scene.reach("borrowed")

    scene.start("t", train, size=1, borrow_bytes=2 * SHARD_BYTES)
    scene.play(r=read)


def lost_lock(scene: Scene) -> None:
    """I11: a borrower whose lock is gone is told when it leaves, also while it is written."""
    filling = scene.rng.random() < 0.5
    copy_bits, is_filling = transforms.copy_bits, []

    def slow_copy(target, source):
        copy_bits(target, source)
        if is_filling and is_filling.pop():
            scene.reach("half filled", until="left")

    def train(me: Process) -> None:
        lend(me, 1)
        scene.until("lost")
        lend(me, 2)
        is_filling[:] = [filling]
        lend(me, 3)
        scene.reach("half filled")

    def read(me: Process) -> None:
        scene.when(lambda: 1 in scene.contents and me.handle.list(), "publication")
        try:
            with me.handle.borrow(1, timeout_s=60) as tensors:
                lose_lock(scene.loans[me])
                scene.reach("lost", until="half filled")
                demand(not shows(me, tensors, 1), "nothing was written")
        except LoanBroken:
            scene.reach("told")
        scene.reach("left")

    with patch.object(transforms, "copy_bits", slow_copy):
        scene.start("t", train, size=1, borrow_bytes=SHARD_BYTES)
        scene.play(r=read)
    demand("told" in scene.reached, "I11: nobody told the borrower that its loan was broken")


def kernels_last(scene: Scene) -> None:
    """I11: kernels that were queued inside the block read before the fill is looked at."""

    def train(me: Process) -> None:
        lend(me, 1)
        scene.until("leaves")
        lend(me, 2)
        lend(me, 3)
        scene.reach("written")

    def read(me: Process) -> None:
        def finish_devices():
            scene.reach("leaves", until="written")

        scene.when(lambda: 1 in scene.contents and me.handle.list(), "publication")
        with patch.object(borrowing, "_finish_devices", finish_devices):
            try:
                with me.handle.borrow(1, timeout_s=60):
                    lose_lock(scene.loans[me])
            except LoanBroken:
                scene.reach("told")

    scene.start("t", train, size=1, borrow_bytes=SHARD_BYTES)
    scene.play(r=read)
    demand("told" in scene.reached, "I11: a kernel read what was written, and nobody was told")


def left_in_order(scene: Scene) -> None:
    """I11: who leaves is not told of what was written since; and what it had is lent again."""

    def train(me: Process) -> None:
        lend(me, 1)
        for version in range(2, 9):
            lend(me, version)
            scene.sleep(0.2)
        scene.until("left")
        lend(me, 9)
        scene.reach("9 is there", until="borrowed 9")

    def read(me: Process) -> None:
        scene.when(lambda: 1 in scene.contents and me.handle.list(), "publication")
        for _ in range(4):
            with suppress(LoanRefused):  # the last one that is lent was not given back in time
                borrow(me, "latest")
        scene.reach("left", until="9 is there")
        borrow(me, 9)
        scene.reach("borrowed 9")

    scene.start("t", train, size=1, borrow_bytes=SHARD_BYTES)
    scene.play(r=read)
    demand("borrowed 9" in scene.reached, "I11: what was given back is not lent again")


def dies_borrowing(scene: Scene) -> None:
    """I11: what a dead borrower had is lent again."""

    def train(me: Process) -> None:
        lend(me, 1)
        scene.until("dead")
        lend(me, 2)
        scene.reach("2 is there", until="borrowed 2")

    def die(me: Process) -> None:
        borrow(me, 1, reach="has 1", until="never")

    def read(me: Process) -> None:
        scene.until("has 1")
        [victim] = scene.start_named("r1").processes
        scene.soon(lambda: (scene.kill_process(victim), scene.reach("dead")))
        scene.until("2 is there")
        borrow(me, 2)
        scene.reach("borrowed 2")

    scene.start("t", train, size=1, borrow_bytes=SHARD_BYTES)
    scene.play(r1=die, r2=read)
    demand("borrowed 2" in scene.reached, "I11: what a dead borrower had is not lent again")


def bound(scene: Scene) -> None:
    """I11: no more is lent than borrow_bytes, whoever comes late; and the lender has room."""

    def train(me: Process) -> None:
        lend(me, 1)
        scene.until("found")
        for version in range(2, 7):
            lend(me, version)
            scene.reach(f"{version} is there")
            if version < 6:
                scene.until(f"tried {version}")
        scene.reach("published")

    def late(me: Process) -> None:
        scene.when(lambda: 1 in scene.contents and me.handle.list(), "publication")
        scene.before_lock[me] = lambda: (scene.reach("found"), scene.until("tried 2"))
        with suppress(LoanRefused):
            borrow(me, "latest", until="published")

    def greedy(me: Process, version: int) -> None:
        scene.until(f"{version} is there")
        try:
            borrow(me, version, reach=f"tried {version}", until="published")
        except LoanRefused:
            scene.reach(f"tried {version}")

    scene.start("t", train, size=1, borrow_bytes=SHARD_BYTES)
    scene.start("r", late, size=1)
    for version in range(2, 6):
        scene.start(f"r{version}", partial(greedy, version=version), size=1)
    scene.play()
    demand("published" in scene.reached, "I11: the lender did not come to its end")


def lends_late(scene: Scene) -> None:
    """I6: who waits to borrow sees that another publisher of the same version has come."""

    def first(me: Process) -> None:
        lend(me, 1)
        scene.reach("1 is there", until="1 is read")
        joined = "begin of the second publication"
        scene.when(lambda: any("/t2@" in key for key in scene.checks.holdings), joined)
        me.handle.unpublish()
        scene.reach("none lends", until="borrowed")

    def read(me: Process) -> None:
        scene.until("1 is there")
        me.handle.replicate(1, timeout_s=60)
        scene.reach("1 is read", until="borrowed")

    def second(me: Process) -> None:
        scene.until("1 is read")
        if me.rank:
            scene.until("none lends")
            scene.sleep(1.0)
        lend(me, 1)
        scene.until("borrowed")

    def late(me: Process) -> None:
        scene.until("none lends")
        borrow(me, "latest")
        scene.reach("borrowed")

    scene.start("t1", first, size=1, borrow_bytes=SHARD_BYTES)
    scene.start("t2", second, borrow_bytes=SHARD_BYTES)
    scene.play(r1=read, r2=late)
    demand("borrowed" in scene.reached, "nobody borrowed")


SCENES |= scenes_of(__name__)
