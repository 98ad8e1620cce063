"""`torch-ros push` and `pull`: from files to replicas, and from replicas to files, bit for bit."""

import errno
import fcntl
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from archived import everything, same
from kit import until
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import torch_ros
from torch_ros import Contents, ShardHandle
from torch_ros.checkpoints import written
from torch_ros.checkpoints.framing import INDEX, NAMES
from torch_ros.checkpoints.mapped import mapped
from torch_ros.cli import main, moving
from torch_ros.errors import FolderError, UsageError

DTYPES = list(NAMES)


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_a_version_is_pulled_bit_for_bit(opened, asked, tmp_path, form):
    tensors, trainer = everything(), opened("trainer")
    trainer.register(tensors)
    trainer.publish(7)
    code, out, err = asked("pull", trainer.model, "latest", tmp_path / "out", "--format", form)
    assert (code, err) == (0, "")
    assert f"version 7 of {trainer.model!r}: {len(tensors)} tensors" in out
    if form == "safetensors":
        found = load_file(tmp_path / "out" / "model.safetensors")
    else:
        found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        reader = dcp.FileSystemReader(tmp_path / "out")
        dcp.load(found, storage_reader=reader, no_dist=True)
    same(found, tensors)
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_what_is_pulled_is_pushed_and_a_rollout_cannot_tell(opened, asked, tmp_path):
    tensors, trainer = everything(), opened("trainer")
    trainer.register(tensors)
    trainer.publish(7)
    assert asked("pull", trainer.model, 7, tmp_path / "out")[0] == 0
    trainer.close()
    same(mapped(tmp_path / "out"), tensors)
    handle = opened("again", mapped(tmp_path / "out"))
    handle.publish(8)
    rollout = opened("rollout")
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    rollout.register(found)
    assert rollout.replicate() == 8
    same(found, tensors)


def test_many_files_have_an_index_and_hold_what_fits(opened, tmp_path):
    trainer, reader = opened("trainer"), opened("reader")
    tensors = {f"layer.{n}": torch.full((256,), float(n)) for n in range(7)}
    trainer.register(tensors)
    trainer.publish(1)
    contents = reader.contents(1)
    wanted = written.selected(contents, ["layer.[0-4]", "layer.6"])
    seen = []
    with written.made_whole(tmp_path / "out") as folder:
        written.write_safetensors(
            reader, contents, wanted, folder, lambda *done: seen.append(done), file_bytes=2100
        )
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == [*(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)), INDEX]
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 6 * 1024
    assert seen == [(done * 1024, 6144) for done in range(1, 7)]
    same(mapped(tmp_path / "out"), {name: t for name, t in tensors.items() if name != "layer.5"})
    with pytest.raises(UsageError, match="no tensor of version 1 matches 'head'"):
        written.selected(contents, ["head"])


def test_a_dtype_without_a_name_is_refused_and_nothing_is_left(opened, tmp_path):
    contents = Contents(1, {"w": (torch.complex128, torch.Size([2]))})
    with (
        pytest.raises(UsageError, match="'w' is torch.complex128"),
        written.made_whole(tmp_path / "out") as folder,
    ):
        written.write_safetensors(opened("r"), contents, contents.tensors, folder, print)
    assert not list(tmp_path.iterdir())


def test_a_tensor_whose_name_is_empty_or_a_path_is_pulled_compared_and_verified(
    opened, asked, tmp_path
):
    tensors, trainer = {name: torch.ones(2) for name in ("", "a/b", "\n", "w")}, opened("trainer")
    trainer.register(tensors)
    trainer.publish(1)
    assert asked("pull", trainer.model, 1, tmp_path / "out")[0] == 0
    same(mapped(tmp_path / "out"), tensors)
    assert asked("diff", trainer.model, 1, tmp_path / "out")[0] == 0
    assert asked("verify", trainer.model, 1, "--full", "--against", tmp_path / "out")[0] == 0


def test_a_name_that_files_have_for_something_else_is_refused(opened, asked, tmp_path):
    tensors, trainer = {"__metadata__": torch.ones(2)}, opened("trainer")
    trainer.register(tensors)
    trainer.publish(1)
    code, _, err = asked("pull", trainer.model, 1, tmp_path / "out")
    assert (code, "'__metadata__'" in err) == (2, True)
    assert not list(tmp_path.iterdir())
    assert asked("pull", trainer.model, 1, tmp_path / "out", "--format", "dcp")[0] == 0
    dcp.load(found := {"__metadata__": torch.zeros(2)}, checkpoint_id=tmp_path / "out")
    same(found, tensors)


