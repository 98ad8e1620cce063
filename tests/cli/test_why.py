"""`torch-ros why`, over a store in memory and over a real etcd."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time

import pytest
import torch
from kit import inside, published
from msgspec.structs import replace

import torch_ros
from torch_ros.cli import main, waiting
from torch_ros.cli.waits import Blamed, Hop, Why
from torch_ros.fleet import life
from torch_ros.printable import printable
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.records import GroupRecord, SeenRecord, ShardRecord, VersionRecord
from torch_ros.store.endpoint import connect
from torch_ros.store.txn import Put, Read, Txn, Watch, one


def test_a_replica_that_has_not_asked_is_named_with_its_process(opened, asked):
    trainer, rollout = opened("trainer"), opened("rollout")
    published(trainer, 7)
    code, out, err = asked("why", trainer.model, "rollout")
    assert (code, err) == (1, "")
    assert "rollout: has no version, makes no call, and has not asked for 7" in out
    assert f"py-spy dump --pid {os.getpid()}" in out
    rollout.register({"w": torch.empty(4)})
    rollout.replicate()
    code, out, _ = asked("why", trainer.model, "rollout")
    ago = r"\d+ (s|min) ago"
    assert code == 0
    assert re.fullmatch(
        f"rollout: has version 7, the newest, which trainer published {ago}\n"
        f"trainer: has version 7, which it published {ago}, and waits for nobody\n"
        f"  trainer, rank 0: host .*, process {os.getpid()}; it runs; its stack: py-spy .*\n",
        out,
    )
    code, out, _ = asked("why", trainer.model, "rollout", "--version", "7")
    assert (code, out) == (0, "rollout: has version 7, and waits for nobody\n")
    code, out, _ = asked("--json", "why", trainer.model, "rollout", "--version", "9")
    found = json.loads(out)
    assert (code, found["schema"], found["kind"]) == (1, 1, "version")
    assert found["hops"][0]["replica"] == "rollout"


def test_a_trainer_between_two_versions_is_not_blamed(opened, asked):
    trainer, rollout = opened("trainer"), opened("rollout")
    published(trainer, 7)
    rollout.register({"w": torch.empty(4)})
    rollout.replicate()
    trainer.unpublish()
    code, out, _ = asked("why", trainer.model, "trainer")
    assert code == 0, out
    assert out.startswith(
        "trainer: published version 7, the newest, has let go of it, and waits for nobody\n"
        "  trainer, rank 0: host "
    )
    assert asked("why", trainer.model, "rollout")[0] == 0


def test_names_that_are_nearly_right_are_told(opened, asked):
    trainer = opened("trainer")
    published(trainer, 7)
    code, _, err = asked("why", trainer.model, "trainr")
    assert (code, "there is 'trainer'" in err) == (2, True)
    code, _, err = asked("why", trainer.model[:-1], "trainer")
    assert (code, f"did you mean {trainer.model!r}?" in err) == (2, True)


def test_nothing_in_a_name_is_obeyed_by_a_terminal():
    there, gone = Blamed("r\x1b[2J", 0, "host", 7), Blamed("r", 1, "", 0)
    found = Why((Hop("r\x1b[2J", "waits"),), "process", (there, gone))
    assert [printable(line) for line in waiting.lines(found)] == [
        "r\\x1b[2J: waits",
        "  r\\x1b[2J, rank 0: host host, process 7; its stack, there: py-spy dump --pid 7",
        "  r, rank 1: no process has had this seat; start it, or look at why it ended",
    ]


# A process that lives on, and whose lease has ended


@pytest.fixture
def child():
    """A process to be told of, which does nothing."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def sat(process, at_ms=0):
    """The record of a process that took a seat."""
    own = life.own()
    stat = open(f"/proc/{process.pid}/stat").read()  # noqa: PTH123, SIM115
    started = int(stat.rpartition(")")[2].split()[19])
    return SeenRecord(socket.gethostname(), process.pid, at_ms, own.boot, own.namespace, started)


