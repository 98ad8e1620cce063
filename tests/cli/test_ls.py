"""`torch-ros ls`, in this process over a store in memory, and as a process over a real etcd."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from crowd import Crowd
from kit import inside, published

import torch_ros
from torch_ros.cli import asking, ls, main, output
from torch_ros.fleet.fleet import Fleet, Held, Published, Replica
from torch_ros.protocol.keys import EVERY_MODEL, Keys
from torch_ros.protocol.records import SchemaRecord, SeenRecord, VersionRef
from torch_ros.store.endpoint import connect
from torch_ros.store.txn import Delete, Put, Read, Txn, one

ONE, TWO = VersionRef("run-a", 1, "u1", 1), VersionRef("run-a", 2, "u2", 1)

NOW_MS = 1_790_000_000_000


@pytest.fixture
def fixed_clock(monkeypatch):
    monkeypatch.setattr(ls, "wall_ms", lambda: NOW_MS)


def held(replica, ref=TWO, state="full", **more):
    kind = more.pop("kind", "replica")
    since_ms = more.pop("since_ms", NOW_MS - 125_000)
    options = {"is_offered": state == "full", "is_relay": False, "spot": False, **more}
    options |= {"world_size": 2, "since_ms": since_ms}
    return Held(ref, replica, f"{replica}@0", "default", kind, state, **options)


def fleet(*there, versions=(TWO, ONE), names=()):
    published = [
        Published(ref, any(h.ref == ref and h.is_offered for h in there), 3, 3 << 30, NOW_MS - 3100)
        for ref in versions
    ]
    names = {*names, *(each.replica for each in there)}
    replicas = {
        name: Replica(name, f"{name}@0", "complete", "default", False, "run-a", 2)
        for name in sorted(names)
    }
    return Fleet("policy", 7, {"run-a": 1}, published, there, replicas)


def test_a_terminal_obeys_no_name():
    out = io.StringIO()
    output.say_table(out, ("A",), [("x\x1b[2Jy",)])
    output.say(out, "r\x1b[0m: joining")
    assert out.getvalue().split("\n")[1:] == ["x\\x1b[2Jy", r"r\x1b[0m: joining", ""]


@pytest.mark.usefixtures("fixed_clock")
def test_a_model_is_a_line():
    both = fleet(held("trainer", kind="original"), held("r0"), held("r1", state="filling"))
    [row] = ls.models([both])
    assert row == ("policy", "run-a", "2", "3.0 GiB", "2", "1", "3", "3 s ago", "")
    [row] = ls.models([fleet(held("trainer"), held("spot", spot=True))])
    assert row[-1] == "! only copy"
    [row] = ls.models([fleet(versions=(), names=["r0"])])
    assert row == ("policy", "run-a", "-", "-", "0", "-", "1", "-", "")


@pytest.mark.usefixtures("fixed_clock")
def test_a_version_is_a_line_for_each_holding():
    rows = ls.versions(
        fleet(
            held("trainer", kind="original", readers=("r0",)),
            held("r0", state="filling", is_relay=True, sources=("trainer",)),
            versions=(TWO, ONE),
        )
    )
    assert rows == [
        ("2", "full", "3.0 GiB", "trainer", "2", "default", "original", "2 min", "(read by r0)"),
        ("", "filling", "", "r0", "2", "default", "relay", "2 min", "trainer"),
        ("1", "gone", "3.0 GiB", "-", "-", "-", "-", "-", ""),
    ]
    assert ls.versions(fleet(held("trainer")), 1) == [rows[2]]


@pytest.mark.usefixtures("fixed_clock")
def test_a_replica_without_a_version_is_a_line():
    there = fleet(held("trainer"), names=["r0"])
    assert ls.without_version(there, {"r1": [0], "trainer": [1]}) == [
        ("-", "empty", "-", "r0", "2", "default", "-", "-", ""),
        ("-", "lost its seat", "-", "r1", "-", "-", "-", "-", ""),
    ]
    assert ls.behind(there) == ["r0: no version; to see why: torch-ros why policy r0"]


def test_a_source_of_many_names_a_few():
    many = tuple(f"r{number}" for number in range(500))
    [row] = ls.versions(fleet(held("trainer", readers=many), versions=[TWO]))
    assert row[-1] == "(read by r0, r1, r2 and 497 more)"


def test_full_is_never_said_of_what_no_reader_is_given():
    [row] = ls.versions(fleet(held("r0", is_offered=False), versions=[TWO]))
    assert row[1] == "full, not offered"


GOLDEN = Path(__file__).with_name("ls.golden.txt")
FLEETS = {
    "nothing": fleet(versions=()),
    "nobody has published": fleet(versions=(), names=["r0", "r1"]),
    "a trainer alone": fleet(held("trainer", ONE, kind="original"), versions=[ONE]),
    "a reader": fleet(
        held("trainer", kind="original", readers=("r0",)),
        held("r0", state="filling", since_ms=NOW_MS - 900, is_relay=True, sources=("trainer",)),
    ),
    "one that holds nothing": fleet(held("trainer", kind="original"), names=["r0"]),
    "a drain": fleet(held("trainer", kind="original", state="draining", readers=("r0", "r1"))),
    "a copy in host memory": fleet(held("trainer", kind="copy", since_ms=NOW_MS - 8_000_000)),
    "left behind": fleet(held("trainer", kind="lingering", since_ms=NOW_MS - 90_000_000)),
    "spot replicas alone": fleet(held("r0", spot=True), held("r1", spot=True)),
    "not offered": fleet(held("r0", is_offered=False)),
    "behind": fleet(held("trainer", kind="original"), held("r0", ONE)),
    "a clock ahead, and one unknown": fleet(
        held("r0", since_ms=NOW_MS + 60_000), held("r1", since_ms=None)
    ),
    "many readers": fleet(held("trainer", readers=tuple(f"r{n}" for n in range(20)))),
}


@pytest.mark.usefixtures("fixed_clock")
def test_tables_are_as_they_were(monkeypatch, capsys):
    """After a change that is meant: write what is found into the file, and read its difference."""
    monkeypatch.setattr(asking, "models", lambda *_: ["policy"])
    monkeypatch.setenv("COLUMNS", "80")
    found = []
    for name, there in FLEETS.items():
        monkeypatch.setattr(asking, "fleet", lambda *_, there=there: there)
        monkeypatch.setattr(asking, "fleet_of", lambda *_, there=there: there)
        for arguments in (["ls"], ["ls", "policy"]):
            assert main.main(["--endpoint", "memory://golden", *arguments]) == 0
        found.append(f"== {name}\n{capsys.readouterr().out}")
    assert "".join(found).splitlines() == GOLDEN.read_text().splitlines()


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_watch_prints_again_at_each_change(opened, endpoint, monkeypatch, capsys):
    trainer = opened("trainer")
    published(trainer, 7)
    seen = []

    def changes(kv, model, after_rev, timeout_s):
        seen.append(capsys.readouterr().out)
        if len(seen) == 2:
            raise KeyboardInterrupt
        trainer.unpublish()
        real(kv, model, after_rev, timeout_s)

    real = asking.await_change
    monkeypatch.setattr(asking, "await_change", changes)
    assert main.main(["--endpoint", endpoint, "ls", trainer.model, "--watch"]) == 130
    assert ["full" in text for text in seen] == [True, False]


@pytest.mark.long
def test_a_watch_goes_on_after_etcd_was_away(etcd_server, monkeypatch, capsys):
    endpoint, seen, told = f"etcd://{etcd_server.host}", [], []

    def changes(*_):
        seen.append(capsys.readouterr().out)
        if len(seen) == 2:
            raise KeyboardInterrupt
        etcd_server.kill()

    def say(text, code):
        told.append(text)
        etcd_server.start()
        return code

    monkeypatch.setattr(asking, "await_change", changes)
    monkeypatch.setattr(main, "_say", say)
    with torch_ros.open("m", endpoint=endpoint, replica="trainer") as trainer:
        published(trainer, 7)
        assert main.main(["--endpoint", endpoint, "ls", "m", "--watch"]) == 130
    assert ["full" in text for text in seen] == [True, True]
    assert ["it goes on" in text for text in told] == [True]


@pytest.mark.usefixtures("fixed_clock")
@pytest.mark.parametrize(
    ("passed_ms", "text"),
    [
        (-60_000, "0 s"),  # a clock that is ahead of this one
        (999, "0 s"),
        (59_999, "59 s"),
        (60_000, "1 min"),
        (7_199_999, "1 h"),
        (50 * 3_600_000, "2 d"),
    ],
)
def test_ages_are_for_people(passed_ms, text):
    assert ls.age(NOW_MS - passed_ms) == text
    assert ls.age(None) == "-"


def test_who_is_behind_is_named():
    assert ls.behind(fleet(held("trainer"), held("old", ONE))) == ["old: holds 1"]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 60, "5242880.0 TiB"),
    ],
)
def test_sizes_are_for_people(size_bytes, text):
    assert ls.size(size_bytes) == text


def test_it_shows_what_is_there_and_writes_nothing(opened, asked):
    trainer, rollout = opened("trainer"), opened("rollout")
    published(trainer, 7)
    rollout.register({"w": torch.empty(4)})
    rollout.replicate()
    kv = inside(trainer).group.kv
    before = kv.read(Read((EVERY_MODEL,)), timeout_s=5).entries
    code, out, err = asked("ls")
    assert (code, err) == (0, "")
    [line] = [line for line in out.splitlines() if line.startswith(trainer.model)]
    assert line.split()[-1] == "ago"
    figures = ["7", "16", "B", "2", "0", "2"]
    assert line.split()[:8] == [trainer.model, trainer.fleet().latest.run, *figures]
    code, out, _ = asked("ls", trainer.model)
    rows = [line.split()[0] for line in out.splitlines() if "full" in line]
    assert (code, rows) == (0, ["7", "full"])
    assert asked("ls", trainer.model, "7")[1] == out
    code, out, _ = asked("--json", "ls", trainer.model)
    [found] = json.loads(out)["models"]
    assert (code, json.loads(out)["schema"], found["model"]) == (0, 1, trainer.model)
    assert {each["replica"] for each in found["held"]} == {"trainer", "rollout"}
    assert kv.read(Read((EVERY_MODEL,)), timeout_s=5).entries == before


def test_it_shows_who_holds_nothing_and_who_has_lost_a_seat(opened, asked):
    trainer = opened("trainer")
    published(trainer, 7)
    opened("r0")
    kv, keys = inside(trainer).group.kv, Keys(trainer.model)
    dead = SeenRecord("elsewhere", 1).encode()
    kv.commit(Txn((), (Put(keys.seen_at("r1", 0), dead),)), timeout_s=5)
    code, out, _ = asked("ls", trainer.model)
    found = [re.split("  +", line)[1:4] for line in out.splitlines() if line.startswith("-")]
    assert (code, found) == (0, [["empty", "-", "r0"], ["lost its seat", "-", "r1"]])
    assert out.splitlines()[-2:] == [
        f"r0: no version; to see why: torch-ros why {trainer.model} r0",
        "r1: lost its seat: the lease of rank 0 has ended, and etcd was told of no close",
    ]
    assert json.loads(asked("--json", "ls", trainer.model)[1])["lost"] == {"r1": [0]}
    assert "r0" not in asked("ls", trainer.model, "7")[1]


def test_what_is_not_there_is_said_with_what_may_be_meant(opened, asked):
    trainer = opened("trainer")
    published(trainer, 7)
    code, _, err = asked("ls", trainer.model[:-1])
    assert (code, f"did you mean {trainer.model!r}?" in err) == (2, True)
    code, _, err = asked("ls", trainer.model, "8")
    assert (code, "has no version 8; it has 7" in err) == (2, True)


def test_a_model_of_another_release_does_not_hide_the_others(opened, asked):
    trainer = opened("trainer")
    name, kv = f"{trainer.model}-other", inside(trainer).group.kv
    kv.commit(Txn((), (Put(Keys(name).schema(), SchemaRecord(99, "9").encode()),)), timeout_s=5)
    code, out, err = asked("ls")
    is_hidden = asked("ls", name)[0]
    kv.commit(Txn((), (Delete(one(Keys(name).schema())),)), timeout_s=5)
    assert (code, trainer.model in out, "release 9" in err) == (1, True, True)
    assert is_hidden == 3


def start(*arguments, **options):
    command = [sys.executable, "-m", "torch_ros", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.long
def test_an_etcd_that_is_not_there_is_an_exit_code(tmp_path):
    found = start("ls", env=os.environ | {"TORCH_ROS_LOCAL_DIR": str(tmp_path / "none")})
    assert (found.returncode, found.stdout) == (3, "")
    assert "no etcd of this user runs on this host" in found.stderr
    assert "Traceback" not in found.stderr
    assert start("--endpoint", "redis://here", "ls").returncode == 2
    assert start("lss").returncode == 2


def unread(*arguments):
    """The exit code, and the errors, of a command whose output nobody reads, as behind `| head`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "torch_ros", *arguments]
    found = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    return found.returncode, found.stderr


