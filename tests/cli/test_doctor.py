"""`torch-ros doctor`: each condition that it names is made, really or by facts; health is quiet."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import msgspec
import pytest
import torch
from kit import inside
from pyetcd import etcdrpc as rpc

from puppets import Actor
from torch_ros.cli import doctor, main, trial
from torch_ros.cli.doctor import Examined, Facts, Surroundings, findings
from torch_ros.cli.examining import WAYS
from torch_ros.cli.health import EtcdHealth, MemberHealth, health, within_s
from torch_ros.cli.waits import Blamed
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.records import Holding, SchemaRecord
from torch_ros.store.endpoint import connect
from torch_ros.store.txn import Delete, Put, Read, Txn, Watch, one, under

NOBODY = 65534
AS_NOBODY = """
import os
from torch_ros.cli import examining, main
examining.examine(os.environ["TORCH_ROS_ENDPOINT"], None)  # loads what nobody may not read
os.setuid({uid})
main.main(["--json", "doctor", "--model", "policy"])
"""
WELL = MemberHealth("a:2379", version="3.5.21", size_bytes=1 << 20, quota_bytes=2 << 30)
OPEN = {"voucher": ""}
OPEN |= {"cma": "", "mapped": ""}  # feature shortcuts
OPEN |= {"lending": ""}  # feature lending


def etcd(*members, alarms=()):
    return Facts(endpoint="etcd://a:2379", etcd=EtcdHealth(members, alarms))


def shell(endpoint="etcd://a:2379", rdma=(), has_gpu=False, memlock=None, **environ):
    here = Surroundings("this shell", environ, memlock)
    return Facts(
        endpoint=endpoint, processes=[here], devices=["lo", "eth0"], rdma=rdma, has_gpu=has_gpu
    )


CONDITIONS = {
    "silent": (Facts(silence="etcd at a:2379 did not answer"), "FAIL", "did not answer"),
    "a member": (etcd(WELL, MemberHealth("b:2379", "refused")), "warn", "member b:2379: refused"),
    "leader": (etcd(MemberHealth("a", version="3.5.21", has_leader=False)), "FAIL", "no leader"),
    "full": (etcd(WELL, alarms=["NOSPACE"]), "FAIL", "NOSPACE: it refuses reads and writes"),
    "corrupt": (etcd(WELL, alarms=["CORRUPT"]), "FAIL", "alarm CORRUPT"),
    "loses": (etcd(MemberHealth("a", version="3.5.2")), "warn", "3.5.2 at a may lose a write"),
    "ends": (etcd(MemberHealth("a", version="3.5.6")), "warn", "3.5.6 at a may end"),
    "ends, 3.4": (etcd(MemberHealth("a", version="3.4.22")), "warn", "3.4.22 at a may end"),
    "old": (etcd(MemberHealth("a", version="3.3.25")), "FAIL", "older than any"),
    "nearly full": (
        etcd(MemberHealth("a", version="3.6.0", size_bytes=90, quota_bytes=100)),
        "warn",
        "nearly full: 90 B of 100 B",
    ),
    "disk": (etcd(MemberHealth("a", version="3.6.0", sync_s=0.032)), "warn", "up to 32 ms"),
    "release": (Facts(models=[Examined("m", "release 9")]), "FAIL", "release 9"),
    "clocks": (
        Facts(models=[Examined("m", ahead_s={"h1": 0.5, "h2": 61.2})]),
        "warn",
        "h2 is at least 61 s",
    ),
    "copying": (
        Facts(ways=OPEN | {"cma": "Operation not permitted"}, ptrace_scope="1"),
        "warn",
        r"blocked by cma \(Operation not permitted\).*ptrace_scope is 1",
    ),
    "no voucher": (
        Facts(ways={"voucher": "/proc is of another pid namespace than this process"}),
        "warn",
        r"blocked by voucher \(/proc is of another pid namespace",
    ),
    "no tcp": (Facts(tcp=((), "refused")), "warn", 'transport="tcp" does not work here: refused'),
    "only here": (Facts(tcp=((), "")), "warn", 'transport="tcp" reaches this host alone'),
    "containers": (
        Facts(models=[Examined("m", "", {"r/0": "process 7 is not to be found", "q/0": ""})]),
        "warn",
        "cannot copy from r/0: process 7 is not to be found",
    ),
    "no nixl": (Facts(packages={"nixl": ("1.5.1", "")}), "FAIL", "nixl is not installed"),
    "old torch": (Facts(packages={"torch": ("2.13", "2.9.1+cpu")}), "FAIL", "torch 2.9.1.cpu is o"),
    "shm": (Facts(shm_bytes=(64 << 20, 63 << 20)), "warn", "63.0 MiB free of 64.0 MiB"),
    "no way": (
        shell(UCX_TLS="self", TORCH_ROS_TRANSPORT="ucx"),
        "FAIL",
        "leaves no way to other processes",
    ),
    "no network": (
        shell(UCX_TLS="self,sm", TORCH_ROS_TRANSPORT="ucx"),
        "warn",
        "leaves no way to other hosts",
    ),
    "no rdma": (
        shell(UCX_TLS="rc,cma", TORCH_ROS_TRANSPORT="ucx"),
        "warn",
        "leaves no way to other hosts",
    ),
    "negated": (
        shell(UCX_TLS="^tcp,rc", TORCH_ROS_TRANSPORT="ucx"),
        "warn",
        "leaves no way to other hosts",
    ),
    "negated copies": (shell(UCX_TLS="^cma"), "warn", "nothing is copied"),
    "no copies": (shell(UCX_TLS="tcp,self"), "warn", "nothing is copied within a host"),
    "no device": (shell(UCX_NET_DEVICES="ib9:1"), "FAIL", "this host has no ib9"),
    "some device": (shell(UCX_NET_DEVICES="eth0,ib9:1"), "warn", "this host has no ib9"),
    "segments": (
        shell(has_gpu=True, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
        "FAIL",
        "expandable_segments",
    ),
    "two hosts": (shell("local", WORLD_SIZE="16", LOCAL_WORLD_SIZE="8"), "FAIL", "8 ranks are not"),
    "memlock": (shell(rdma=["mlx5_0"], memlock=8 << 20), "warn", "locked: 8.0 MiB"),
    "a container without": (
        Facts(rdma=["mlx5_0"], has_verbs=False),
        "warn",
        "/dev/infiniband has no device of mlx5_0: bytes come over TCP",
    ),
    "a lost seat": (
        Facts(models=[Examined("m", lost=[Blamed("r2", 1, "h", 123, False, 0, "stopped")])]),
        "warn",
        r"process 123 of rank 1 of 'r2' has lost its seat; it is stopped \(state T\)",
    ),
}


@pytest.mark.parametrize(("facts", "level", "text"), CONDITIONS.values(), ids=CONDITIONS)
def test_a_condition_is_named(facts, level, text):
    bad = [each for each in findings(facts) if each.level != "ok"]
    [found] = [each for each in bad if re.search(text, each.found)]
    assert found.level == level
    assert doctor.is_well([found]) == (level != "FAIL")


FINE = {
    "one etcd": etcd(WELL),
    "3.4": etcd(MemberHealth("a", version="3.4.23")),
    "local": Facts(etcd=EtcdHealth([MemberHealth("a", version="3.5.1")])),
    "memory": Facts(endpoint="memory://x"),
    "tcp": Facts(tcp=(["10.0.0.7"], "")),
    "no alarms told": etcd(WELL, alarms=None),
    "copies": Facts(
        ways=OPEN, models=[Examined("m", "", {"r/0": ""})], shm_bytes=(1 << 40, 1 << 40)
    ),
    "all of UCX": shell(UCX_TLS="all", UCX_NET_DEVICES="all"),
    "UCX": shell(UCX_TLS="rc,tcp,cma", UCX_NET_DEVICES="mlx5_0:1,eth0", rdma=["mlx5_0"]),
    "not rdma": shell(UCX_TLS="^rc", UCX_NET_DEVICES=""),
    "segments without a GPU": shell(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
    "one host": shell("local", WORLD_SIZE="8", LOCAL_WORLD_SIZE="8"),
    "an etcd for two hosts": shell(WORLD_SIZE="16", LOCAL_WORLD_SIZE="8"),
    "its own endpoint": shell(
        "local", WORLD_SIZE="16", LOCAL_WORLD_SIZE="8", TORCH_ROS_ENDPOINT="etcd://b:2379"
    ),
    "memlock": shell(rdma=["mlx5_0"]),
    "no rdma": shell(memlock=8 << 20),
    "packages": Facts(packages={"torch": ("2.13", "2.13.0+cpu"), "nixl": ("1.5.1", "1.10")}),
}


@pytest.mark.parametrize("facts", FINE.values(), ids=FINE)
def test_nothing_is_said_of_what_is_well(facts):
    assert [each for each in findings(facts) if each.level != "ok"] == []


def test_why_bytes_come_over_tcp_is_said_where_nothing_else_can_carry_them():
    for facts, is_said in (
        (Facts(), True),
        (Facts(has_gpu=True), False),
        (Facts(rdma=["mlx5_0"]), False),
    ):
        assert any("come over TCP" in each.found for each in findings(facts)) is is_said


def test_rdma_is_named_where_there_is_some():
    libraries = ["/lib/libibverbs.so.1", "/lib/libefa.so.1"]
    for facts, said in (
        (Facts(rdma_libraries=libraries), f"devices none; libraries of this host {libraries[0]}, "),
        (Facts(rdma=["mlx5_0"]), "devices mlx5_0; libraries of this host none"),
    ):
        assert said in next(each.found for each in findings(facts) if "RDMA:" in each.found)
    assert not any("RDMA:" in each.found for each in findings(Facts()))


NO_WAY = {"UCX_TLS": "self", "TORCH_ROS_TRANSPORT": "ucx"}


def test_several_processes_with_one_fault_are_one_line():
    names = [f"r/{rank}" for rank in range(9)]
    there = [Surroundings(name, NO_WAY) for name in names]
    [found] = [each for each in findings(Facts(processes=there)) if each.level == "FAIL"]
    assert found.found.endswith("(r/0, r/1, r/2 and 6 more)")


def test_a_histogram_says_how_long_99_of_100_take():
    rows = [("0.001", 50), ("0.002", 98), ("0.004", 99), ("8", 99), ("+Inf", 100)]
    text = "\n".join(f'x_bucket{{le="{bound}"}} {count}' for bound, count in rows)
    assert within_s(text, "x", 0.99) == 0.004
    assert within_s(text, "x", 1.0) == float("inf")
    assert within_s(text.replace("100", "99"), "x", 0.5) is None  # too few
    assert within_s("", "x", 0.99) is None


def test_a_stranger_is_read_and_is_no_child():
    assert trial.ways(*WAYS) == OPEN
    with trial._stranger() as said:
        status = Path(f"/proc/{said['process'][0]}/stat").read_text()
        assert int(status.rpartition(")")[2].split()[1]) != os.getpid()


def run(*arguments, **options):
    command = [sys.executable, "-m", "torch_ros", "--json", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
    assert "Traceback" not in found.stderr
    said = json.loads(found.stdout)["findings"] if found.stdout else []
    return found.returncode, [each for each in said if each["level"] != "ok"], said


def named(found, text):
    return [each["level"] for each in found if text in each["found"]]


@pytest.mark.long
def test_a_healthy_fleet_of_two_processes_has_no_warning(started, surroundings):
    subprocess.run(
        [sys.executable, "-m", "torch_ros.store.local", "start"], env=surroundings, check=True
    )
    options = {"model": "policy", "tensors": 1, "elements": 1 << 10}
    there = {"TORCH_ROS_LOCAL_DIR": surroundings["TORCH_ROS_LOCAL_DIR"]}
    there["TORCH_ROS_ENDPOINT"] = "local"
    trainer, rollout = (Actor(started, name, there, **options) for name in ("trainer", "rollout"))
    for actor in (trainer, rollout):
        assert actor.hear() == {"answer": "here"}
    trainer.ask("publish", version=1)
    rollout.ask("replicate", version=1)
    code, bad, said = run("doctor", "--model", "policy", env=surroundings)
    assert (code, bad) == (0, [])
    assert [each["found"] for each in said][-1] == "model 'policy': 2 processes here, copied from"
    if os.geteuid() == 0:
        here = surroundings | {"TORCH_ROS_ENDPOINT": endpoint_of(surroundings)}
        command = [sys.executable, "-c", AS_NOBODY.format(uid=NOBODY)]
        found = subprocess.run(command, env=here, capture_output=True, text=True, timeout=60)
        assert "Traceback" not in found.stderr, found.stderr
        assert named(json.loads(found.stdout)["findings"], "another user's") == ["warn"]


@pytest.mark.long
def test_a_stopped_process_is_told_of_after_its_lease(started, surroundings):
    subprocess.run(
        [sys.executable, "-m", "torch_ros.store.local", "start"], env=surroundings, check=True
    )
    options = {"model": "policy", "tensors": 1, "elements": 1 << 10, "ttl_s": 2}
    here = surroundings | {"TORCH_ROS_ENDPOINT": endpoint_of(surroundings)}
    endpoint = {"TORCH_ROS_ENDPOINT": here["TORCH_ROS_ENDPOINT"]}
    trainer = Actor(started, "trainer", endpoint, **options)
    assert trainer.hear() == {"answer": "here"}
    trainer.ask("publish", version=1)
    group = one(Keys("policy").group("trainer"))
    with contextlib.closing(connect(here["TORCH_ROS_ENDPOINT"], timeout_s=10)) as kv:
        seen = kv.read(Read((group,)), timeout_s=10)
        trainer.process.signal(signal.SIGSTOP)
        assert kv.wait(Watch((group,), seen.rev, "its end"), timeout_s=20)
    *_, said = run("doctor", "--model", "policy", env=here)
    [lost] = [each for each in said if "has lost its seat" in each["found"]]
    assert (lost["level"], "is stopped (state T)" in lost["found"]) == ("warn", True)
    command = [sys.executable, "-m", "torch_ros", "why", "policy", "trainer"]
    found = subprocess.run(command, env=here, capture_output=True, text=True, check=False)
    assert (found.returncode, "it is stopped (state T)" in found.stdout) == (1, True), found.stderr
    trainer.resume()


def endpoint_of(surroundings):
    command = [sys.executable, "-m", "torch_ros.store.local", "status"]
    said = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=True)
    return said.stdout.split()[1]


@pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
@pytest.mark.long
def test_an_old_etcd_and_another_release_are_named(endpoint):
    model, kv = "m-" + uuid.uuid4().hex[:8], connect(endpoint, timeout_s=5)
    with contextlib.closing(kv):
        record = SchemaRecord(99, "9")
        kv.commit(Txn((), (Put(Keys(model).schema(), record.encode()),)), timeout_s=5)
        [member] = health(endpoint, timeout_s=5).members
        code, bad, _ = run("--endpoint", endpoint, "doctor", "--model", model)
        kv.commit(Txn((), (Delete(under(f"{Keys(model).root}/")),)), timeout_s=5)
    assert (code, named(bad, f"etcd {member.version} at")) == (1, ["warn"])
    assert named(bad, "is served by release 9") == ["FAIL"]
    assert run("--endpoint", endpoint, "doctor", "--model", f"{model}x")[:2] == (2, [])


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_clock_that_is_ahead_is_named(opened, endpoint, capsys):
    trainer = opened("trainer", {"w": torch.zeros(4)})
    trainer.publish(1)
    kv, within = inside(trainer).group.kv, Keys(trainer.model).holdings()
    [(key, entry)] = kv.read(Read((within,)), timeout_s=5).within(within)
    holding = Holding.decode(entry.value, key)
    for ahead_s, level in ((0, []), (61, ["warn"])):
        later = msgspec.structs.replace(holding, at_ms=holding.at_ms + 1000 * ahead_s)
        kv.commit(Txn((), (Put(key, later.encode(), entry.lease_id),)), timeout_s=5)
        main.main(["--endpoint", endpoint, "--json", "doctor", "--model", trainer.model])
        found = json.loads(capsys.readouterr().out)["findings"]
        assert named(found, f"the clock of {socket.gethostname()} is at least ") == level


@pytest.mark.long
def test_an_etcd_without_room_has_an_alarm(running_etcd, tmp_path):
    with running_etcd(tmp_path / "etcd", "--quota-backend-bytes", str(1 << 20)) as server:
        kv = connect(f"etcd://{server.host}", timeout_s=5)
        with contextlib.closing(kv), contextlib.suppress(Exception):
            for number in range(100):
                kv.commit(Txn((), (Put(f"/{number}", b"x" * 100_000),)), timeout_s=5)
        code, bad, _ = run("--endpoint", f"etcd://{server.host}", "doctor")
    assert (code, named(bad, "refuses requests")) == (3, ["FAIL"])
    assert (named(bad, "alarm NOSPACE"), named(bad, "nearly full")) == (["FAIL"], ["warn"])


@pytest.mark.long
def test_members_that_are_gone_and_a_leader_that_is_missing_are_named(etcd_cluster):
    leader = etcd_cluster.leader()  # who stays: until another is chosen nothing can be read
    one, other = (index for index in range(3) if index != leader)
    etcd_cluster.kill(one)
    code, bad, _ = run("--endpoint", etcd_cluster.endpoint, "doctor")
    assert (code, named(bad, f"member {etcd_cluster.hosts[one]}")) == (0, ["warn"])
    etcd_cluster.kill(other)
    deadline = iter(range(20))  # until it knows
    while not named(bad, "has no leader: nothing can be read"):
        next(deadline)
        code, bad, _ = run("--endpoint", etcd_cluster.endpoint, "doctor")
    assert (code, named(bad, "has no leader: more than half of its members")) == (3, ["FAIL"])


@pytest.mark.long
def test_a_user_without_a_role_is_told_so(running_etcd, tmp_path):
    with running_etcd(tmp_path / "etcd") as server:
        environment = with_users(server, tmp_path / "password")
        code, bad, _ = run("--endpoint", f"etcd://{server.host}", "doctor", env=environment)
        assert (code, named(bad, "may not read all keys")) == (3, ["FAIL"])
        environment.pop("TORCH_ROS_ETCD_USER")
        assert run("--endpoint", f"etcd://{server.host}", "doctor", env=environment)[:2] == (2, [])
        environment.pop("TORCH_ROS_ETCD_PASSWORD_FILE")
        code, bad, _ = run("--endpoint", f"etcd://{server.host}", "doctor", env=environment)
        assert (code, named(bad, "etcd has users, and none was named")) == (3, ["FAIL"])


def with_users(server, password_file):
    """Switch users on in an etcd; the environment of one who may do nothing."""
    import grpc

    password_file.write_text("secret\n")
    with grpc.insecure_channel(server.host) as channel:
        auth = rpc.AuthStub(channel)
        auth.RoleAdd(rpc.AuthRoleAddRequest(name="root"))
        for user in ("root", "ros"):
            auth.UserAdd(rpc.AuthUserAddRequest(name=user, password="secret"))
        auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"))
        auth.AuthEnable(rpc.AuthEnableRequest())
    return os.environ | {
        "TORCH_ROS_ETCD_USER": "ros",
        "TORCH_ROS_ETCD_PASSWORD_FILE": str(password_file),
    }


def test_text_has_a_line_for_each_and_the_line_to_type(capsys):
    assert main.main(["--endpoint", f"memory://{uuid.uuid4().hex}", "doctor"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("ok    memory://")
    shown = list(doctor.lines(findings(shell(UCX_TLS="self", TORCH_ROS_TRANSPORT="ucx"))))
    assert shown[-2].startswith("FAIL  UCX_TLS=self leaves no way to other processes (this shell)")
    assert shown[-1] == "      -> unset UCX_TLS"
