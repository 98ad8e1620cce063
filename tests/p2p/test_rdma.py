"""Processes end with the exit code that is theirs where Debian's RDMA libraries are installed."""

import fcntl
import json
import os
import shutil
import subprocess
import sys

import pytest

PACKAGES = (
    *("libibverbs1", "ibverbs-providers", "librdmacm1"),
    *("libnl-3-200", "libnl-route-3-200"),
)
REACH_S = 60  # for Debian's registry to answer

# Each end is made in a child, by an interpreter that ends as any other does.
SCRIPT = """
import json, os, signal, sys
import torch  # once, for all

def open_transport():
    import torch_ros.p2p.nixl
    return torch_ros.p2p.nixl.NixlTransport()

def open_ucx():
    import nixl._bindings as bindings
    config = bindings.nixlAgentConfig()
    config.useProgThread = True
    agent = bindings.nixlAgent("a", config)
    agent.createBackend("UCX", {})
    return agent

def returns():
    open_transport().close()

def left_open():
    global kept
    kept = open_transport()

def exits():
    kept = open_transport()
    sys.exit(7)

def raises():
    kept = open_transport()
    raise ValueError("meant")

def ctrl_c():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kept = open_transport()
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()

def imports_nixl_first():
    import nixl
    open_transport().close()

def forks():
    import torch_ros
    if (child := os.fork()) == 0:
        return returns()
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

def has_another_library_first():
    import ctypes
    ctypes.CDLL("libibverbs.so.1")
    open_ucx()
    open_transport().close()

def uses_nixl_first():
    kept = open_ucx()
    open_transport().close()

said = {}
for end in sys.argv[1:]:
    if (child := os.fork()) == 0:
        sys.stdout = sys.stderr
        said = None
        globals()[end]()
        break
    said[end] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
if said is not None:
    print(json.dumps(said))
"""
ENDS = {
    "returns": 0,
    "left_open": 0,
    "exits": 7,
    "raises": 1,
    "ctrl_c": -2,
    "imports_nixl_first": 0,
    "forks": 0,
    "has_another_library_first": 0,
    # If this one ends well, NIXL's wheel is mended, and torch_ros/p2p/rdma.py can go.
    "uses_nixl_first": -11,
}
SPAWNING = """
import multiprocessing

def child():
    from torch_ros.p2p.nixl import NixlTransport
    NixlTransport()

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""
RANK = "from torch_ros.p2p.nixl import NixlTransport; NixlTransport()"


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """A folder with Debian's packages, unpacked once for all workers; their way to load it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "rdma"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "problem").exists():
            (folder / "problem").write_text(_unpacked(folder))
    if problem := (folder / "problem").read_text():
        pytest.skip(problem)
    found = {str(path.parent) for path in (folder / "root").rglob("lib*.so.*")}
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(sorted(found))}


def _unpacked(folder):
    """The reason why there are none; "": there are."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return "this host has no apt-get and dpkg-deb"
    lists = ["-o", f"Dir::State::lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
    quick = ["-o", "Acquire::http::Timeout=5", "-o", "Acquire::Retries=0"]
    apt, download = ["apt-get", "-qq", *quick], ["download", *PACKAGES]
    (folder / "lists/partial").mkdir(parents=True)
    (folder / "cache").mkdir()
    try:
        hosts = [*apt, "-o", f"Dir::Cache={folder}/cache", *download]
        if subprocess.run(hosts, cwd=folder, timeout=REACH_S).returncode:  # its lists are too old
            for package in folder.glob("*.deb"):
                package.unlink()
            for command in (["update"], download):
                subprocess.run([*apt, *lists, *command], cwd=folder, check=True, timeout=REACH_S)
    except subprocess.SubprocessError as error:
        return f"Debian's registry cannot be reached: {error}"
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder / "root"], check=True)
    return ""


@pytest.mark.parametrize(
    "ends", [["left_open", "uses_nixl_first"], pytest.param([*ENDS], marks=pytest.mark.long)]
)
def test_a_process_ends_with_its_own_exit_code(libraries, ends):
    command = [sys.executable, "-c", SCRIPT, *ends]
    done = subprocess.run(command, env=libraries, capture_output=True, text=True, timeout=100)
    assert json.loads(done.stdout) == {end: ENDS[end] for end in ends}, done.stderr
    assert done.stderr.count("SIGSEGV (exit code 139)") == 1  # said by the last


@pytest.mark.long
def test_a_spawned_child_ends_well(libraries, tmp_path):
    program = tmp_path / "spawning.py"
    program.write_text(SPAWNING)
    done = subprocess.run([sys.executable, program], env=libraries, timeout=100)
    assert done.returncode == 0


@pytest.mark.long
def test_torchruns_ranks_end_well(libraries, tmp_path):
    rank = tmp_path / "rank.py"
    rank.write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert subprocess.run([*torchrun, rank], env=libraries, timeout=100).returncode == 0