COUNTED = """
import cProfile, sys
from torch_ros.cli.main import main
counted = cProfile.Profile()
code = counted.runcall(main, sys.argv[1:])
calls = sum(each.callcount for each in counted.getstats())
print("counted", code, calls, {"rich", "torch", "nixl"} & {*sys.modules}, file=sys.stderr)
"""


@pytest.mark.long
def test_a_list_of_a_thousand_replicas_of_eight_ranks_is_little_work(etcd_server):
    """Work, not time, which other tests take too: some 0.3 s of a processor, start included."""
    there = Crowd(connect(f"etcd://{etcd_server.host}", timeout_s=10), "policy")
    there.join("trainer")
    there.publish("trainer", 42)
    for number in range(1000):
        there.join(f"rollout-{number}")
        there.read(f"rollout-{number}", f"rollout-{number - 1}" if number else "trainer", 42)
    there.commit()
    there.kv.close()
    sent = "etcd_network_client_grpc_sent_bytes_total"
    before = etcd_server.metric(sent)
    command = [sys.executable, "-c", COUNTED, "--endpoint", f"etcd://{etcd_server.host}"]
    found = subprocess.run([*command, "ls", "policy"], capture_output=True, text=True, timeout=60)
    _, code, calls, imported = found.stderr.split(maxsplit=3)
    names = [line.split()[-1] for line in found.stdout.splitlines()]
    assert {"rollout-998", "trainer"} <= {*names}
    assert (code, imported.strip()) == ("0", "set()")
    assert etcd_server.metric(sent) - before < 1 << 20
    assert int(calls) < 600 * 1000  # rich took ten times that


@pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
@pytest.mark.long
def test_a_process_imports_no_torch_and_survives_pipes_and_ctrl_c(opened, endpoint):
    published(opened("trainer"), 7)
    heard = start("--endpoint", endpoint, "ls", env=os.environ | {"COLUMNS": "40"})
    assert (heard.returncode, heard.stderr) == (0, "")
    code = (
        "import sys; from torch_ros.cli.main import main; main(sys.argv[1:]); "
        "sys.exit('torch' in sys.modules or 'nixl' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "--endpoint", endpoint, "ls"]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0
    assert unread("--endpoint", endpoint, "ls") == (0, b"")
    assert unread("--endpoint", endpoint, "--json", "ls") == (0, b"")
    interruptible = (  # also where a shell's & had it ignored
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from torch_ros.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    away = subprocess.Popen(
        [sys.executable, "-c", interruptible, "--endpoint", "etcd://127.0.0.1:9", "ls"],
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(2)
    away.send_signal(signal.SIGINT)
    _, err = away.communicate(timeout=30)
    assert (away.returncode, "Traceback" in err) == (130, False)
