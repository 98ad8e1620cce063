"""`--deep`: how far a read is, of readers in this process, and of processes that stand still."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import closing

import numpy as np
import pytest
from crowd import Crowd, inst
from kit import until
from terminal import drawn

from puppets import Actor
from torch_ros.cli import asking, deep, headway, ls, main
from torch_ros.cli.deep import Depths
from torch_ros.cli.headway import Headway, Position
from torch_ros.fleet.fleet import Fleet, fleet_ranges
from torch_ros.memory.transport import MemoryTransport
from torch_ros.protocol.keys import Keys, parse_reader, replica_of
from torch_ros.protocol.records import ShardRecord, mark
from torch_ros.spans import HOST
from torch_ros.store.endpoint import connect
from torch_ros.store.txn import Put, Read, Txn
from torch_ros.transfer.card import ALL_BLOCKS
from torch_ros.transfer.mailbox import Mailbox, region_of
from torch_ros.weights.manifest import BLOCK_BYTES, ChunkRecord, Layout, TensorRecord

BLOCKS = 50
LAYOUT = Layout(
    (TensorRecord("w", "uint8", (BLOCKS * BLOCK_BYTES,)),),
    (ChunkRecord(0, (0,), (BLOCKS * BLOCK_BYTES,), (1,), spread=False),),
)
TOTAL = BLOCKS * BLOCK_BYTES
RANKS = 8  # of each replica of a crowd
MARK = mark("u1", 1)  # of its reads of version 1


# Serves version 1 from mailboxes of agents of their own, as so many processes would.
SERVING = """
import sys, numpy as np
sys.path[:] = sys.argv[3:]
from test_deep import BLOCKS, HOST, LAYOUT, MARK
from torch_ros.face.choose import Network, choose_transport
from torch_ros.transfer.mailbox import Mailbox, region_of
boxes = []
for n in range(int(sys.argv[2])):
    transport = choose_transport(
        sys.argv[1], Network(), replica=f"r{n}", rank=0, in_process=False, reason="")
    boxes.append(Mailbox(transport))
    memory = np.zeros(4096, np.uint8)
    boxes[-1].show(LAYOUT, [region_of(memory).address], [HOST], [region_of(memory)])
    boxes[-1].serve(MARK, BLOCKS // 2)
print(" ".join(box.card.hex() for box in boxes), flush=True)
sys.stdin.readline()
"""


class Rank:
    """A rank's mailbox in this process, in front of one page of memory that stands for all."""

    def __init__(self):
        self.transport, self.memory = MemoryTransport(), np.zeros(4096, np.uint8)
        self.mailbox = Mailbox(self.transport)
        region = region_of(self.memory)
        self.mailbox.show(LAYOUT, [region.address], [HOST], [region])

    def record(self):
        return ShardRecord("here", 1, self.mailbox.card)

    def close(self):
        self.mailbox.close()
        self.transport.close()


@pytest.fixture
def rank():
    made = Rank()
    yield made
    made.close()


@pytest.fixture
def kv():
    with closing(connect(f"memory://{uuid.uuid4().hex}", timeout_s=5)) as there:
        yield there


@pytest.fixture
def crowd(kv):
    """A trainer, and a rollout that reads version 1 from it."""
    there = Crowd(kv, "policy")
    for name in ("trainer", "rollout"):
        there.join(name)
    there.publish("trainer", 1)
    there.read("rollout", "trainer", 1)
    there.commit()
    return there


def seat(crowd, name, *ranks):
    puts = (Put(crowd.keys.shard(inst(name), n), each.encode()) for n, each in enumerate(ranks))
    crowd.kv.commit(Txn((), tuple(puts)), timeout_s=5)


def fleet_of(crowd):
    view = crowd.kv.read(Read(fleet_ranges(crowd.keys)), timeout_s=5)
    return Fleet.of(view, crowd.keys)


def looked(crowd):
    with closing(Depths(crowd.kv, "policy", MemoryTransport())) as depths:
        return depths.look(fleet_of(crowd))


def test_a_read_that_goes_on_has_a_share_and_a_rate(crowd, rank):
    seat(crowd, "rollout", *[rank.record()] * RANKS)
    over = threading.Event()

    def read():
        for position in range(1, BLOCKS):
            rank.mailbox.serve(MARK, position)
            if over.wait(0.02):
                return

    with closing(Depths(crowd.kv, "policy", MemoryTransport())) as depths:
        reading = threading.Thread(target=read)
        rank.mailbox.serve(MARK, 0)
        reading.start()
        try:
            found = depths.look(fleet_of(crowd))[inst("rollout")]
        finally:
            over.set()
            reading.join()
    assert 0 < found.bytes_done < found.bytes_total == RANKS * TOTAL
    assert found.bytes_done % BLOCK_BYTES == 0
    # A block in 20 ms, or in more where the processors are busy.
    assert 0 < found.bytes_per_s <= 1.5 * RANKS * BLOCK_BYTES / 0.02
    share = found.bytes_done / found.bytes_total
    assert headway.text(found) == f"{share:.0%} {found.bytes_per_s / 1e9:.2f} GB/s"


def test_what_a_rank_had_before_is_not_taken_for_the_read(crowd, rank):
    seat(crowd, "rollout", *[rank.record()] * RANKS)
    rank.mailbox.serve(mark("u0", 1), ALL_BLOCKS)
    assert "shows no position" in looked(crowd)[inst("rollout")].problem
    rank.mailbox.serve(MARK, BLOCKS)
    assert looked(crowd)[inst("rollout")] == Headway(RANKS * TOTAL, RANKS * TOTAL, 0.0)


@pytest.mark.parametrize("seats", [0, RANKS - 1])
def test_ranks_without_a_seat_hide_the_others(seats, crowd, rank):
    rank.mailbox.serve(MARK, ALL_BLOCKS)
    seat(crowd, "rollout", *[rank.record()] * seats)
    assert looked(crowd)[inst("rollout")].problem == f"{seats} of {RANKS} ranks are there"


def test_ranks_are_summed_up_and_one_without_a_position_hides_the_others():
    first, later = Position(10.0, 7, 100, 1000), Position(12.0, 7, 300, 1000)
    anew = Position(12.0, 8, 50, 1000)
    assert headway.summed([(first, later), (first, later)]) == Headway(600, 2000, 200.0)
    assert headway.summed([(first, anew)]) == Headway(50, 1000, 0.0), "another read has begun"
    silent = headway.summed([(first, later), (first, Position(12.0, 0, 0, 0))])
    assert silent.bytes_done is None
    assert headway.text(silent) == "filling ?"


def test_who_cannot_be_asked_is_a_question_mark_and_is_left_alone_for_a_while(
    crowd, rank, monkeypatch
):
    gone = Rank()
    crowd.join("lost")
    crowd.read("lost", "trainer", 1)
    crowd.commit()
    seat(crowd, "rollout", *[rank.record()] * RANKS)
    seat(crowd, "lost", *[gone.record()] * RANKS)
    rank.mailbox.serve(MARK, 25)
    gone.close()
    asked, state = [], deep.Peers.state
    monkeypatch.setattr(
        deep.Peers, "state", lambda *args, **more: asked.append(1) or state(*args, **more)
    )
    with closing(Depths(crowd.kv, "policy", MemoryTransport())) as depths:
        for looks in (1, 2):
            found = depths.look(fleet_of(crowd))
            assert found[inst("rollout")] == Headway(RANKS * TOTAL // 2, RANKS * TOTAL, 0.0)
            assert found[inst("lost")].bytes_done is None
            assert found[inst("lost")].problem
            assert len(asked) == RANKS * looks + 1
    rows = ls.versions(fleet_of(crowd), None, found)
    assert [row[2] for row in rows] != []
    assert {row[3]: row[1] for row in rows} == {
        "trainer": "full",
        "rollout": "50% 0.00 GB/s",
        "lost": "filling ?",
    }


@pytest.mark.long
@pytest.mark.parametrize("transport", ["auto", "ucx-tcp", "tcp"])
def test_many_that_are_stopped_or_dead_keep_no_other_waiting(
    transport, crowd, started, monkeypatch
):
    monkeypatch.setenv("TORCH_ROS_TRANSPORT", transport)
    mute = [f"mute-{n}" for n in range(7)]
    for name in mute:
        crowd.join(name)
        crowd.read(name, "trainer", 1)
    crowd.commit()
    stopped = started.start(SERVING, transport, len(mute), *sys.path, talks=True)
    alive = started.start(SERVING, transport, 1, *sys.path, talks=True)
    for process, names in ((stopped, mute), (alive, ["rollout"])):
        for name, card in zip(names, process.hear().split(), strict=True):
            seat(crowd, name, *[ShardRecord("here", 1, bytes.fromhex(card))] * RANKS)

    def look(depths):
        began_s = time.monotonic()
        found = depths.look(fleet_of(crowd))
        assert time.monotonic() - began_s < 3 * deep.RANK_S
        assert found.pop(inst("rollout")).bytes_done == RANKS * TOTAL // 2
        return {each.bytes_done for each in found.values()}

    with closing(Depths(crowd.kv, "policy")) as depths:
        assert look(depths) == {RANKS * TOTAL // 2}
        stopped.signal(signal.SIGSTOP)
        assert look(depths) == {None}  # also on this host, where the kernel could copy
    with closing(Depths(crowd.kv, "policy")) as depths:
        assert look(depths) == {None}, "they never were"
    stopped.kill()
    with closing(Depths(crowd.kv, "policy")) as depths:
        assert look(depths) == {None}, "they are dead"


def test_a_card_that_is_none_is_a_question_mark(crowd):
    seat(crowd, "rollout", *[ShardRecord("here", 1, b"no card")] * RANKS)
    assert "its card" in looked(crowd)[inst("rollout")].problem


def test_nobody_is_asked_where_nobody_reads(crowd):
    crowd.arrive("rollout", "trainer", 1)
    crowd.hold("trainer", 2, "filling", is_original=True)
    crowd.commit()
    fleet = fleet_of(crowd)
    assert [each.replica for each in fleet.held if each.state == "filling"] == ["trainer"]
    assert looked(crowd) == {}


def test_it_takes_a_model(crowd, capsys):
    assert main.main(["--endpoint", crowd.kv.endpoint, "ls", "--deep"]) == main.USAGE
    assert "--deep takes a model" in capsys.readouterr().err


WITHOUT = """
import sys
sys.modules[sys.argv.pop(1)] = None
from torch_ros.cli import main
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("name", ["nixl", "torch"])
@pytest.mark.long
def test_what_is_not_installed_is_named(name, etcd_endpoint):
    with closing(connect(etcd_endpoint, timeout_s=5)) as kv:
        crowd = Crowd(kv, "m-" + uuid.uuid4().hex[:8])
        crowd.commit()
    asked = ["--endpoint", etcd_endpoint, "ls", crowd.keys.model]
    command = [sys.executable, "-c", WITHOUT, name, *asked]
    environment = {**os.environ, "TORCH_ROS_TRANSPORT": "ucx"}
    how = {"capture_output": True, "check": False, "text": True, "env": environment}
    without = subprocess.run(command, **how)
    deep = subprocess.run([*command, "--deep"], **how)
    assert (without.returncode, deep.returncode) == (main.FINE, main.USAGE)
    assert deep.stderr == (
        f"torch-ros: ls takes {name}, which is not installed: "
        "install torch-ros with all that it depends on\n"
    )


def readers_of(kv, model):
    view = kv.read(Read((Keys(model).readers(),)), timeout_s=5)
    return {replica_of(parse_reader(key)[1]) for key in view.entries}


@pytest.mark.long
def test_a_process_that_waits_is_told_and_one_that_is_stopped_is_a_question_mark(
    etcd_endpoint, started, capsys
):
    """The source is stopped in the middle, so `waits` waits for it; `stopped` is itself.

    `waits` tells its position though it is no relay.
    """
    model = "m-" + uuid.uuid4().hex[:8]
    options = {"model": model, "timeout_s": 100}
    options["ttl_s"] = 100  # they are stopped for longer than the usual one
    # Nothing is copied: that would be over too soon.
    environment = {"TORCH_ROS_ENDPOINT": etcd_endpoint, "UCX_TLS": "tcp"}
    source, waits, stopped = (
        Actor(started, name, environment, relay=name != "waits", **options)
        for name in ("source", "waits", "stopped")
    )
    for actor in (source, waits, stopped):
        actor.hear()

    def look():
        """Of each reader, what is told of it."""
        argv = ["--endpoint", etcd_endpoint, "--json", "ls", model, "--deep"]
        assert main.main(argv) == main.FINE
        reads = json.loads(capsys.readouterr().out)["reads"]
        return {replica_of(each["inst"]): each for each in reads}

    def a_slice():
        source.resume()
        time.sleep(0.02)
        source.process.signal(signal.SIGSTOP)
        there = look()["waits"]
        return there if there["bytes_done"] else None

    source.ask("publish", version=1)
    with closing(connect(etcd_endpoint, timeout_s=5)) as kv:
        waits.tell("replicate")
        until(lambda: "waits" in readers_of(kv, model))
        source.process.signal(signal.SIGSTOP)
        there = until(a_slice, 60)
        assert 0 < there["bytes_done"] < there["bytes_total"] == 1 << 30
        assert there["bytes_per_s"] == 0
        assert drawn(etcd_endpoint, model, b"% 0.00 GB/s", "--deep") == 0
        stopped.tell("replicate")
        until(lambda: "stopped" in readers_of(kv, model))
        stopped.process.signal(signal.SIGSTOP)
        began_s, before = time.monotonic(), asking.revision(kv)
        found = look()
        assert time.monotonic() - began_s < 10
        assert asking.revision(kv) == before, "it has written"
    assert found["waits"]["bytes_done"] == there["bytes_done"]
    assert found["stopped"]["bytes_done"] is None
    assert "within 1 s" in found["stopped"]["problem"]
    for actor in (stopped, source):
        actor.resume()
    assert [actor.hear().get("error") for actor in (waits, stopped)] == [None, None]
