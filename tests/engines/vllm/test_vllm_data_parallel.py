"""Data parallel engines, each a replica of its own: by vLLM's server, which sends calls to all.

The model has no experts: engines that shared theirs did not answer `/pause`; why is not known.
"""

import pytest
import torch
from rollouts import running_server
from trainer import digest

import torch_ros
from torch_ros.protocol.keys import replica_of

RANKS = 2


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(tiny("untied"), log, **{"data-parallel-size": str(RANKS)}) as server:
        yield server


def test_each_engine_follows_under_a_name_of_its_own_and_all_are_sources(
    server, tiny, train, etcd_endpoint
):
    name = "parallel"
    trainer = train(tiny("untied"), name, digests="full")
    options = {"endpoint": etcd_endpoint, "digests": "full"}
    info = {"model": name, "replica": "vllm", "options": options}
    server.ask("init_weight_transfer_engine", {"init_info": info})
    for version in (1, 2):
        published = trainer.publish(version)
        server.update(version)
        for rank in range(RANKS):
            server.agrees(published["answers"], **{"X-data-parallel-rank": str(rank)})
    trainer.kill()
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
        assert {source, replica_of(stream._filling._inst)} == engines
        assert digest(got) == digest(others) == published["digest"]
