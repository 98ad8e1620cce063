"""TLS, users and roles on a real etcd: who gets in, who is told why not, and what is never said."""

import contextlib
import datetime as dt
import ipaddress
import logging
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kit import until
from pyetcd import etcdrpc as rpc

import torch_ros
from torch_ros.deadline import Deadline
from torch_ros.errors import AccessDenied, StoreUnavailable, UsageError
from torch_ros.store.credentials import User
from torch_ros.store.distributed import rendezvous
from torch_ros.store.distributed.lease import SharedLease
from torch_ros.store.endpoint import OPTIONS, connect
from torch_ros.store.etcd import EtcdKV
from torch_ros.store.session import Session
from torch_ros.store.txn import Put, Read, Txn, Unchanged, Watch, under

pytestmark = pytest.mark.timeout(60)

ROOT = Path(torch_ros.__file__).parents[1]
PASSWORD, WRONG_PASSWORD, ROOT_PASSWORD = "s3cret-of-ros", "s3cret-guess", "s3cret-of-root"
MINE = under("/torch-ros/mine/")
KEY = "/torch-ros/mine/key"
# etcd's own default takes 60 ms of both cores for each login.
CHEAP = ("--bcrypt-cost", "4")


def token_of(kv):
    return kv._token


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for variable in OPTIONS.values():
        monkeypatch.delenv(variable, raising=False)


# Certificates


