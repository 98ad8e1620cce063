"""How much memory a host says that it has, and the groups of a process."""

import gc
import math
import os
import resource
import subprocess
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from kit import write_files

import torch_ros
from torch_ros.copies import cgroups
from torch_ros.copies.room import NAMES, V1, V2, available_bytes, left_in, ranks_here

V1_NONE = 9223372036854771712


@pytest.mark.parametrize(
    ("names", "files", "left"),
    [
        (V2, {"memory.max": "max", "memory.high": "max", "memory.current": "5"}, math.inf),
        (V2, {"memory.max": "90", "memory.high": "max", "memory.current": "50"}, 40),
        (V2, {"memory.max": "90", "memory.high": "60", "memory.current": "50"}, 10),
        (V2, {"memory.max": "90", "memory.current": "50", "memory.stat": "inactive_file 7"}, 47),
        (V2, {"memory.max": "90", "memory.current": "95"}, 0),
        (V2, {"memory.max": "90", "memory.current": "5", "memory.stat": "inactive_file 7"}, 90),
        (V2, {"memory.max": "90"}, math.inf),
        (V2, {"memory.current": "90"}, math.inf),
        (V2, {"memory.max": "many", "memory.current": "few", "memory.stat": "a\n\nb c"}, math.inf),
        (V1, {"memory.limit_in_bytes": f"{V1_NONE}", "memory.usage_in_bytes": "5"}, math.inf),
        (V1, {"memory.limit_in_bytes": "90", "memory.usage_in_bytes": "50"}, 40),
        (
            V1,
            {
                "memory.limit_in_bytes": "90",
                "memory.usage_in_bytes": "50",
                "memory.stat": "inactive_file 2\ntotal_inactive_file 9",
            },
            49,
        ),
    ],
)
def test_a_group_has_left_what_its_limit_and_its_use_leave(names, files, left):
    assert left_in(names, lambda name: files.get(name, "")) == left


MOUNTED = "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate"


def test_the_narrowest_group_on_the_way_up_counts(tmp_path):
    assert available_bytes(tmp_path) == math.inf
    write_files(tmp_path / "proc", meminfo="MemTotal: 900 kB\nMemAvailable:     100 kB\n")
    assert available_bytes(tmp_path) == 100 * 1024
    write_files(tmp_path / "proc/self", cgroup="0::/job/step/task", mountinfo=MOUNTED)
    top = tmp_path / "sys/fs/cgroup"
    write_files(top / "job/step/task", memory_max="max", memory_current=4000)
    assert available_bytes(tmp_path) == 100 * 1024
    write_files(
        top / "job", memory_max=20000, memory_current=5000, memory_stat="inactive_file 1000"
    )
    assert available_bytes(tmp_path) == 16000
    write_files(top / "job/step", memory_max=9000, memory_current=5000)
    assert available_bytes(tmp_path) == 4000
    (top / "job/step/memory.max").write_bytes(b"\xff\xfe")
    assert available_bytes(tmp_path) == 16000


def test_a_container_may_have_less_than_its_host(tmp_path):
    write_files(tmp_path / "proc", meminfo="MemAvailable:     100 kB\n")
    write_files(tmp_path / "sys/fs/cgroup", memory_max=20000, memory_current=5000)
    assert available_bytes(tmp_path) == 15000


@pytest.mark.parametrize(("told", "count"), [("2", 2), ("", 4), ("two", 4), ("0", 1)])
def test_ranks_are_here_as_torchrun_says_or_all_of_them(monkeypatch, told, count):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    assert ranks_here(4) == count


def test_this_host_has_some():
    assert 0 < available_bytes() < math.inf


JOB = """
import os, pathlib, sys
from torch_ros.copies.room import available_bytes
(pathlib.Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
print(int(available_bytes()))
"""


def own_group():
    """A new group of a real hierarchy below this process's own, and the file of its limit."""
    for version, folder in cgroups.own("memory", cgroups.reader()):
        limit = NAMES[version].limits[0]
        if (Path(folder) / limit).exists():
            return Path(folder) / f"torch_ros_{os.getpid()}", limit
    return None


@contextmanager
def room_left(size_bytes):
    """Within it, this process may map so many bytes more."""
    gc.collect()  # what a traceback of an earlier test keeps would be unmapped within it
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmSize" in x]
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = 1024 * int(line.split()[1]) + size_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


ROOM_BYTES = 100 << 20


@pytest.fixture
def trainer():
    endpoint = f"memory://{uuid.uuid4().hex}"
    with torch_ros.open("m", retain=("latest",), endpoint=endpoint, linger_s=0) as trainer:
        yield trainer


def large():
    return {"w": torch.zeros(3 * ROOM_BYTES, dtype=torch.uint8)}


def test_a_copy_that_the_own_limit_leaves_no_room_for_is_an_error_that_names_it(trainer):
    tensors = large()
    with room_left(ROOM_BYTES), pytest.raises(MemoryError) as caught:
        trainer.publish_copy(1, tensors)
    assert "a buffer for copies takes 3145" in str(caught.value)
    assert "too little: RLIMIT_AS (ulimit -v) leaves" in str(caught.value)
    assert trainer.version is None
    assert trainer.publish_copy(1, tensors)


def test_a_limit_of_the_process_alone_is_no_room_of_its_host(tmp_path):
    """Memory that it keeps mapped for its next copy counts against the limit, and is room."""
    with room_left(ROOM_BYTES):
        assert available_bytes(tmp_path) == math.inf


def test_a_retained_version_that_the_own_limit_leaves_no_room_for_is_dropped(trainer, caplog):
    trainer.register(large())
    trainer.publish(1)
    with room_left(ROOM_BYTES):
        trainer.unpublish()
    assert "may be lost, it cannot be copied: a copy" in caplog.text
    assert "RLIMIT_AS (ulimit -v) leaves" in caplog.text
    assert trainer.list() == {}


@pytest.mark.long
def test_a_limit_of_a_real_job_is_seen():
    if (found := own_group()) is None:
        pytest.skip("no cgroup with a controller of memory below which one can be made")
    group, limit = found
    try:
        group.mkdir()
        (group / limit).write_text(str(450 << 20))
    except OSError as error:
        group.is_dir() and group.rmdir()
        pytest.skip(f"this process may make no cgroup: {error}")
    try:
        job = subprocess.run([sys.executable, "-c", JOB, group], capture_output=True, text=True)
        assert job.returncode == 0, job.stderr
        assert 0 < int(job.stdout) <= 450 << 20
    finally:
        group.rmdir()
