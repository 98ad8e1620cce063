"""Deltas in a bucket: versions come back bit for bit, from whatever is there; or are refused."""

import gc
import json
import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from archived import bits, everything, same
from kit import memory
from safetensors import safe_open
from test_bucket import zeros

import torch_ros.bucket
from torch_ros.bucket import deltas, files
from torch_ros.bucket.archive import Archiver, Form
from torch_ros.bucket.deltas import difference
from torch_ros.bucket.files import InBucket, Mismatch, StoredBase, StoredChange, kept
from torch_ros.errors import BucketError, ManifestMismatch, UnreadableVersion, VersionNotFound
from torch_ros.weights.chunked import Chunked

pytest.importorskip("obstore")


def changed(tensors, seed, share=0.02):
    """A content in which a share of the elements has other bits, one of each tensor at least."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, tensor in tensors.items():
        raw = bits(tensor.clone()).numpy().reshape(-1, max(1, tensor.element_size()))
        at = rng.random(len(raw)) < share
        at[: 1 if name != "nan" else 0] = True
        raw[at] = rng.integers(0, 2 if tensor.dtype == torch.bool else 256, raw[at].shape, np.uint8)
        new = torch.from_numpy(raw.reshape(-1)).view(tensor.dtype) if tensor.numel() else tensor
        found[name] = new.view(tensor.shape).clone()
    return found


def large(rows=600, columns=700):
    """Large enough that a delta of 2 % is less than half."""
    torch.manual_seed(1)
    return {
        "matrix": torch.randn(rows, columns).to(torch.bfloat16),
        "flat": torch.randn(70_000),
        "0-d": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "wide": torch.randn(300, dtype=torch.complex128),
    }


endpoint = pytest.fixture(memory)


@pytest.fixture
def url(tmp_path):
    return str(tmp_path / "bucket")


class Line:
    """A trainer that publishes one version after the other, and its archiver."""

    def __init__(self, opened, url, form):
        self.trainer, self.tensors = opened("trainer"), None
        self.bucket = torch_ros.bucket.open(url, self.trainer.model)
        self.archiver = Archiver(opened("archiver", spot=True), self.bucket, keep=5, form=form)
        self.versions = {}

    def publish(self, version, tensors):
        if self.tensors is None:
            self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            self.trainer.register(self.tensors)
        else:
            self.trainer.unpublish()
            for name, tensor in tensors.items():
                bits(self.tensors[name]).copy_(bits(tensor))
        self.trainer.publish(version)
        self.versions[version] = tensors
        return self.archiver.archive(lambda *_: None)


@pytest.fixture
def line(opened, url):
    return lambda **form: Line(opened, url, Form(**{"deltas": 32} | form))


@pytest.fixture
def three(line):
    """Versions 1 to 3, the last two as deltas."""
    made = line()
    made.publish(1, large())
    for version in (2, 3):
        made.publish(version, changed(made.versions[version - 1], version))
    return made


def fetched(bucket, tensors, version, monkeypatch):
    """The bytes that a load fetches beside lists and manifests."""
    count, get_ranges = [0], bucket.store.get_ranges

    def counted(key, begins, ends):
        count[0] += sum(ends) - sum(begins)
        return get_ranges(key, begins, ends)

    with monkeypatch.context() as patch:
        patch.setattr(bucket.store, "get_ranges", counted)
        assert bucket.load(tensors, version) == version
    return count[0]


@pytest.mark.parametrize("encoding", ["gaps", "coo"])
@pytest.mark.parametrize("file_bytes", [1000, 10**9])
@pytest.mark.long
def test_each_version_comes_back_from_nothing_and_from_the_one_before(line, encoding, file_bytes):
    made = line(encoding=encoding, file_bytes=file_bytes)
    small = everything()
    tensors = small | {f"large {name}": tensor for name, tensor in large().items()}
    written = [made.publish(1, tensors)]
    written += [made.publish(v, changed(made.versions[v - 1], v)) for v in (2, 3, 4)]
    assert [each.base for each in written] == [None, 1, 2, 3]
    assert made.bucket.list() == {1: "full", 2: "delta", 3: "delta", 4: "delta"}
    for version in (3, 1, 4):
        found = zeros(tensors)
        assert made.bucket.load(found, version) == version
        same(found, made.versions[version])
    followed = zeros(tensors)
    for version in (1, 2, 4, 3, "latest"):
        number = made.bucket.load(followed, version)
        same(followed, made.versions[number])


def test_who_has_the_base_fetches_the_deltas_since(three, monkeypatch):
    bucket, tensors = three.bucket, zeros(large())
    full = fetched(bucket, tensors, 1, monkeypatch)
    there = bucket.kept()
    size = {each.version: bucket.manifest(each).size_bytes for each in there}
    assert fetched(bucket, tensors, 3, monkeypatch) <= size[2] + size[3]
    same(tensors, three.versions[3])
    assert size[2] + size[3] < full / 6
    assert fetched(bucket, tensors, 3, monkeypatch) == 0  # it has it
    assert fetched(bucket, tensors, 2, monkeypatch) > full / 2  # a delta leads onwards only
    same(tensors, three.versions[2])


def other_tensors(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def written_to(tensors):
    tensors["flat"].add_(1)
    return tensors


def freed_and_made_anew(tensors):
    flat = tensors["flat"]
    flat.set_(torch.zeros_like(flat))
    return tensors


@pytest.mark.parametrize("what", [other_tensors, written_to, freed_and_made_anew])
def test_who_seems_to_have_the_base_and_has_not_reads_all(three, monkeypatch, what):
    tensors = zeros(large())
    full = fetched(three.bucket, tensors, 1, monkeypatch)
    tensors = what(tensors)
    assert fetched(three.bucket, tensors, 3, monkeypatch) > full
    same(tensors, three.versions[3])


def test_a_tensor_that_joins_is_read_in_full_and_the_others_are_not(line, monkeypatch):
    made = line(file_bytes=1000)  # a file for each
    made.publish(1, large())
    made.publish(2, changed(made.versions[1], 2))
    tensors = zeros(large())
    flat = tensors.pop("flat")
    fetched(made.bucket, tensors, 1, monkeypatch)
    tensors["flat"] = flat
    came = fetched(made.bucket, tensors, 2, monkeypatch)
    assert flat.nbytes < came < flat.nbytes + tensors["matrix"].nbytes / 6
    same(tensors, made.versions[2])
    tensors["flat"] = torch.zeros(3)  # nothing is written where something does not fit
    made.publish(3, changed(made.versions[2], 3))
    with pytest.raises(ManifestMismatch, match="flat"):
        made.bucket.load(tensors, 3)
    tensors["flat"] = made.versions[2]["flat"]
    same(tensors, made.versions[2])


def test_contents_are_those_that_the_publisher_tells(three):
    for version in (1, 3):
        found = three.bucket.contents(version)
        assert found.tensors == {n: (t.dtype, t.shape) for n, t in sorted(large().items())}
        assert [*found.tensors] == sorted(large())
    assert found == three.trainer.contents(3) == three.bucket.contents()


def test_a_content_that_was_replaced_under_its_number_is_not_loaded(three):
    was, tensors = three.bucket.contents(2), zeros(large())
    with pytest.raises(VersionNotFound, match=f"expected '{was.uid}'"):
        three.bucket.load(tensors, 3, uid=was.uid)
    same(tensors, zeros(large()))
    assert three.bucket.load(tensors, 2, uid=was.uid) == 2
    same(tensors, three.versions[2])


def test_a_write_that_torch_does_not_see_is_found_and_healed(three, monkeypatch, caplog):
    """At a place that changes: places that do not are not looked at."""
    tensors = zeros(large())
    full = fetched(three.bucket, tensors, 2, monkeypatch)
    older, newer = (three.versions[v]["flat"].view(torch.int32) for v in (2, 3))
    at = int((older != newer).nonzero()[0])
    tensors["flat"].view(torch.int32).numpy()[at] += 1
    assert fetched(three.bucket, tensors, 3, monkeypatch) > full
    same(tensors, three.versions[3])
    assert "'flat' did not have version 2" in caplog.text


@pytest.mark.parametrize("times", [30, pytest.param(300, marks=pytest.mark.long)])
def test_a_load_that_is_interrupted_is_made_whole_by_the_next_one(three, monkeypatch, times):
    """Before, in the middle of, or behind the delta of some tensor."""
    rng, tensors = random.Random(1), zeros(large())
    interruptions, apply = 0, deltas.apply
    left = [0]

    def interrupted(delta, *args, **options):
        left[0] -= 1
        if left[0] == 0:
            if rng.random() < 0.5:
                apply(delta.between(0, 1), *args, **options)  # its first segment alone
            raise KeyboardInterrupt
        found = apply(delta, *args, **options)
        if left[0] == 1 and rng.random() < 0.5:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(deltas, "apply", interrupted)
    for _ in range(times):
        left[0], version = rng.randint(1, 6), rng.choice([1, 2, 3])
        try:
            three.bucket.load(tensors, version)
        except KeyboardInterrupt:
            interruptions += 1
            left[0], version = 0, rng.choice([1, 2, 3])
            three.bucket.load(tensors, version)
        same(tensors, three.versions[version])
    assert interruptions > times / 5


def test_any_sharding_takes_its_part_of_a_delta(three):
    whole = three.versions[3]
    boxes = {"matrix": {(0, 0): (100, 700), (300, 5): (200, 3)}, "flat": {(65_000,): (5_000,)}}
    made = {
        name: Chunked(
            whole[name].shape,
            whole[name].dtype,
            {at: torch.zeros(sizes, dtype=whole[name].dtype) for at, sizes in there.items()},
        )
        for name, there in boxes.items()
    }
    for version in (1, 2, 3):
        three.bucket.load(made, version)
        for name, there in boxes.items():
            for at, sizes in there.items():
                cut = tuple(slice(o, o + size) for o, size in zip(at, sizes, strict=True))
                expected = three.versions[version][name][cut]
                found = made[name].chunks[at]
                assert torch.equal(bits(found), bits(expected)), (version, name, at)


def test_a_part_that_was_written_to_is_read_anew(three):
    """The digest of all changes says nothing of a part."""
    part = torch.zeros(5_000)
    made = {"flat": Chunked((70_000,), torch.float32, {(65_000,): part})}
    three.bucket.load(made, 1)
    part.add_(1)
    three.bucket.load(made, 3)
    assert torch.equal(bits(part), bits(three.versions[3]["flat"][65_000:]))


def test_strided_tied_and_partial_targets(three, monkeypatch):
    full = zeros(large())
    turned = torch.zeros(700, 600, dtype=torch.bfloat16).t()
    assert three.bucket.load({"matrix": turned}, 1) == 1
    target = {"matrix": turned}
    three.bucket.load(target, 2)
    few = fetched(three.bucket, target, 3, monkeypatch)
    assert torch.equal(bits(turned), bits(three.versions[3]["matrix"]))
    assert few < fetched(three.bucket, full, 1, monkeypatch) / 6


def test_tied_tensors_are_followed(line, monkeypatch):
    made, tensors = line(), large()
    tensors["tied"] = tensors["flat"].clone()
    made.publish(1, tensors)
    newer = changed(tensors, 5)
    newer["tied"] = newer["flat"].clone()
    made.publish(2, newer)
    found = zeros(large())
    found["tied"] = found["flat"]
    full = fetched(made.bucket, found, 1, monkeypatch)
    assert fetched(made.bucket, found, 2, monkeypatch) < full / 6
    same(found, newer)


def test_parameters_that_are_gone_are_no_base(three):
    bucket = three.bucket
    bucket.load(zeros(large()), 1)
    gc.collect()
    tensors = zeros(large())
    bucket.load(tensors, 2)
    same(tensors, three.versions[2])


def test_what_is_written_in_full(line):
    made, tensors = line(deltas=2), large()
    kinds = [made.publish(1, tensors).base]
    kinds += [made.publish(v, changed(made.versions[v - 1], v)).base for v in (2, 3, 4)]
    assert kinds == [None, 1, 2, None], "behind two deltas comes a full one"
    assert made.publish(5, changed(made.versions[4], 5, share=0.9)).base is None, "it is larger"
    assert made.publish(6, made.versions[5]).base == 5, "nothing has changed"
    found = zeros(tensors)
    assert made.bucket.load(found) == 6
    same(found, made.versions[6])


def test_an_archiver_without_deltas_or_that_has_begun_anew_writes_in_full(line, opened):
    made = line(deltas=0)
    made.publish(1, large())
    assert made.publish(2, changed(large(), 2)).base is None
    made.archiver._form = Form(deltas=5)
    assert made.publish(3, changed(large(), 3)).base is None
    assert made.publish(4, changed(large(), 4)).base == 3


def test_versions_that_were_passed_by_are_in_the_delta(line):
    made = line()
    made.publish(1, large())
    archive, made.archiver.archive = made.archiver.archive, lambda _: None
    made.publish(2, changed(large(), 2))
    made.archiver.archive = archive
    assert made.publish(3, changed(made.versions[2], 3)).base == 1
    found = zeros(large())
    made.bucket.load(found)
    same(found, made.versions[3])


def test_what_a_delta_needs_stays_as_long_as_it(line):
    made = line()
    made.archiver._keep = 2
    made.publish(1, large())
    for version in range(2, 7):
        made.publish(version, changed(made.versions[version - 1], version))
        made.archiver.collect()
    assert made.bucket.list().keys() == {1, 2, 3, 4, 5, 6}
    made.archiver._before = None  # it begins anew
    made.publish(7, changed(made.versions[6], 7))
    made.publish(8, changed(made.versions[7], 8))
    made.archiver.collect()
    assert made.bucket.list() == {7: "full", 8: "delta"}
    found = zeros(large())
    made.bucket.load(found)
    same(found, made.versions[8])


def test_a_delta_of_something_that_is_gone_is_not_the_latest(three):
    [second] = [each for each in three.bucket.kept() if each.version == 2]
    three.bucket.store.delete([f"{three.bucket.root}/{second.key}"])
    found = zeros(large())
    with pytest.raises(VersionNotFound, match=r"version 2 is gone; the bucket has 1$"):
        three.bucket.load(found, 3)
    assert three.bucket.load(found) == 1
    same(found, three.versions[1])
    assert three.publish(4, changed(large(), 4)).base == 3, "its own base is there"
    assert three.bucket.load(found) == 1


def test_a_lower_number_is_no_delta_of_a_higher_one(three):
    """As of a run whose etcd was wiped: a base is older, so that no chain is a circle."""
    before = three.archiver._before
    assert before.version.version == 3
    for number, is_delta in ((4, True), (3, False), (2, False)):
        new = replace(before.version, version=number, uid="anew", nonce="0a0b", base=None)
        made = three.archiver._made(before, new, before.tensors)
        assert (made is not None) == is_delta


def test_a_base_that_was_collected_is_none(three):
    [third] = [each for each in three.bucket.kept() if each.version == 3]
    three.bucket.store.delete([f"{three.bucket.root}/{third.key}"])
    assert three.publish(4, changed(large(), 4)).base is None
    found = zeros(large())
    assert three.bucket.load(found) == 4
    same(found, three.versions[4])


def test_what_does_not_fit_is_refused_and_nothing_is_written(three):
    found = zeros(large())
    three.bucket.load(found, 2)
    with pytest.raises(ManifestMismatch, match="nobody"):
        three.bucket.load(found | {"nobody": torch.zeros(2)}, 3)
    same(found, three.versions[2])
    with pytest.raises(ManifestMismatch, match="flat"):
        three.bucket.load(found | {"flat": torch.zeros(7)}, 3)
    same(found, three.versions[2])


def test_patches_make_a_version_of_its_base(three):
    for base, version in ((1, 2), (2, "latest"), (1, 3)):
        number = 3 if version == "latest" else version
        found = {name: tensor.clone() for name, tensor in three.versions[base].items()}
        patches = [*three.bucket.patches(base, version)]
        for patch in patches:
            assert patch.shape == found[patch.name].shape
            assert patch.values.dtype == found[patch.name].dtype
            assert (patch.indices.diff() > 0).all()
            bits(found[patch.name]).view(-1, patch.values.element_size())[patch.indices] = bits(
                patch.values
            ).view(-1, patch.values.element_size())
        same(found, three.versions[number])
        assert [patch.name for patch in patches] == sorted(found.keys() - {"empty"})
    assert [*three.bucket.patches(3)] == []


def test_patches_lead_onwards_from_what_the_version_needs(three):
    for base, version in ((3, 2), (0, 3)):
        with pytest.raises(VersionNotFound, match=r"only from 1, 2(, 3)?; load it"):
            list(three.bucket.patches(base, version))


# Files that are not what was archived


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1])


def swapped(path):
    other = next(p for p in path.parent.parent.rglob("delta*") if p.parent != path.parent)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


@pytest.mark.parametrize("how", [flipped, truncated, swapped, lambda path: path.unlink()])
def test_a_delta_that_is_not_what_was_archived_is_refused(three, tmp_path, how):
    found = zeros(large())
    three.bucket.load(found, 2)
    [third] = [each for each in three.bucket.kept() if each.version == 3]
    how(tmp_path / "bucket" / three.bucket.root / third.files_at / "delta.safetensors")
    with pytest.raises(BucketError, match="delta.safetensors"):
        three.bucket.load(found, 3)
    three.bucket.load(found, 1)
    same(found, three.versions[1])


def rewritten(bucket, version, **changes):
    """A manifest of that version which says something else."""
    [link] = [each for each in bucket.kept() if each.version == version]
    stored = msgspec.structs.replace(bucket.manifest(link), **changes)
    key = f"{bucket.root}/{link.key}"
    bucket.store.delete([key])
    assert bucket.store.create(key, stored.encode())
    return stored


def test_a_delta_of_a_number_that_has_another_content_is_refused(three):
    stored = rewritten(three.bucket, 3)
    base = msgspec.structs.replace(stored.base, uid="another")
    rewritten(three.bucket, 3, base=base)
    for begin in (1, 2):
        found = zeros(large())
        three.bucket.load(found, begin)
        with pytest.raises(BucketError, match="another"):
            three.bucket.load(found, 3)


def test_a_delta_whose_digests_are_of_another_base_is_refused(three):
    stored = rewritten(three.bucket, 3)
    changes = [
        msgspec.structs.replace(each, digest="0" * 15 + "7") if each.fqn == "flat" else each
        for each in stored.changes
    ]
    rewritten(three.bucket, 3, changes=tuple(changes))
    with pytest.raises(BucketError, match="'flat' is of other content"):
        three.bucket.load(zeros(large()), 3)


def test_a_count_that_is_not_that_of_the_arrays_is_refused(three):
    stored = rewritten(three.bucket, 3)
    changes = [
        msgspec.structs.replace(each, count=each.count + 1) if each.fqn == "flat" else each
        for each in stored.changes
    ]
    rewritten(three.bucket, 3, changes=tuple(changes))
    with pytest.raises(BucketError, match="'flat'"):
        three.bucket.load(zeros(large()), 3)


@pytest.mark.parametrize("arrays", ["behind each other", "outside", "more values"])
def test_indices_that_are_none_are_refused(arrays):
    change = StoredChange("w", "int16", (100,), 3, "0" * 16)
    places = {"behind each other": [1, 1, 2], "outside": [1, 2, 100]}.get(arrays, [1, 2, 3])
    values = np.zeros(4 if arrays == "more values" else 3, np.int16)
    with pytest.raises(ValueError, match="indices"):
        deltas._decoded(change, [np.array(places, np.int32), values], "coo")


@pytest.mark.parametrize("encoding", ["gaps", "coo"])
@pytest.mark.parametrize("shape", [(), (1, 1)])
def test_arrays_of_a_delta_that_are_no_rows_are_refused_by_their_file(line, encoding, shape):
    made = line(encoding=encoding)
    made.publish(1, {"w": torch.zeros(1000)})
    made.publish(2, {"w": torch.zeros(1000).index_fill(0, torch.tensor([5]), 1.0)})

    def reshaped(tensor):  # of one element: as many bytes as before
        of_one = "index" not in tensor.fqn or encoding == "coo"
        return msgspec.structs.replace(tensor, shape=shape) if of_one else tensor

    [file] = made.bucket.manifest(made.bucket.kept()[-1]).files
    tensors = tuple(reshaped(each) for each in file.tensors)
    rewritten(made.bucket, 2, files=(msgspec.structs.replace(file, tensors=tensors),))
    with pytest.raises(UnreadableVersion, match="delta.safetensors.*expected rows"):
        made.bucket.load({"w": torch.zeros(1000)}, 2)


def test_indices_are_int64_where_int32_does_not_count_the_elements(line, monkeypatch, tmp_path):
    monkeypatch.setattr(deltas, "PLACES_32_BITS", 70_000)  # of a tensor of 4 GiB, in truth
    made = line(encoding="coo")
    made.publish(1, large())
    made.publish(2, changed(large(), 2))
    [path] = (tmp_path / "bucket").rglob("delta.safetensors")
    with safe_open(path, "pt") as file:
        found = [file.get_tensor(f"{name}.indices").dtype for name in ("flat", "matrix")]
    assert found == [torch.int32, torch.int64]
    followed = zeros(large())
    for version in (1, 2):
        assert made.bucket.load(followed, version) == version
    same(followed, made.versions[2])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"base": None}, "a delta of None"),
        ({"base": StoredBase(1, "u1", "0000")}, r"a delta of \(1, '0000'\)"),
        ({"base": StoredBase(3, "u1", "0a1b")}, r"a delta of \(3,"),
        ({"changes": ()}, "other arrays"),
        ({"changes": (StoredChange("a", "float9", (1,), 0, "0" * 16),)}, "this torch lacks"),
        ({"changes": (StoredChange("a", "int8", (1,), 0, "0" * 16),) * 2}, "same tensor"),
        ({"changes": (StoredChange("a", "int8", (1,), 1, "7"),)}, "no manifest of this release"),
        ({"encoding": "coo"}, "other arrays"),
        ({"encoding": "zip"}, "no manifest of this release"),
    ],
)
def test_a_manifest_of_a_delta_that_contradicts_itself_is_refused(changes, says):
    tensors = tuple(
        files.StoredTensor(name, dtype, shape)
        for name, dtype, shape in (
            ("a.index", "uint32", (1, 4)),
            ("a.gaps", "uint8", (1,)),
            ("a.values", "uint8", (1,)),
        )
    )
    file = files.StoredFile("delta.safetensors", 118, 100, tensors, b"x" * 16)
    change = StoredChange("a", "int8", (1,), 1, "0" * 16)
    one = files.StoredVersion(
        1, "m", "r", 2, "u2", (file,), (), "archiver", StoredBase(1, "u1", "0a1b"), (change,)
    )
    of = InBucket(1, "r", 2, 1000, "u2", "0c2d", (1, "0a1b"))
    assert kept(of.key) == of
    assert files.decoded(one.encode(), "m", of) == one
    with pytest.raises(Mismatch, match=says):
        files.decoded(msgspec.structs.replace(one, **changes).encode(), "m", of)


# Readers of others


def test_a_short_reader_of_others_reads_coordinates(line, tmp_path):
    """As Hugging Face's delta engine keeps them: `indices` and `values` of each parameter."""
    made = line(encoding="coo")
    made.publish(1, large())
    made.publish(2, changed(large(), 2))
    [path] = (tmp_path / "bucket").rglob("delta.safetensors")
    snapshot = {name: tensor.clone() for name, tensor in made.versions[1].items()}
    with safe_open(path, "pt") as file:
        names = {name.rpartition(".")[0] for name in file.keys()}  # noqa: SIM118  # no mapping
        for name in names:
            indices = file.get_tensor(f"{name}.indices").long()
            values = file.get_tensor(f"{name}.values").view(snapshot[name].dtype)
            snapshot[name].view(-1)[indices] = values
        assert json.loads(json.dumps(file.metadata()))["torch_ros.version"] == "2"
    same(snapshot, made.versions[2])


def test_one_percent_takes_less_than_a_60th(line):
    torch.manual_seed(3)
    base = {"w": torch.randn(8 << 20).to(torch.bfloat16)}
    at = torch.rand(8 << 20) < 0.01
    new = {"w": (base["w"].view(torch.int16) ^ at.short()).view(torch.bfloat16)}
    made = difference(base, new)
    ratio = base["w"].nbytes / made.size_bytes
    print(f"{ratio:.1f} times fewer bytes at {at.float().mean():.2%}")
    assert ratio > 60
