"""A folder of one content is written once on a host, and stays as long as a process uses it."""

import errno
import fcntl
import gc
import os
import threading
from pathlib import Path

import pytest

from torch_ros.errors import DeadlineExceeded, FolderError
from torch_ros.integrations import shared_folders
from torch_ros.integrations.shared_folders import pinned

# Another process that writes a folder, or has it; it says so, and waits to be killed.
HOLDER = """
import sys
import time
from pathlib import Path
from torch_ros.integrations.shared_folders import pinned

def said(word):
    Path(sys.argv[2]).write_text(word)
    time.sleep(600)

def write(folder):
    (folder / "half").write_text("1")
    if sys.argv[3] == "writes":
        said("writes")

kept = pinned("a", write, 20, Path(sys.argv[1]))
said("has")
"""


def write(folder):
    (folder / "file").write_text("1")


def never(folder):
    raise AssertionError("it is there")


def test_a_content_is_written_once(tmp_path):
    first = pinned("a", write, 20, tmp_path)
    again = pinned("a", never, 20, tmp_path)
    assert first.path == again.path
    assert (first.path / "file").read_text() == "1"
    assert pinned("b", write, 20, tmp_path).path != first.path


def test_a_folder_stays_until_the_last_one_lets_go(tmp_path):
    first, again = pinned("a", write, 20, tmp_path), pinned("a", never, 20, tmp_path)
    first.let_go()
    other = pinned("b", write, 20, tmp_path)  # sweeps
    assert again.path.exists()
    again.let_go()
    assert not again.path.exists()
    assert other.path.exists()


def test_threads_that_come_at_once_get_what_one_of_them_wrote(tmp_path):
    written, found, start = [], [], threading.Barrier(8)

    def come():
        start.wait(20)
        found.append(pinned("a", lambda folder: written.append(write(folder)), 20, tmp_path))

    threads = [threading.Thread(target=come) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert len(written) == 1
    assert len({one.path for one in found}) == 1
    assert len(found) == 8


def test_a_write_that_fails_leaves_nothing(tmp_path):
    def fail(folder):
        write(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(FolderError, match=r"No space left on device; give it more room"):
        pinned("a", fail, 20, tmp_path)
    assert not list(tmp_path.iterdir())
    assert pinned("a", write, 20, tmp_path).path.exists()


def test_an_error_of_ours_is_raised_as_it_is(tmp_path):
    """Also one that is an OSError, as each TimeoutError."""

    def fail(folder):
        raise DeadlineExceeded("a read", 1.0, "a source that stands still")

    with pytest.raises(DeadlineExceeded, match="stands still"):
        pinned("a", fail, 20, tmp_path)
    assert not list(tmp_path.iterdir())


def holder(started, tmp_path, jobs, word):
    folder, said = tmp_path / "folders", tmp_path / "said"
    folder.mkdir()
    puppet = started.start(HOLDER, str(folder), str(said), word)
    jobs.await_path("said")
    return folder, puppet


def test_a_writer_that_is_killed_leaves_the_folder_to_the_next(tmp_path, started, jobs):
    folder, puppet = holder(started, tmp_path, jobs, "writes")
    with pytest.raises(DeadlineExceeded, match="another process writes"):
        pinned("a", never, 0.05, folder)
    puppet.kill()
    assert pinned("a", write, 20, folder).path.exists()


def test_a_folder_that_another_process_uses_is_not_swept(tmp_path, started, jobs):
    folder, puppet = holder(started, tmp_path, jobs, "has")
    path = pinned("a", never, 20, folder)
    path.let_go()
    pinned("b", write, 20, folder)
    assert path.path.exists()
    puppet.kill()
    pinned("c", write, 20, folder)
    assert not path.path.exists()


def test_a_sweep_in_between_is_noticed(tmp_path, monkeypatch):
    """The kernel lets go of the writer's lock before it takes that of a reader."""
    real, swept = fcntl.flock, []

    def flock(descriptor, kind):
        is_exchange = (tmp_path.exists() and not swept) and written and kind & fcntl.LOCK_SH
        if is_exchange:
            swept.append(1)
            real(descriptor, fcntl.LOCK_UN)
            shared_folders.sweep(tmp_path)
        real(descriptor, kind)

    written = []
    monkeypatch.setattr(shared_folders.fcntl, "flock", flock)
    found = pinned("a", lambda folder: written.append(write(folder)), 20, tmp_path)
    assert (found.path / "file").exists()
    assert len(written) == 2


def test_a_folder_that_another_process_has_written_meanwhile_is_not_written_again(
    tmp_path, monkeypatch
):
    real, others = fcntl.flock, []

    def flock(descriptor, kind):
        if kind & fcntl.LOCK_EX and not others:
            real(descriptor, fcntl.LOCK_UN)
            others.append("comes")
            others.append(pinned("a", write, 20, tmp_path).path)
        real(descriptor, kind)

    monkeypatch.setattr(shared_folders.fcntl, "flock", flock)
    found = pinned("a", never, 20, tmp_path)
    assert found.path == others[1]
    assert (found.path / "file").exists()


def taken_by_a_link(own):
    (own.parent / "elsewhere").mkdir()
    own.symlink_to(own.parent / "elsewhere")


@pytest.mark.parametrize("take", [taken_by_a_link, Path.touch], ids=["a link", "a file"])
def test_a_name_that_another_user_has_taken_is_not_used(tmp_path, monkeypatch, take):
    """All processes of this user then find the same longer one."""
    monkeypatch.setattr(shared_folders, "MEMORY", tmp_path)
    own = tmp_path / f"torch-ros-adapters-{os.geteuid()}"
    take(own)
    first, again = pinned("a", write, 20), pinned("a", never, 20)
    assert first.path == again.path
    assert first.path.parent.name.startswith(f"{own.name}-")
    assert first.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_folders, "MEMORY", tmp_path)
    first = pinned("a", write, 20)
    assert first.path.parent.name == f"torch-ros-adapters-{os.geteuid()}"
    monkeypatch.setattr(shared_folders.os, "geteuid", lambda: 4_000_000)
    (theirs := tmp_path / "torch-ros-adapters-4000000").mkdir()
    assert pinned("a", write, 20).path.parent != theirs
    assert not list(theirs.iterdir())


def test_memory_that_is_not_to_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_folders, "MEMORY", tmp_path / "missing")
    with pytest.raises(FolderError, match="missing/torch-ros-adapters-.*let this user write"):
        pinned("a", write, 20)


def test_a_folder_that_is_let_go_twice_closes_nothing_of_others(tmp_path):
    one = pinned("a", write, 20, tmp_path)
    one.let_go()
    other = os.open(tmp_path, os.O_RDONLY)  # of the lowest number that is free
    one.let_go()
    os.close(other)


def test_a_pin_that_is_dropped_keeps_no_folder(tmp_path):
    path = pinned("a", write, 20, tmp_path).path
    gc.collect()
    other = pinned("b", write, 20, tmp_path)  # sweeps
    assert not path.exists()
    assert other.path.exists()
