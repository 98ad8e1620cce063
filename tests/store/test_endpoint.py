"""From text to a store that answers, or to an error that says what to do."""

import http.server
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from kit import until

import puppets
from torch_ros.errors import StoreUnavailable, UsageError
from torch_ros.local import etcd as local
from torch_ros.store.endpoint import connect
from torch_ros.store.txn import Put, Read, Txn, under

pytestmark = pytest.mark.timeout(60)


def put(kv, key):
    assert kv.commit(Txn(ops=(Put(key, b""),)), timeout_s=5).applied


def keys(kv, prefix):
    return list(kv.read(Read((under(prefix),)), timeout_s=5).entries)


def test_an_etcd_is_reached(etcd_endpoint):
    kv = connect(etcd_endpoint, timeout_s=5)
    assert kv.endpoint == etcd_endpoint
    kv.close()


def test_an_etcd_that_listens_on_ipv6_alone_is_reached(tmp_path):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with puppets.running_etcd(tmp_path, address="[::1]") as server:
        kv = connect(f"etcd://{server.host}", timeout_s=5)
        put(kv, "endpoint-test/a")
        kv.close()


def test_several_hosts_are_one_store(etcd_endpoint):
    kv = connect("etcd://127.0.0.1:1," + etcd_endpoint.removeprefix("etcd://"), timeout_s=5)
    put(kv, "endpoint-test/a")
    kv.close()


def test_a_memory_store_is_shared_by_its_name():
    one, same, other = (connect(f"memory://{name}", timeout_s=1) for name in "aab")
    put(one, "t/a")
    one.close()
    assert keys(same, "t/") == ["t/a"]
    assert keys(other, "t/") == []
    assert same.endpoint == "memory://a"


def test_a_memory_store_needs_no_name():
    put(connect("memory://", timeout_s=1), "nameless/a")
    assert keys(connect("memory://", timeout_s=1), "nameless/") == ["nameless/a"]


def test_local_is_the_etcd_of_this_host(tmp_path, monkeypatch):
    monkeypatch.setenv(local.DIRECTORY, str(tmp_path / "local"))
    try:
        kv = connect("local", timeout_s=5)
        put(kv, "t/a")
        assert kv.endpoint == f"etcd://{local.ensure()}"
        kv.close()
    finally:
        local.stop(tmp_path / "local")


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", "Local", "localhost:2379", "http://127.0.0.1:2379", "memory:", "etcd:", "etcd://"),
        *("etcd://host", "etcd://host:", "etcd://host:0", "etcd://host:65536", "etcd://:2379"),
        *(
            "etcd://host:2379/",
            "etcd://host:2379,",
            "etcd://a b:2379",
            "etcd://host:2379,memory://",
        ),
        *("etcd://::1:2379", "etcd://host:99999999", "etcd://host:2379\n"),
    ],
)
def test_anything_else_is_a_usage_error_that_names_the_forms(endpoint):
    with pytest.raises(UsageError) as caught:
        connect(endpoint, timeout_s=1)
    assert repr(endpoint) in str(caught.value)
    forms = '"etcd://host:port[,host:port]", with TLS "etcds://...", "local" or "memory://[name]"'
    assert forms in str(caught.value)


@pytest.mark.parametrize(
    ("endpoint", "meant"),
    [
        ("http://127.0.0.1:2379", "etcd://127.0.0.1:2379"),
        ("https://a:2379,b:2379", "etcds://a:2379,b:2379"),
        ("localhost:2379", "etcd://localhost:2379"),
        ("a:2379,b:2379", "etcd://a:2379,b:2379"),
    ],
)
def test_how_others_name_an_etcd_is_understood(endpoint, meant):
    with pytest.raises(UsageError, match=f"; did you mean {meant}\\?$"):
        connect(endpoint, timeout_s=1)


@pytest.mark.parametrize(
    "endpoint",
    [
        *(
            "etcds://user:sec/ret@host:1",
            "etcd://user:sec@ret@host:1",
            "http://user:sec/ret@host:1",
        ),
        *("user:sec/ret@host:1", "etcd://user:sec?ret@host:1", "etcds://host:1?password=secret"),
        *("etcd://host:1?secret", "http://host:1?token=secret", "etcd://host?user=a&b=secret"),
    ],
)
def test_a_password_in_an_endpoint_is_refused_and_not_repeated(endpoint):
    with pytest.raises(UsageError) as caught:
        connect(endpoint, timeout_s=1)
    assert "sec" not in str(caught.value).replace("TORCH_ROS_ETCD", "")
    assert "ret" not in str(caught.value)


@pytest.mark.parametrize(
    ("endpoint", "way_out"),
    [
        ("etcd://a:b@host:1", "set TORCH_ROS_ETCD_USER and TORCH_ROS_ETCD_PASSWORD_FILE"),
        ("etcds://host:1?passwd=x", "none of ca, cert, key, user, password_file"),
        ("etcd://host:1?ca=/a.pem", "write etcds://"),
        ("etcd://host:1?user=a", "set both of TORCH_ROS_ETCD_USER and TORCH_ROS_ETCD_PASSWORD"),
        ("etcds://host:1?cert=/a.pem", "set both of TORCH_ROS_ETCD_CERT and TORCH_ROS_ETCD_KEY"),
        ("etcds://host:1?ca=/no/such.pem", "/no/such.pem cannot be read: No such file"),
    ],
)
def test_credentials_that_cannot_be_meant_are_a_usage_error(endpoint, way_out):
    with pytest.raises(UsageError) as caught:
        connect(endpoint, timeout_s=1)
    assert way_out in str(caught.value)


def unavailable(endpoint, within_s=8.0, timeout_s=30.0):
    started = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        connect(endpoint, timeout_s=timeout_s)
    assert time.monotonic() - started < within_s
    return caught.value.reason


def test_nobody_listens():
    assert unavailable("etcd://127.0.0.1:1", timeout_s=0.5) == "connection refused"
    assert unavailable("etcd://127.0.0.1:1,127.0.0.1:2", timeout_s=0.5) == "connection refused"


@pytest.mark.long
def test_an_etcd_that_starts_later_is_waited_for_and_that_is_said_once(etcd_server, caplog):
    etcd_server.kill()
    with ThreadPoolExecutor() as pool:
        connecting = pool.submit(connect, f"etcd://{etcd_server.host}", timeout_s=50)
        until(lambda: caplog.messages)
        etcd_server.start()
        kv = connecting.result()
    put(kv, "t/a")
    kv.close()
    (said,) = caplog.messages
    assert f"etcd at etcd://{etcd_server.host} refused the connection" in said
    assert "waiting for it, at most 50 s" in said


def test_the_name_is_not_known():
    assert unavailable("etcd://unknown.invalid:1", within_s=8) == "the host name is not known"
    both = "etcd://unknown.invalid:1,other.invalid:1"
    assert unavailable(both, within_s=8) == "the host name is not known"


@pytest.mark.long
def test_something_else_listens():
    other = "something answered, but it is not etcd v3"
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        assert unavailable(f"etcd://127.0.0.1:{server.server_port}") == other
        server.shutdown()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hangs = "it takes connections and says nothing; does it hang?"
        assert unavailable(f"etcd://127.0.0.1:{silent.getsockname()[1]}") == hangs
        assert unavailable(f"etcd://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.5) in (
            "no answer",
            hangs,
        )


@pytest.mark.long
def test_an_etcd_that_is_stopped_is_not_called_something_else(etcd_server):
    etcd_server.suspend()
    reason = unavailable(f"etcd://{etcd_server.host}", within_s=20.0)
    assert reason == "it takes connections and says nothing; does it hang?"
