"""One process to one other, the same layout in both, beside all that people do instead.

Where torch_ros brings tensors onto huge pages, they are its own: all others have pages of 4 KiB.
"""

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import tensors as contents
from harness import Actors, Child, Sample, Setup, ask_all, rounds, say, started
from others import Broadcast, Copy, Files, RawReader, RawSource
from ours import ALONE, Rollout, Trainer
from report import Report, Row, ratio, speeds

PART = "One to one, same layout"
COUNTS = (1, 100, 2000)

WANTED = {1: (1.0, 1.7), 100: (1.0, 1.7), 2000: (0.95, 1.6)}  # of the copy, of NIXL by hand

COPY = "torch copy, 1 thread, warm"
REGION = "NIXL by hand, one region"
TENSORS = "NIXL by hand, a descriptor per tensor"
ROS = "torch_ros, replicate"
ROS_WHOLE = "torch_ros, publish and replicate"
SMALL = "torch_ros, huge_pages=False, replicate"
SHARED = "torch_ros, published from shared memory, publish and replicate"
DCP = "DCP FileSystem on tmpfs, save and load"
SAFETENSORS = "safetensors on tmpfs, save_file and load_file"
GLOO = "gloo broadcast"


def source(setup: Setup, count: int) -> Actors:
    held, small, shared = (contents.plain(setup.size_bytes, count) for _ in range(3))
    region = contents.plain(setup.size_bytes, 1)
    contents.join(setup.directory, f"pair-{count}", 0, 2)
    for tensor in shared.values():
        tensor.share_memory_()
    return {
        "trainer": Trainer(setup, f"pair-{count}", held, **ALONE),
        "sharing": Trainer(setup, f"sharing-{count}", shared, **ALONE),
        "small": Trainer(setup, f"small-{count}", small, huge_pages=False, **ALONE),
        "raw": RawSource("source", small),
        "region": RawSource("region source", region),
        "files": Files(small),
        "gloo": Broadcast(small),
    }


def reader(setup: Setup, count: int) -> Actors:
    held, small = (contents.plain(setup.size_bytes, count) for _ in range(2))
    region = contents.plain(setup.size_bytes, 1)
    contents.join(setup.directory, f"pair-{count}", 1, 2)
    # Sources of the copy: pieces of the region, which nobody has to hold twice.
    [whole] = region.values()
    pieces = dict(zip(held, whole.split([t.numel() for t in held.values()]), strict=True))
    return {
        "rollout": Rollout(setup, f"pair-{count}", "rollout", held, **ALONE),
        "small": Rollout(setup, f"small-{count}", "rollout", small, huge_pages=False, **ALONE),
        "sharing": Rollout(setup, f"sharing-{count}", "rollout", held, **ALONE),
        "raw": RawReader("reader", small),
        "region": RawReader("region reader", region),
        "files": Files(small),
        "gloo": Broadcast(small),
        "copy": Copy(pieces, small),
    }


