"""No command answers bad input, or a bad moment, with a traceback: a line, and an exit code."""

import contextlib
import io
import os
import shlex
import signal
import subprocess
import sys
import threading
import uuid

import pytest
import torch
from crowd import Crowd
from safetensors.torch import save_file

from torch_ros import __main__, cli
from torch_ros.cli import asking, main, moving, parsing
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.records import SchemaRecord
from torch_ros.store.endpoint import connect
from torch_ros.store.txn import Put, Read, Txn

[_SUBCOMMANDS] = [each for each in parsing.parser()._actions if isinstance(each.choices, dict)]
ARGUMENTS = {  # of those that take more than a model
    "why": ["MODEL", "trainer"],
    "ready": ["--model", "MODEL", "--replica", "trainer"],
    "doctor": ["--model", "MODEL"],
    "verify": ["MODEL", "latest", "--timeout", "0.2"],
    "pull": ["MODEL", "latest", "FOLDER/out", "--timeout", "0.2"],
    "diff": ["MODEL", "latest", "latest-1", "--timeout", "0.2"],
    "archive": ["MODEL", "FOLDER/out", "--timeout", "0.2", "--once"],
    "push": ["FOLDER", "--model", "MODEL", "--version", "9", "--hold", "0.1"],
    "web": ["MODEL", "--port", "0"],
    "export": ["MODEL", "--port", "0"],
}
COMMANDS = [each for each in _SUBCOMMANDS.choices if each != "demo"]  # it takes no model
SERVE = {"web", "export"}
ASK_ETCD = [each for each in COMMANDS if each != "ready"]
each_command = pytest.mark.parametrize("command", COMMANDS)
each_that_asks = pytest.mark.parametrize("command", ASK_ETCD)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def ask(capsys, monkeypatch, tmp_path):
    """`ask(endpoint, command, model)`: its exit code, and what it says as errors."""
    (tmp_path / "a").mkdir()
    save_file({"w": torch.ones(4)}, tmp_path / "a" / "a.safetensors")

    def ask_(endpoint, command, model, *options):
        words = {"MODEL": model, "FOLDER": str(tmp_path / "a"), "FOLDER/out": str(tmp_path / "o")}
        command, *more = command.split()
        if command == "archive":
            pytest.importorskip("obstore")
        arguments = [words.get(each, each) for each in ARGUMENTS.get(command, ["MODEL"])] + more
        with contextlib.ExitStack() as stack:
            if command == "top":  # it draws on terminals only
                for name in ("stdin", "stdout"):
                    stack.enter_context(monkeypatch.context()).setattr(sys, name, Terminal())
            code = main.main(["--endpoint", endpoint, *options, command, *arguments])
        return code, capsys.readouterr().err

    return ask_


@pytest.fixture
def crowd():
    """A model that a trainer and a rollout have, by their records alone."""
    endpoint = f"memory://{uuid.uuid4().hex}"
    there = Crowd(connect(endpoint, timeout_s=5), "policy")
    for name in ("trainer", "rollout"):
        there.join(name)
    there.publish("trainer", 1)
    there.hold("rollout", 1)
    there.commit()
    return endpoint, there


def test_all_commands_are_tried():
    assert set(ARGUMENTS) < set(COMMANDS)
    assert {"ls", "top", "gc"} < set(COMMANDS)


@pytest.mark.parametrize("command", [each for each in ASK_ETCD if each != "push"])
def test_a_model_that_is_not_there_is_named_with_the_nearest(command, ask, crowd):
    endpoint, there = crowd
    before = there.kv.read(Read(()), timeout_s=5).rev
    code, err = ask(endpoint, command, "polciy")
    assert (code, "no model 'polciy'" in err, "did you mean 'policy'?" in err) == (2, True, True)
    assert there.kv.read(Read(()), timeout_s=5).rev == before


@each_that_asks
def test_an_etcd_that_does_not_answer_is_said(command, ask, monkeypatch):
    monkeypatch.setattr(asking, "ANSWER_S", 0.5)
    monkeypatch.setattr(moving, "OPEN_S", 0.5)
    code, err = ask("etcd://127.0.0.1:9", command, "policy")
    assert code == 3
    assert command == "doctor" or "127.0.0.1:9" in err
    assert "Traceback" not in err


