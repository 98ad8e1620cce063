"""The tensors of a handle come onto huge pages, if it is not told otherwise."""
# needs features shortcuts

import pytest
import torch
from kit import inside, until

import torch_ros
from torch_ros.features.huge_pages.pages import HugePages


def test_a_handle_keeps_pinned_memory_from_huge_pages(etcd_endpoint, monkeypatch):
    followed = []
    monkeypatch.setattr(HugePages, "follow", lambda _, *what: followed.append(what))
    tensors = {"a": torch.zeros(1 << 20), "pinned": torch.zeros(1 << 20)}
    pinned = tensors["pinned"].data_ptr()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda t: t.data_ptr() == pinned)
    with torch_ros.open("pinned", endpoint=etcd_endpoint, transport="auto") as handle:
        handle.register(tensors)
        tensors["a"].data = torch.ones(1 << 20)
        handle.publish(1)
        there = [where for where in followed if where[0]]
        assert [[r.address for r in regions] for regions, _ in there][-1] == [
            tensors["a"].data_ptr()
        ]
        assert len(there) == 2, "a tensor that moved is followed"
        handle.unpublish()


def settled(handle):
    until(lambda: not handle.huge_pages.bytes_waiting)
    return handle.huge_pages


def test_a_handle_brings_its_tensors_onto_huge_pages_once(etcd_endpoint, monkeypatch):
    calls = []
    monkeypatch.setattr(HugePages.__init__, "__defaults__", ("", lambda *a: calls.append(a) or 0))
    tensors = {f"t{n}": torch.full((1 << 20,), float(n)) for n in range(4)}
    with torch_ros.open("huge", endpoint=etcd_endpoint, transport="auto") as handle:
        assert handle.huge_pages == torch_ros.HugePageReport()
        handle.register(tensors)
        assert handle.huge_pages.bytes_huge == 0  # not within the call
        report = settled(handle)
        assert 8 << 20 <= report.bytes_huge == len(calls) << 21  # one at least within each
        handle.publish(1)
        handle.unpublish()
        handle.unregister()
        assert handle.huge_pages == torch_ros.HugePageReport()
        handle.register(tensors)
        assert settled(handle) == report
    assert len(calls) << 21 == report.bytes_huge


@pytest.mark.parametrize("way", ["option", "environment", "transport"])
def test_huge_pages_are_turned_off(etcd_endpoint, monkeypatch, way):
    if way == "environment":
        monkeypatch.setenv("TORCH_ROS_HUGE_PAGES", "0")
    options = {"huge_pages": way != "option", "transport": "ucx" if way == "transport" else "auto"}
    with torch_ros.open(way, endpoint=etcd_endpoint, **options) as handle:
        handle.register({"t": torch.ones(1 << 20)})
        said = {"option": "huge_pages=False", "environment": "TORCH_ROS_HUGE_PAGES=0"}
        assert said.get(way, "no memory is read through") in handle.huge_pages.off_because
        assert not inside(handle).pages._has_thread