class Pair:
    """A new version each time; where it landed is looked at, and may be written to again."""

    def __init__(self, source: Child, reader: Child, directory: str) -> None:
        self._source, self._reader, self._directory = source, reader, directory
        for raw in ("raw", "region"):
            reader.ask(raw, "connect", *source.ask(raw, "offer"))
        for child, actor in ((source, "trainer"), (reader, "rollout")):
            say(f"  {child.ask(actor, 'settle')}")

    def cases(self) -> dict[str, Callable[[], Sample]]:
        return {
            COPY: partial(self._into_small, self._copy),
            REGION: self._region,
            TENSORS: partial(self._into_small, lambda _: self._raw("raw")),
            ROS: self._ros,
            SMALL: partial(self._into_small, self._from_small),
            SHARED: self._shared,
            DCP: partial(self._into_small, lambda _: self._files("dcp")),
            SAFETENSORS: partial(self._into_small, lambda _: self._files("safetensors")),
            GLOO: partial(self._into_small, self._broadcast),
        }

    def _into_small(self, move: Callable[[int], Sample]) -> Sample:
        version = self._source.ask("small", "write")
        sample = move(version)
        self._reader.ask("raw", "verify", version)
        self._reader.ask("small", "let_go")
        return sample

    def _copy(self, version: int) -> Sample:
        return {"elapsed_s": self._reader.ask("copy", "copy", version)}

    def _region(self) -> Sample:
        version = self._source.ask("trainer", "write")
        self._source.ask("region", "write", version)
        sample = self._raw("region")
        self._reader.ask("region", "verify", version)
        return sample

    def _raw(self, raw: str) -> Sample:
        self._source.ask(raw, "begin")
        elapsed_s = self._reader.ask(raw, "read")
        self._source.ask(raw, "end")
        return {"elapsed_s": elapsed_s}

    def _ros(self) -> Sample:
        version = self._source.ask("trainer", "write")
        published_s = self._source.ask("trainer", "publish")
        sample = self._reader.ask("rollout", "replicate", version)
        self._reader.ask("rollout", "verify", version)
        self._reader.ask("rollout", "let_go")
        return {**sample, "published_s": published_s}

    def _from_small(self, version: int) -> Sample:
        self._source.ask("small", "publish")
        return self._reader.ask("small", "replicate", version)

    def _shared(self) -> Sample:
        version = self._source.ask("sharing", "write")
        published_s = self._source.ask("sharing", "publish")
        sample = self._reader.ask("sharing", "replicate", version)
        self._reader.ask("sharing", "verify", version)
        self._reader.ask("sharing", "let_go")
        return {"elapsed_s": sample["elapsed_s"] + published_s}

    def _files(self, kind: str) -> Sample:
        path = Path(tempfile.mkdtemp(dir=self._directory))  # one per version, as trainers do
        saved_s = self._source.ask("files", f"save_{kind}", path)
        loaded_s = self._reader.ask("files", f"load_{kind}", path)
        shutil.rmtree(path)
        return {"elapsed_s": saved_s + loaded_s}

    def _broadcast(self, _: int) -> Sample:
        return {"elapsed_s": max(ask_all((self._source, self._reader), "gloo", "broadcast"))}


def measure(setup: Setup, report: Report) -> None:
    for count in COUNTS:
        say(f"  tensors: {count}")
        builds = {"source": partial(source, setup, count), "reader": partial(reader, setup, count)}
        with started(builds) as children:
            samples = rounds(setup.repeat, Pair(*children, setup.directory).cases())
        elapsed_s = {case: [s["elapsed_s"] for s in taken] for case, taken in samples.items()}
        elapsed_s[ROS_WHOLE] = [s["elapsed_s"] + s["published_s"] for s in samples[ROS]]
        _tell(setup, report, count, elapsed_s)


def _tell(setup: Setup, report: Report, count: int, elapsed_s: dict[str, list[float]]) -> None:
    found = {case: speeds(setup.size_bytes, taken) for case, taken in elapsed_s.items()}
    for case in (COPY, REGION, TENSORS, ROS, SMALL, ROS_WHOLE, SHARED, DCP, SAFETENSORS, GLOO):
        bases = {"of NIXL by hand": TENSORS} if case != TENSORS else {}
        if case in (ROS, SMALL):
            bases["of the copy"] = COPY
        if case in (ROS_WHOLE, SHARED):
            bases |= {"of DCP": DCP, "of safetensors": SAFETENSORS, "of gloo": GLOO}
        report.add(
            Row(
                part=PART,
                what=case,
                params={"MiB": setup.size_mib, "tensors": count},
                unit="GB/s",
                samples=found[case],
                ratios={name: ratio(found[case], found[base]) for name, base in bases.items()},
            )
        )
    of_copy, of_nixl = WANTED[count]
    wanted = (
        (ROS, COPY, of_copy),
        (ROS, TENSORS, of_nixl),
        (ROS_WHOLE, DCP, 5.0),
        (ROS_WHOLE, SAFETENSORS, 3.0),
    )
    for case, base, least in (*wanted, (ROS_WHOLE, GLOO, 2.0)):
        what = f"{count:,} {'tensor' if count == 1 else 'tensors'}: {case}, of {base}"
        report.expect(what, ratio(found[case], found[base]), at_least=least)
