"""Versions that another process lends: mapped where they are, while the lender goes on, or ends."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import torch_ros
from torch_ros.errors import LoanRefused, NotSupported

COUNT = 1 << 18  # elements of float32, and half as many in another tensor
SHARD_BYTES = 6 * COUNT
TTL_S = 2

LENDER = """
import os
import sys
import torch
import torch_ros

endpoint, model, count, transport = *sys.argv[1:3], int(sys.argv[3]), sys.argv[4]
options = dict(endpoint=endpoint, ttl_s=2, timeout_s=20, replica="lender", transport=transport)
handle = torch_ros.open(model, borrow_bytes=int(sys.argv[5]), **options)
weight = torch.arange(count, dtype=torch.float32)
state = {"weight": weight, "bias": weight[::2].view(2, -1)}
print("opened", flush=True)
for line in sys.stdin:
    match line.split():
        case ["publish", first, *last]:
            for version in range(int(first), int((last or [first])[0]) + 1):
                weight.fill_(version)
                handle.publish_copy(version, state, store_wait_s=0)
        case ["live", version]:
            handle.register(state)
            handle.publish(int(version))
        case ["unpublish"]:
            handle.unpublish()
        case ["state"]:
            print(handle.state, flush=True)
            continue
        case ["become", user]:
            os.setuid(int(user))
        case ["close"]:
            handle.close()
    print("done", flush=True)
"""

BORROWER = """
import sys
import torch
import torch_ros

handle = torch_ros.open(sys.argv[2], endpoint=sys.argv[1], ttl_s=2, timeout_s=20)
with handle.borrow() as tensors:
    print(int(tensors["weight"][5]), flush=True)
    for line in sys.stdin:
        if line.strip() == "write":
            tensors["weight"][5] = 1
        before = anonymous_bytes()
        total = sum(float(tensor.max()) for tensor in tensors.values())
        print(total, anonymous_bytes() - before, flush=True)
handle.close()
"""
BORROWER = BORROWER.replace(
    "handle =",
    """
def anonymous_bytes():
    [row] = [r for r in open("/proc/self/status") if r.startswith("RssAnon")]
    return int(row.split()[1]) * 1024

