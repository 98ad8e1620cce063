"""Which transports a process makes, by their name and by what its host has."""

import os
import socket
from contextlib import closing, suppress
from pathlib import Path

import pytest

from torch_ros.errors import UsageError
from torch_ros.face import choose
from torch_ros.face.choose import Network, choose_transport, interfaces_for
from torch_ros.fleet import life
from torch_ros.p2p import rdma, ucx

LOOPBACKS = {"0100007F", "00000000000000000000000001000000"}  # as the kernel writes them


def transport(name, **network):
    there = {"replica": "r", "rank": 0, "in_process": False, "reason": "a test"}
    return closing(choose_transport(name, Network(**network), **there))


@pytest.fixture(autouse=True)
def a_host_without_rdma_and_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(rdma, "DEVICES", tmp_path / "none")
    monkeypatch.setattr(choose, "has_gpu", lambda: False)


def test_tcp_of_ucx_has_the_interfaces_that_ucx_is_told_of_or_all():
    there = tuple(name for _, name in socket.if_nameindex())
    assert "lo" in there
    assert interfaces_for("") == there
    assert interfaces_for("mlx5_0:1") == there, "those are RDMA's"
    assert interfaces_for("mlx5_0:1,lo") == ("lo",)


def listening():
    """The sockets that this process listens on, and whether each is of loopback alone."""
    own = set()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            own.add(each.stat().st_ino)
    both = (Path(f"/proc/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6"))
    lines = (line.split() for lines in both for line in lines)
    return {
        int(line[9]): line[1].split(":")[0] in LOOPBACKS
        for line in lines
        if line[3] == "0A" and int(line[9]) in own
    }


# feature tcp {
@pytest.mark.parametrize("given", [None, "tcp,self", "all"])
@pytest.mark.parametrize(
    ("name", "has_gpu", "to_others", "on_loopback"),
    [("auto", False, 0, 1), ("auto", True, 0, 2), ("tcp", False, 0, 1), ("nixl", False, 0, 1)],
)
def test_no_port_is_open_but_that_of_tcp_whatever_ucx_is_told(
    monkeypatch, given, name, has_gpu, to_others, on_loopback
):
    """TCP listens on loopback here; with a GPU and without RDMA UCX does, so that it is told when
    a process of this host ends.
    """
    if given:
        monkeypatch.setenv("UCX_TLS", given)
    monkeypatch.setattr(choose, "has_gpu", lambda: has_gpu)
    before = listening()
    network = {} if name == "nixl" else {"listen": "127.0.0.1"}
    with transport(name, **network):
        new = [is_local for inode, is_local in listening().items() if inode not in before]
    assert (new.count(False), new.count(True)) == (to_others, on_loopback)
    assert os.environ.get("UCX_TLS") == given


def test_ucx_as_it_likes_listens_to_other_hosts():
    before = listening()
    with transport("ucx"):
        new = {inode: at for inode, at in listening().items() if inode not in before}
    assert not all(new.values()), "this shows that the test above could fail"


@pytest.mark.parametrize(
    ("name", "network", "made"),
    [
        ("auto", {}, ["tcp"]),
        ("tcp", {}, ["tcp"]),
        ("nixl", {}, ["nixl"]),
        ("ucx", {}, ["ucx"]),
        ("ucx", {"fabric": "west"}, ["ucx", "tcp"]),  # feature fabrics
        ("ucx-tcp", {"listen": "lo"}, ["ucx-tcp", "tcp"]),  # feature fabrics
        ("nixl", {"fabric": "west"}, ["nixl", "tcp"]),  # feature fabrics
    ],
)
def test_the_log_names_the_ways_of_a_process(caplog, name, network, made):
    caplog.set_level("INFO", logger="torch_ros")
    with transport(name, **network):
        [said] = [each.getMessage() for each in caplog.records if "transport:" in each.msg]
    assert said.startswith(f"transport: {'; '.join(choose.HOW[each] for each in made)}")


def test_who_copies_within_a_host_is_told_which_processes_are_frozen():
    with transport("auto") as made:
        assert made.is_frozen is life.is_frozen


def test_devices_of_rdma_that_ucx_cannot_use_are_told_of_and_done_without(
    monkeypatch, tmp_path, caplog
):
    (tmp_path / "uverbs0").touch()
    monkeypatch.setattr(rdma, "DEVICES", tmp_path)
    assert rdma.has_devices()
    with transport("auto"):
        pass
    assert "neither RDMA nor NVLink is used: UCX cannot use" in caplog.text
    with pytest.raises(UsageError, match="UCX cannot use RDMA"), transport("nixl"):
        pass


def test_a_gpu_is_read_by_nixl_where_rdma_cannot_be_used(monkeypatch, tmp_path, caplog):
    (tmp_path / "uverbs0").touch()
    monkeypatch.setattr(rdma, "DEVICES", tmp_path)
    for module in (choose, ucx):
        monkeypatch.setattr(module, "has_gpu", lambda: True)
    caplog.set_level("INFO", logger="torch_ros")
    with transport("auto"):
        pass
    assert "RDMA is not used: UCX cannot use RDMA" in caplog.text
    assert "transport: NIXL without a port to other hosts; TCP" in caplog.text


# } tcp
def test_what_the_user_told_ucx_is_known_while_it_is_told_something_else(monkeypatch):
    for value in ("cma,self", ""):
        monkeypatch.setenv("UCX_TLS", value)
        with ucx.closing({"cma"}):
            assert os.environ["UCX_TLS"] != value
            assert ucx.told() == value
        assert (os.environ["UCX_TLS"], ucx.told()) == (value, value)


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ("", "^cma,tcp"),
        ("all", "^cma,tcp"),
        ("^rc", "^cma,rc,tcp"),
        ("rc_x,tcp,cuda_ipc", "rc_x,cuda_ipc"),
        ("sm,self", "self,posix,sysv"),
        ("tcp", ""),
    ],
)
def test_what_ucx_may_use_is_what_it_is_told_without_what_is_closed(given, allowed):
    assert ucx.allowed(given, {"tcp", "cma"}) == allowed
