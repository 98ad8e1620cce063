"""Streams: a version through two buffers, beside `replicate` of the same version."""

from functools import partial
from pathlib import Path
from statistics import median

import tensors as contents
import torch
from harness import Actors, Child, Sample, Setup, rounds, say, seconds, started
from ours import ALONE, Rollout, Trainer, status_bytes
from report import Report, Row, ratio, speeds

import torch_ros

PART = "Streams"
COUNTS = (100, 2000)
BUFFER_BYTES = 64 << 20

REPLICATE = "replicate"
STREAM = "stream, in buffers of 64 MiB"
PEAK = "stream: peak RSS, beyond that before the first"


class Streamer:
    """It looks at the first and last element of each tensor."""

    def __init__(self, setup: Setup, model: str, tensors: contents.Tensors) -> None:
        self._fqns = list(tensors)
        self._handle = torch_ros.open(
            f"{setup.name}-{model}", endpoint=setup.endpoint, replica="streamer", **ALONE
        )
        self._before = status_bytes("VmRSS")  # of any stream: the handle keeps buffers

    def stream(self, version: int) -> dict[str, float]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
        elapsed_s = seconds(lambda: self._consume(version))
        return {"elapsed_s": elapsed_s, "grown_mib": (status_bytes("VmHWM") - self._before) / 2**20}

    def _consume(self, version: int) -> None:
        expected = torch.tensor(version % contents.VALUES, dtype=torch.bfloat16)
        came = 0
        for _, tensor in self._handle.stream(version, self._fqns, buffer_bytes=BUFFER_BYTES):
            assert tensor[0] == expected == tensor[-1]
            came += 1
        assert came == len(self._fqns)

    def close(self) -> None:
        self._handle.close()


def trainer(setup: Setup, count: int) -> Actors:
    held = contents.plain(setup.size_bytes, count)
    return {"trainer": Trainer(setup, f"streams-{count}", held, **ALONE)}


def rollout(setup: Setup, count: int) -> Actors:
    held = contents.plain(setup.size_bytes, count)
    return {"rollout": Rollout(setup, f"streams-{count}", "rollout", held, **ALONE)}


def streamer(setup: Setup, count: int) -> Actors:
    names = contents.plain(0, count)
    return {"streamer": Streamer(setup, f"streams-{count}", names)}


class Cases:
    def __init__(self, source: Child, reader: Child, streamer: Child) -> None:
        self._source, self._reader, self._streamer = source, reader, streamer
        for child, actor in ((source, "trainer"), (reader, "rollout")):
            say(f"  {child.ask(actor, 'settle')}")

    def replicate(self) -> Sample:
        version = self._next()
        sample = self._reader.ask("rollout", "replicate", version)
        self._reader.ask("rollout", "verify", version)
        self._reader.ask("rollout", "let_go")
        return sample

    def stream(self) -> Sample:
        return self._streamer.ask("streamer", "stream", self._next())

    def _next(self) -> int:
        version = self._source.ask("trainer", "write")
        self._source.ask("trainer", "publish")
        return version


def measure(setup: Setup, report: Report) -> None:
    for count in COUNTS:
        say(f"  tensors: {count}")
        builds = {
            each.__name__: partial(each, setup, count) for each in (trainer, rollout, streamer)
        }
        with started(builds) as children:
            cases = Cases(*children)
            samples = rounds(setup.repeat, {REPLICATE: cases.replicate, STREAM: cases.stream})
        _tell(setup, report, count, samples)


def _tell(setup: Setup, report: Report, count: int, samples: dict[str, list[Sample]]) -> None:
    params = {"MiB": setup.size_mib, "tensors": count}
    found = {
        case: speeds(setup.size_bytes, [sample["elapsed_s"] for sample in taken])
        for case, taken in samples.items()
    }
    reached = ratio(found[STREAM], found[REPLICATE])
    for case in (REPLICATE, STREAM):
        ratios = {"of replicate": reached} if case == STREAM else {}
        report.add(
            Row(
                part=PART, what=case, params=params, unit="GB/s", samples=found[case], ratios=ratios
            )
        )
    grown = [sample["grown_mib"] for sample in samples[STREAM]]
    report.add(Row(part=PART, what=PEAK, params=params, unit="MiB", samples=grown))
    report.expect(f"{count:,} tensors: stream, of replicate", reached, at_least=0.8)
    largest = setup.size_mib / count
    report.expect(
        f"{count:,} tensors: stream, memory", median(grown), at_most=128 + largest, unit="MiB"
    )
