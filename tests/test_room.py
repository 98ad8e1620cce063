"""How much memory a host says that it has, and the groups of a process."""

import math
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch

import torch_ros
from torch_ros.shard import host_copies
from torch_ros.shard.room import V1, V2, available_bytes, groups, left_in

V1_NONE = 9223372036854771712
MOUNTED_V1 = (
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
)
MOUNTED_V2 = "41 31 0:38 {root} {at} rw,relatime - cgroup2 cgroup2 rw,nsdelegate"
SLURM = "/slurm/uid_0/job_7/step_0"


def v1(root="/"):
    return MOUNTED_V1.format(root=root)


def v2(root="/", at="/sys/fs/cgroup"):
    return MOUNTED_V2.format(root=root, at=at)


LAYOUTS = {  # /proc/self/cgroup, mountinfo, and the folders from the process's own on
    "v2 at the root": ("0::/\n", v2(), ["/sys/fs/cgroup"]),
    "v2 of systemd": (
        "0::/user.slice/app.scope\n",
        v2(),
        ["/sys/fs/cgroup/user.slice/app.scope", "/sys/fs/cgroup/user.slice", "/sys/fs/cgroup"],
    ),
    "v1": (
        f"4:memory:{SLURM}\n3:cpuset:/other\n1:name=systemd:/init\n",
        v1(),
        [f"/sys/fs/cgroup/memory{path}" for path in (SLURM, "/slurm/uid_0/job_7", "/slurm/uid_0")]
        + ["/sys/fs/cgroup/memory/slurm", "/sys/fs/cgroup/memory"],
    ),
    "v1 with other controllers": (
        "4:cpu,memory,pids:/a\n",
        v1().replace("rw,memory", "rw,cpu,memory,pids"),
        ["/sys/fs/cgroup/memory/a", "/sys/fs/cgroup/memory"],
    ),
    "hybrid": (
        "4:memory:/job\n0::/job\n",
        v1() + "\n" + v2(at="/sys/fs/cgroup/unified"),
        [f"/sys/fs/cgroup/{each}" for each in ("memory/job", "memory", "unified/job", "unified")],
    ),
    "a container that sees its own group": (
        "4:memory:/docker/c0\n",
        v1("/docker/c0"),
        ["/sys/fs/cgroup/memory"],
    ),
    "a group within such a container": (
        "4:memory:/docker/c0/job\n",
        v1("/docker/c0"),
        ["/sys/fs/cgroup/memory/job", "/sys/fs/cgroup/memory"],
    ),
    "a name that only begins alike": (
        "4:memory:/docker/c01\n",
        v1("/docker/c0"),
        ["/sys/fs/cgroup/memory"],
    ),
    "a namespace, from outside": ("0::/../other\n", v2(), ["/sys/fs/cgroup"]),
    "a mount from outside of the namespace": ("0::/\n", v2("/../.."), ["/sys/fs/cgroup"]),
    "a name with spaces and colons": (
        "0::/a b:c\n",
        v2(at="/sys/fs/c\\040g"),
        ["/sys/fs/c g/a b:c", "/sys/fs/c g"],
    ),
    "nothing told": ("", "", ["/sys/fs/cgroup"]),
    "garbage": ("x\n:\n0\n", "y\n - \n - cgroup2\n1 2 - cgroup x memory", ["/sys/fs/cgroup"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_groups_of_a_process_are_found(layout):
    cgroup, mountinfo, folders = LAYOUTS[layout]
    assert [str(folder) for _, folder in groups(cgroup, mountinfo)] == folders


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


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


def test_the_narrowest_group_on_the_way_up_counts(tmp_path):
    assert available_bytes(tmp_path) == math.inf
    write(tmp_path / "proc", meminfo="MemTotal: 900 kB\nMemAvailable:     100 kB\n")
    assert available_bytes(tmp_path) == 100 * 1024
    write(tmp_path / "proc/self", cgroup="0::/job/step/task", mountinfo=v2())
    top = tmp_path / "sys/fs/cgroup"
    write(top / "job/step/task", memory_max="max", memory_current=4000)
    assert available_bytes(tmp_path) == 100 * 1024
    write(top / "job", memory_max=20000, memory_current=5000, memory_stat="inactive_file 1000")
    assert available_bytes(tmp_path) == 16000
    write(top / "job/step", memory_max=9000, memory_current=5000)
    assert available_bytes(tmp_path) == 4000
    (top / "job/step/memory.max").write_bytes(b"\xff\xfe")
    assert available_bytes(tmp_path) == 16000


def test_a_container_may_have_less_than_its_host(tmp_path):
    write(tmp_path / "proc", meminfo="MemAvailable:     100 kB\n")
    write(tmp_path / "sys/fs/cgroup", memory_max=20000, memory_current=5000)
    assert available_bytes(tmp_path) == 15000


def test_this_host_has_some():
    assert 0 < available_bytes() < math.inf


JOB = """
import os, pathlib, sys
from torch_ros.shard import host_copies
from torch_ros.shard.room import available_bytes
(pathlib.Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
print(int(available_bytes()))
"""


def own_group():
    """A new group of a real hierarchy below this process's own, and the file of its limit."""
    for names, folder in groups(
        *(Path(f"/proc/self/{n}").read_text() for n in ("cgroup", "mountinfo"))
    ):
        if (Path(folder) / names.limits[0]).exists():
            return Path(folder) / f"torch_ros_{os.getpid()}", names.limits[0]
    return None


def test_a_copy_for_which_there_is_no_memory_is_not_made_and_the_trainer_steps_on(
    monkeypatch, caplog
):
    trainer = torch_ros.open("m", retain=("latest",), endpoint=f"memory://{uuid.uuid4().hex}")
    trainer.register({"w": torch.ones(9)})
    trainer.publish(1)
    with monkeypatch.context() as patch:
        patch.setattr(host_copies, "available_bytes", lambda: 30.0)
        trainer.unpublish()
    assert "may be lost, it cannot be copied: a copy takes 0.0 GB of host memory" in caplog.text
    assert trainer.list() == {}
    trainer.publish(2)
    trainer.unpublish()
    assert [*trainer.list()] == [2]
    trainer.close(linger_s=0)


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
