"""Fixtures that tests of several folders use."""

import gc
import os
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor

import demos
import kit
import pytest

import puppets
import torch_ros
from puppets.objects import ObjectServer
from torch_ros import environment
from torch_ros.store import run


def pytest_configure(config):
    """Share one warm parent among the processes that run tests."""
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        puppets.share_warm_parent()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import all tests; half a million objects, which no garbage collection looks at again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session")
def etcd_programs():
    """The directory with `etcd` and `etcdctl`."""
    return puppets.etcd_programs()


@pytest.fixture(scope="session")
def running_etcd():
    """A context with an etcd of one's own: `with running_etcd(directory, *options) as server`."""
    return puppets.running_etcd


@pytest.fixture
def etcd_server(tmp_path):
    """An etcd of this test's own, running; to be killed and started at will."""
    with puppets.running_etcd(tmp_path / "etcd") as server:
        yield server


@pytest.fixture(scope="session")
def etcd_endpoint(tmp_path_factory):
    """ "etcd://127.0.0.1:port" of an etcd that all tests share: use a prefix of your own."""
    with puppets.running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield f"etcd://{server.host}"


@pytest.fixture
def etcd_cluster(tmp_path):
    """A cluster of this test's own, running; its members to be killed and restarted at will."""
    cluster = puppets.EtcdCluster(tmp_path)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def shared_etcd_cluster(tmp_path_factory):
    """A cluster that all tests share: use a prefix of your own, and kill nothing."""
    cluster = puppets.EtcdCluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(autouse=True, scope="session")
def ready_folder(tmp_path_factory):
    """Where engines of tests say what they use: nobody's probe finds them."""
    os.environ[environment.READY_DIR] = str(tmp_path_factory.mktemp("ready"))


@pytest.fixture
def started(tmp_path):
    """Puppets of this test: `started.start(program, *arguments)`."""
    made = puppets.Puppets(tmp_path)
    yield made
    made.close()


@pytest.fixture
def jobs(etcd_endpoint, started, tmp_path):
    """Jobs of this test: `jobs.run_ranks(2, "reshard")`; tests/puppets/programs has them."""
    return puppets.Jobs(etcd_endpoint, tmp_path, started)


@pytest.fixture
def server(monkeypatch):
    """A store of objects that the environment leads to: "s3://weights"."""
    server = ObjectServer()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


@pytest.fixture
def surroundings(tmp_path):
    """The environment in which an example has an etcd and a temporary directory of its own."""
    with demos.apart(tmp_path) as environment:
        yield environment


@pytest.fixture
def ctrl_c():
    """SIGINT interrupts here and in processes that this test starts: nohup and `&` ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


endpoint = pytest.fixture(params=kit.STORES)(kit.store)


@pytest.fixture
def quick_looks(monkeypatch):
    """A wait asks ten times as often whether to go on."""
    monkeypatch.setattr(run, "LOOK_S", run.LOOK_S / 10)


@pytest.fixture
def opened_with():
    """The options of all handles of a module, which may have its own."""
    return {}


@pytest.fixture
def opened(endpoint, opened_with):
    """Handles of one model, closed in the end: `opened("replica", tensors, **options)`."""
    own = "m-" + uuid.uuid4().hex[:8]
    handles, always = [], {"endpoint": endpoint, "timeout_s": 20, "ttl_s": 5, **opened_with}

    def open_(replica=None, tensors=None, *, model=own, **options):
        handle = torch_ros.open(model, replica=replica, **(always | options))
        handles.append(handle)
        if tensors is not None:
            handle.register(tensors)
        return handle

    yield open_
    for handle in handles:
        handle.close(linger_s=0)


@pytest.fixture
def asked(endpoint, capsys):
    """Runs a command: its exit code, and what it has printed on either stream."""

    def ask(*arguments):
        from torch_ros.cli import main

        code = main.main(["--endpoint", endpoint, *map(str, arguments)])
        return code, *capsys.readouterr()

    return ask


@pytest.fixture
def url(tmp_path):
    (tmp_path / "bucket" / "another model").mkdir(parents=True)  # an archiver was here
    return str(tmp_path / "bucket")


@pytest.fixture(scope="module")
def mesh():
    """A device mesh of this process alone."""
    import torch.distributed
    from torch.distributed.device_mesh import init_device_mesh

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.fixture
def pool():
    """Threads that are ranks."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def ranks(opened, pool):
    """All ranks of a replica, opened together: `ranks("replica", 2, **options)`."""

    def open_ranks(name, count=2, **options):
        def open_rank(rank):
            return opened(name, rank=rank, world_size=count, **options)

        return list(pool.map(open_rank, range(count)))

    return open_ranks
