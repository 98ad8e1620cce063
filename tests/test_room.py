"""How much memory a host says that it has."""

import math

from torch_ros.shard.room import available_bytes


def test_a_container_may_have_less_than_its_host(tmp_path):
    assert available_bytes(tmp_path) == math.inf
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemAvailable:     100 kB\n")
    assert available_bytes(tmp_path) == 100 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5000\n")
    (group / "memory.stat").write_text("anon 10\ninactive_file 1000\n")
    assert available_bytes(tmp_path) == 100 * 1024
    (group / "memory.max").write_text("20000\n")
    assert available_bytes(tmp_path) == 16000


def test_this_host_has_some():
    assert 0 < available_bytes() < math.inf
