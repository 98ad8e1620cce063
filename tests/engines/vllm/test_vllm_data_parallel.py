"""Data parallel engines, each a replica of its own: by vLLM's server, which sends calls to all."""

from contextlib import contextmanager

import torch
from rollouts import running_server
from trainer import digest

import torch_ros

RANKS = 2


@contextmanager
def running(path, tmp_path):
    options = {"data-parallel-size": str(RANKS)}
    with running_server(path, tmp_path / "log", **options) as server:
        yield server


def follow(server, trainer, endpoint):
    options = {"endpoint": endpoint, "digests": "full"}
    info = {"model": trainer.name, "replica": "vllm", "options": options}
    server.ask("init_weight_transfer_engine", {"init_info": info})
    for version in (1, 2):
        published = trainer.publish(version)
        server.update(version)
        for rank in range(RANKS):
            server.agrees(published["answers"], **{"X-data-parallel-rank": str(rank)})
    return published


def test_engines_that_share_their_experts_follow(tiny, train, etcd_endpoint, tmp_path):
    trainer = train(tiny("moe"), "shared", digests="full")
    with running(tiny("moe"), tmp_path) as server:
        follow(server, trainer, etcd_endpoint)
        told = server.ask("weight_info", method="GET")
        assert told == {"weight_version": "2"}
        trainer.publish(3, is_quick=True, shape={"model.layers.0.mlp.gate.weight": [5, 256]})
        server.update_fails(3)


def test_each_engine_follows_under_a_name_of_its_own_and_all_are_sources(
    tiny, train, etcd_endpoint, tmp_path
):
    name = "parallel"
    trainer = train(tiny("untied"), name, digests="full")
    with running(tiny("untied"), tmp_path) as server:
        published = follow(server, trainer, etcd_endpoint)
        trainer.kill()
        both_are_sources(name, etcd_endpoint, published)


def both_are_sources(name, etcd_endpoint, published):
    engines = {f"vllm-dp{rank}" for rank in range(RANKS)}
    with torch_ros.open(name, endpoint=etcd_endpoint, linger_s=0) as reader:
        reader.wait(lambda held: held.get(2) == engines, timeout_s=60)
        fqns = sorted(published["shapes"])
        # A source that somebody reads from is not the first choice.
        with reader.stream(2, fqns, buffer_bytes=1) as stream:
            got = {fqn: tensor.clone() for fqn, tensor in [next(stream)]}
            others = {fqn: torch.zeros(shape) for fqn, shape in published["shapes"].items()}
            source = reader.read(2, others, timeout_s=60).source
            got |= {fqn: tensor.clone() for fqn, tensor in stream}
        assert {source, stream._filling._replica} == engines
        assert digest(got) == digest(others) == published["digest"]
