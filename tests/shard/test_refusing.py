"""An etcd that renews leases and refuses what a trainer asks: it is full, corrupt, or denies it."""

import contextlib
import subprocess
import time
from contextlib import closing

import grpc
import pytest
import torch
import torch.distributed.checkpoint as dcp
from pyetcd import etcdrpc as rpc

import puppets
import torch_ros
from torch_ros.cli import main
from torch_ros.dcp import ROSWriter
from torch_ros.errors import RequestTooLarge, StoreAlarm, StoreUnavailable, TorchRosError
from torch_ros.store.credentials import User
from torch_ros.store.etcd import EtcdKV
from torch_ros.store.txn import Put, Read, Txn, one

TTL_S = 2
TIMEOUT_S, AT_ONCE_S = 60, 20  # calls that wait for etcd take all of the first
CORRUPT = 2  # an alarm
ROOT = "root"
PASSWORD = "secret"


class Refusing:
    """An etcd that can be made to refuse, and mended. `kv` is a connection of an administrator."""

    sign: str  # in each text about it
    user: User | None = None

    def __init__(self, server, folder):
        self.server, self.folder = server, folder
        self.channel = grpc.insecure_channel(server.host)
        self.upkeep = rpc.MaintenanceStub(self.channel)

    def prepare(self):
        pass


class Full(Refusing):
    sign = "NOSPACE"

    def strike(self):
        """Fill it to its last page: until then, it still answers reads."""
        with closing(EtcdKV([self.server.host])) as kv:
            for size in (1_000_000, 50_000, 1):
                self.end_alarm()
                with contextlib.suppress(StoreAlarm):
                    while True:
                        kv.commit(Txn(ops=(Put("junk", bytes(size)),)), timeout_s=10)

    def mend(self):
        """As docs/OPERATIONS.md says: compact, defragment, and end the alarm."""
        now = self.upkeep.Status(rpc.StatusRequest()).header.revision
        self.etcdctl("compact", f"{now}")
        self.etcdctl("defrag")
        self.end_alarm()

    def end_alarm(self):
        self.etcdctl("alarm", "disarm")

    def etcdctl(self, *words):
        asked = [puppets.etcd_programs() / "etcdctl", "--endpoints", self.server.host, *words]
        subprocess.run(asked, check=True, capture_output=True)


class Corrupt(Refusing):
    sign = "CORRUPT"

    def strike(self):
        self.alarm(rpc.AlarmRequest.ACTIVATE)

    def mend(self):
        self.alarm(rpc.AlarmRequest.DEACTIVATE)

    def alarm(self, action):
        member = self.upkeep.Status(rpc.StatusRequest()).header.member_id
        self.upkeep.Alarm(rpc.AlarmRequest(action=action, memberID=member, alarm=CORRUPT))


class Denying(Refusing):
    """A user that loses the right to write, and reads on."""

    sign = "may not write"
    permission = rpc.Permission(permType=2, key=b"/torch-ros/", range_end=b"/torch-ros0")

    def ask(self, what, **fields):
        auth, metadata = rpc.AuthStub(self.channel), ()
        if self.user is not None:
            asked = rpc.AuthenticateRequest(name=ROOT, password=PASSWORD)
            metadata = (("token", auth.Authenticate(asked).token),)
        request = getattr(rpc, f"Auth{what.removeprefix('Auth')}Request")(**fields)
        getattr(auth, what)(request, metadata=metadata)

    def prepare(self):
        file = self.folder / "password"
        file.write_text(PASSWORD)
        for name in (ROOT, "ros"):
            self.ask("RoleAdd", name=name)
            self.ask("UserAdd", name=name, password=PASSWORD)
            self.ask("UserGrantRole", user=name, role=name)
        self.ask("RoleGrantPermission", name="ros", perm=self.permission)
        self.ask("AuthEnable")
        self.user = User("ros", str(file))

    def strike(self):
        fewer = rpc.Permission(permType=0, key=b"/torch-ros/", range_end=b"/torch-ros0")
        self.ask("RoleGrantPermission", name="ros", perm=fewer)

    def mend(self):
        self.ask("RoleGrantPermission", name="ros", perm=self.permission)