@pytest.fixture
def short_of_memory():
    """From its call on, this process can have some 100 MiB more than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)

    def begin():
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (100 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))

    yield begin
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_too_little_memory_is_a_line(opened, asked, tmp_path, short_of_memory, form):
    trainer = opened("trainer", {"w": torch.zeros(1 << 30, dtype=torch.uint8)})
    trainer.publish(1)
    short_of_memory()
    code, _, err = asked("pull", trainer.model, 1, tmp_path / "out", "--format", form)
    assert code == 1
    assert "too little memory" in err
    assert not list(tmp_path.iterdir())


def test_a_link_in_the_place_of_what_a_pull_left_leads_nowhere(tmp_path):
    other, folder = tmp_path / "other", tmp_path / "folder"
    other.mkdir()
    folder.mkdir()
    (folder / ".out.aa.part").symlink_to(other)
    with written.made_whole(folder / "out"):
        pass
    assert list(other.iterdir()) == []


def test_a_folder_is_never_half_written_nor_overwritten(tmp_path):
    (tmp_path / ".out.0.part").mkdir()  # of a process that was killed
    (tmp_path / ".out.b.0.part").mkdir()  # of one that writes to another place
    (tmp_path / "out").mkdir()
    with pytest.raises(ZeroDivisionError), written.made_whole(tmp_path / "out") as folder:
        (folder / "file").write_text("half")
        raise ZeroDivisionError
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.b.0.part"}
    with written.made_whole(tmp_path / "out") as folder:
        (folder / "file").write_text("whole")
    assert (tmp_path / "out" / "file").read_text() == "whole"
    with pytest.raises(UsageError, match="is there already"), written.made_whole(tmp_path / "out"):
        pass


def test_of_two_writers_of_one_name_the_later_one_is_told_and_leaves_nothing(tmp_path, pool):
    """Also of one process: each has a lock of its own."""
    first, second = threading.Event(), threading.Event()

    def write(text, begun, may_end):
        with written.made_whole(tmp_path / "out") as folder:
            (folder / "file").write_text(text)
            begun.set()
            assert may_end.wait(20)

    later = pool.submit(write, "later", first, second)
    assert first.wait(20)
    write("sooner", threading.Event(), first)
    second.set()
    with pytest.raises(FolderError, match="somebody has made it meanwhile"):
        later.result(20)
    assert (tmp_path / "out" / "file").read_text() == "sooner"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_is_left_alone_while_its_writer_lives_and_removed_when_it_was_killed(tmp_path):
    ready, ends = os.pipe()
    writer = os.fork()
    if not writer:
        with written.made_whole(tmp_path / "out") as folder:
            (folder / "file").write_text("first")
            os.write(ends, b".")
            signal.pause()
    try:
        os.read(ready, 1)
        [first] = tmp_path.iterdir()
        with written.made_whole(tmp_path / "out") as folder:
            assert (first / "made" / "file").read_text() == "first"
            (folder / "file").write_text("second")
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert first.exists()
    with pytest.raises(UsageError, match="there already"), written.made_whole(tmp_path / "out"):
        pass
    (tmp_path / "out").rename(tmp_path / "was out")
    with written.made_whole(tmp_path / "out"):
        assert not first.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "was out"}


def test_a_writer_whose_folder_is_taken_for_left_behind_takes_another(tmp_path, monkeypatch):
    taken, mkdir = [], Path.mkdir

    def made_and_removed(path, *args, **kwargs):
        mkdir(path, *args, **kwargs)
        if path.name.endswith(".part") and len(taken) < 2:
            taken.append(path)
            if len(taken) == 1:
                path.rmdir()
            else:
                monkeypatch.setattr(written, "other", written._locked(path), raising=False)

    monkeypatch.setattr(Path, "mkdir", made_and_removed)
    with written.made_whole(tmp_path / "out") as folder:
        assert folder.parent not in taken
    os.close(written.other)


def test_where_files_cannot_be_locked_nobody_removes_what_is_there(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / ".out.0.part").mkdir()
    monkeypatch.setattr(fcntl, "flock", refuse)
    with written.made_whole(tmp_path / "out") as folder:
        names = {path.name for path in tmp_path.iterdir()}
        assert folder.parent.suffix == ".unlocked"
    assert names == {".out.0.part", folder.parent.name}
    assert {path.name for path in tmp_path.iterdir()} == {".out.0.part", "out"}


def places(folder):
    """Where nothing can be written, and what is said of it."""
    (folder / "file").write_text("")
    (folder / "circle").symlink_to("circle")
    (folder / "work").mkdir()
    os.chdir(folder / "work")
    return {
        "below a file": (folder / "file" / "x", "exists"),
        "a long name": (folder / ("x" * 300), "shorter name"),
        "a circle of links": (folder / "circle", "circle: "),
        "the working folder": (Path(), "in which this process works"),
        "the one above it": (Path(".."), "is there already"),
        "nowhere to write": (Path("/proc/out"), "out: "),
    }


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_pull_to_where_nothing_can_be_written_ends_with_a_line(
    opened, asked, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    trainer = opened("trainer", {"w": torch.zeros(9)})
    trainer.publish(1)
    for place, said in places(tmp_path).values():
        code, _, err = asked("pull", trainer.model, 1, place)
        assert code in {1, 2}
        assert said in err.splitlines()[-1]
    monkeypatch.chdir(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {"file", "circle", "work"}
    (tmp_path / "link").symlink_to("work")
    assert asked("pull", trainer.model, 1, tmp_path / "link")[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "work" / "model.safetensors").exists()


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
@pytest.mark.parametrize("form", ["safetensors", "dcp"])
@pytest.mark.parametrize("how", [errno.ENOSPC, "Ctrl-C"])
def test_a_pull_that_ends_while_it_writes_leaves_nothing(
    opened, asked, tmp_path, monkeypatch, form, how
):
    trainer = opened("trainer", {"w": torch.zeros(9)})
    trainer.publish(1)

    def end(*_):
        raise KeyboardInterrupt if how == "Ctrl-C" else OSError(how, os.strerror(how))

    monkeypatch.setattr(written.framing, "contents", end)
    monkeypatch.setattr(FileSystemWriter, "write_data", end)
    code, _, err = asked("pull", trainer.model, 1, tmp_path / "out", "--format", form)
    assert code == (130 if how == "Ctrl-C" else 1)
    assert how == "Ctrl-C" or "No space left on device; make room" in err
    assert not list(tmp_path.iterdir())


ODD = {
    "a number": '{"weight_map": {"w": 5}}',
    "a list": '{"weight_map": []}',
    "nothing": '{"weight_map": null}',
    "a list of all": "[]",
    "deep": '{"weight_map":' + "[" * 10**5,
    "twice": '{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}',
    "no number": '{"metadata": NaN, "weight_map": {"w": "a.safetensors"}}',
    "digits": '{"metadata": ' + "9" * 5000 + ', "weight_map": {"w": "a.safetensors"}}',
    "half a character": '{"weight_map": {"w": "\\ud800.safetensors"}}',
    "above": '{"weight_map": {"w": ".."}}',
    "itself": '{"weight_map": {"w": "."}}',
    "no name": '{"weight_map": {"w": ""}}',
    "no text": b"\xff\xfe{",
}


@pytest.mark.parametrize("content", ODD.values(), ids=ODD.keys())
def test_an_index_of_anything_else_is_refused(tmp_path, content):
    save_file({"w": torch.zeros(2)}, tmp_path / "a.safetensors")
    as_bytes = content if isinstance(content, bytes) else content.encode()
    (tmp_path / INDEX).write_bytes(as_bytes)
    with pytest.raises(UsageError):
        mapped(tmp_path)


def test_an_index_is_utf_8_whatever_the_locale_says(tmp_path, monkeypatch):
    save_file({"größe": torch.ones(2)}, tmp_path / "a.safetensors")
    index = json.dumps({"weight_map": {"größe": "a.safetensors"}}, ensure_ascii=False)
    (tmp_path / INDEX).write_text(index, encoding="utf-8")
    monkeypatch.setattr(io, "text_encoding", lambda encoding, *_: encoding or "ascii")
    assert mapped(tmp_path).keys() == {"größe"}


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device", "folder", "dangling", "FIFO below"])
def test_what_is_no_file_is_refused_and_never_opened(tmp_path, kind):
    place = tmp_path / "a.safetensors"
    if kind == "folder":
        place.mkdir()
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(place))
    elif "FIFO" in kind:
        os.mkfifo(place)
    else:
        place.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    if kind == "FIFO below":
        (tmp_path / INDEX).write_text('{"weight_map": {"w": "a.safetensors"}}')
    with pytest.raises(UsageError, match="expected a file of safetensors"):
        mapped(tmp_path)
    if kind == "FIFO":
        with pytest.raises(UsageError, match="expected a file of safetensors"):
            mapped(place)
        place.rename(tmp_path / INDEX)
        with pytest.raises(UsageError, match="is no index"):
            mapped(tmp_path)


def test_one_of_two_checkpoints_in_a_folder_is_chosen_by_a_pattern(tmp_path):
    for name, value in (("model-00001-of-00002", 1.0), ("model-00002-of-00002", 2.0)):
        save_file({f"m{value}": torch.full((2,), value)}, tmp_path / f"{name}.safetensors")
    assert mapped(tmp_path).keys() == {"m1.0", "m2.0"}
    save_file({"w": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    both = (
        "'consolidated.safetensors' and 'model-\\*-of-00002.safetensors', and no model.saf.*index"
    )
    with pytest.raises(UsageError, match=both):
        mapped(tmp_path)
    assert mapped(tmp_path / "model-*-of-00002.safetensors").keys() == {"m1.0", "m2.0"}
    assert mapped(tmp_path / "consolidated.safetensors").keys() == {"w"}
    with pytest.raises(UsageError, match="has no file"):
        mapped(tmp_path / "none-*")
    (tmp_path / "consolidated.safetensors").unlink()
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UsageError, match="expected 2 files, found 1"):
        mapped(tmp_path)


def test_checkpoints_that_are_none_are_named(tmp_path):
    with pytest.raises(UsageError, match="found neither"):
        mapped(tmp_path / "none")
    with pytest.raises(UsageError, match="has no file that ends in"):
        mapped(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"garbage")
    with pytest.raises(UsageError, match="cannot be read"):
        mapped(tmp_path)
    for name in "ab":
        save_file({"w": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(UsageError, match="expected it once"):
        mapped(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"v": "a.safetensors"}}))
    with pytest.raises(UsageError, match="says that 'v' is in a.safetensors"):
        mapped(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"v": "../a.safetensors"}}))
    with pytest.raises(UsageError, match="files of its own folder"):
        mapped(tmp_path)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(UsageError, match="is no index"):
        mapped(tmp_path)


def test_a_checkpoint_is_mapped_not_copied(tmp_path):
    save_file({"w": torch.ones(64, 1 << 18)}, tmp_path / "a.safetensors")
    before = private_mib()
    tensors = mapped(tmp_path)
    assert float(tensors["w"].sum()) == 64 * (1 << 18)
    assert private_mib() - before < 8  # of 64


def private_mib():
    with open("/proc/self/status") as status:  # noqa: PTH123
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith("RssAnon"))


PUSH = """
import json, sys, time
import torch_ros
from torch_ros.cli import main, moving

