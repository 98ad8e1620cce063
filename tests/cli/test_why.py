"""`torch-ros why`, over a store in memory and over a real etcd."""

import json
import os

import torch
from test_ls import published

from torch_ros.cli import waiting
from torch_ros.printable import printable
from torch_ros.protocol.waits import Blamed, Hop, Why


def test_a_replica_that_has_not_asked_is_named_with_its_process(opened, asked):
    trainer, rollout = opened("trainer"), opened("rollout")
    published(trainer, 7)
    code, out, err = asked("why", trainer.model, "rollout")
    assert (code, err) == (1, "")
    assert "rollout: has no version, makes no call, and has not asked for 7" in out
    assert f"py-spy dump --pid {os.getpid()}" in out
    rollout.register({"w": torch.empty(4)})
    rollout.replicate()
    code, out, _ = asked("why", trainer.model, "rollout")
    assert (code, out) == (0, "rollout: has version 7, and waits for nobody\n")
    code, out, _ = asked("--json", "why", trainer.model, "rollout", "--version", "9")
    found = json.loads(out)
    assert (code, found["schema"], found["kind"]) == (1, 1, "version")
    assert found["hops"][0]["replica"] == "rollout"


def test_names_that_are_nearly_right_are_told(opened, asked):
    trainer = opened("trainer")
    published(trainer, 7)
    code, _, err = asked("why", trainer.model, "trainr")
    assert (code, "there is 'trainer'" in err) == (2, True)
    code, _, err = asked("why", trainer.model[:-1], "trainer")
    assert (code, f"did you mean {trainer.model!r}?" in err) == (2, True)


def test_nothing_in_a_name_is_obeyed_by_a_terminal():
    there, gone = Blamed("r\x1b[2J", 0, "host", 7), Blamed("r", 1, "", 0)
    found = Why((Hop("r\x1b[2J", "waits"),), "process", (there, gone))
    assert [printable(line) for line in waiting.lines(found)] == [
        "r\\x1b[2J: waits",
        "  r\\x1b[2J, rank 0: host host, process 7; its stack, there: py-spy dump --pid 7",
        "  r, rank 1: it has no process here; start it, or look at why it ended",
    ]