class Gone(Denying):
    """A user that is taken away, and comes back."""

    sign = "user 'ros'"

    def strike(self):
        self.ask("UserDelete", name="ros")

    def mend(self):
        self.ask("UserAdd", name="ros", password=PASSWORD)
        self.ask("UserGrantRole", user="ros", role="ros")


class Unreadable(Gone):
    """A user whose token has ended, and whose password is being exchanged."""

    sign = "password cannot be read"

    def strike(self):
        (self.folder / "password").unlink()
        super().strike()

    def mend(self):
        super().mend()
        (self.folder / "password").write_text(PASSWORD)


KINDS = {
    "full": Full,
    "corrupt": Corrupt,
    "denies writes": Denying,
    "user gone": Gone,
    "no password": Unreadable,
}


@pytest.fixture
def etcd(request, running_etcd, tmp_path, monkeypatch):
    kind = KINDS[request.param]
    with running_etcd(tmp_path / "etcd", "--quota-backend-bytes", str(16 << 20)) as server:
        made = kind(server, tmp_path)
        made.prepare()
        if made.user is not None:
            monkeypatch.setenv("TORCH_ROS_ETCD_USER", made.user.name)
            monkeypatch.setenv("TORCH_ROS_ETCD_PASSWORD_FILE", made.user.password_file)
        with made.channel:
            yield made


@pytest.fixture
def opened(etcd):
    with contextlib.ExitStack() as stack:

        def open_(replica, as_user="", **options):
            options = {"ttl_s": TTL_S, "timeout_s": TIMEOUT_S, "transport": "memory", **options}
            where = f"etcd://{etcd.server.host}"
            if as_user:
                where += f"?user={as_user}&password_file={etcd.user.password_file}"
            return stack.enter_context(
                torch_ros.open("m", endpoint=where, replica=replica, **options)
            )

        yield open_


def took_s(call):
    began_s = time.monotonic()
    call()
    return time.monotonic() - began_s


ALL = [pytest.param(kind, marks=() if kind == "full" else pytest.mark.long) for kind in KINDS]


@pytest.mark.parametrize("etcd", ALL, indirect=True)
def test_a_trainer_steps_on_while_etcd_refuses_and_is_read_afterwards(etcd, opened, caplog):
    trainer, rollout = opened("trainer"), opened("rollout")
    sent, got = torch.zeros(8), torch.zeros(8)
    trainer.register({"w": sent})
    rollout.register({"w": got})
    trainer.publish(1)
    assert rollout.replicate() == 1
    etcd.strike()
    for version in (2, 3, 4):
        lasts_s = took_s(trainer.unpublish)
        assert lasts_s < AT_ONCE_S + (TTL_S if version == 2 else 0)
        sent.fill_(version)
        began_s = time.monotonic()
        assert trainer.publish(version, store_wait_s=0) is False
        assert time.monotonic() - began_s < AT_ONCE_S
    assert trainer.version == 4
    assert etcd.sign in caplog.text
    with pytest.raises(TorchRosError, match=etcd.sign):
        torch_ros.open("m", endpoint=f"etcd://{etcd.server.host}", replica="new", timeout_s=5)
    etcd.mend()
    there = rollout.wait(lambda there: "trainer" in there.get(4, ()))
    assert 4 in there
    assert rollout.update()
    assert got.eq(4).all()
    trainer.unpublish()
    sent.fill_(5)
    assert trainer.publish(5) is True


