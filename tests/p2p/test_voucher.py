"""A voucher says what is registered now, and who may show it."""

import os
from contextlib import contextmanager, suppress

import pytest

from torch_ros.p2p import voucher
from torch_ros.p2p.voucher import Neighbour, Process, Unproven, Voucher

pytestmark = pytest.mark.timeout(90)

NUMBER = 400  # of a file that a process has open


def vouched(own, agent="a"):
    neighbour = Neighbour(agent, own.process)
    try:
        return set(neighbour.vouched())
    finally:
        neighbour.close()


def test_a_voucher_says_what_is_registered_now_under_the_same_number():
    own = Voucher("a")
    neighbour = Neighbour("a", own.process)
    for digests in ([], [b"1"], [b"1", b"2"], [b"2"]):
        own.show(digests)
        assert neighbour.vouched() == set(digests)
    neighbour.close()
    own.close()
    with pytest.raises(Unproven):
        vouched(own)


def test_a_voucher_of_another_agent_is_refused():
    own = Voucher("a")
    with pytest.raises(Unproven, match="voucher of agent a"):
        vouched(own, "b")
    own.close()


@contextmanager
def forked(do=lambda: None):
    """A child that has done that."""
    (is_over, end), (said, say) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            do()
            os.write(say, b" ")
            os.close(end)
            os.read(is_over, 1)
        os._exit(0)
    os.close(say)
    assert os.read(said, 1)
    try:
        yield child
    finally:
        for each in (end, is_over, said):
            os.close(each)
        os.waitpid(child, 0)


def test_a_forked_child_does_not_vouch_for_what_its_parent_has():
    own = Voucher("a")
    own.show([b"1"])
    with forked() as child:
        process = Process(child, own.process.namespace, own.process.voucher)
        neighbour = Neighbour("a", process)
        with pytest.raises(Unproven, match=f"process {os.getpid()}"):
            neighbour.vouched()
        neighbour.close()
    own.close()


def in_child(as_user=None):
    """A child with a voucher of its own at 401."""

    def begin():
        if as_user:
            os.setuid(as_user)
        own = Voucher("a")
        own.show([b"1"])
        os.dup2(own.process.voucher, NUMBER)

    return forked(begin)


def test_a_process_that_has_ended_vouches_no_more():
    with in_child() as child:
        neighbour = Neighbour("a", Process(child, 0, NUMBER))
        assert neighbour.vouched() == {b"1"}
    with pytest.raises(Unproven, match="cannot be read"):
        neighbour.vouched()
    neighbour.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="to become another user, one has to be root")
def test_a_process_of_another_user_is_not_believed():
    with in_child(65534) as child, pytest.raises(Unproven, match="another user"):
        # The kernel says that it is root's, since a debugger may not read it.
        Neighbour("a", Process(child, 0, NUMBER)).vouched()


@pytest.mark.skipif(os.geteuid() != 0, reason="to give a file away, one has to be root")
def test_a_voucher_that_another_user_has_made_is_refused():
    own = Voucher("a")
    os.fchown(own.process.voucher, 65534, -1)
    with pytest.raises(Unproven, match="made by another user"):
        vouched(own)
    os.close(own.process.voucher)


def is_same(*fds):
    return len({os.fstat(fd).st_ino for fd in fds}) == 1


def test_a_number_that_has_become_another_file_is_left_alone():
    own = Voucher("a")
    other = os.memfd_create("somebody's")
    os.dup2(other, own.process.voucher)  # all was closed, and something opened
    with pytest.raises(OSError, match="closed"):
        own.show([b"1"])
    own.close()
    assert is_same(own.process.voucher, other)
    for fd in (own.process.voucher, other):
        os.close(fd)


def test_a_voucher_that_is_replaced_while_it_is_looked_at_is_looked_at_again(monkeypatch):
    """Between a reader's open and its look at who has the file open, the maker shows another."""
    mine = voucher.Voucher("agent")
    here = voucher.Neighbour("agent", mine.process)
    read, times = here.read, iter([1, 2])

    def read_late(name):
        if name.startswith("fdinfo/") and next(times, None):
            mine.show([b"new"])
        return read(name)

    monkeypatch.setattr(here, "read", read_late)
    assert here.vouched() == {b"new"}
    monkeypatch.setattr(here, "read", lambda name: mine.show([os.urandom(4)]) or read(name))
    mine.show([b"newer"])
    with pytest.raises(voucher.Unproven, match="another voucher at each look"):
        here.vouched()
    here.close()
    mine.close()


def test_the_proc_of_another_namespace_proves_nothing(monkeypatch):
    monkeypatch.setattr(os, "readlink", lambda path: "1")
    with pytest.raises(OSError, match="another pid namespace"):
        voucher.Voucher("agent")
