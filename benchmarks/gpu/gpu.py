"""All that is to be learnt on one GPU, within minutes, from a machine that may be bare.

    python benchmarks/gpu/gpu.py                          # or `make gpu`; 5 minutes at most
    python benchmarks/gpu/gpu.py --device cpu             # every piece, on a CPU that stands in
    python benchmarks/gpu/gpu.py --only loop ways-tcp --out DIRECTORY

Pieces stand in the order of their value. Each runs in a process of its own, with a limit of its
own, and whatever it found until then counts. `results.json` in the directory of `--out` is written
after each piece; pieces that have ended well there are left out, so that a second call goes on.
The last lines are a table. The exit status says whether all pieces ended, not what they found.

A machine without package registries is given what `carried.py` packs: all but torch, numpy and
transformers. torch may be older than the package's bound, which only pip knows.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from harness import etcd_at  # noqa: E402

TCP = {"TORCH_ROS_TRANSPORT": "tcp", "TORCH_ROS_LISTEN": "127.0.0.1"}
GROWING = dict.fromkeys(  # the name of today, and that of before
    ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"
)
CPU_SCALE = 1 / 512  # 16 MiB in place of 8 GiB
PATIENCE = {"cuda": 1, "cpu": 3}  # times the limits
BEGIN_S = 60.0  # for imports, before a piece's own time
LEAST_S = 5.0  # a piece that would have less is left for the next call
WORDS_MAX = 1500  # characters of what a piece said in the end


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the agenda. Its function takes a `Card` and yields `Row`s."""

    name: str
    where: str  # module:function
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)


PIECES = (
    Piece("machine", "machine:machine", 20),
    Piece("loop", "loop:loop", 80),
    Piece("copies", "speeds:copies", 40),
    Piece("ways", "ways:ways", 45),
    Piece("batching", "loop:batching", 40),
    Piece("digests", "speeds:digests", 20),
    Piece("expandable", "dangers:expandable", 40, GROWING),
    Piece("tests", "machine:tests", 90),
    Piece("ways-tcp", "ways:ways", 45, TCP),
    Piece("graphs", "dangers:graphs", 20),
    Piece("graphs-tcp", "dangers:graphs", 20, TCP),
    Piece("memory", "dangers:memory", 20),
    Piece("segments", "dangers:segments", 20),
    Piece("deaths", "dangers:deaths", 40),
    Piece("lost", "dangers:lost", 40),
    Piece("lent", "dangers:lent", 15),
    Piece("lent-host", "dangers:lent_to_host", 15),
    Piece("fork", "dangers:fork", 15),
    Piece("names", "dangers:names", 20),
    Piece("streams", "dangers:streams", 20),
    Piece("deltas", "speeds:deltas", 40),
    Piece("expandable-tcp", "dangers:expandable", 40, TCP | GROWING),
)


# In a piece's process


def perform(piece: Piece, device: str, scale: float) -> None:
    """Import what it needs; when told, run it, and print a line of JSON per row."""
    import torch  # noqa: PLC0415  # not needed where the pieces are started
    from card import card  # noqa: PLC0415

    module, _, function = piece.where.partition(":")
    call = getattr(importlib.import_module(module), function)
    if device == "cpu":
        torch.set_num_threads(1)  # a piece and its children share the cores
    print("ready", flush=True)
    sys.stdin.readline()
    for row in call(card(device, scale)):
        is_judged = device == "cuda" or row.ratio is None  # speeds are those of a GPU
        print(json.dumps(asdict(row if is_judged else replace(row, is_met=None))), flush=True)


# Around them