@pytest.mark.parametrize("etcd", ["full", "denies writes"], indirect=True)
def test_a_publish_that_waits_for_nothing_gives_up_its_seat_at_once(etcd, opened):
    trainer, reader = opened("trainer"), opened("reader")
    trainer.register({"w": torch.ones(8)})
    trainer.publish(1)
    trainer.unpublish()
    etcd.strike()
    assert took_s(lambda: trainer.publish(2, store_wait_s=0)) < AT_ONCE_S
    assert trainer.state == "away"
    etcd.mend()
    assert 2 in reader.wait(lambda there: 2 in there)


@pytest.mark.long
@pytest.mark.parametrize("etcd", ["full"], indirect=True)
def test_whoever_needs_a_full_etcd_is_told_what_to_do(etcd, opened, capsys):
    rollout = opened("rollout")
    rollout.register({"w": torch.zeros(8)})
    etcd.strike()
    with pytest.raises(StoreAlarm, match="NOSPACE.*alarm disarm"):
        rollout.replicate(timeout_s=0.5)
    where = ["--endpoint", f"etcd://{etcd.server.host}"]
    assert main.main([*where, "ls"]) == 3
    assert main.main([*where, "doctor"]) == 3
    told = capsys.readouterr()
    assert "NOSPACE" in told.err
    assert "alarm disarm" in told.err
    assert "alarm NOSPACE" in told.out
    assert "is the name right" not in told.out


def test_a_request_that_is_too_large_names_what_is_large(etcd_endpoint):
    with closing(EtcdKV([etcd_endpoint.removeprefix("etcd://")])) as kv:
        for size in (1_600_000, 5_000_000):  # more than etcd takes, and than gRPC takes there
            ops = (Put("small", b"x"), Put("large", bytes(size)))
            with pytest.raises(RequestTooLarge) as caught:
                kv.commit(Txn(ops=ops), timeout_s=10)
            assert (caught.value.key, caught.value.size_bytes) == ("large", size + 5)
        assert not kv.read(Read((one("small"),)), timeout_s=5).entries


@pytest.mark.long
def test_a_learner_is_passed_over_and_named_if_it_is_alone(running_etcd, etcd_programs, tmp_path):
    with running_etcd(tmp_path / "voter") as voter:
        learner = type(voter)(tmp_path / "learner", name="learner")
        ctl = [etcd_programs / "etcdctl", "--endpoints", voter.host, "member", "add", "learner"]
        asked = [*ctl, "--learner", "--peer-urls", learner.peer_url]
        subprocess.run(asked, check=True, capture_output=True)
        learner.cluster = f"{voter.cluster},{learner.cluster}"
        learner.options = ("--initial-cluster-state", "existing")
        try:
            learner.spawn()
            until_s = time.monotonic() + 30
            with closing(EtcdKV([learner.host])) as kv:
                while True:
                    with pytest.raises(StoreUnavailable) as caught:
                        kv.read(Read((one("a"),)), timeout_s=2)
                    if "voting member" in str(caught.value):
                        break
                    assert time.monotonic() < until_s, caught.value
                    time.sleep(0.05)
            with closing(EtcdKV([learner.host, voter.host])) as kv:
                kv.commit(Txn(ops=(Put("a", b""),)), timeout_s=5)
                assert kv.grant(5, timeout_s=5)
        finally:
            learner.kill()


@pytest.mark.parametrize("etcd", ["full"], indirect=True)
def test_a_save_goes_on_without_being_told_to_and_says_so_once(etcd, opened, caplog):
    trainer, state = opened("trainer"), {"w": torch.zeros(8)}
    etcd.strike()
    with caplog.at_level("WARNING", logger="torch_ros"):
        for version in (1, 2):
            began_s = time.monotonic()
            dcp.save(state, storage_writer=ROSWriter(version, handle=trainer))
            assert time.monotonic() - began_s < TTL_S + AT_ONCE_S
            trainer.unpublish()
    said = [record.getMessage() for record in caplog.records]
    told = [line.split()[:2] for line in said if "wait for it (store_wait_s=0)" in line]
    assert told == [["version", "1"]]