@each_that_asks
def test_records_of_another_release_are_said(command, ask, crowd, capsys):
    endpoint, there = crowd
    there.kv.commit(
        Txn((), (Put(Keys("policy").schema(), SchemaRecord(99, "9.1").encode()),)), timeout_s=5
    )
    code, err = ask(endpoint, command, "policy")
    assert code == (1 if command == "doctor" else 3)
    assert command == "doctor" or ("9.1" in err and "0.1.0" in err)
    assert "Traceback" not in err


@each_that_asks
def test_ctrl_c_while_etcd_is_silent_is_an_exit_code(command, ask, ctrl_c, monkeypatch):
    monkeypatch.setattr(asking, "ANSWER_S", 20.0)
    at = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    at.start()
    try:
        code, err = ask("etcd://127.0.0.1:9", command, "policy")
    finally:
        at.cancel()
        at.join()
    assert (code, "torch-ros:" in err, "Traceback" in err) == (130, False, False)


@pytest.mark.parametrize(
    ("command", "name", "extra"),
    [
        ("top", "textual", "top"),
        ("top", "rich", "top"),
        ("web", "starlette", "web"),
        ("web", "uvicorn", "web"),
        ("export", "prometheus_client", "metrics"),
        ("push", "safetensors", "cli"),
    ],
)
def test_an_extra_that_is_not_installed_is_named(command, name, extra, ask, crowd, monkeypatch):
    ours = ("torch_ros.cli.", "torch_ros.checkpoints", "torch_ros.metrics.")
    for each in list(sys.modules):
        if each.partition(".")[0] == name:
            monkeypatch.setitem(sys.modules, each, None)
        elif each.startswith(ours):
            monkeypatch.delitem(sys.modules, each)
    monkeypatch.setitem(sys.modules, name, None)
    for module in ("top", "web", "moving"):  # where the package has them
        monkeypatch.delattr(cli, module, raising=False)
    code, err = ask(crowd[0], command, "policy")
    assert (code, f"{command} takes {name}, which is not installed" in err) == (2, True)
    assert err.endswith(f"install torch-ros with the extra {extra}, or tools, which has all\n")