class Certificates:
    """PEM files: `<name>.pem` and `<name>.key`, signed by `ca`, or by `stranger-ca`."""

    def __init__(self, directory):
        self.directory = directory
        here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        ca, stranger = self.make("ca"), self.make("stranger-ca")
        for name, issuer, days, san in (
            ("server", ca, 9, here),
            ("expired-server", ca, -1, here),
            ("another-host", ca, 9, x509.DNSName("another.example")),
            ("client", ca, 9, None),
            ("expired-client", ca, -1, None),
            ("stranger", stranger, 9, None),
        ):
            self.make(name, issuer, days, san)

    def make(self, name, issuer=None, days=9, san=None):
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = dt.datetime.now(dt.UTC)
        draft = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer[0].subject if issuer else subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=10))
            .not_valid_after(now + dt.timedelta(days=days))
            .add_extension(x509.BasicConstraints(issuer is None, None), critical=True)
        )
        if san:
            draft = draft.add_extension(x509.SubjectAlternativeName([san]), critical=False)
        certificate = draft.sign(issuer[1] if issuer else key, hashes.SHA256())
        self.path(f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        self.write_key(f"{name}.key", key, serialization.NoEncryption())
        return certificate, key

    def write_key(self, name, key, encryption):
        pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        self.path(name).write_bytes(key.private_bytes(*pem, encryption))

    def path(self, name):
        return self.directory / name

    def options(self, **names):
        """ "?ca=...&cert=..." for an endpoint."""
        return "?" + "&".join(f"{option}={self.path(name)}" for option, name in names.items())

    def client(self, name):
        """The options of a client that shows the certificate `name`."""
        return self.options(ca="ca.pem", cert=f"{name}.pem", key=f"{name}.key")

    def for_etcd(self, name, *, wants_clients=False):
        options = ["--cert-file", self.path(f"{name}.pem"), "--key-file", self.path(f"{name}.key")]
        if wants_clients:
            options += ["--client-cert-auth", "--trusted-ca-file", self.path("ca.pem")]
        return options


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_etcd(running_etcd, certificates, tmp_path_factory):
    """ "host:port" of an etcd with a certificate of `ca`."""
    directory = tmp_path_factory.mktemp("tls")
    with running_etcd(directory, *certificates.for_etcd("server"), with_tls=True) as server:
        yield server.host


@pytest.fixture(scope="module")
def strict_etcd(running_etcd, certificates, tmp_path_factory):
    """ "host:port" of one that also wants a client certificate of `ca`."""
    options = certificates.for_etcd("server", wants_clients=True)
    with running_etcd(tmp_path_factory.mktemp("strict"), *options, with_tls=True) as server:
        yield server.host


def denied(endpoint):
    with pytest.raises(AccessDenied) as caught:
        connect(endpoint, timeout_s=5)
    return caught.value


def use(kv):
    """One of each request."""
    lease_id, _ = kv.grant(60, timeout_s=5)
    rev = kv.commit(Txn(ops=(Put(KEY, b"", lease_id),)), timeout_s=5).rev
    assert kv.keep_alive(lease_id, timeout_s=5) > 0
    assert KEY in kv.read(Read((MINE,)), timeout_s=5).entries
    assert not kv.wait(Watch((MINE,), rev, ""), timeout_s=0.3)
    kv.revoke(lease_id, timeout_s=5)
    assert kv.wait(Watch((MINE,), rev, ""), timeout_s=5)
    assert not kv.commit(Txn(ops=(Put(KEY, b"", lease_id),)), timeout_s=5).applied
    assert kv.commit(Txn((Unchanged(KEY, 0),)), timeout_s=5).applied


def test_tls_with_a_private_ca(tls_etcd, certificates):
    kv = connect(f"etcds://{tls_etcd}{certificates.options(ca='ca.pem')}", timeout_s=5)
    use(kv)
    assert kv.endpoint == f"etcds://{tls_etcd}"
    kv.close()


def test_files_are_named_by_the_environment_too(strict_etcd, certificates, monkeypatch):
    for option, name in (("ca", "ca.pem"), ("cert", "client.pem"), ("key", "client.key")):
        monkeypatch.setenv(OPTIONS[option], str(certificates.path(name)))
    kv = connect(f"etcds://{strict_etcd}", timeout_s=5)
    use(kv)
    kv.close()
    wrong = f"?ca={certificates.path('stranger-ca.pem')}"
    assert denied(f"etcds://{strict_etcd}{wrong}").what == "server certificate"


def test_an_etcd_of_another_ca_is_not_believed(tls_etcd, certificates):
    for options in (certificates.options(ca="stranger-ca.pem"), ""):
        error = denied(f"etcds://{tls_etcd}{options}")
        assert error.what == "server certificate"
        assert "unable to get local issuer certificate" in error.reason
        assert "TORCH_ROS_ETCD_CA" in error.advice


@pytest.mark.parametrize(
    ("name", "reason"),
    [("expired-server", "certificate has expired"), ("another-host", "for another host name")],
)
def test_an_etcd_with_a_bad_certificate_is_not_believed(
    running_etcd, certificates, tmp_path, name, reason
):
    with running_etcd(tmp_path / "etcd", *certificates.for_etcd(name), with_tls=True) as server:
        error = denied(f"etcds://{server.host}{certificates.options(ca='ca.pem')}")
        assert (error.what, reason in error.reason) == ("server certificate", True)


def test_a_client_certificate_of_the_ca_is_let_in(strict_etcd, certificates):
    kv = connect(f"etcds://{strict_etcd}{certificates.client('client')}", timeout_s=5)
    use(kv)
    kv.close()


@pytest.mark.parametrize("name", ["expired-client", "stranger"])
def test_another_client_certificate_is_not(strict_etcd, certificates, name):
    error = denied(f"etcds://{strict_etcd}{certificates.client(name)}")
    assert error.what == "client certificate"
    assert f"{name}.pem" in error.reason


def test_no_client_certificate_is_told_apart(strict_etcd, certificates):
    error = denied(f"etcds://{strict_etcd}{certificates.options(ca='ca.pem')}")
    assert error.what == "client certificate"
    assert "none was named" in error.reason


def test_a_member_with_a_bad_certificate_does_not_matter_if_another_has_a_good_one(
    running_etcd, tls_etcd, certificates, tmp_path
):
    options = certificates.options(ca="ca.pem")
    with running_etcd(tmp_path / "e", *certificates.for_etcd("another-host"), with_tls=True) as bad:
        kv = connect(f"etcds://{bad.host},{tls_etcd}{options}", timeout_s=5)
        use(kv)
        kv.close()
        assert denied(f"etcds://{bad.host},127.0.0.1:1{options}").what == "server certificate"


def test_tls_and_its_absence_do_not_meet(tls_etcd, etcd_endpoint, certificates):
    plain = etcd_endpoint.removeprefix("etcd://")
    with pytest.raises(StoreUnavailable, match="does it speak TLS"):
        connect(f"etcds://{plain}{certificates.options(ca='ca.pem')}", timeout_s=5)
    with pytest.raises(StoreUnavailable, match="etcds://"):
        connect(f"etcd://{tls_etcd}", timeout_s=5)


@contextlib.contextmanager
def a_server_that_hangs_up(is_reset, says):
    """With bytes left unread it resets the connection; which end of it is seen is then a race."""

    def serve():
        while True:
            connection, _ = server.accept()  # raises once `server` is shut down
            with connection, contextlib.suppress(OSError):
                connection.recv(1 if is_reset else 1 << 16)
                connection.sendall(says)
                linger = struct.pack("ii", is_reset, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:
        thread.submit(serve)
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("is_reset", [False, True])
def test_tls_is_the_question_however_the_other_side_hangs_up(certificates, is_reset):
    ca = certificates.options(ca="ca.pem")
    for says, scheme, options, question in (
        (b"", "etcds", ca, "does it speak TLS"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "etcds", ca, "does it speak TLS"),
        (b"", "etcd", "", "does it want TLS"),
    ):
        with (
            a_server_that_hangs_up(is_reset, says) as host,
            pytest.raises(StoreUnavailable, match=question),
        ):
            connect(f"{scheme}://{host}{options}", timeout_s=10)


@pytest.mark.parametrize("key", ["encrypted.key", "stranger.key", "client.pem", "ca.pem"])
def test_a_key_that_cannot_be_used_is_a_usage_error(certificates, key):
    secret = serialization.BestAvailableEncryption(b"no terminal is asked for this")
    certificates.write_key("encrypted.key", ec.generate_private_key(ec.SECP256R1()), secret)
    options = certificates.options(ca="ca.pem", cert="client.pem", key=key)
    with pytest.raises(UsageError, match="cannot be used"):
        connect(f"etcds://127.0.0.1:1{options}", timeout_s=1)


# Users


class Users:
    """An etcd with users: "ros" has readwrite on /torch-ros/mine/, and root may do everything."""

    def __init__(self, server, password_file):
        self.server, self.password_file = server, password_file
        self._channel = grpc.insecure_channel(server.host)
        self._auth = rpc.AuthStub(self._channel)
        password_file.write_text(PASSWORD + "\n")

    def add(self):
        for user, password, role in (("root", ROOT_PASSWORD, "root"), ("ros", PASSWORD, "mine")):
            self.ask("UserAdd", rpc.AuthUserAddRequest(name=user, password=password))
            self.ask("RoleAdd", rpc.AuthRoleAddRequest(name=role))
            self.ask("UserGrantRole", rpc.AuthUserGrantRoleRequest(user=user, role=role))
        grant = rpc.AuthRoleGrantPermissionRequest(name="mine")
        grant.perm.permType = 2  # READWRITE
        grant.perm.key, grant.perm.range_end = MINE.start.encode(), MINE.end.encode()
        self.ask("RoleGrantPermission", grant)

    def enable(self):
        self.ask("AuthEnable", rpc.AuthEnableRequest())

    def ask(self, method, request, token=""):
        metadata = (("token", token),) if token else ()
        return getattr(self._auth, method)(request, timeout=10, metadata=metadata)

    def ask_as_root(self, method, request):
        login = rpc.AuthenticateRequest(name="root", password=ROOT_PASSWORD)
        return self.ask(method, request, self.ask("Authenticate", login).token)

    def is_accepted(self, token):
        """Whether etcd still takes a token. It lives longer for being shown."""
        with contextlib.suppress(grpc.RpcError):
            metadata = (("token", token),)
            rpc.KVStub(self._channel).Txn(rpc.TxnRequest(), metadata=metadata, timeout=10)
            return True
        return False

    def endpoint(self, user="ros", password_file=None):
        file = password_file or self.password_file
        return f"etcd://{self.server.host}?user={user}&password_file={file}"

    def kv(self):
        return EtcdKV([self.server.host], user=User("ros", str(self.password_file)))

    def close(self):
        self._channel.close()


@pytest.fixture(scope="module")
def users_of(running_etcd):
    """A context with an etcd that has users."""

    @contextlib.contextmanager
    def start(directory, *options):
        with running_etcd(directory / "etcd", *CHEAP, *options) as server:
            users = Users(server, directory / "password")
            users.add()
            users.enable()
            yield users
            users.close()

    return start


@pytest.fixture(scope="module")
def shared_users(users_of, tmp_path_factory):
    """Change nothing of it."""
    with users_of(tmp_path_factory.mktemp("users")) as users:
        yield users


@pytest.fixture
def users(users_of, tmp_path):
    """Of this test's own."""
    with users_of(tmp_path) as users:
        yield users


def test_a_role_for_one_prefix_is_enough_for_everything_below_it(shared_users):
    kv = connect(shared_users.endpoint(), timeout_s=5)
    use(kv)
    kv.close()


def test_user_and_password_come_from_the_environment_too(shared_users, monkeypatch):
    monkeypatch.setenv("TORCH_ROS_ETCD_USER", "ros")
    monkeypatch.setenv("TORCH_ROS_ETCD_PASSWORD_FILE", str(shared_users.password_file))
    kv = connect(f"etcd://{shared_users.server.host}", timeout_s=5)
    use(kv)
    kv.close()


def test_tls_and_users_go_together(running_etcd, certificates, tmp_path):
    options = certificates.for_etcd("server")
    with running_etcd(tmp_path / "etcd", *CHEAP, *options, with_tls=True) as server:
        credentials = grpc.ssl_channel_credentials(certificates.path("ca.pem").read_bytes())
        users = Users(server, tmp_path / "password")
        users._auth = rpc.AuthStub(grpc.secure_channel(server.host, credentials))
        users.add()
        users.enable()
        ca = f"ca={certificates.path('ca.pem')}"
        kv = connect(f"etcds:{users.endpoint().partition(':')[2]}&{ca}", timeout_s=5)
        use(kv)
        kv.close()


def test_a_wrong_password_and_an_unknown_user_are_refused(shared_users, tmp_path):
    (tmp_path / "wrong").write_text(WRONG_PASSWORD)
    for endpoint in (
        shared_users.endpoint(password_file=tmp_path / "wrong"),
        shared_users.endpoint(user="nobody"),
    ):
        error = denied(endpoint)
        assert error.what == "user"
        assert "is wrong" in error.reason


def test_a_missing_password_file_is_a_usage_error(shared_users, tmp_path):
    with pytest.raises(UsageError, match="none cannot be read: No such file"):
        connect(shared_users.endpoint(password_file=tmp_path / "none"), timeout_s=5)


def test_whoever_names_no_user_is_told_that_there_are_some(shared_users):
    kv = connect(f"etcd://{shared_users.server.host}", timeout_s=5)
    with pytest.raises(AccessDenied, match="none was named; set TORCH_ROS_ETCD_USER") as caught:
        kv.read(Read((MINE,)), timeout_s=5)
    assert caught.value.what == "user"
    kv.close()


def test_keys_that_the_role_does_not_have_are_named(shared_users):
    kv = shared_users.kv()
    other = under("/torch-ros/other/")
    for forbidden in (
        lambda: kv.read(Read((other,)), timeout_s=5),
        lambda: kv.commit(Txn(ops=(Put("/torch-ros/other/key", b""),)), timeout_s=5),
        lambda: kv.commit(Txn((Unchanged("/torch-ros/other/key", 0),)), timeout_s=5),
        lambda: kv.wait(Watch((other,), 1, ""), timeout_s=5),
    ):
        with pytest.raises(AccessDenied, match="user 'ros'.*'/torch-ros/other/") as caught:
            forbidden()
        assert caught.value.what == "role"
    use(kv)
    kv.close()


def test_a_model_needs_a_role_for_its_own_prefix_only(shared_users):
    torch.manual_seed(7)
    weights, got = {"w": torch.randn(40, 3)}, {"w": torch.zeros(40, 3)}
    with (
        torch_ros.open("mine", endpoint=shared_users.endpoint(), replica="a") as trainer,
        torch_ros.open("mine", endpoint=shared_users.endpoint(), replica="b") as rollout,
    ):
        trainer.register(weights)
        trainer.publish(1)
        rollout.register(got)
        assert rollout.replicate("latest") == 1
        assert torch.equal(got["w"], weights["w"])
        assert rollout.list() == {1: {"a", "b"}}
        rollout.unpublish()
        trainer.unpublish()
    with pytest.raises(AccessDenied, match="'/torch-ros/other/") as caught:
        torch_ros.open("other", endpoint=shared_users.endpoint(), timeout_s=10)
    assert caught.value.what == "role"


def test_a_token_that_expires_is_replaced_while_somebody_waits(users_of, certificates, tmp_path):
    """JSON web tokens end at their time. etcd's simple tokens live longer for being used."""
    jwt = f"pub-key={certificates.path('server.pem')},priv-key={certificates.path('server.key')}"
    with users_of(tmp_path, "--auth-token", f"jwt,{jwt},sign-method=ES256,ttl=1s") as users:
        kv = users.kv()
        lost = []
        session = Session(kv, ttl_s=6, on_lost=lost.append, name="test")
        rev = kv.commit(Txn(ops=(Put(KEY, b"", session.lease_id),)), timeout_s=5).rev
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(kv.wait, Watch((MINE,), rev, ""), timeout_s=30)
            for _ in range(3):
                token = token_of(kv)
                until(lambda: not users.is_accepted(token))  # noqa: B023
                assert KEY in kv.read(Read((MINE,)), timeout_s=5).entries
                assert token_of(kv) != token
            token = token_of(kv)
            until(lambda: not users.is_accepted(token))
            assert not waiting.done()
            rev = kv.commit(Txn(ops=(Put(KEY, b"", session.lease_id),)), timeout_s=5).rev
            assert waiting.result(timeout=5)
        assert wait_with_an_expired_token(users, kv, rev)
        assert session.is_valid()
        assert not lost
        session.close()
        assert not kv.read(Read((MINE,)), timeout_s=5).entries
        kv.close()


def wait_with_an_expired_token(users, kv, rev):
    """etcd refuses such a watch; whoever waits looks again, and by then has another token."""
    token = token_of(kv)
    until(lambda: not users.is_accepted(token))
    woke = kv.wait(Watch((MINE,), rev, ""), timeout_s=5)
    return woke and token_of(kv) != token


def test_a_simple_token_that_expires_is_replaced(users_of, tmp_path):
    with users_of(tmp_path, "--auth-token-ttl", "1") as users:
        kv = users.kv()
        use(kv)
        token = token_of(kv)
        time.sleep(3)  # to look whether it is over would make it last
        use(kv)
        assert token_of(kv) != token
        kv.close()


def test_an_etcd_that_restarts_has_forgotten_its_tokens(users):
    kv = users.kv()
    rev = kv.commit(Txn(ops=(Put(KEY, b""),)), timeout_s=5).rev
    woke = threading.Event()

    def follow():
        after = rev
        while not woke.is_set():
            with contextlib.suppress(StoreUnavailable):
                kv.wait(Watch((MINE,), after, ""), timeout_s=5)
                entry = kv.read(Read((MINE,)), timeout_s=5).entries[KEY]
                if entry.value == b"after":
                    woke.set()

    with ThreadPoolExecutor() as pool:
        following = pool.submit(follow)
        users.server.kill()
        users.server.start()
        other = users.kv()
        other.commit(Txn(ops=(Put(KEY, b"after"),)), timeout_s=5)
        assert woke.wait(10)
        following.result(timeout=10)
    use(kv)
    kv.close()
    other.close()


def test_a_token_from_the_future_of_a_wiped_etcd_is_given_up(users):
    """etcd would wait until it has written as much as when it gave the token away."""
    kv = users.kv()
    for _ in range(60):
        kv.commit(Txn(ops=(Put(KEY, b""),)), timeout_s=5)
    kv._token = None
    use(kv)
    users.server.kill()
    shutil.rmtree(users.server.directory / "records")
    users.server.start()
    users.add()
    users.enable()
    with contextlib.suppress(StoreUnavailable):
        kv.read(Read((MINE,)), timeout_s=1)
    use(kv)
    kv.close()


def test_a_password_that_is_changed_is_read_again(users):
    kv = users.kv()
    use(kv)
    new = rpc.AuthUserChangePasswordRequest(name="ros", password="s3cret-of-tomorrow")
    users.ask_as_root("UserChangePassword", new)
    with pytest.raises(AccessDenied, match="is wrong"):
        use(kv)
    users.password_file.write_text("s3cret-of-tomorrow")
    use(kv)
    kv.close()


def test_a_lease_outlasts_a_password_that_comes_late(users, caplog):
    kv, lost = users.kv(), []
    session = Session(kv, ttl_s=6, on_lost=lost.append, name="test")
    new = rpc.AuthUserChangePasswordRequest(name="ros", password="s3cret-of-tomorrow")
    users.ask_as_root("UserChangePassword", new)
    with pytest.raises(AccessDenied):
        use(kv)
    until(lambda: "its lease ends in" in caplog.text)  # a renewal was refused
    deadline = session.deadline
    users.password_file.write_text("s3cret-of-tomorrow")
    until(lambda: session.deadline > deadline)
    assert not lost
    session.close()
    kv.close()


def test_a_shared_lease_outlasts_a_password_that_comes_late(users, caplog):
    kv = users.kv()
    lease = SharedLease(kv, f"{MINE.start}lease", 6, Deadline("open", 10))
    new = rpc.AuthUserChangePasswordRequest(name="ros", password="s3cret-of-tomorrow")
    users.ask_as_root("UserChangePassword", new)
    with pytest.raises(AccessDenied):
        use(kv)
    until(lambda: "trying again" in caplog.text)  # a renewal was refused
    lease.check()
    users.password_file.write_text("s3cret-of-tomorrow")
    use(kv)
    assert kv.keep_alive(lease.id, timeout_s=5) > 0
    lease.check()
    lease.close()
    kv.close()


def test_a_role_that_is_changed_counts_at_once(users):
    kv = users.kv()
    use(kv)
    gone = rpc.AuthUserRevokeRoleRequest(name="ros", role="mine")
    users.ask_as_root("UserRevokeRole", gone)
    with pytest.raises(AccessDenied) as caught:
        use(kv)
    assert caught.value.what == "role"
    users.ask_as_root("UserGrantRole", rpc.AuthUserGrantRoleRequest(user="ros", role="mine"))
    use(kv)
    kv.close()


def test_users_may_be_set_up_while_we_run(running_etcd, tmp_path, caplog):
    with running_etcd(tmp_path / "etcd", *CHEAP) as server:
        users = Users(server, tmp_path / "password")
        kv = connect(users.endpoint(), timeout_s=5)
        use(kv)
        assert "has no users" in caplog.text
        users.add()
        users.enable()
        use(kv)
        users.ask_as_root("AuthDisable", rpc.AuthDisableRequest())
        use(kv)
        kv.close()
        users.close()


# What docs/SECURITY.md says


def test_the_documented_commands_work_as_printed(tmp_path, etcd_programs):
    document = ROOT.joinpath("docs/SECURITY.md").read_text()
    commands = "".join(re.findall(r"^```bash\n(.*?)^```$", document, re.MULTILINE | re.DOTALL))
    assert "auth enable" in commands
    for printed in ("PORT=2379", "PEER_PORT=2380"):
        assert f" {printed} " in commands
        with socket.create_server(("127.0.0.1", 0)) as server:
            free = f"{printed.partition('=')[0]}={server.getsockname()[1]}"
        commands = commands.replace(f" {printed} ", f" {free} ")
    commands = commands.replace("python -c", f"{sys.executable} -c")
    script = f"set -e; trap 'kill $(jobs -p)' EXIT\n{commands}\n{REFUSED}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{etcd_programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "refused: role" in done.stdout


REFUSED = f"""{sys.executable} -c "
import torch_ros
from torch_ros.errors import AccessDenied
try: torch_ros.open('another-model', timeout_s=10)
except AccessDenied as error: print('refused:', error.what)
"
"""


# What is never said


def told(error):
    """All that a log, a debugger or a peer could show of an error."""
    causes = []
    while error is not None:
        causes.append(error)
        error = error.__cause__ or error.__context__
    shown = [f"{e!s} {e!r} {e.args} {vars(e)}" for e in causes]
    return "\n".join([*shown, *traceback.format_exception(causes[0])])


def test_secrets_are_in_no_log_repr_or_error(shared_users, tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    wrong = tmp_path / "wrong"
    wrong.write_text(WRONG_PASSWORD)
    binary = tmp_path / "binary"
    binary.write_bytes(PASSWORD.encode() + b"\xff")
    words = []
    for file in (wrong, binary, tmp_path / "none"):
        with pytest.raises((AccessDenied, UsageError)) as caught:
            connect(shared_users.endpoint(password_file=file), timeout_s=5)
        words.append(told(caught.value))
    kv = shared_users.kv()
    with pytest.raises(AccessDenied) as caught:
        kv.read(Read((under("/elsewhere/"),)), timeout_s=5)
    words += [told(caught.value), repr(kv), repr(kv._user), repr(kv._members)]
    token = token_of(kv)
    assert token
    kv.close()
    handle = torch_ros.open("mine", endpoint=shared_users.endpoint(), replica=uuid.uuid4().hex)
    words.append(repr(handle))
    handle.close()
    everything = "\n".join([*words, caplog.text, *capfd.readouterr()])
    assert "opened " in everything
    assert "user 'ros'" in everything
    for secret in ("s3cret", token):
        assert secret not in everything


def test_a_password_without_tls_is_worth_a_warning(shared_users, caplog):
    connect(shared_users.endpoint(), timeout_s=5).close()
    assert "the password of user 'ros' goes to" in caplog.text
    assert "unencrypted" in caplog.text


# torch.distributed


def test_torch_finds_its_store_over_tls(tls_etcd, certificates):
    endpoint = f"etcds://{tls_etcd}{certificates.options(ca='ca.pem')}"
    urls = (
        f"{endpoint}&rank=0&world_size=1".replace("?", "/job?"),
        f"{rendezvous.url_of(endpoint, 'job')}&rank=0&world_size=1",
    )
    stores = [next(torch.distributed.rendezvous(url))[0] for url in urls]
    stores[0].set("k", "v")
    assert stores[1].get("k") == b"v"
    for store in stores:
        assert store.endpoint.startswith("etcds://")
        store.close()
