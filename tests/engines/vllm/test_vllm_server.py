"""vLLM's own HTTP endpoints, with nothing of ours at the driver; and its trainer engines."""

from contextlib import closing

import pytest
from rollouts import FarAway, running_server
from trainer import greedy, step


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(tiny("untied"), log) as server:
        yield server


def test_a_driver_that_knows_vllm_alone(server, tiny, train, etcd_endpoint):
    trainer = train(tiny("untied"), "http")
    info = {"model": "http", "options": {"endpoint": etcd_endpoint}}
    server.ask("init_weight_transfer_engine", {"init_info": info})
    for version in (1, 2, 3):
        published = trainer.publish(version)
        server.update(version)
        server.agrees(published["answers"])
        assert server.ask("weight_info", method="GET") == {"weight_version": str(version)}


def test_a_bucket_is_all_that_is_shared(server, tiny, train, etcd_endpoint, tmp_path):
    url = str(tmp_path / "bucket")
    server.ask("init_weight_transfer_engine", {"init_info": {"model": "far", "bucket": url}})
    with closing(FarAway(train(tiny("untied"), "far"), etcd_endpoint, url)) as far_away:
        for version, share in ((1, 1.0), (2, 0.01)):
            published = far_away.publish(version, share=share)
            server.update("latest")
            server.agrees(published["answers"])
        assert far_away.bucket.list() == {1: "full", 2: "delta"}


def test_a_trainer_engine_of_vllm(server, tiny, etcd_endpoint):
    """vLLM's own handshake, driven from the trainer."""
    import torch
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from torch_ros.integrations.vllm import register
    from torch_ros.integrations.vllm.trainer import ROSTrainerInitInfo

    register()
    register()  # vLLM may call it more than once
    model = AutoModelForCausalLM.from_pretrained(tiny("untied"), dtype=torch.float32).eval()
    place = {"options": {"endpoint": etcd_endpoint}}
    engine = WeightTransferTrainerFactory.trainer_init(
        ROSTrainerInitInfo("pushed", rank=0, **place, engine=place),
        client=HTTPVLLMWeightSyncClient(server.url),
        source=ModuleSource(model),
    )
    try:
        for version in (1, 2):
            step(model, version)
            engine.send_weights()
            server.agrees(greedy(model))
            assert engine.version == version
            assert server.ask("weight_info", method="GET") == {"weight_version": str(version)}
    finally:
        engine.shutdown()
