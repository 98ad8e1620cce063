"""What can happen to an etcd, and to who talks to it."""

import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from kit import until
from pyetcd import etcdrpc

import torch_ros
from torch_ros.errors import NO_LEADER, StoreUnavailable
from torch_ros.store import etcd
from torch_ros.store.etcd import EtcdKV
from torch_ros.store.txn import Put, Range, Read, Txn, Watch, one, under

pytestmark = pytest.mark.timeout(60)

ROOT = Path(torch_ros.__file__).parents[1]
DEAD = "127.0.0.1:1"
EVERYTHING = under("t/")


@pytest.fixture
def kv(etcd_server):
    kv = EtcdKV([etcd_server.host])
    yield kv
    kv.close()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def put(kv, name="a", value=b""):
    return kv.commit(Txn(ops=(Put("t/" + name, value),)), timeout_s=5).rev


def read(kv, timeout_s=5.0):
    return kv.read(Read((EVERYTHING,)), timeout_s=timeout_s)


def wait(kv, after_rev, timeout_s=30.0):
    return kv.wait(Watch((EVERYTHING,), after_rev, "a test waits"), timeout_s=timeout_s)


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def is_answering(kv):
    try:
        read(kv)
    except StoreUnavailable:
        return False
    return True


def requests(kv, timeout_s):
    return [
        lambda: read(kv, timeout_s),
        lambda: kv.commit(Txn(ops=(Put("t/b", b""),)), timeout_s=timeout_s),
        lambda: kv.grant(60, timeout_s=timeout_s),
        lambda: kv.keep_alive(1, timeout_s=timeout_s),
        lambda: kv.revoke(1, timeout_s=timeout_s),
    ]


def test_a_dead_etcd_is_unavailable_at_once(kv, etcd_server):
    put(kv)
    etcd_server.kill()
    for request in requests(kv, timeout_s=5):
        started = time.monotonic()
        with pytest.raises(StoreUnavailable) as caught:
            request()
        assert time.monotonic() - started < 3
        assert caught.value.endpoint == f"etcd://{etcd_server.host}"
    assert caught.value.reason == "connection refused"


def test_an_etcd_that_hangs_is_unavailable_in_time(kv, etcd_server):
    put(kv)
    etcd_server.suspend()
    for request in requests(kv, timeout_s=0.5):
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="did not answer within"):
            request()
        assert time.monotonic() - started < 10


@pytest.mark.long
def test_an_etcd_that_restarts_is_found_again_with_its_records(kv, etcd_server):
    rev = put(kv, value=b"kept")
    etcd_server.kill()
    end_s = time.monotonic() + 2  # the pauses between attempts to connect grow meanwhile
    while time.monotonic() < end_s:
        assert not is_answering(kv)
        time.sleep(0.1)
    etcd_server.start()
    until(lambda: is_answering(kv), limit_s=10)
    view = read(kv)
    assert (view.rev, view.entries["t/a"].value) == (rev, b"kept")
    assert put(kv) == rev + 1


def test_who_waits_wakes_when_the_connection_breaks(kv, etcd_server, threads):
    rev = put(kv)
    waiting = threads.submit(wait, kv, rev)
    assert not wait(kv, rev, timeout_s=0.2)
    etcd_server.kill()
    assert waiting.result(timeout=10)
    assert wait(kv, rev)
    etcd_server.start()
    until(lambda: is_answering(kv), limit_s=10)
    assert not wait(kv, rev, timeout_s=0.2)


@pytest.mark.long
def test_who_waits_wakes_when_the_host_vanishes(kv, etcd_server, threads):
    """Nothing closes the connection then: only pings tell."""
    rev = put(kv)
    waiting = threads.submit(wait, kv, rev)
    assert not wait(kv, rev, timeout_s=0.2)
    etcd_server.suspend()
    assert waiting.result(timeout=20)


def test_who_waits_wakes_when_the_store_was_wiped(kv, etcd_server):
    rev = max(put(kv) for _ in range(5))
    etcd_server.kill()
    shutil.rmtree(etcd_server.directory / "records")
    etcd_server.start()
    until(lambda: is_answering(kv), limit_s=10)
    assert wait(kv, rev)
    assert not wait(kv, read(kv).rev, timeout_s=0.2)


def test_who_waits_wakes_when_the_past_was_compacted(kv, etcd_server):
    first = put(kv)
    last = max(put(kv, name="elsewhere") for _ in range(5))
    with grpc.insecure_channel(etcd_server.host) as channel:
        etcdrpc.KVStub(channel).Compact(etcdrpc.CompactionRequest(revision=last))
    elsewhere = Watch((one("u"),), first, "a test waits")
    assert kv.wait(elsewhere, timeout_s=5)


STOPPED = """
import sys
from torch_ros.store.etcd import EtcdKV
from torch_ros.store.txn import Read, Watch, one
kv = EtcdKV(sys.argv[1:])
rev = kv.read(Read((one("t"),)), timeout_s=5).rev
print("waiting", flush=True)
while not kv.read(Read((one("t"),)), timeout_s=5).entries:
    kv.wait(Watch((one("t"),), rev, ""), timeout_s=60)
print("told", flush=True)
kv.close()
"""


