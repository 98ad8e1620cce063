"""Spans of OpenTelemetry around calls, and the links from reads to their publication."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from kit import inside, published, until
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from torch_ros.errors import DeadlineExceeded, SeatLost
from torch_ros.features.tracing import spans as tracing
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.records import VersionRecord
from torch_ros.store.txn import Read, one


@pytest.fixture(scope="session")
def exporter():
    """The process has one provider, for good."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def ended(exporter):
    """The spans that have ended since: `ended("publish")`."""
    tracing.flush()
    exporter.clear()

    def of(name):
        tracing.flush()
        return [each for each in exporter.get_finished_spans() if each.name == f"torch_ros.{name}"]

    return of


def record(handle, version):
    key = Keys(handle.model).version(handle.run, version)
    kv = inside(handle).group.kv
    return VersionRecord.at(kv.read(Read((one(key),)), timeout_s=5), key)


def test_a_publication_has_a_span_that_its_version_names(opened, ended):
    trainer = opened("trainer")
    with trace.get_tracer("user").start_as_current_span("step") as step:
        published(trainer, 7)
    [span] = ended("publish")
    assert span.parent.span_id == step.get_span_context().span_id
    found = dict(span.attributes)
    assert found.pop("torch_ros.replica") == "trainer"
    assert found == {
        "torch_ros.model": trainer.model,
        "torch_ros.rank": 0,
        "torch_ros.version": 7,
        "torch_ros.bytes": 16,
        "torch_ros.is_offered": True,
    }
    told = record(trainer, 7).traceparent
    assert len(told) == 55
    assert told.split("-")[1:3] == [f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"]
    stages = ended("tensors") + ended("decide") + ended("digest") + ended("commit")
    assert {each.parent.span_id for each in stages} == {span.context.span_id}
    assert len(stages) == 4


def test_a_read_links_to_the_publication_and_has_its_stages(opened, ended):
    trainer, rollout = opened("trainer"), opened("rollout")
    published(trainer, 1)
    rollout.register({"w": torch.empty(4)})
    rollout.replicate()
    [publish], [read] = ended("publish"), ended("replicate")
    assert [link.context.span_id for link in read.links] == [publish.context.span_id]
    assert [link.context.trace_id for link in read.links] == [publish.context.trace_id]
    found = read.attributes
    assert (found["torch_ros.version"], found["torch_ros.source"]) == (1, "trainer")
    assert found["torch_ros.bytes"] == 16
    assert found["torch_ros.way"] in rollout.last_read.ways
    took_s = (read.end_time - read.start_time) / 1e9
    stages = [ended(stage) for stage in rollout.last_read.stages_s]
    inside = [
        each for spans in stages for each in spans if each.parent.span_id == read.context.span_id
    ]
    assert len(inside) == len(rollout.last_read.stages_s)
    together_s = sum(each.end_time - each.start_time for each in inside) / 1e9
    assert together_s == pytest.approx(rollout.last_read.elapsed_s, rel=0.1)
    assert together_s <= took_s * 1.01
    published(trainer, 2)
    assert rollout.update()
    assert not rollout.update()  # there is nothing newer, and no span
    assert len(ended("update")) == 1
    assert [span.attributes["torch_ros.version"] for span in ended("unpublish")] == [1, 1]


def test_a_version_keeps_its_span_when_it_is_copied_and_brought_back(opened, ended):
    trainer = opened("trainer", retain=("latest",))
    published(trainer, 1)
    told = record(trainer, 1).traceparent
    assert told
    trainer.unpublish()  # the only copy: it goes to host memory
    assert record(trainer, 1).traceparent == told
    inside(trainer).group.fence(SeatLost("trainer", "for a test"))
    rollout = opened("rollout", {"w": torch.empty(4)})
    rollout.replicate()
    assert record(trainer, 1).traceparent == told
    [publish], [read] = ended("publish"), ended("replicate")
    assert [link.context.span_id for link in read.links] == [publish.context.span_id]


def test_ranks_have_a_span_each_and_their_version_one(ranks, pool, ended):
    handles = ranks("trainer")
    list(pool.map(lambda handle: published(handle, 1), handles))
    spans = {f"{span.context.span_id:016x}" for span in ended("publish")}
    assert len(spans) == 2
    assert record(handles[0], 1).traceparent.split("-")[2] in spans


def test_a_call_that_fails_says_so_in_its_span(opened, ended):
    rollout = opened("rollout", {"w": torch.empty(4)})
    with pytest.raises(DeadlineExceeded):
        rollout.replicate(timeout_s=0.2)
    [span] = ended("replicate")
    assert span.status.status_code == trace.StatusCode.ERROR
    assert [event.attributes["exception.type"] for event in span.events] == [
        "torch_ros.errors.DeadlineExceeded"
    ]
    assert trace.get_current_span() is trace.INVALID_SPAN


class Weights:
    pass


def test_a_call_that_has_failed_keeps_nothing_of_its_caller(exporter, ended):
    def fail():
        weights = Weights()
        with tracing.spanned("read"):
            raise ValueError
        return weights

    def failed():
        with pytest.raises(ValueError) as raised:
            fail()
        frame = raised.traceback[-1].frame.raw
        return weakref.ref(frame.f_locals["weights"])

    kept = failed()
    until(lambda: gc.collect() >= 0 and kept() is None, 5)
    assert len(ended("read")) == 1


@pytest.mark.parametrize(
    "told", ["", "x", "00-" + "0" * 32 + "-" + "0" * 16 + "-00", "00-zz-1-01", "0" * 55]
)
def test_a_context_that_means_nothing_is_no_link(opened, ended, told):
    rollout = opened("rollout")
    with tracing.spanned("read"):
        rollout._shard.tracing.link(told)
    [span] = ended("read")
    assert [link for link in span.links if link.context.is_valid] == []


def test_a_child_that_was_forked_starts_no_thread_at_its_end(exporter, ended):
    """From Python 3.12 on none can be started then."""
    with tracing.spanned("read"):
        pass
    assert len(ended("read")) == 1
    if not (child := os.fork()):
        tracing.flush()
        os._exit("torch_ros spans" in [thread.name for thread in threading.enumerate()])
    assert os.waitpid(child, 0)[1] == 0


PROGRAM = """
import sys, threading, torch, torch_ros
from torch_ros.protocol.keys import Keys
from torch_ros.store.txn import Read

trainer = torch_ros.open("policy", endpoint="memory://here", replica="trainer")
trainer.register({"w": torch.zeros(4)})
kv, keys = trainer._shard.group.kv, Keys("policy")

def is_traced(version):
    trainer.unpublish()
    trainer.publish(version)
    entries = kv.read(Read((keys.versions(),)), timeout_s=5).entries
    is_named = any(b"traceparent" in entry.value for entry in entries.values())
    return is_named or any("spans" in thread.name for thread in threading.enumerate())

print(is_traced(1), any(name.startswith("opentelemetry") for name in sys.modules))
from opentelemetry import trace  # the API alone
trace.get_tracer("user")
print(is_traced(2))
"""


@pytest.mark.long
def test_without_an_sdk_nothing_is_traced_nor_imported():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=100,
        env={k: v for k, v in os.environ.items() if not k.startswith("OTEL_")},
    )
    assert done.stdout.split() == ["False"] * 3, done.stderr
