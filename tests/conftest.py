"""Fixtures that tests of several folders use."""

import signal

import pytest

import puppets


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
def ctrl_c():
    """SIGINT interrupts here and in processes that this test starts: nohup and `&` ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
