"""The doctor's findings about transport="tcp"."""

from torch_ros.features.tcp.trial import tried


def test_a_host_is_read_plain_and_sealed():
    told, problem = tried("")
    assert problem == ""
    assert not any(each.startswith(("127.", "fe80")) for each in told)
    assert tried("127.0.0.1:7000") == (("127.0.0.1",), "")


def test_what_is_wrong_is_said():
    told, problem = tried("nosuch")
    assert told == ()
    assert "no device 'nosuch'" in problem
