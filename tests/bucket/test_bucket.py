"""A version goes into a bucket and comes back, bit for bit, in any sharding; or it is refused."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from itertools import chain

import kit
import pytest
import torch
import torch.distributed.checkpoint as dcp
from archived import everything, same
from kit import both_stores, read_only
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

import torch_ros
import torch_ros.bucket
from puppets.objects import ObjectServer
from torch_ros import errors
from torch_ros.bucket import archive, files, reading
from torch_ros.bucket.archive import Archiver, Form
from torch_ros.checkpoints.framing import INDEX
from torch_ros.checkpoints.mapped import mapped
from torch_ros.cli import main
from torch_ros.weights.local import build, local_chunks

pytest.importorskip("obstore")


LACKING = torch.ones(3, 5, dtype=torch.complex128)  # a dtype that safetensors has not


def zeros(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


@pytest.fixture
def bucket(url, opened):
    return torch_ros.bucket.open(url, opened("anybody").model)


@pytest.fixture
def archived(opened, bucket):
    """Publishes tensors and archives them; then the replica is closed."""

    def publish(version, tensors, *, name="trainer", close=True, **options):
        trainer = opened(name, tensors)
        trainer.publish(version)
        archiver = Archiver(opened("archiver", spot=True), bucket, keep=5, **options)
        written = archiver.archive(lambda *_: None)
        archiver.say()
        if close:
            trainer.close()
        return written

    return publish


endpoint = pytest.fixture(kit.store)  # in memory, where nothing else is said


@both_stores
def test_a_version_comes_back_bit_for_bit_when_everybody_has_gone(archived, bucket):
    tensors = everything(complex128=LACKING)
    written = archived(7, tensors)
    assert (written.version, written.tensor_count) == (7, len(tensors))
    assert bucket.list() == {7: "full"}
    found = zeros(tensors)
    assert bucket.load(found) == 7
    same(found, tensors)
    part = {"nan": torch.zeros(3), "0-d": torch.tensor(0.0)}
    assert bucket.load(part, 7) == 7
    same(part, {name: tensors[name] for name in part})


def test_a_writer_leaves_its_marker_before_anything_else(opened, archived, bucket, monkeypatch):
    there, put = [], bucket.store.put

    def putting(*arguments, **options):
        there.append(bucket.keys())
        put(*arguments, **options)

    monkeypatch.setattr(bucket.store, "put", putting)
    archived(7, {"w": torch.ones(3)})
    assert there == [["torch_ros"]]


@pytest.mark.parametrize("file_bytes", [1, 700, 10**9])
def test_tools_of_others_read_the_folder(archived, bucket, url, tmp_path, file_bytes):
    tensors = everything(complex128=LACKING)
    archived(7, tensors, form=Form(file_bytes=file_bytes))
    [folder] = {path.parent for path in (tmp_path / "bucket").rglob("*.safetensors")}
    plain = mapped(folder)
    odd = plain.pop("complex128")
    assert torch.equal(odd.view(torch.complex128), tensors.pop("complex128").view(-1))
    same(plain, tensors)
    readable = {n: torch.zeros_like(t) for n, t in tensors.items() if n in {"matrix", "nan"}}
    dcp.load(readable, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
    same(readable, {name: tensors[name] for name in readable})
    if file_bytes == 10**9:
        assert load_file(folder / "model.safetensors").keys() == {*tensors, "complex128"}
    else:
        index = json.loads((folder / INDEX).read_text())
        assert index["weight_map"].keys() == {*tensors, "complex128"}
    found = zeros(tensors)
    bucket.load(found)
    same(found, tensors)


@pytest.mark.parametrize("part_bytes", [64, 1000, 4 << 20])
def test_any_sharding_is_filled(archived, bucket, monkeypatch, part_bytes):
    monkeypatch.setattr(files, "PART_BYTES", part_bytes)
    monkeypatch.setattr(reading, "PART_BYTES", part_bytes)
    monkeypatch.setattr(reading, "WINDOW_BYTES", 4 * part_bytes)
    whole = torch.randn(60, 40, 3)
    tensors = {"w": whole, "before": torch.zeros(3, dtype=torch.int8), "x": torch.randn(50)}
    archived(7, tensors, form=Form(file_bytes=600))
    for cut in ("rows", "columns", "odd", "transposed", "inside"):
        if cut == "rows":
            chunks = {(n, 0, 0): torch.zeros(15, 40, 3) for n in range(0, 60, 15)}
        elif cut == "columns":
            chunks = {(0, n, 0): torch.zeros(60, 8, 3) for n in range(0, 40, 8)}
        elif cut == "odd":
            chunks = {(0, 0, 0): torch.zeros(7, 40, 3), (7, 0, 0): torch.zeros(53, 1, 3)}
            chunks[7, 1, 0] = torch.zeros(53, 39, 3)
        elif cut == "transposed":
            chunks = {(0, 0, 0): torch.zeros(3, 40, 60).permute(2, 1, 0)}
        else:
            chunks = {(0, 0, 0): torch.zeros(61, 41, 4)[1:, 1:, 1:]}
        bucket.load({"w": torch_ros.Chunked((60, 40, 3), torch.float32, chunks)})
        for at, box in chunks.items():
            expected = whole[tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))]
            assert torch.equal(box, expected), cut


def test_a_shard_by_rows_reads_little_more_than_its_own(archived, bucket, monkeypatch):
    whole = torch.arange(8 << 20, dtype=torch.int32).view(8192, 1024)  # 32 MiB
    archived(7, {"w": whole})
    asked = []
    get_ranges = bucket.store.get_ranges

    def counted(key, starts, ends):
        asked.append(sum(ends) - sum(starts))
        return get_ranges(key, starts, ends)

    monkeypatch.setattr(bucket.store, "get_ranges", counted)
    mine = torch.zeros(1024, 1024, dtype=torch.int32)
    bucket.load({"w": torch_ros.Chunked(whole.shape, torch.int32, {(2048, 0): mine})})
    assert torch.equal(mine, whole[2048:3072])
    assert sum(asked) <= mine.nbytes + 2 * files.PART_BYTES


@pytest.mark.parametrize("tensors", [{}, {"e": torch.empty(0, 7)}], ids=["none", "empty"])
def test_a_version_without_elements_is_one_too(archived, bucket, tensors):
    archived(7, tensors)
    assert bucket.load(zeros(tensors)) == 7
    assert bucket.load({}) == 7


def test_parameters_are_filled_and_autograd_notices(archived, bucket):
    archived(7, {"weight": torch.ones(3, 4), "bias": torch.ones(3)})
    module = torch.nn.Linear(4, 3)
    loss = module(torch.ones(2, 4, requires_grad=True)).square().sum()
    assert bucket.load(dict(module.named_parameters())) == 7
    assert module.weight.eq(1).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.long
def test_transformers_loads_an_archived_version(archived, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.Qwen3Config(num_attention_heads=2, num_key_value_heads=1, **sizes)
    model = transformers.Qwen3ForCausalLM(config)
    archived(7, dict(model.state_dict()), form=Form(file_bytes=9000))
    [folder] = {path.parent for path in (tmp_path / "bucket").rglob("*.safetensors")}
    config.save_pretrained(folder)
    found = transformers.Qwen3ForCausalLM.from_pretrained(folder)
    same(found.state_dict(), dict(model.state_dict()))


@pytest.mark.parametrize("streams", [False, True])
def test_a_name_that_files_have_for_something_else_is_refused(archived, bucket, streams):
    with pytest.raises(errors.UsageError, match="'__metadata__'"):
        archived(1, {"__metadata__": torch.ones(2)}, form=Form(streams=streams))
    assert bucket.list() == {}


def test_what_does_not_fit_is_refused_and_nothing_is_written(archived, bucket):
    archived(7, {"w": torch.ones(4), "v": torch.ones(2)})
    mine = {"w": torch.zeros(4), "v": torch.zeros(2, dtype=torch.float64)}
    with pytest.raises(errors.ManifestMismatch, match="'v'.*does not cast"):
        bucket.load(mine)
    with pytest.raises(errors.ManifestMismatch, match="missing from the version"):
        bucket.load({"w": mine["w"], "u": torch.zeros(1)})
    with pytest.raises(errors.VersionNotFound, match="the bucket has 7"):
        bucket.load({"w": mine["w"]}, 6)
    for _ in range(2):
        with pytest.raises(errors.UsageError, match="expected a mapping"):
            bucket.load([mine["w"]])
        assert not mine["w"].any()
        bucket.load({"w": torch.zeros(4)})


@pytest.mark.usefixtures("ctrl_c")
def test_memory_that_may_only_be_read_is_named_and_nothing_is_written(archived, bucket, tmp_path):
    archived(1, {"a": torch.ones(9), "w": torch.ones(5, 3)})
    tensors = {"a": torch.zeros(9), "w": read_only(tmp_path / "w", 5, 3)}
    with pytest.raises(
        errors.UsageError, match="load: tensor 'w' lies in memory that .* may only read"
    ):
        bucket.load(tensors)
    assert not tensors["a"].any()


@contextmanager
def standing_still(bucket, monkeypatch, meanwhile=lambda: None):
    """A target for a read that ends soon. Its bytes come when the caller has gone on."""
    comes, came, mine = threading.Event(), threading.Event(), torch.zeros(1 << 10)
    get_ranges, copy_out = bucket.store.get_ranges, reading._copy_out

    def slow(*asked):
        found = get_ranges(*asked)
        meanwhile()
        comes.wait(60)
        return found

    def copied(*asked):
        came.set()
        copy_out(*asked)

    monkeypatch.setattr(bucket.store, "get_ranges", slow)
    monkeypatch.setattr(reading, "_copy_out", copied)
    threads, began_s = set(threading.enumerate()), time.monotonic()
    yield {"w": mine}
    assert time.monotonic() - began_s < 30
    comes.set()
    for late in set(threading.enumerate()) - threads:
        late.join(60)
    assert not came.is_set()
    assert not mine.any()


@both_stores
def test_a_load_that_ctrl_c_ends_returns_at_once_and_writes_nothing_afterwards(
    archived, bucket, monkeypatch, ctrl_c
):
    archived(7, {"w": torch.ones(1 << 10)})
    strike = lambda: threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with (
        standing_still(bucket, monkeypatch, strike) as mine,
        pytest.raises(KeyboardInterrupt),
    ):
        bucket.load(mine)


def test_a_read_that_is_given_up_ends_at_once_and_writes_nothing_afterwards(
    archived, bucket, monkeypatch
):
    archived(7, {"w": torch.ones(1 << 10)})
    [of] = bucket.kept()

    def gives_up(_):
        raise TimeoutError

    with standing_still(bucket, monkeypatch) as mine:
        stored, folder = bucket.manifest(of), f"{bucket.root}/{of.files_at}"
        target = build(local_chunks(mine), {})
        with pytest.raises(TimeoutError):
            reading.fill_chunks(bucket.store, folder, stored, target, gives_up)


def spoil(path, how):
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[-3] ^= 1
    elif how == "truncated":
        del content[-3:]
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["flipped", "truncated", "gone", "swapped"])
def test_a_file_that_is_not_what_was_archived_is_refused(archived, bucket, tmp_path, how):
    archived(7, {"a": torch.ones(500), "b": torch.zeros(500)}, form=Form(file_bytes=2000))
    one, other = sorted((tmp_path / "bucket").rglob("*.safetensors"))
    if how == "gone":
        other.unlink()
    elif how == "swapped":
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
    else:
        spoil(other, how)
    with pytest.raises(errors.BucketError, match=r"model-0000\d-of-00002"):
        bucket.load({"a": torch.zeros(500), "b": torch.zeros(500)})
    if how != "swapped":
        assert bucket.load({"a": torch.zeros(500)}) == 7  # it does not need the other file


@pytest.mark.parametrize("how", ["truncated", "of another version"])
def test_a_manifest_that_is_not_what_was_archived_is_refused(archived, bucket, tmp_path, how):
    archived(7, {"a": torch.ones(5)})
    archived(8, {"a": torch.ones(5)})
    seven, eight = sorted((tmp_path / "bucket").rglob("*.json"))
    if how == "truncated":
        spoil(eight, how)
    else:
        eight.write_bytes(seven.read_bytes())
    with pytest.raises(errors.BucketError, match="read another version"):
        bucket.load({"a": torch.zeros(5)})
    assert bucket.load({"a": torch.zeros(5)}, "latest-1") == 7


def test_what_is_no_file_or_larger_than_any_manifest_is_refused_and_not_read(
    archived, bucket, tmp_path
):
    archived(7, {"w": torch.ones(4)})
    [manifest] = (tmp_path / "bucket").rglob("*.full.json")
    [file] = (tmp_path / "bucket").rglob("*.safetensors")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(errors.UnreadableVersion, match="it is no file"):
        bucket.load({"w": torch.zeros(4)})
    os.truncate(manifest, 1 << 40)
    with pytest.raises(errors.UnreadableVersion, match=f"it has {1 << 40} bytes, expected at most"):
        bucket.contents()


@pytest.mark.parametrize(("fails", "error"), [("clone", MemoryError), ("as_strided", RuntimeError)])
def test_only_a_copy_that_torch_cannot_make_is_told_as_too_little_memory(
    archived, monkeypatch, fails, error
):
    def failing(*_):
        raise RuntimeError("torch says why")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, fails, failing)
        with pytest.raises(error):
            archived(7, {"w": torch.ones(4)})


@pytest.mark.parametrize(
    "read", [lambda store, key: store.get(key), lambda store, key: store.get_ranges(key, [0], [1])]
)
def test_a_file_that_cannot_be_looked_at_is_an_error_of_the_bucket(archived, bucket, read):
    archived(7, {"w": torch.ones(4)})
    with pytest.raises(errors.BucketError, match="File name too long"):
        read(bucket.store, "n" * 256)


def test_files_without_a_manifest_are_no_version_and_go_after_the_grace(
    archived, bucket, opened, monkeypatch, tmp_path
):
    archived(7, {"a": torch.ones(5)}, close=False)
    folder = next((tmp_path / "bucket").rglob("*.safetensors")).parent
    left = folder.with_name(folder.name[:-8] + "ffffffff")  # of an archiver that was killed
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    versions = folder.parent.parent / "versions"
    unfinished = [left / "x.safetensors#1", next(versions.glob("*")).with_suffix(".json#12")]
    for path in [*unfinished, versions.parent.parent / "probe/probe-0"]:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    assert bucket.list() == {7: "full"}
    archiver = Archiver(opened("next", spot=True), bucket, keep=1, grace_s=100)
    clock = [time.monotonic()]
    monkeypatch.setattr(archive, "monotonic", lambda: clock[0])
    assert archiver.collect() == 0
    clock[0] += 99
    assert archiver.collect() == 0
    clock[0] += 2
    assert archiver.collect() == 4
    left = [p.parent for p in (tmp_path / "bucket").rglob("*") if p.is_file()]
    assert sorted(left) == [tmp_path / "bucket" / bucket.root, folder, versions]
    assert bucket.load({"a": torch.zeros(5)}) == 7


def test_old_versions_go_manifests_first_and_files_after_the_grace(
    archived, bucket, opened, tmp_path, monkeypatch
):
    for version in range(4):
        archived(version, {"a": torch.full((5,), float(version))})
    opened("keeps the run")
    archiver = Archiver(opened("next", spot=True), bucket, keep=2, grace_s=100)
    clock = [time.monotonic()]
    monkeypatch.setattr(archive, "monotonic", lambda: clock[0])
    assert archiver.collect() == 2
    assert bucket.list() == {2: "full", 3: "full"}
    assert len(list((tmp_path / "bucket").rglob("*.safetensors"))) == 4
    clock[0] += 101
    assert archiver.collect() == 2
    found = {"a": torch.zeros(5)}
    for version in (2, 3):
        assert bucket.load(found, version) == version == found["a"][0]
    assert len(list((tmp_path / "bucket").rglob("*.safetensors"))) == 2


def test_an_upload_that_takes_half_of_the_grace_is_no_version(archived, bucket, monkeypatch):
    clock = [0.0]

    def later():
        clock[0] += 60
        return clock[0]

    monkeypatch.setattr(archive, "monotonic", later)
    with pytest.raises(errors.BucketError, match="half of the grace"):
        archived(7, {"a": torch.ones(5)}, grace_s=100)
    assert bucket.list() == {}


def test_a_number_that_is_published_anew_is_archived_anew_and_the_old_one_is_none(archived, bucket):
    for version in (99, 100):
        archived(version, {"a": torch.full((5,), float(version))})
    assert archived(100, {"a": torch.full((5,), -1.0)}) is not None
    assert bucket.list() == {99: "full", 100: "full"}
    assert len(bucket.kept()) == 3
    found = {"a": torch.zeros(5)}
    assert bucket.load(found) == 100
    assert float(found["a"][0]) == -1.0


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_version_that_is_published_anew_while_it_is_looked_at_is_given_up(
    bucket, opened, monkeypatch, name
):
    tensors, trainer = {"a": torch.ones(5)}, opened("trainer")
    trainer.register(tensors)
    trainer.publish(7)
    handle = opened("archiver", spot=True)
    contents = handle.contents

    def looked_at(version):
        found = contents(version)
        trainer.unpublish()
        trainer.unregister()
        trainer.register({name: tensors["a"].fill_(2)})
        trainer.publish(version)
        return found

    monkeypatch.setattr(handle, "contents", looked_at)
    archiver = Archiver(handle, bucket, keep=5)
    with pytest.raises(errors.VersionNotFound, match="published anew"):
        archiver.archive(lambda *_: None)
    assert bucket.list() == {}
    monkeypatch.setattr(handle, "contents", contents)
    assert archiver.archive(lambda *_: None).version == 7
    found = {name: torch.zeros(5)}
    bucket.load(found)
    assert float(found[name][0]) == 2.0


def test_two_archivers_of_one_version_harm_nobody(archived, bucket, opened):
    archived(7, {"a": torch.ones(5)}, close=False)
    other = Archiver(opened("other", spot=True), bucket, keep=5)
    assert other.archive(lambda *_: None) is None
    there = bucket.kept
    bucket.kept = lambda: ()  # it lists late
    assert other.archive(lambda *_: None).version == 7
    bucket.kept = there
    assert bucket.list() == {7: "full"}
    assert bucket.load({"a": torch.zeros(5)}) == 7


def test_two_archivers_of_one_version_leave_one_in_a_store_that_overwrites(
    archived, bucket, opened, monkeypatch, tmp_path
):
    archived(7, {"a": torch.ones(5)}, close=False)
    archiver = Archiver(opened("other", spot=True), bucket, keep=5, grace_s=100)
    there = bucket.kept
    monkeypatch.setattr(bucket, "kept", tuple)  # it lists late
    assert archiver.archive(lambda *_: None).version == 7
    monkeypatch.setattr(bucket, "kept", there)
    clock = [time.monotonic()]
    monkeypatch.setattr(archive, "monotonic", lambda: clock[0])
    assert archiver.collect() == 1
    clock[0] += 101
    assert archiver.collect() == 1
    assert len(list((tmp_path / "bucket").rglob("*.safetensors"))) == 1
    assert bucket.load({"a": torch.zeros(5)}) == 7


def test_an_older_version_is_not_written_only_to_be_collected(archived, bucket, opened):
    older, newer = opened("older"), opened("newer")
    for version, trainer in ((7, older), (8, newer)):
        trainer.register({"a": torch.full((5,), float(version))})
        trainer.publish(version)
    archiver = Archiver(opened("archiver", spot=True), bucket, keep=1)
    assert archiver.archive(lambda *_: None).version == 8
    archiver.say()
    newer.close()
    assert archiver.archive(lambda *_: None) is None
    assert bucket.list() == {8: "full"}


@pytest.mark.parametrize("before", ["list", "create"])
def test_files_that_another_archiver_collects_make_no_version(
    bucket, opened, monkeypatch, tmp_path, before
):
    trainer = opened("trainer", {"a": torch.ones(5)})
    trainer.publish(7)
    archiver = Archiver(opened("archiver", spot=True), bucket, keep=1)
    do = getattr(bucket.store, before)

    def after_all_has_gone(*given):
        for path in (tmp_path / "bucket").rglob("*.safetensors"):
            path.unlink()
        return do(*given)

    monkeypatch.setattr(bucket.store, before, after_all_has_gone)
    with pytest.raises(errors.BucketError, match="another archiver may collect here"):
        archiver.archive(lambda *_: None)
    monkeypatch.undo()
    assert bucket.list() == {}
    assert archiver.archive(lambda *_: None).version == 7


@pytest.mark.parametrize("streams", [False, True])
def test_nobody_is_read_while_a_version_is_uploaded_unless_it_streams(
    bucket, opened, monkeypatch, tmp_path, streams
):
    trainer = opened("trainer")
    tensors = {f"w{n}": torch.randn(1 << 16) for n in range(5)}
    trainer.register(tensors)
    trainer.publish(7)
    monkeypatch.setattr(archive, "BUFFER_BYTES", 1 << 18)  # two of five tensors
    archiver = Archiver(opened("archiver", spot=True), bucket, keep=1, form=Form(streams=streams))
    put, is_read, sizes = bucket.store.put, [], []

    def watched(key, content, **options):
        pieces = iter(content)
        first = [next(pieces) for _ in range(3)]  # the header, and two: the third cannot be there
        is_read.append(any(each.readers for each in trainer.fleet().held))
        sizes.append(options["size_bytes"])
        put(key, chain(first, pieces), **options)

    monkeypatch.setattr(bucket.store, "put", watched)
    assert archiver.archive(lambda *_: None).version == 7
    assert is_read == [streams]
    assert sizes == [file.stat().st_size for file in (tmp_path / "bucket").rglob("*.safetensors")]
    found = zeros(tensors)
    assert bucket.load(found) == 7
    same(found, tensors)


def test_a_store_that_fails_leaves_no_version_and_the_next_attempt_is_whole(
    archived, opened, monkeypatch
):
    server = ObjectServer(keeps_creates=False, page=2)
    try:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        model = opened("trainer").model
        trainer = opened("trainer 2")
        tensors = {f"w{n}": torch.randn(1 << 19) for n in range(6)}
        trainer.register(tensors)
        trainer.publish(7)
        bucket = torch_ros.bucket.open("s3://weights/p", model)
        archiver = Archiver(
            opened("archiver", spot=True), bucket, keep=5, form=Form(file_bytes=5 << 20)
        )
        for number in range(1, 4):  # the first requests are a list and the beginning of a file
            server.faults[:] = ["503"] * 0 + [None] * number + ["deny"]
            with pytest.raises(errors.BucketError):
                archiver.archive(lambda *_: None)
            server.faults[:] = []
            assert bucket.list() == {}
        server.faults[:] = [None, "503", None, "lost", None, "503"]
        assert archiver.archive(lambda *_: None).version == 7
        server.faults[:] = ["503", None, "lost"]
        found = zeros(tensors)
        assert bucket.load(found) == 7
        same(found, tensors)
    finally:
        server.close()


def foreign(bucket, of, content, **changes):
    """A manifest by the name of another version."""
    key = dataclasses.replace(of, nonce="ffffffff", **changes).key
    bucket.store.create(f"{bucket.root}/{key}", content)
    return key


def test_a_manifest_that_cannot_be_read_is_replaced_if_it_is_the_newest(
    archived, bucket, opened, tmp_path, caplog
):
    archived(7, {"a": torch.ones(5)}, close=False)
    [path] = (tmp_path / "bucket").rglob("*.json")
    spoil(path, "truncated")
    with pytest.raises(errors.BucketError):
        bucket.load({"a": torch.zeros(5)})
    assert Archiver(opened("next", spot=True), bucket, keep=5).archive(lambda *_: None).version == 7
    assert "it does not count, and is replaced if it is the newest" in caplog.text
    assert not path.exists()
    assert bucket.load({"a": torch.zeros(5)}) == 7


def test_a_manifest_of_somebody_else_stops_nobody_and_goes_when_it_is_old(
    archived, bucket, opened, caplog
):
    for version in (5, 6, 7):
        archived(version, {"a": torch.full((5,), float(version))}, close=version < 7)
    [seven, *_] = bucket.kept()[::-1]
    later = {"version": 100, "born_ms": seven.born_ms + 10**6}
    newest = foreign(bucket, seven, b"none", **later)
    oldest = foreign(bucket, seven, b"{}", version=5, born_ms=1, uid="u")
    trainer, archiver = opened("other"), Archiver(opened("next", spot=True), bucket, keep=2)
    for version in (8, 9):
        trainer.register({"a": torch.full((5,), float(version))})
        trainer.publish(version)
        assert archiver.archive(lambda *_: None).version == version
        archiver.collect()
        trainer.unpublish()
        trainer.unregister()
    assert caplog.text.count("it does not count") == 2
    assert {each.version for each in bucket.kept()} == {8, 9, 100}
    assert {newest} == {each.key for each in bucket.kept() if each.version == 100}
    assert bucket.store.get(f"{bucket.root}/{oldest}") is None
    found = {"a": torch.zeros(5)}
    assert bucket.load(found, 9) == 9 == found["a"][0]


@pytest.mark.long
@both_stores
def test_the_command_archives_once(opened, asked, url):
    trainer = opened("trainer")
    code, _, err = asked("archive", trainer.model, url, "--once")
    assert code == 2
    assert "has no version to archive" in err
    trainer.register({"w": torch.arange(1000.0)})
    trainer.publish(7)
    code, out, err = asked("archive", trainer.model, url, "--once", "--keep", 1)
    assert (code, err) == (0, "")
    assert f"version 7 of {trainer.model!r}: 1 tensors, 4.1 KiB" in out
    trainer.unpublish()
    trainer.publish(8)
    assert asked("archive", trainer.model, url, "--once", "--keep", 1)[0] == 0
    bucket = torch_ros.bucket.open(url, trainer.model)
    assert bucket.list() == {8: "full"}
    assert asked("archive", trainer.model, url, "--once")[:2] == (0, "")
    assert asked("archive", trainer.model, "ftp://x", "--once")[0] == 2


@both_stores
def test_the_largest_number_that_can_be_published_is_archived(opened, asked, tmp_path):
    trainer = opened("trainer", {"w": torch.arange(1000.0)})
    trainer.publish(2**63 - 1)
    assert asked("archive", trainer.model, str(tmp_path), "--once")[::2] == (0, "")
    assert torch_ros.bucket.open(tmp_path.as_uri(), trainer.model).list() == {2**63 - 1: "full"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--metrics-port", "abc"], "--metrics-port 'abc': expected PORT, or HOST:PORT"),
        (["--metrics-port", "9100", "--once"], "--once ends before anybody asks"),
    ],
)
@both_stores
def test_where_figures_are_served_is_looked_at_first(asked, tmp_path, options, text):
    code, _, err = asked("archive", "m", str(tmp_path / "b"), *options)
    assert code == 2
    assert text in err
    assert not (tmp_path / "b").exists()


@pytest.mark.long
def test_the_room_needs_no_etcd():
    code = "import sys, torch_ros.bucket; print({'grpc', 'nixl', 'pyetcd'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


def test_a_folder_may_have_any_name(tmp_path):
    for url, name in (
        (str(tmp_path / "run#1?x"), "run#1?x"),
        (f"file://{tmp_path}/my%20dir", "my dir"),
        (f"file://localhost{tmp_path}/a", "a"),
    ):
        torch_ros.bucket.open(url, "m").store.put("k", [b"x"])
        assert (tmp_path / name / "k").read_bytes() == b"x"


@pytest.mark.parametrize("grace", ["0", "-1", "nan", "inf", "soon"])
def test_a_grace_is_a_time(capsys, grace):
    with pytest.raises(SystemExit, match="2"):
        main.main(["archive", "m", "memory://x", "--grace", grace])
    assert "is no time: expected 90, 60s" in capsys.readouterr().err


def test_a_bad_url_or_model_is_named():
    for url, model in (("", "m"), ("memory://x", ""), (None, "m"), ("memory://x", 7)):
        with pytest.raises(errors.UsageError):
            torch_ros.bucket.open(url, model)
    for model in (".", ".."):
        with pytest.raises(errors.UsageError, match="no store has a folder of that name"):
            torch_ros.bucket.open("memory://x", model)
    for url in ("s3://b?x=y", "memory://x#1", "file://elsewhere/x", "ftp://x", "s3://", "file://"):
        with pytest.raises(errors.UsageError, match="names no store"):
            torch_ros.bucket.open(url, "m")
    assert torch_ros.bucket.open(f"memory://{uuid.uuid4().hex}", "m").list() == {}