@dataclass
class Running:
    """A process that waits until it is told to begin."""

    piece: Piece
    process: subprocess.Popen[bytes]
    directory: Path

    @classmethod
    def started(cls, piece: Piece, given: argparse.Namespace, directory: Path) -> "Running":
        command = [sys.executable, __file__, "--piece", piece.name, "--device", given.device]
        paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
        found = directory / piece.name
        with (
            found.with_suffix(".rows").open("wb") as rows,
            found.with_suffix(".log").open("wb") as log,
        ):
            process = subprocess.Popen(
                [*command, "--scale", str(given.scale)],
                env=os.environ | {"PYTHONPATH": paths} | piece.environment,
                stdin=subprocess.PIPE,
                stdout=rows,
                stderr=log,
                start_new_session=True,
            )
        return cls(piece, process, directory)

    @property
    def _stem(self) -> Path:
        return self.directory / self.piece.name

    def ended(self, limit_s: float) -> dict[str, Any]:
        """Results of the piece, once it has begun and ended, or its time was over."""
        end_s = time.monotonic() + BEGIN_S
        while self.process.poll() is None and time.monotonic() < end_s:
            if b"ready" in self._stem.with_suffix(".rows").read_bytes():
                break
            time.sleep(0.05)
        began_s = time.monotonic()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"begin\n")
            self.process.stdin.close()
        try:
            ended = "failed" if self.process.wait(limit_s) else "well"
        except subprocess.TimeoutExpired:
            ended = "late"
        self.end()
        lines = self._stem.with_suffix(".rows").read_text().splitlines()
        rows = [json.loads(line) for line in lines if line.startswith('{"what"')]
        said = self._stem.with_suffix(".log").read_text(errors="replace")
        took_s = round(time.monotonic() - began_s, 1)
        return {"ended": ended, "took_s": took_s, "rows": rows, "said": said[-WORDS_MAX:]}

    def end(self) -> None:
        """Kill it, and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run(given: argparse.Namespace, pieces: list[Piece], results: dict[str, Any]) -> None:
    """One piece after the other. While one runs, the next one's process imports."""
    end_s = time.monotonic() + given.minutes * 60
    logs = given.out / "logs"
    logs.mkdir(exist_ok=True)
    waiting = [Running.started(pieces[0], given, logs)] if pieces else []
    try:
        for number, piece in enumerate(pieces):
            left_s = end_s - time.monotonic()
            if left_s < LEAST_S:
                print(f"left for the next call: {', '.join(each.name for each in pieces[number:])}")
                return
            limit_s = piece.limit_s * PATIENCE[given.device]
            current = waiting.pop()
            waiting += [Running.started(each, given, logs) for each in pieces[number + 1 :][:1]]
            try:
                results["pieces"][piece.name] = found = current.ended(min(limit_s, left_s))
            finally:
                current.end()
            written = given.out / "results.new"
            written.write_text(json.dumps(results, indent=1))
            written.replace(given.out / "results.json")
            print(f"{piece.name}: {found['ended']}, {found['took_s']} s", flush=True)
    finally:
        for each in waiting:
            each.end()


def table(results: dict[str, Any]) -> Iterator[str]:
    yield f"{'piece':14} {'what':46} {'found':>12} {'of torch':>8}  aim"
    for name, found in results["pieces"].items():
        for row in found["rows"]:
            ratio = f"{row['ratio']:.3f}" if row["ratio"] is not None else ""
            met = {True: ": met", False: ": MISSED", None: ""}[row["is_met"]]
            what, said = row["what"], row["found"]
            yield f"{name:14} {what:46} {said:>12} {ratio:>8}  {row['aim']}{met}".rstrip()
        if found["ended"] != "well":
            yield f"{name:14} {found['ended'].upper()} after {found['took_s']} s"
            yield from (f"    {line}" for line in found["said"].splitlines()[-6:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scale", type=float, help="of all sizes; 1, on a CPU 1/512")
    parser.add_argument("--minutes", type=float, default=4.75)
    parser.add_argument("--only", nargs="+", choices=[piece.name for piece in PIECES])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--piece", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.scale = given.scale or (1.0 if given.device == "cuda" else CPU_SCALE)
    if given.piece:
        perform(next(p for p in PIECES if p.name == given.piece), given.device, given.scale)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    before, results = given.out / "results.json", {"device": given.device, "pieces": {}}
    if before.exists() and json.loads(before.read_text())["device"] == given.device:
        results = json.loads(before.read_text())
    done = {name for name, found in results["pieces"].items() if found["ended"] == "well"}
    wanted = given.only or [piece.name for piece in PIECES if piece.name not in done]
    os.environ["HF_HUB_OFFLINE"] = "1"
    with etcd_at("local"):
        os.environ["TORCH_ROS_ENDPOINT"] = "local"
        run(given, [piece for piece in PIECES if piece.name in wanted], results)
    print(*table(results), sep="\n")
    sys.exit(any(found["ended"] != "well" for found in results["pieces"].values()))


if __name__ == "__main__":
    main()