@pytest.fixture
def fleet(opened, endpoint):
    """A model of which one rollout is behind."""
    trainer, *rollouts = (opened(name) for name in ("trainer", "behind", "rollout"))
    trainer.register({f"layer.{number}": torch.ones(4) for number in range(3)})
    trainer.publish(1)
    for rollout in rollouts:
        rollout.register({f"layer.{number}": torch.zeros(4) for number in range(3)})
        rollout.replicate()
    trainer.unpublish()
    trainer.publish(2)
    rollouts[1].update()
    return endpoint, trainer.model


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
@pytest.mark.parametrize("command", ["pull", "verify", "diff"])
def test_a_version_that_is_gone_is_usage_and_one_that_does_not_come_is_not_fine(
    command, fleet, monkeypatch, tmp_path, capsys
):
    more = {"pull": [str(tmp_path / "o")], "verify": [], "diff": ["latest"]}[command]
    said = []
    for number in ("0", "9", "9" * 20):
        arguments = [command, fleet[1], number, *more, "--timeout", "0.2"]
        said.append((main.main(["--endpoint", fleet[0], *arguments]), capsys.readouterr().err))
    assert [code for code, _ in said] == [2, 1, 2]
    assert "no readable version 0" in said[0][1]
    assert "version 9 is not published yet" in said[1][1]
    assert f"{'9' * 20}: expected 0 <= version <= {2**63 - 1}" in said[2][1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["push", "x", "--model", "m", "--version", "1", "--hold", "nan"], "is no time"),
        (["push", "x", "--model", "m", "--version", "1", "--hold", "-1"], "is no time"),
        (["push", "x", "--model", "m", "--version", "1", "--until-held", "0"], "whole number"),
        (["pull", "m", "1", "x", "--timeout", "nan"], "is no time"),
        (["verify", "m", "1", "--timeout", "inf"], "is no time"),
        (["diff", "m", "1", "2", "--timeout", "-1"], "is no time"),
        (["archive", "m", "x", "--timeout", "0"], "is no time"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main(arguments)
    assert said in capsys.readouterr().err


def test_files_that_are_not_there_are_said_before_a_version_is_waited_for(crowd, capsys, tmp_path):
    arguments = ["verify", "policy", "9", "--against", str(tmp_path / "none")]
    assert main.main(["--endpoint", crowd[0], *arguments]) == 2
    assert "found neither" in capsys.readouterr().err


def test_of_many_names_some_are_told(crowd, capsys):
    endpoint, there = crowd
    for number in range(100):
        there.join(f"rollout-{number}")
    there.commit()
    for number in range(100):
        other = Crowd(there.kv, f"other-{number}")
        other.join("trainer")
        other.commit()
    assert main.main(["--endpoint", endpoint, "why", "policy", "x"]) == 2
    assert capsys.readouterr().err.endswith("'rollout-0', 'rollout-1' and 99 more\n")
    assert main.main(["--endpoint", endpoint, "ls", "x"]) == 2
    assert capsys.readouterr().err.endswith("'other-0', 'other-1', 'other-10' and 98 more\n")


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
@pytest.mark.parametrize("command", [each for each in COMMANDS if each != "top"])
def test_output_that_nobody_reads_is_no_error(command, ask, fleet, monkeypatch):
    """As behind `| head`."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        code, err = ask(*fleet[:1], command, fleet[1])
    assert (code, "torch-ros:" in err, "Error" in err) == (0, False, False)


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
@pytest.mark.parametrize("command", [each for each in COMMANDS if each not in {"top", *SERVE}])
def test_a_terminal_of_40_columns_is_enough(command, ask, fleet, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        code, err = ask(*fleet[:1], command, fleet[1])
    assert (code in {0, 1}, "Traceback" in err) == (True, False)
    assert out.getvalue()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")  # noqa: PTH110
def test_an_output_that_is_full_is_a_line_and_an_exit_code():
    command = [sys.executable, "-m", "torch_ros", "--endpoint", "memory://full", "ls"]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (
        1,
        "torch-ros: [Errno 28] No space left on device\n",
    )


@pytest.mark.parametrize("command", _SUBCOMMANDS.choices)
def test_help_has_examples_that_can_be_typed(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main.main([command, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    found = [
        line.split("torch-ros ", 1)[1] for line in said.split("examples:")[1].splitlines() if line
    ]
    assert found
    for each in found:
        assert parsing.parser().parse_args(shlex.split(each)).command == command


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_table_in_a_pipe_has_a_line_for_each_row(ask, fleet, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    out = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        assert ask(*fleet[:1], "ls", fleet[1])[0] == 0
    wide = out.getvalue().splitlines()
    assert wide[0].split()[0] == "VERSION"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out := io.StringIO())
        patch.setenv("COLUMNS", "30")
        assert ask(*fleet[:1], "ls", fleet[1])[0] == 0
    assert len(out.getvalue().splitlines()) > len(wide)


def test_ctrl_c_before_the_commands_are_imported_is_an_exit_code(monkeypatch):
    class CtrlC:
        def find_spec(self, name, *_):
            if name == main.__name__:
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, main.__name__)
    monkeypatch.delattr(cli, "main")
    monkeypatch.setattr(sys, "meta_path", [CtrlC(), *sys.meta_path])
    assert __main__.main() == main.INTERRUPTED


@each_command
def test_a_model_whose_name_is_no_utf_8_is_refused(ask, command):
    """As Python has the byte 0xff of an argument."""
    code, err = ask("memory://", command, "\udcff")
    assert (code, err) == (
        main.USAGE,
        "torch-ros: name '\\udcff': expected text that UTF-8 can write\n",
    )


@pytest.mark.parametrize("closed", [["stdout"], ["stderr"], ["stdin", "stdout", "stderr"]])
@pytest.mark.parametrize("command", ["ls", "why", "gc", "top"])
def test_a_command_whose_streams_are_closed_ends_with_its_exit_code(
    crowd, monkeypatch, command, closed
):
    endpoint, _ = crowd
    arguments = ["--endpoint", endpoint, command, *ARGUMENTS.get(command, ["MODEL"])]
    arguments = ["policy" if each == "MODEL" else each for each in arguments]
    open_code = main.main(arguments)
    for name in closed:  # as Python has them after `>&-`
        monkeypatch.setattr(sys, name, None)
    assert main.main(arguments) == open_code


def test_a_complaint_that_nobody_can_hear_changes_no_exit_code(monkeypatch):
    broken = Terminal()
    broken.close()
    monkeypatch.setattr(sys, "stderr", broken)
    assert main.main(["--endpoint", "nothing://", "ls"]) == main.USAGE


def test_an_encoding_without_a_character_has_it_escaped(monkeypatch):
    there = Crowd(connect(f"memory://{uuid.uuid4().hex}", timeout_s=5), "mödel")
    there.join("trainer")
    there.publish("trainer", 1)
    there.commit()
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main.main(["--endpoint", there.kv.endpoint, "ls"]) == main.FINE
    assert rb"m\xf6del" in written.getvalue()