def test_a_process_that_was_stopped_while_its_past_was_compacted_is_told(kv, etcd_server):
    """Its connection breaks while it is stopped: it has to watch anew, from one that is gone."""
    process = python(STOPPED, etcd_server.host)
    assert process.stdout.readline() == "waiting\n"
    until(lambda: etcd_server.metric("etcd_debugging_mvcc_watcher_total") == 2, limit_s=10)
    process.send_signal(signal.SIGSTOP)
    kv.commit(Txn(ops=(Put("t", b""),)), timeout_s=5)
    last = max(put(kv, name="elsewhere") for _ in range(5))
    with grpc.insecure_channel(etcd_server.host) as channel:
        etcdrpc.KVStub(channel).Compact(etcdrpc.CompactionRequest(revision=last, physical=True))
    etcd_server.kill()
    etcd_server.start()
    process.send_signal(signal.SIGCONT)
    output, errors = process.communicate(timeout=20)
    assert (output, process.returncode) == ("told\n", 0), errors


def test_a_watch_that_etcd_refuses_does_not_sleep(kv):
    backwards = Watch((Range("b", "a"),), put(kv), "a test waits")
    assert kv.wait(backwards, timeout_s=5)


def test_a_change_in_the_past_is_noticed_at_once(kv):
    """etcd itself takes 100 ms for it, whenever a change falls between a read and a watch."""
    rev = put(kv)
    put(kv)
    times = []
    for _ in range(10):
        started = time.monotonic()
        assert wait(kv, rev)
        times.append(time.monotonic() - started)
    assert min(times) < 0.05


def test_waiting_leaves_nothing_in_etcd(kv, etcd_server):
    def watchers():
        return etcd_server.metric("etcd_debugging_mvcc_watcher_total")

    rev = put(kv)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait, kv, rev)
        until(lambda: watchers() == 2, limit_s=5)  # from now on, and from the past
        put(kv)
        waiting.result()
    for _ in range(10):
        wait(kv, rev)
        wait(kv, rev + 1, timeout_s=0.02)
    until(lambda: watchers() == 0, limit_s=5)


@pytest.mark.parametrize("dead", [DEAD, "unknown.invalid:2379"])
def test_a_dead_first_endpoint_does_not_matter(etcd_server, dead):
    kv = EtcdKV([dead, etcd_server.host])
    assert read(kv).rev == put(kv) - 1
    assert not wait(kv, read(kv).rev, timeout_s=0.2)
    assert "," in kv.endpoint
    kv.close()


def test_the_next_endpoint_takes_over(etcd_server, etcd_endpoint):
    kv = EtcdKV([etcd_server.host, etcd_endpoint.removeprefix("etcd://")])
    put(kv, value=b"on the first")
    etcd_server.kill()
    until(lambda: is_answering(kv), limit_s=3)
    assert "t/a" not in read(kv).entries
    kv.close()


def test_names_are_resolved(etcd_server):
    local = f"localhost:{etcd_server.port}"
    for hosts in ([local], [DEAD, local]):
        kv = EtcdKV(hosts)
        assert is_answering(kv)
        kv.close()


def test_a_proxy_for_the_web_is_not_used(etcd_server, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://{DEAD}")
    monkeypatch.delenv("no_proxy", raising=False)
    kv = EtcdKV([etcd_server.host])
    assert is_answering(kv)
    kv.close()


def python(script, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & has it ignored
from torch_ros.store.etcd import EtcdKV
from torch_ros.store.txn import Read, Watch, one
kv = EtcdKV(sys.argv[1:])
rev = kv.read(Read((one("t"),)), timeout_s=5).rev
print("waiting", flush=True)
try:
    kv.wait(Watch((one("t"),), rev, ""), timeout_s=60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
kv.close()
"""


def test_a_wait_can_be_interrupted(etcd_server):
    process = python(INTERRUPTED, etcd_server.host)
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.3)  # so that it really waits; sooner would pass too
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert (output, process.returncode) == ("interrupted\n", 0), errors


FORKED = """
import os, sys
from torch_ros.errors import ClosedError
from torch_ros.store.etcd import EtcdKV
from torch_ros.store.txn import Read, one
kv = EtcdKV(sys.argv[1:])
kv.read(Read((one("t"),)), timeout_s=5)
if os.fork() == 0:
    try:
        kv.read(Read((one("t"),)), timeout_s=5)
    except ClosedError as error:
        print(error, flush=True)
    kv.close()
    os._exit(0)
os.wait()
kv.read(Read((one("t"),)), timeout_s=5)
kv.close()
"""


def test_a_child_of_fork_is_told_so(etcd_server):
    output, errors = python(FORKED, etcd_server.host).communicate(timeout=20)
    assert output == f"etcd://{etcd_server.host} was opened before fork(); open it again here\n"
    assert "Traceback" not in errors


def test_closing_leaves_no_threads_and_no_connection(etcd_server):
    before = threading.active_count()
    descriptors = open_descriptors()
    for _ in range(5):
        kv = EtcdKV([etcd_server.host])
        wait(kv, put(kv), timeout_s=0.02)
        kv.close()
    until(lambda: threading.active_count() <= before, limit_s=5)
    until(lambda: open_descriptors() <= descriptors + 8, limit_s=5)


class NoLeader(grpc.RpcError):
    def code(self):
        return grpc.StatusCode.UNAVAILABLE

    def details(self):
        return NO_LEADER


def test_members_without_a_leader_are_asked_more_and_more_rarely(monkeypatch):
    pauses, now = [], [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda s: (pauses.append(s), now.append(now.pop() + s))
    )
    monkeypatch.setattr(etcd, "time", clock)
    kv = EtcdKV([DEAD, "127.0.0.1:2"])

    def method(*_, **__):
        raise NoLeader

    with closing(kv), pytest.raises(NoLeader):
        kv._send(method, None, 60.0, "")
    assert 0.05 <= pauses[0] <= 0.15
    assert all(0.4 <= pause <= 1.2 for pause in pauses[3:-1])
    assert len(set(pauses)) == len(pauses), "all ask at one moment"
