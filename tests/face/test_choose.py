"""The network interfaces that TCP is given."""

import re
import socket

import pytest

from torch_ros.errors import UsageError
from torch_ros.face.choose import interfaces_for


def test_tcp_has_the_interfaces_that_are_named_by_the_user_or_by_ucx_or_all():
    there = tuple(name for _, name in socket.if_nameindex())
    assert "lo" in there
    assert interfaces_for((), "") == there
    assert interfaces_for((), "mlx5_0:1") == there, "those are RDMA's"
    assert interfaces_for((), "mlx5_0:1,lo") == ("lo",)
    assert interfaces_for(("lo",), "eth0") == ("lo",)
    with pytest.raises(UsageError, match=re.escape(f"['nosuch']: this host has {there[0]}")):
        interfaces_for(("lo", "nosuch"), "")
