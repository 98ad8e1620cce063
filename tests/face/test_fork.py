"""Fork: who may open a handle or a store in the child, and that it can be read from."""

import os
import sys

import pytest

from torch_ros.store import forking

SCRIPT = """
import os, sys
import torch, torch_ros
from torch_ros.errors import UsageError

endpoint, model = sys.argv[1:]

def forked(body):
    child = os.fork()
    if child == 0:
        body()
        os._exit(0)
    return child

def refused():
    try:
        torch_ros.open(model, endpoint=endpoint)
    except UsageError as error:
        assert "before the fork" in str(error), error
    else:
        os._exit(3)

def source():
    with torch_ros.open(model, endpoint=endpoint, replica="source") as handle:
        handle.register({"w": torch.arange(8.0)})
        handle.publish(1)
        os.read(end, 1)

def reader():
    with torch_ros.open(model, endpoint=endpoint, replica="reader") as handle:
        got = torch.zeros(8)
        handle.register({"w": got})
        handle.replicate(1, timeout_s=60)
        assert torch.equal(got, torch.arange(8.0))

parent = torch_ros.open(model + "-parent", endpoint=endpoint)
assert os.waitpid(forked(refused), 0)[1] == 0, "opened beside its parent's"
assert os.waitpid(forked(lambda: os.waitpid(forked(refused), 0)[1] and os._exit(4)), 0)[1] == 0
parent.list()
parent.close()
end, begin = os.pipe()
serving = forked(source)
assert os.waitpid(forked(reader), 0)[1] == 0, "a child could not read from another"
os.write(begin, b"x")
assert os.waitpid(serving, 0)[1] == 0
"""


def test_a_child_opens_a_handle_only_if_its_parent_has_none(etcd_endpoint, started):
    started.start(SCRIPT, etcd_endpoint, "fork").finish()


STORES = """
import os, signal, sys, threading, time
from torch_ros.errors import UsageError
from torch_ros.store import forking
from torch_ros.store.endpoint import connect
from torch_ros.store.txn import Read, Watch, under

endpoint, open_idle = sys.argv[1:]
forking.END_S = 20.0  # on the busiest of machines, too
everything = under("/fork-tests/")

def store():
    kv = connect(endpoint, timeout_s=30)
    kv.read(Read((everything,)), timeout_s=30)
    return kv

def child(body, *, exits=False):
    if (pid := os.fork()) == 0:
        signal.alarm(60)  # it hangs
        try:
            body()
        except UsageError as error:
            assert "forked while its parent" in str(error), error
            os._exit(7)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        if exits:
            sys.exit(0)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def use():
    store().close()

def use_and_fork():
    use()
    os._exit(child(use))

# Closed: nothing of gRPC is left, and children and theirs have their own.
for _ in range(5):
    use()
    assert not forking._threads()
assert [child(use), child(use_and_fork)] == [0, 0]
answers = []
by_thread = threading.Thread(target=lambda: answers.append(child(use)))
by_thread.start()
by_thread.join()
assert answers == [0]

# Open and idle: it depends on whether gRPC's own handlers are on.
parents = store()
revision = parents.read(Read((everything,)), timeout_s=10).rev
assert child(use) == int(open_idle)
assert child(parents.close) == 0
parents.read(Read((everything,)), timeout_s=10)

if os.environ.get("GRPC_ENABLE_FORK_SUPPORT") == "1":
    sys.exit(0)  # gRPC's own handler hangs in a child that is forked within a watch

# Within gRPC: refused.
def watch():
    parents.wait(Watch((everything,), revision, "a change"), timeout_s=60)

watching = threading.Thread(target=watch, daemon=True)
watching.start()
while not forking._here.watches:
    time.sleep(0.001)
assert [child(use), child(lambda: os._exit(child(use)))] == [7, 7]
sys.exit(child(print, exits=True))
"""


@pytest.mark.parametrize(("support", "open_idle"), [(None, 0), ("1", 0), ("0", 7)])
def test_a_child_has_its_own_store_or_is_refused(etcd_endpoint, started, support, open_idle):
    environment = {"GRPC_ENABLE_FORK_SUPPORT": support} if support else {}
    started.start(STORES, etcd_endpoint, open_idle, **environment).finish()


@pytest.mark.parametrize(("support", "count"), [(None, 0), ("0", 0), ("1", 1), ("True", 1)])
def test_grpc_handlers_that_hang_are_warned_of_once(monkeypatch, caplog, support, count):
    monkeypatch.setattr(forking, "_here", forking._Forking())
    monkeypatch.delenv(forking.SUPPORT, raising=False)
    if support:
        monkeypatch.setenv(forking.SUPPORT, support)
    users = [type("User", (), {})() for _ in range(2)]
    for user in users:
        forking.begin(user)
    assert [f"{forking.SUPPORT}={support} lets" in told for told in caplog.messages] == [
        True
    ] * count


@pytest.mark.parametrize(("is_open", "is_lost"), [(False, 0), (True, 1)])
def test_a_fork_without_proc_is_silent_and_takes_channels_for_lost(
    monkeypatch, tmp_path, is_open, is_lost
):
    """The hooks' errors are printed at each fork, by a process that may never have used gRPC."""
    raised = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    monkeypatch.setattr(forking, "_here", forking._Forking())
    monkeypatch.setattr(forking, "TASKS", tmp_path / "none")
    user = type("User", (), {})()
    if is_open:
        forking.begin(user)
    if (child := os.fork()) == 0:
        os._exit(9 if raised else forking._here.is_lost)
    assert (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), raised) == (is_lost, [])
