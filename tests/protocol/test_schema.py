"""Another release is told apart by one number, before any record of it is believed."""

from contextlib import contextmanager

import pytest
from kit import inside

import torch_ros
from torch_ros.errors import BackendError
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.records import SchemaRecord
from torch_ros.protocol.schema import SCHEMA
from torch_ros.store.txn import Delete, Put, Read, Txn, one

OTHER = SchemaRecord(SCHEMA + 1, "9.9.9")


@contextmanager
def of_another_release(handle):
    """Within, the model's records are another release's. Others list all models of this etcd."""
    kv, key = inside(handle).group.kv, Keys(handle.model).schema()
    [ours] = [entry.value for at, entry in entries(handle).items() if at == key]
    kv.commit(Txn((), (Put(key, OTHER.encode()),)), timeout_s=5)
    try:
        yield
    finally:
        kv.commit(Txn((), (Put(key, ours),)), timeout_s=5)


def entries(handle):
    ranges = (Keys(handle.model).groups(), one(Keys(handle.model).schema()))
    return inside(handle).group.kv.read(Read(ranges), timeout_s=5).entries


def test_the_first_handle_of_a_model_says_which_format_it_has(opened):
    first = opened("first")
    [there] = [e for key, e in entries(first).items() if key == Keys(first.model).schema()]
    assert SchemaRecord.decode(there.value, "") == SchemaRecord(SCHEMA, torch_ros.__version__)
    assert not there.lease_id
    opened("second")
    assert entries(first)[Keys(first.model).schema()] == there  # nobody writes it again


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "waited for"])
def test_a_model_of_another_release_is_refused_by_name_and_left_as_it_is(opened, is_new):
    handle = opened("here")
    with of_another_release(handle):
        before = entries(handle)
        with pytest.raises(
            BackendError, match=r"release 9\.9\.9 .*and this is release 0"
        ) as caught:
            opened("late" if is_new else "here", timeout_s=5)
        assert f"etcdctl del --prefix /torch-ros/{handle.model}/" in str(caught.value)
        assert entries(handle) == before
        with pytest.raises(BackendError, match=r"9\.9\.9"):
            handle.fleet()


@pytest.mark.long
@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_who_comes_back_to_an_empty_store_puts_it_again(opened):
    handle = opened("here", ttl_s=2)
    group = inside(handle).group
    group.kv.commit(Txn((), (Delete(one(Keys(handle.model).schema())),)), timeout_s=5)
    group.kv.revoke(group.session.lease_id, timeout_s=5)
    handle.wait(lambda _: Keys(handle.model).schema() in entries(handle), timeout_s=15)