handle =""",
    1,
)


@pytest.fixture
def model(request):
    return request.node.name


@pytest.fixture
def lend(etcd_endpoint, started, model):
    """A lender, in a process of its own."""

    def start(endpoint=etcd_endpoint, transport="auto", shards=2):
        options = (COUNT, transport, shards * SHARD_BYTES)
        lender = started.start(LENDER, endpoint, model, *options, talks=True)
        assert lender.hear() == "opened"
        return lender

    return start


def do(lender, *what):
    lender.tell(*what)
    assert lender.hear() == "done"


@pytest.fixture
def handle(etcd_endpoint, model):
    with torch_ros.open(model, endpoint=etcd_endpoint, ttl_s=TTL_S, timeout_s=20) as opened:
        yield opened


def is_version(tensors, version):
    return {fqn: (tensor.dtype, tuple(tensor.shape)) for fqn, tensor in tensors.items()} == {
        "weight": (torch.float32, (COUNT,)),
        "bias": (torch.float32, (2, COUNT // 4)),
    } and all(bool((tensor == version).all()) for tensor in tensors.values())


def test_a_version_is_borrowed_while_the_lender_publishes_on(lend, handle):
    lender = lend()
    do(lender, "publish", 1)
    with handle.borrow() as first:
        assert is_version(first, 1)
        do(lender, "publish", 2, 40)
        with handle.borrow() as second, handle.borrow(40) as same:
            assert is_version(second, 40)
            assert is_version(same, 40)
        do(lender, "publish", 41, 50)
        assert is_version(first, 1)
    with handle.borrow() as last:
        assert is_version(last, 50)


def test_a_borrower_that_never_leaves_costs_one_buffer_in_a_hundred_steps(lend, handle):
    lender = lend(shards=1)
    do(lender, "publish", 0)
    with handle.borrow() as tensors:
        do(lender, "publish", 1, 2)
        files = lent_files(lender)
        do(lender, "publish", 3, 100)
        assert lent_files(lender) == files
        assert len(files) == 3
        with pytest.raises(LoanRefused, match="'lender'.*borrow_bytes"), handle.borrow():
            pass
        assert is_version(tensors, 0)
    do(lender, "publish", 101)
    with handle.borrow() as tensors:
        assert is_version(tensors, 101)


def lent_files(lender):
    """The files of its buffers."""
    files = set()
    for each in Path(f"/proc/{lender.pid}/fd").iterdir():
        if str(each.readlink()).startswith("/memfd:torch_ros lent"):
            files.add(each.stat().st_ino)
    return files


def test_a_borrower_that_is_killed_frees_its_buffer(lend, handle, borrowing):
    lender = lend(shards=1)
    do(lender, "publish", 1)
    borrower = borrowing(1)
    do(lender, "publish", 2)
    with pytest.raises(LoanRefused), handle.borrow():
        pass
    borrower.kill()
    do(lender, "publish", 3)  # at once: no lease has to end
    with handle.borrow() as tensors:
        assert is_version(tensors, 3)
    assert len(lent_files(lender)) == 2


@pytest.fixture
def borrowing(started, etcd_endpoint, model):
    """A borrower, in a process of its own, that has found that version."""

    def start(version):
        borrower = started.start(BORROWER, etcd_endpoint, model, talks=True)
        assert borrower.hear() == str(version)
        return borrower

    return start


def test_a_borrower_that_is_stopped_for_longer_than_any_lease_keeps_its_version(
    lend, handle, borrowing
):
    lender = lend()
    do(lender, "publish", 1)
    borrower = borrowing(1)
    borrower.signal(signal.SIGSTOP)
    borrower.await_stop()
    until_s = time.monotonic() + TTL_S + 2
    while time.monotonic() < until_s:
        version = handle.list().popitem()[0] + 1
        do(lender, "publish", version, version + 9)
    borrower.signal(signal.SIGCONT)
    borrower.tell("look")
    assert borrower.hear().split()[0] == "2.0"  # the sum of two ones
    borrower.stdin.close()
    borrower.finish()


def test_a_borrower_takes_no_memory_of_its_own(lend, borrowing):
    lender = lend()
    do(lender, "publish", 1)
    borrower = borrowing(1)
    borrower.tell("look")
    borrower.hear()  # with all that torch allocates at first
    borrower.tell("look")
    assert int(borrower.hear().split()[1]) < COUNT // 2


def test_a_write_ends_the_borrower_and_does_not_reach_the_lender(lend, handle, borrowing):
    lender = lend()
    do(lender, "publish", 2)
    borrower = borrowing(2)
    borrower.tell("write")
    assert borrower.wait(20) == -signal.SIGSEGV
    with handle.borrow() as tensors:
        assert is_version(tensors, 2)


@pytest.mark.parametrize("end", ["close", "kill", "unpublish"])
def test_a_loan_outlives_its_lender(lend, handle, end):
    lender = lend()
    do(lender, "publish", 1)
    with handle.borrow() as tensors:
        if end == "kill":
            lender.kill()
        else:
            do(lender, end)
        assert is_version(tensors, 1)


def test_a_lender_that_is_started_again_lends_anew(lend, handle):
    lender = lend()
    do(lender, "publish", 1)
    with handle.borrow() as first:
        lender.kill()
        do(lend(), "publish", 2)
        with handle.borrow(2) as second:
            assert is_version(second, 2)
        assert is_version(first, 1)


def test_a_loan_is_none_of_etcds_business(lend, etcd_server, model):
    endpoint = f"etcd://{etcd_server.host}"
    lender = lend(endpoint)
    do(lender, "publish", 1)
    handle = torch_ros.open(model, endpoint=endpoint, ttl_s=TTL_S, timeout_s=20)
    with handle.borrow() as tensors:
        etcd_server.kill()
        shutil.rmtree(etcd_server.directory / "records")
        do(lender, "publish", 2, 5)  # without etcd
        assert is_version(tensors, 1)
        etcd_server.start()
        successor = lend(endpoint)  # takes the lender's name
        await_state(lender, "gone")
        do(successor, "publish", 6, 9)
        assert is_version(tensors, 1)
    handle.close()


def await_state(lender, wanted):
    until_s = time.monotonic() + 30
    found = ""
    while found != wanted:
        assert time.monotonic() < until_s, found
        lender.tell("state")
        found = lender.hear()


def test_a_lender_that_is_fenced_fills_nothing_that_is_lent(lend, handle):
    lender = lend()
    do(lender, "publish", 1)
    with handle.borrow() as tensors:
        lend()
        await_state(lender, "gone")
        lender.tell("publish", 2)
        assert lender.wait(20) == 1  # with SeatLost
        assert is_version(tensors, 1)


def test_live_tensors_are_not_lent(lend, handle):
    do(lend(), "live", 1)
    with pytest.raises(NotSupported, match="live tensors.*publish_copy"), handle.borrow():
        pass


@pytest.mark.parametrize("end", ["lender", "borrower"])
def test_both_ends_need_the_transport_that_says_which_process_it_is(
    lend, etcd_endpoint, model, end
):
    do(lend(transport="ucx" if end == "lender" else "auto"), "publish", 1)
    transport = "ucx" if end == "borrower" else "auto"
    with (
        torch_ros.open(model, endpoint=etcd_endpoint, transport=transport) as handle,
        pytest.raises(NotSupported, match='transport="auto"'),
        handle.borrow(),
    ):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="to become another user, one has to be root")
def test_another_user_lends_nothing(lend, handle):
    lender = lend()
    do(lender, "become", 65534)
    do(lender, "publish", 1)
    with pytest.raises(NotSupported, match="another user"), handle.borrow():
        pass


def test_a_lender_in_this_very_process_lends_nothing(handle, etcd_endpoint, model):
    with torch_ros.open(model, endpoint=etcd_endpoint, borrow_bytes=1 << 20) as lender:
        lender.publish_copy(1, {"w": torch.ones(3)})
        with pytest.raises(NotSupported, match="this very process"), handle.borrow():
            pass
