"""A vLLM engine answers as the trainer's model does, whatever way its weights come."""

import pytest
import torch
from rollouts import running_engine
from trainer import digest

import torch_ros
from torch_ros.integrations.vllm import attach

KINDS = [("untied", 1, "auto"), ("tied", 1, "auto"), ("moe", 1, "proven"), ("untied", 2, "auto")]
MIB = 1 << 20


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def engine(request, tiny):
    kind, ranks, direct = request.param
    with running_engine(tiny(kind), ranks=ranks) as engine:
        engine.name, engine.direct = f"{kind}-{ranks}", direct
        yield engine


def attached(engine, trainer, endpoint, **how):
    options = {"endpoint": endpoint, "digests": "full"}
    return attach(engine.llm, model=trainer.name, replica="vllm", options=options, **how)


def follow(engine, trainer, policy, versions):
    for version in versions:
        published = trainer.publish(version)
        assert policy.update("latest")
        assert policy.version == version
        installs = policy._handle.installs()
        assert {one.active.version for one in installs.values()} == {version}
        assert engine.llm.get_weight_version() == str(version)
        engine.agrees(published)
        assert not policy.update("latest")
    return published


def read_by_a_plain_process(name, endpoint, published):
    """The digest of a version that a process without an engine reads."""
    with torch_ros.open(name, endpoint=endpoint, linger_s=0) as reader:
        got = {fqn: torch.zeros(shape) for fqn, shape in published["shapes"].items()}
        reader.register(got)
        reader.replicate(published["version"], timeout_s=60)
        return digest(got), reader.last_read.source


def test_staged(engine, train, etcd_endpoint):
    trainer = train(engine.path, f"staged-{engine.name}")
    with attached(engine, trainer, etcd_endpoint, direct="never", buffer_bytes=MIB) as policy:
        follow(engine, trainer, policy, [1, 2, 3])
        for report in engine.reports():
            assert report.direct == ()
            assert set(report.staged.values()) == {"direct='never'"}


def test_direct(engine, train, etcd_endpoint):
    """And a version that vLLM loads itself leaves no other bytes in its parameters."""
    trainer = train(engine.path, f"direct-{engine.name}", digests="full")
    with attached(engine, trainer, etcd_endpoint, direct=engine.direct) as policy:
        follow(engine, trainer, policy, [1, 2, 3, 4])
        for report in engine.reports():
            assert report.direct_share >= 0.999, report
        in_place = engine.checksums()
    with attached(engine, trainer, etcd_endpoint, direct="never") as policy:
        assert policy.update(4)
        assert engine.checksums() == in_place


def test_recording_is_quick_and_changes_nothing(engine, train, etcd_endpoint):
    trainer = train(engine.path, f"recorded-{engine.name}")
    with attached(engine, trainer, etcd_endpoint) as policy:
        follow(engine, trainer, policy, [1])
        before = engine.checksums()

        def look(transfer):
            import time

            installer = transfer._installer
            contents = installer.handle.contents(1).tensors
            began_s = time.perf_counter()
            recording = installer._engine.record(contents)
            return len(contents), time.perf_counter() - began_s, not recording.unwritten

        for names, took_s, _ in engine.in_workers(look):
            print(f"{engine.name}: recorded {names} names in {1e3 * took_s:.1f} ms")
        assert engine.checksums() == before
        engine.agrees(trainer.publish(2, seed=1))


def test_an_update_in_place_takes_no_memory(engine, train, etcd_endpoint):
    trainer = train(engine.path, f"memory-{engine.name}")

    def reset(transfer):
        from pathlib import Path

        Path("/proc/self/clear_refs").write_text("5")
        return Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]

    def peak(transfer):
        from pathlib import Path

        return Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]

    with attached(engine, trainer, etcd_endpoint, direct=engine.direct) as policy:
        follow(engine, trainer, policy, [1, 2])
        trainer.publish(3)
        before = engine.in_workers(reset)
        policy.update(3)
        for one, other in zip(before, engine.in_workers(peak), strict=True):
            more = (int(other) - int(one)) / 1024
            print(f"{engine.name}: {more:.1f} MiB more while it updated in place")
            assert more <= 12


def test_an_engine_is_a_source_when_the_trainer_has_gone(engine, train, etcd_endpoint):
    trainer = train(engine.path, f"relay-{engine.name}", digests="full")
    with attached(engine, trainer, etcd_endpoint, direct=engine.direct) as policy:
        published = follow(engine, trainer, policy, [1, 2])
        trainer.ask()
        trainer.kill()
        found, source = read_by_a_plain_process(trainer.name, etcd_endpoint, published)
        assert (found, source) == (published["digest"], "vllm")


def test_an_engine_of_two_ranks_reads_from_one_of_one(tiny, train, etcd_endpoint):
    path = tiny("untied")
    trainer = train(path, "chain")
    with running_engine(path) as first, running_engine(path, ranks=2) as second:
        options = {"endpoint": etcd_endpoint}
        with attach(first.llm, model="chain", replica="first", options=options) as policy:
            for version in (1, 2):  # padding was never loaded before the first
                published = trainer.publish(version)
                policy.update()
            trainer.kill()
            with attach(second.llm, model="chain", replica="second", options=options) as other:
                assert other.update(2, timeout_s=120)
                second.agrees(published)
                found, _ = read_by_a_plain_process("chain", etcd_endpoint, published)
                assert found == published["digest"]
