"""Versions of a bucket get into engines, whose parameters they land in, or by their loaders."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from test_attach import LLM
from test_installation import EVERYWHERE, Fused, Together, Toy

import torch_ros
import torch_ros.bucket
from torch_ros.bucket.archive import Archiver, Form
from torch_ros.errors import BucketError, ManifestMismatch, VersionNotFound
from torch_ros.integrations.from_bucket import BucketVersions
from torch_ros.integrations.installation import Installer, InstallOptions
from torch_ros.integrations.landing_plan import Obstacle
from torch_ros.integrations.vllm import attach

pytest.importorskip("obstore")

SHAPES = {"q": (4, 4), "k": (2, 4), "out": (4, 4), "norm": (4,), "no place for it": (10_000,)}
EXTRA = ["no place for it"]
STAGED = Obstacle("a test says so")


class Place:
    """A trainer and its archiver; `publish` returns when the version is in the bucket."""

    def __init__(self, url, stack):
        self.url, self.bucket = url, torch_ros.bucket.open(url, "m")
        self._stack, self._weights = stack, {name: torch.randn(of) for name, of in SHAPES.items()}
        self.start()

    def start(self):
        """As after the end of everything: the same run, from any number on."""
        options = {"endpoint": f"memory://{uuid.uuid4().hex}", "run": "r", "timeout_s": 20}
        self._trainer, archiver = (
            self._stack.enter_context(torch_ros.open("m", **options, linger_s=0)) for _ in "12"
        )
        form = Form(deltas=9, file_bytes=1)  # a file for each tensor
        self._archiver = Archiver(archiver, self.bucket, keep=9, form=form)

    def publish(self, version, **changes):
        """A version in which one element of each tensor is new."""
        self._weights = {name: one.clone() for name, one in self._weights.items()} | changes
        for one in self._weights.values():
            one.view(-1)[version % 3] = torch.randn(())
        self._trainer.publish_copy(version, self._weights)
        self._archiver.archive(lambda *_: None)
        return self._weights

    def files(self, version, *, without=()):
        """Those of a version, except where these tensors are."""
        (found,) = [one for one in self.bucket.kept() if one.version == version]
        folder = Path(self.url, "m", found.files_at)
        return [
            folder / file.name
            for file in self.bucket.manifest(found).files
            if not {*without} & {tensor.fqn for tensor in file.tensors}
        ]


@pytest.fixture
def place(tmp_path):
    with ExitStack() as stack:
        yield Place(str(tmp_path / "bucket"), stack)


def installer_of(place, toy, **options):
    options = InstallOptions(**{"ignore": EXTRA, **options})
    return Installer(BucketVersions(place.url, "m"), toy, options)


@pytest.mark.parametrize("staged", [(), ("out",), EVERYWHERE], ids=["none", "one", "all"])
def test_a_full_version_then_what_has_changed_since(place, staged):
    """The files of the full version are not needed again."""
    engine = Fused()
    names = {name if "." in name else f"{name}.weight" for name in staged}
    installer = installer_of(place, Toy(engine, dict.fromkeys(names, STAGED)))
    for version in (1, 2, 3):
        weights = place.publish(version)
        assert place.bucket.list()[version] == ("full" if version == 1 else "delta")
        report = installer.install("latest", 20)
        assert engine.has(weights)
        assert installer.active == report.version == version
        assert len(report.staged) == {0: 0, 1: 1, 3: 4}[len(staged)]
        assert list(report.ignored) == EXTRA
        if version == 1:
            for file in place.files(1):
                file.unlink()
    assert installer_of(place, Toy(engine)).handle.contents() == installer.handle.contents()


def test_a_parameter_that_turns_out_to_land_leaves_the_copy(place):
    engine = Fused()
    obstacle = Obstacle("unknown", is_provable=True)
    installer = installer_of(place, Toy(engine, dict.fromkeys(EVERYWHERE, obstacle)))
    for version, copied in ((1, 4), (2, 0), (3, 0)):
        weights = place.publish(version)
        assert len(installer.install(version, 20).staged) == copied
        assert len(installer.handle._copy) == copied
        assert engine.has(weights)


def test_what_landed_goes_on_from_there_when_more_lands_than_before(place):
    engine = Fused()
    provable = {"out.weight": Obstacle("unknown", is_provable=True)}
    installer = installer_of(place, Toy(engine, provable))
    place.publish(1)
    assert list(installer.install(1, 20).staged) == ["out"]
    for file in place.files(1, without=["out"]):
        file.unlink()
    weights = place.publish(2)
    assert not installer.install(2, 20).staged
    assert engine.has(weights)


def test_other_tensors_and_shapes_than_before_are_read_anew(place):
    engine = Fused()
    installer = installer_of(place, Toy(engine), direct="never", ignore=[*EXTRA, "more"])
    place.publish(1)
    installer.install(1, 20)
    weights = place.publish(2, more=torch.ones(3))
    installer.install(2, 20)
    assert engine.has(weights)
    place.publish(3, out=torch.ones(5, 5))
    with pytest.raises(ManifestMismatch, match="nothing for out"):
        installer.install(3, 20)
    assert installer.active == 2
    assert engine.has(weights)


@pytest.mark.parametrize("on_failure", ["reread", "keep", "refuse"])
def test_a_version_whose_files_are_gone_is_refused(place, on_failure):
    engine = Fused()
    installer = installer_of(place, Toy(engine, {"out.weight": STAGED}), on_failure=on_failure)
    first = place.publish(1)
    installer.install(1, 20)
    place.publish(2)
    for file in place.files(2):
        file.unlink()
    with pytest.raises(BucketError, match="there is no such object"):
        installer.install("latest", 20)
    assert installer.active == (None if on_failure == "refuse" else 1)
    assert engine.has(first)
    with pytest.raises(VersionNotFound, match="the bucket has 2, 1"):
        installer.install(3, 20)


def test_ranks_never_take_two_contents_of_one_number(place):
    """The trainer goes back, and publishes the number again, between the looks of two ranks."""
    engines, peers = [Fused(rank, 2) for rank in range(2)], Together(2)
    how = InstallOptions(on_failure="refuse", ignore=EXTRA)  # nothing puts right what was written
    installers = [
        Installer(BucketVersions(place.url, "m", rank), Toy(one), how, peers.of(rank))
        for rank, one in enumerate(engines)
    ]

    def each(version):
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(one.install, version, 20) for one in installers]
            return [call.exception(60) for call in calls]

    place.publish(1)
    first = place.publish(2)
    assert each("latest") == [None, None]
    place.publish(3)
    second = installers[1].handle
    look = second.contents

    def late(*args, **options):
        second.contents = look
        place.start()
        place.publish(3)
        return look(*args, **options)

    second.contents = late
    assert [type(error) for error in each("latest")] == [VersionNotFound] * 2
    assert all(engine.has(first) for engine in engines)
    assert [one.active for one in installers] == [2, 2]
    weights = place.publish(4)
    assert each("latest") == [None, None]
    assert all(engine.has(weights) for engine in engines)


class LLMOfABucket(LLM):
    def init_weight_transfer_engine(self, request):
        info = request["init_info"]
        assert (info["replica"], info["options"]) == (None, {})
        versions = BucketVersions(info["bucket"], info["model"])
        self.installer = Installer(versions, self.model, InstallOptions(ignore=["*"]))

    def shutdown_weight_transfer_engine(self):
        self.installer.handle.close()


def test_an_attached_engine_follows_a_trainer_that_went_back(place):
    llm = LLMOfABucket()
    with attach(llm, model="m", bucket=place.url) as policy:
        with pytest.raises(VersionNotFound, match="the bucket has nothing"):
            policy.update()
        assert llm.asked == []  # it was not paused
        for version, is_lower in ((5, False), (6, False), (3, True), (3, True), (5, False)):
            if is_lower:
                place.start()
            weights = place.publish(version, x=torch.randn(3))
            assert policy.update()
            assert not policy.update()
            assert policy.version == version
            assert torch.equal(llm.model.module.x, weights["x"])
        with pytest.raises(VersionNotFound, match="the bucket has 5, 3"):
            policy.update(6)
        assert policy.version == 5
        assert policy.update(3)
        assert policy.update("latest")
        assert policy.version == 5
    policy.close()
