"""See how versions spread: a trainer and two rollouts write OpenTelemetry's spans into files.

    pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-common
    python examples/spans.py /tmp/spans

Each line of a file is OTLP as JSON, which Jaeger's page takes ("Upload"), and a collector's
receiver `otlpjsonfile`. A fleet exports to a collector, by OpenTelemetry's OTLPSpanExporter in
place of `SpanFile`; nothing else changes.
"""

import base64
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

import torch_ros

LAST = 3  # version
IDS = {"traceId", "spanId", "parentSpanId"}  # hex in OTLP's JSON, base64 in protobuf's


def hexed(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: base64.b64decode(v).hex() if k in IDS else hexed(v) for k, v in value.items()}
    return [hexed(each) for each in value] if isinstance(value, list) else value


class SpanFile(SpanExporter):
    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        print(json.dumps(hexed(MessageToDict(encode_spans(spans)))), file=self._file, flush=True)
        return SpanExportResult.SUCCESS


def main(folder: Path, replica: str = "trainer") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    provider = TracerProvider(resource=Resource.create({"service.name": replica}))
    provider.add_span_processor(BatchSpanProcessor(SpanFile(folder / f"{replica}.jsonl")))
    trace.set_tracer_provider(provider)
    weights = {"w": torch.zeros(1 << 20)}
    with torch_ros.open("spans", replica=replica) as handle:
        handle.register(weights)
        if replica != "trainer":
            next(version for version in handle.follow("latest") if version == LAST)
            return
        command = [sys.executable, __file__, str(folder)]
        rollouts = [subprocess.Popen([*command, name]) for name in ("rollout-0", "rollout-1")]
        for version in range(1, LAST + 1):
            handle.unpublish()
            weights["w"].fill_(version)
            handle.publish(version)
            if version == 1:
                handle.wait(lambda held: len(held.get(1, ())) > len(rollouts), timeout_s=60)
        assert [rollout.wait(60) for rollout in rollouts] == [0, 0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