class Told:
    def write(self, text):
        told = {"said": text, "private_mib": private_mib() - BEFORE_MIB}
        told |= {"wall_s": time.monotonic() - BEGAN[0], "cpu_s": time.process_time() - BEGAN[1]}
        print(json.dumps(told), file=OUT)
    def flush(self):
        OUT.flush()
    def isatty(self):
        return False

def private_mib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon"))

torch_ros.open("imported", endpoint="memory://imported").close()
BEFORE_MIB = private_mib()
OUT, sys.stdout, BEGAN = sys.stdout, Told(), (time.monotonic(), time.process_time())
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
def test_a_gib_from_disk_is_published_in_a_second_and_takes_no_memory(opened, endpoint, tmp_path):
    """It prints the seconds from after the imports until the version is published, and the MiB."""
    torch.manual_seed(0)
    names = [f"model.layers.{number}.weight" for number in range(300)]
    tensors = {name: torch.randint(1 << 15, (1792, 1024), dtype=torch.int16) for name in names}
    tensors = {name: tensor.view(torch.bfloat16) for name, tensor in tensors.items()}
    assert sum(tensor.nbytes for tensor in tensors.values()) >= 1 << 30
    files = {f"model-{number}.safetensors": names[number::2] for number in range(2)}
    for file, inside in files.items():
        save_file({name: tensors[name] for name in inside}, tmp_path / file)
    where = {name: file for file, inside in files.items() for name in inside}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": where}))
    rollout = opened("rollout")
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    rollout.register(found)
    command = [sys.executable, "-c", PUSH, "--endpoint", endpoint, "push", str(tmp_path)]
    command += ["--model", rollout.model, "--version", "3", "--until-held", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        published = json.loads(process.stdout.readline())
        assert rollout.replicate(timeout_s=60) == 3
        said = [json.loads(line) for line in process.stdout]
    finally:
        process.kill()
        process.wait()
    same(found, tensors)
    print([published, *said])
    assert "300 tensors, 1.0 GiB" in published["said"]
    assert "leaving version 3" in said[-1]["said"]
    assert published["cpu_s"] < 1
    assert max(each["private_mib"] for each in (published, *said)) < 50


@pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
@pytest.mark.parametrize("ends_by", ["enough", "Ctrl-C"])
@pytest.mark.long
def test_a_process_that_pushes_stays_until_it_is_told_or_enough_have_it(
    opened, endpoint, tmp_path, ends_by
):
    tensors = {"w": torch.arange(1000.0)}
    save_file(tensors, tmp_path / "a.safetensors")
    rollout = opened("rollout")
    found = {"w": torch.zeros(1000)}
    rollout.register(found)
    command = [sys.executable, "-u", "-m", "torch_ros", "--endpoint", endpoint, "push"]
    command += [str(tmp_path), "--model", rollout.model, "--version", "3", "--replica", "disk"]
    command += ["--until-held", "1"] if ends_by == "enough" else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert rollout.replicate(timeout_s=60) == 3
    same(found, tensors)
    if ends_by == "Ctrl-C":
        line = "".join(process.stdout.readline() for _ in range(2))
        assert "nobody else" in line or "rollout" in line
        assert rollout.list() == {3: {"disk", "rollout"}}
        process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    assert "leaving version 3" in text
    assert rollout.list() == {3: {"rollout"}}


@pytest.mark.long
def test_a_process_that_pushes_stays_while_etcd_is_away(
    etcd_server, tmp_path, monkeypatch, caplog, pool
):
    monkeypatch.setattr(moving, "LOOK_S", 0.1)
    monkeypatch.setattr(moving, "OPEN_S", 2.0)
    endpoint, found = f"etcd://{etcd_server.host}", {"w": torch.zeros(1000)}
    save_file({"w": torch.arange(1000.0)}, tmp_path / "a.safetensors")
    command = ["--endpoint", endpoint, "push", str(tmp_path), "--model", "m", "--version", "3"]

    def look_on(rollout):
        rollout.wait(lambda there: 3 in there)
        etcd_server.kill()
        until(lambda: "it goes on" in caplog.text)
        etcd_server.start()
        return rollout.replicate()

    with torch_ros.open("m", endpoint=endpoint, replica="rollout", timeout_s=60) as rollout:
        rollout.register(found)
        looking = pool.submit(look_on, rollout)
        assert main.main([*command, "--until-held", "1"]) == 0
        assert looking.result() == 3
    same(found, {"w": torch.arange(1000.0)})


@pytest.mark.long
@pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
def test_a_pull_that_is_killed_leaves_no_folder_of_that_name(opened, endpoint, tmp_path):
    trainer = opened("trainer", {f"w{n}": torch.full((1 << 22,), float(n)) for n in range(24)})
    trainer.publish(1)
    command = [sys.executable, "-m", "torch_ros", "--endpoint", endpoint, "pull"]
    command += [trainer.model, "1", str(tmp_path / "out")]
    for delay_s in (0.0, 0.05, 0.1):
        process = subprocess.Popen(command)
        while process.poll() is None and not list(tmp_path.glob(".out.*.part/made/*")):
            time.sleep(0.005)
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        if process.returncode == -signal.SIGKILL:
            assert not (tmp_path / "out").exists()
    subprocess.run(command, check=True, timeout=120)
    assert os.listdir(tmp_path) == ["out"]  # noqa: PTH208
    assert float(load_file(tmp_path / "out" / "model.safetensors")["w23"][-1]) == 23.0


@pytest.mark.long
@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_transformers_loads_what_was_pulled(opened, asked, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.Qwen3Config(num_attention_heads=2, num_key_value_heads=1, **sizes)
    model = transformers.Qwen3ForCausalLM(config)
    trainer = opened("trainer", model.state_dict())
    trainer.publish(7)
    assert asked("pull", trainer.model, "7", tmp_path / "out")[0] == 0
    config.save_pretrained(tmp_path / "out")
    found = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "out")
    same(found.state_dict(), model.state_dict())


def test_versions_and_checkpoints_are_compared_bit_for_bit(opened, asked, tmp_path):
    trainer = opened("trainer")
    tensors = everything()
    trainer.register(tensors)
    trainer.publish(1)
    reader = opened("reader")
    kept = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    reader.register(kept)
    reader.replicate(1)
    trainer.unpublish()
    trainer.unregister()
    for dtype in (torch.bfloat16, torch.complex64, torch.bool, torch.float8_e4m3fn):
        raw = tensors[str(dtype)].view(-1).view(torch.uint8)
        raw[: 2 * dtype.itemsize : dtype.itemsize] ^= 1  # of two elements
    del tensors["one byte"]
    tensors["0-d"] = torch.tensor(3)
    trainer.register(tensors)
    trainer.publish(2)
    code, out, _ = asked("diff", trainer.model, 1, "latest")
    found = {line.split()[0]: line.split()[1:] for line in out.splitlines()[1:-1]}
    assert (code, found.pop("0-d")[:2]) == (1, ["-", "-"])
    assert found.pop("one")[1:] == ["-", "-", "only", "the", "first", "has", "it"]
    assert {name: row[0] for name, row in found.items()} == {
        f"torch.{name}": "2" for name in ("bfloat16", "complex64", "bool", "float8_e4m3fn")
    }
    assert out.splitlines()[-1].startswith(f"6 of {len(kept)} tensors differ: 8 of ")
    assert asked("diff", trainer.model, 1, 1)[0] == 0
    assert asked("pull", trainer.model, 1, tmp_path / "out")[0] == 0
    assert asked("diff", trainer.model, 1, tmp_path / "out", "--select", "torch.*")[0] == 0
    code, out, _ = asked("--json", "diff", trainer.model, 2, tmp_path / "out")
    assert (code, len(json.loads(out)["tensors"])) == (1, 6)


@pytest.fixture
def after_contents(monkeypatch):
    """`after_contents(act)`: done once, when a command has been told what a version contains."""

    def after(act):
        contents = ShardHandle.contents

        def told(handle, *given, **named):
            found = contents(handle, *given, **named)
            monkeypatch.setattr(ShardHandle, "contents", contents)
            act()
            return found

        monkeypatch.setattr(ShardHandle, "contents", told)

    return after


def test_both_versions_of_a_diff_are_found_at_one_moment(opened, asked, after_contents):
    """Before, the second one was looked for when the first was known."""
    trainers = [opened(f"trainer-{number}") for number in range(3)]
    for number, trainer in enumerate(trainers):
        trainer.register({"w": torch.full((4,), float(number))})
    trainers[0].publish(1)
    trainers[1].publish(2)
    after_contents(lambda: trainers[2].publish(3))
    code, out, _ = asked("diff", trainers[0].model, "latest", "latest-1")
    assert (code, out.splitlines()[-1].endswith("between 2 and 1")) == (1, True)
    code, out, _ = asked("--json", "diff", trainers[0].model, "latest-2", "latest")
    assert (code, json.loads(out)["versions"]) == (1, ["1", "3"])


def test_a_checkpoint_that_is_not_there_is_no_version_either(asked):
    code, _, err = asked("diff", "m", "1", "no-such-folder")
    assert code == 2
    assert "'no-such-folder' is no file or folder that is there; version" in err


@pytest.mark.parametrize("command", ["pull", "pull dcp", "diff", "verify"])
def test_a_number_that_is_published_anew_is_not_taken_for_the_version(
    opened, asked, after_contents, tmp_path, command
):
    old, new = opened("old", {"w": torch.zeros(4)}), opened("new", run="new")
    old.publish(1)
    new.register({"w": torch.ones(4)})
    after_contents(lambda: new.publish(1))
    words = {"pull": [tmp_path / "out"], "diff": [1], "verify": ["--against", tmp_path / "files"]}
    words["pull dcp"] = [tmp_path / "out", "--format", "dcp"]
    (tmp_path / "files").mkdir()
    save_file({"w": torch.zeros(4)}, tmp_path / "files" / "w.safetensors")
    code, _, err = asked(command.split()[0], old.model, 1, *words[command])
    assert code in {1, 2}
    is_told = "was published anew, or another run has begun" in err
    assert is_told or "with the content that it had" in err
    assert not (tmp_path / "out").exists()


def test_a_version_of_5000_digits_is_a_line(opened, asked, tmp_path):
    trainer = opened("trainer", {"w": torch.zeros(4)})
    trainer.publish(1)
    code, _, err = asked("pull", trainer.model, "9" * 5000, tmp_path / "out")
    assert (code, "expected a number" in err) == (2, True)
