"""`torch-ros demo`: what it refuses. tests/processes runs it."""

import pytest

from torch_ros.cli import main


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--json",), "demo is a story for people"),
        (("--endpoint", "memory://here"), "demo starts processes, which share no memory://"),
    ],
)
def test_what_it_cannot_do_is_refused(options, complaint, capsys):
    assert main.main([*options, "demo"]) == 2
    assert complaint in capsys.readouterr().err


def test_an_etcd_that_is_not_there_is_told_before_a_process_is_started(capsys, monkeypatch):
    monkeypatch.setattr("torch_ros.cli.asking.ANSWER_S", 0.2)
    assert main.main(["--endpoint", "etcd://127.0.0.1:1", "demo"]) == 3
    assert "127.0.0.1:1" in capsys.readouterr().err
