"""A vLLM engine that shares a bucket with the trainer, and nothing else, answers as it does."""

import pytest
from rollouts import FarAway, running_engine

import torch_ros.bucket
from torch_ros.errors import BucketError, UsageError, VersionNotFound
from torch_ros.integrations.vllm import attach

pytest.importorskip("obstore")

NOBODY = "etcd://127.0.0.1:9"  # the engine's processes could not ask any other
KINDS = {"one": ("untied", 1, True), "two": ("untied", 2, True), "packed": ("tied", 1, False)}


@pytest.fixture(scope="module", params=KINDS)
def engine(request, tiny):
    kind, ranks, plain = KINDS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_ROS_ENDPOINT", NOBODY)
        with running_engine(tiny(kind), ranks=ranks, plain=plain) as engine:
            engine.kind = request.param
            yield engine


@pytest.fixture
def far_away(engine, train, etcd_endpoint, tmp_path, request):
    name = f"{request.node.originalname}-{engine.kind}"
    place = FarAway(train(engine.path, name), etcd_endpoint, str(tmp_path / "bucket"))
    yield place
    place.close()


def attached(engine, place, **how):
    return attach(engine.llm, model=place.model, bucket=place.url, **how)


def data_of(tmp_path, version):
    """The file of a version in the bucket."""
    (found,) = tmp_path.glob(f"bucket/*/*/data/{version:020d}-*/*.safetensors")
    return found


def test_a_full_version_then_what_has_changed_since(engine, far_away, tmp_path):
    """The engine does without the files of the full version when all of it has landed."""
    with attached(engine, far_away) as policy:
        for version in (1, 2, 3, 4):
            published = far_away.publish(version, share=1.0 if version == 1 else 0.01)
            assert far_away.bucket.list()[version] == ("full" if version == 1 else "delta")
            assert policy.update()
            assert policy.version == version
            assert engine.llm.get_weight_version() == str(version)
            engine.agrees(published)
            assert not policy.update()
            if version == 2:  # before, padding was staged
                full = data_of(tmp_path, 1)
                full.rename(tmp_path / "aside")
        for report in engine.reports():
            print(f"{engine.kind}: {100 * report.direct_share:.1f} % in place")
            assert (report.direct_share > 0.9) == (engine.kind != "packed")
        (tmp_path / "aside").rename(full)
    with attached(engine, far_away, direct="never") as policy:  # from nothing, and all is loaded
        policy.update(3)
        assert policy.update()
        engine.agrees(published)
        assert {report.direct for report in engine.reports()} == {()}


def test_a_version_that_cannot_be_read_leaves_the_engine_the_one_before(engine, far_away, tmp_path):
    before = far_away.publish(1)
    with attached(engine, far_away) as policy:
        policy.update()
        with pytest.raises(VersionNotFound, match="the bucket has 1"):
            policy.update(2)
        engine.agrees(before)
        far_away.publish(2, share=0.01)
        data_of(tmp_path, 2).unlink()
        with pytest.raises(BucketError):
            policy.update()
        assert policy.version == 1
        engine.agrees(before)


def test_a_bucket_beside_what_is_of_a_replica_is_refused(engine, far_away):
    for more in ({"replica": "vllm-0"}, {"options": {"endpoint": NOBODY}}):
        with pytest.raises(UsageError, match="expected none of these"):
            attached(engine, far_away, **more)


def patched(worker, url, model, base, version):
    """vLLM's own loader of patches, fed by the bucket."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    patches = [
        CheckpointWeightPatch(one.name, tuple(one.shape), one.values.dtype, one.values, one.indices)
        for one in torch_ros.bucket.open(url, model).patches(base, version)
    ]
    load_checkpoint_weight_patches(worker.model_runner.model, patches)
    return len(patches)


def test_vllm_itself_takes_the_patches_of_a_bucket(engine, far_away):
    if engine.kind == "packed":
        pytest.skip("vLLM patches the parameters, and this engine has packed them")
    far_away.publish(1)
    far_away.publish(2, share=0.01)
    with attached(engine, far_away) as policy:
        policy.update(1)
        published = far_away.publish(3, share=0.01)
        place = (far_away.url, far_away.model, 1, 3)
        counts = engine.llm.collective_rpc(patched, args=place)
        assert all(
            40 < count <= len(published["shapes"]) for count in counts
        )  # of small ones, some
        engine.llm.reset_prefix_cache()
        engine.agrees(published)
