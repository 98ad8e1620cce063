"""Rules are found by their names, and only where one is meant."""

import pytest
from planting import changed, owners

from torch_ros.protocol import calls, membership, seat, sources
from torch_ros.protocol.keys import Keys


def test_a_rule_is_changed_wherever_it_is_known():
    with changed("group_txn", lambda _: "another"):
        assert {calls.group_txn, seat.group_txn, sources.group_txn} == {"another"}
    assert calls.group_txn is seat.group_txn is sources.group_txn != "another"


def test_a_method_is_a_rule_of_its_class():
    assert owners("Keys.ready") == [(Keys, "ready")]


def test_where_several_have_one_name_a_module_tells_which_one_is_meant():
    with pytest.raises(LookupError, match=r"'leave' must be one.*installs.*membership"):
        owners("leave")
    assert owners("membership:leave") == [(membership, "leave")]


@pytest.mark.parametrize("rule", ["no_such_rule", "keys:leave", "NoSuchClass.ready"])
def test_a_rule_that_is_not_there_is_an_error(rule):
    with pytest.raises(LookupError, match="must be one"):
        owners(rule)
