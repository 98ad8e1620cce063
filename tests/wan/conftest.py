"""The lab, where it can be made, with an etcd in its west."""

import contextlib

import pytest
from lab import Lab, LabUnavailable


@pytest.fixture(scope="module")
def lab():
    """Two datacenters, 200 Mbit/s and 40 ms apart, that the tests of a file share."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(Lab())
        except LabUnavailable as error:
            pytest.skip(str(error))
        yield made


@pytest.fixture(scope="module")
def etcd_in_the_west(lab, running_etcd, tmp_path_factory):
    with contextlib.ExitStack() as stack:
        with lab.host("west"):
            directory = tmp_path_factory.mktemp("etcd")
            server = stack.enter_context(running_etcd(directory, address=lab.address("west")))
        yield server