def stop(process):
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def put(store, *records):
    assert store.commit(
        Txn(ops=tuple(Put(key, each.encode()) for key, each in records)), timeout_s=5
    ).applied


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_stopped_rollout_whose_lease_has_ended_is_found_and_said_to_be_stopped(
    opened, asked, store, child
):
    trainer = opened("trainer")
    published(trainer, 7)
    keys = Keys(trainer.model)
    stop(child)
    put(store, (keys.seen_at("r2", 0), sat(child, int(1000 * time.time()))))
    code, out, err = asked("why", trainer.model, "r2")
    assert (code, err) == (1, "")
    assert re.fullmatch(
        "r2: lost its seat: the lease of rank 0 has ended, and etcd was told of no close\n"
        f"  r2, rank 0: was here: host {re.escape(socket.gethostname())}, process {child.pid}, "
        r"seated since \d\d:\d\d:\d\d; it is stopped \(state T\); "
        f"it goes on after: kill -CONT {child.pid}\n",
        out,
    )
    found = json.loads(asked("--json", "why", trainer.model, "r2")[1])
    assert found["kind"] == "gone"
    assert (found["processes"][0]["state"], found["processes"][0]["is_seated"]) == (
        "stopped",
        False,
    )


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_stopped_rank_that_its_peers_wait_for_is_found(opened, asked, store, child):
    trainer = opened("trainer")
    keys = Keys(trainer.model)
    put(
        store,
        (keys.group("r2"), GroupRecord("0badcafe.1", 2, trainer.run)),
        (keys.shard("r2@0badcafe.1", 0), ShardRecord("h", 1, b"")),
        (keys.seen_at("r2", 0), SeenRecord("h", 1)),
        (keys.seen_at("r2", 1), sat(child)),
    )
    code, out, _ = asked("why", trainer.model, "r2")
    assert (code, "r2: not there yet: rank 1 of 2" in out) == (1, True)
    assert f"r2, rank 1: was here: host {socket.gethostname()}, process {child.pid}; it runs" in out
    child.kill()
    child.wait()
    assert "it is gone; start it" in asked("why", trainer.model, "r2")[1]


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
@pytest.mark.parametrize("is_held", [True, False])
def test_a_rollout_that_has_the_newest_hears_that_its_trainer_lost_its_seat(
    opened, asked, store, child, is_held
):
    rollout = opened("rollout")
    keys, run = Keys(rollout.model), rollout.run
    if is_held:
        published(rollout, 7)
    at_ms = int(1000 * (time.time() - 600))
    old = store.read(Read((keys.versions(run),)), timeout_s=5).entries.get(keys.version(run, 7))
    uid = VersionRecord.decode(old.value, "").uid if old else "u"
    layout = VersionRecord.decode(old.value, "").layout if old else "L/1/1"
    stop(child)
    put(
        store,
        (keys.version(run, 7), VersionRecord(uid, layout, at_ms, by="trainer")),
        (keys.seen_at("trainer", 0), sat(child)),
    )
    code, out, _ = asked("why", rollout.model, "rollout")
    gone = "nobody has any version; its publisher has no seat"
    said = "has version 7, the newest, which trainer published 10 min ago" if is_held else gone
    assert (code, out.splitlines()[0]) == (1, f"rollout: {said}")
    assert "trainer: lost its seat" in out
    assert "it is stopped (state T)" in out


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
@pytest.mark.parametrize(
    ("sign", "said"),
    [
        ("", "it is stopped (state T); it goes on after: kill -CONT "),
        ("0bad", "it has closed this handle; its process goes on without it; open it there again"),
    ],
)
def test_a_trainer_that_stands_still_with_its_seat_holds_the_rollout_up(
    opened, asked, store, child, sign, said
):
    trainer, rollout = opened("trainer"), opened("rollout")
    published(trainer, 7)
    rollout.register({"w": torch.empty(4)})
    rollout.replicate()
    keys = Keys(trainer.model)
    shard = keys.shard(inside(trainer).group.seat.inst, 0)
    entry = store.read(Read((one(shard),)), timeout_s=5).entries[shard]
    stop(child)
    there = ShardRecord(socket.gethostname(), child.pid, ShardRecord.decode(entry.value, "").card)
    store.commit(Txn(ops=(Put(shard, there.encode(), entry.lease_id),)), timeout_s=5)
    put(store, (keys.seen_at("trainer", 0), replace(sat(child), sign=sign)))
    code, out, _ = asked("why", trainer.model, "rollout")
    assert (code, said in out) == (1, True), out
    assert "was here" not in out


def test_who_has_closed_its_handle_is_not_looked_for(opened, asked):
    trainer, rollout = opened("trainer"), opened("rollout")
    published(trainer, 7)
    rollout.register({"w": torch.empty(4)})
    rollout.replicate()
    trainer.close()
    assert asked("why", trainer.model, "rollout")[:2] == (
        0,
        "rollout: has version 7, and waits for nobody\n",
    )
    assert asked("why", trainer.model, "trainer")[0] == 2


@pytest.mark.long
def test_who_has_closed_its_handle_while_etcd_was_away_is_not_looked_for(etcd_server, capsys):
    endpoint = f"etcd://{etcd_server.host}"
    options = {"endpoint": endpoint, "ttl_s": 2, "timeout_s": 20}
    with torch_ros.open("m", replica="trainer", **options) as trainer:
        rollout = torch_ros.open("m", replica="rollout", **options)
        published(trainer, 7)
        etcd_server.kill()
        rollout.close(linger_s=0)
        etcd_server.start()
        keys = Keys("m")
        with contextlib.closing(connect(endpoint, timeout_s=10)) as kv:
            shards = (keys.shards_of("rollout"),)
            while (view := kv.read(Read(shards), timeout_s=10)).entries:
                assert kv.wait(Watch(shards, view.rev, "the end of its lease"), timeout_s=20)
            assert kv.read(Read((keys.seen_of("rollout"),)), timeout_s=10).entries
        assert main.main(["--endpoint", endpoint, "why", "m", "rollout"]) == 2
        assert "no replica 'rollout'" in capsys.readouterr().err
        assert main.main(["--endpoint", endpoint, "doctor", "--model", "m"]) == 0
        assert "has lost its seat" not in capsys.readouterr().out
        assert main.main(["--endpoint", endpoint, "gc", "m"]) == 0
        assert "/rollout/" in capsys.readouterr().out


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_trainer_that_waits_for_its_rollout_to_use_the_version_makes_no_cycle(opened, asked):
    trainer, rollout = opened("trainer"), opened("rollout", installs=True)
    published(trainer, 7)
    rollout.register({"w": torch.empty(4)})
    with rollout.installing(7):
        rollout.replicate(7)
        code, out, _ = asked("why", trainer.model, "rollout")
    assert (code, "cycle" in out, out.count("\n")) == (0, False, 1)
    assert out.endswith("and waits for nobody\n")
