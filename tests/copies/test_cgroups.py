"""The groups that a process is in, as its files in /proc say, and the cores that they leave it."""

import math

import pytest
from kit import write_files

from torch_ros.copies.cgroups import cores, folders

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
    cgroup, mountinfo, found = LAYOUTS[layout]
    assert [str(folder) for _, folder in folders("memory", cgroup, mountinfo)] == found


def test_the_narrowest_quota_of_cores_on_the_way_up_counts(tmp_path):
    assert cores(tmp_path) == math.inf
    write_files(tmp_path / "proc/self", cgroup="0::/job/step", mountinfo=v2())
    top = tmp_path / "sys/fs/cgroup"
    write_files(top / "job/step", cpu_max="max 100000")
    assert cores(tmp_path) == math.inf
    write_files(top / "job", cpu_max="150000 100000")
    assert cores(tmp_path) == 1.5
    write_files(top / "job/step", cpu_max="50000 100000")
    assert cores(tmp_path) == 0.5
    write_files(top / "job/step", cpu_max="many")
    assert cores(tmp_path) == 1.5


@pytest.mark.parametrize(("quota", "left"), [(-1, math.inf), (250000, 2.5)])
def test_the_first_version_of_groups_tells_it_in_two_files(tmp_path, quota, left):
    mounted = v1().replace("memory", "cpu,cpuacct")
    write_files(tmp_path / "proc/self", cgroup="4:cpu,cpuacct:/job\n", mountinfo=mounted)
    group = tmp_path / "sys/fs/cgroup/cpu,cpuacct/job"
    write_files(group, cpu_cfs_quota_us=quota, cpu_cfs_period_us=100000)
    assert cores(tmp_path) == left
