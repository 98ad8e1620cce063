"""How fast weights get from one process to another, beside what else people use on one host.

Every round measures every case once, in the same processes, so that a noisy machine is noisy for
all of them; the first round warms up and does not count. GB/s count the payload, once: the bytes
of the version, over the time of the slowest rank. Prints a row of JSON per result, then tables.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import peers
from peers import Failure, Setup
from report import Row, Sample, call_row, machine_row, speeds, tables, transfer_row

LIMIT_S = 300.0  # for one answer of a child
END_S = 10.0
CALLS_PER_ROUND = 20

COPY = "torch copy, 1 thread"
RAW = "NIXL read by hand"
SAME = "torch_ros, same layout"
COLUMNS = "torch_ros, FSDP(2) to columns of TP(2)"
ROWS = "torch_ros, FSDP(2) to rows of TP(2)"
DCP_WRITE, DCP_READ, DCP = "DCP files in tmpfs, write", "... read", "... write and read"

Samples = dict[str, list[Sample]]  # of each case, one per round
Timed = dict[str, list[float]]  # of each call, seconds


class Child:
    def __init__(self, build: Callable[..., dict[str, Any]], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.name = build.__name__
        self.process = context.Process(
            target=peers.serve, args=(theirs, build, *arguments), daemon=True
        )
        self.process.start()
        theirs.close()  # so that its death ends our wait

    def tell(self, *told: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # `hear` says why it has ended
            self._pipe.send(told)

    def hear(self) -> Any:
        if not self._pipe.poll(LIMIT_S):
            sys.exit(f"{self.name} has not answered for {LIMIT_S:.0f} s")
        try:
            heard = self._pipe.recv()
        except EOFError:
            self.process.join(END_S)
            sys.exit(f"{self.name} has ended with exit status {self.process.exitcode}")
        if isinstance(heard, Failure):
            sys.exit(f"{self.name} failed:\n{heard.report}")
        return heard

    def end(self) -> None:
        self.process.terminate()
        self.process.join(END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(END_S)


def ask(children: Sequence[Child], actor: str, method: str, *arguments: object) -> list[Any]:
    """All do it at the same time; what each says."""
    for child in children:
        child.tell(actor, method, arguments)
    return [child.hear() for child in children]


@contextlib.contextmanager
def started(setup: Setup) -> Iterator[dict[str, list[Child]]]:
    """The processes of one run, ready. None is left afterwards, whatever happens."""
    ranks = range(peers.RANKS)
    groups: dict[str, list[Child]] = defaultdict(list)
    try:
        # Inherited: Ctrl-C reaches children too, and is ours alone to handle.
        ours = signal.signal(signal.SIGINT, signal.SIG_IGN)
        groups["source"].append(Child(peers.pair_source, setup))
        groups["reader"].append(Child(peers.pair_reader, setup))
        for rank in ranks:
            groups["fsdp"].append(Child(peers.fsdp_rank, setup, rank))
            groups["tp"].append(Child(peers.tp_rank, setup, rank))
        signal.signal(signal.SIGINT, ours)
        everyone = [child for group in groups.values() for child in group]
        for child in everyone:
            child.hear()
        yield groups
        for child in everyone:
            child.tell()
        for child in everyone:
            child.process.join(END_S)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not stop us halfway
        for group in groups.values():
            for child in group:
                child.end()


class Bench:
    def __init__(self, groups: dict[str, list[Child]]) -> None:
        self._source, self._reader = groups["source"], groups["reader"]
        self._fsdp, self._tp = groups["fsdp"], groups["tp"]
        ask(self._source, "raw", "begin")
        [offer] = ask(self._source, "raw", "offer")
        ask(self._reader, "raw", "connect", *offer)
        [plain_bytes] = ask(self._source, "trainer", "size_bytes")
        sharded_bytes, *_ = ask(self._fsdp, "trainer", "size_bytes")
        self.size_bytes = defaultdict(lambda: plain_bytes)
        self.size_bytes |= {COLUMNS: sharded_bytes, ROWS: sharded_bytes}
        self.cases = {
            COPY: self._copy,
            RAW: self._raw,
            SAME: self._same,
            COLUMNS: lambda: self._sharded("columns"),
            ROWS: lambda: self._sharded("rows"),
            DCP: self._files,
        }
        self.timed: Timed = defaultdict(list)

    def _copy(self) -> Sample:
        return ask(self._reader, "alone", "copy")[0]

    def _raw(self) -> Sample:
        [version] = ask(self._source, "trainer", "publish")  # it also writes what we read
        ask(self._source, "raw", "begin")
        [sample] = ask(self._reader, "raw", "read", version)
        ask(self._source, "raw", "end")
        return sample

    def _same(self) -> Sample:
        ask(self._source, "trainer", "publish")
        [sample] = ask(self._reader, "rollout", "update")
        self._look(self._reader, "rollout")
        return sample

    def _sharded(self, rollout: str) -> Sample:
        ask(self._fsdp, "trainer", "publish")  # so that nobody but the trainer has it
        samples = ask(self._tp, rollout, "update")
        self._look(self._tp, rollout)
        slowest = max(samples, key=lambda sample: sample["elapsed_s"])
        return {**slowest, "bytes_read": sum(sample["bytes_read"] for sample in samples)}

    def _files(self) -> Sample:
        return ask(self._reader, "alone", "through_files")[0]

    def _look(self, group: Sequence[Child], rollout: str) -> None:
        timed = ask(group, rollout, "look", CALLS_PER_ROUND)
        self._note("update that finds nothing", len(group), zip(*timed, strict=True))

    def time_publishing(self) -> None:
        for group in (self._source, self._fsdp):
            by_rank = ask(group, "trainer", "warm", CALLS_PER_ROUND)
            whole_mib = self.size_bytes[SAME if len(group) == 1 else ROWS] / 2**20
            for size, mib in (("small", peers.SMALL_MIB), ("whole", whole_mib)):
                for position, call in enumerate(("publish", "unpublish")):
                    timed = [[pair[position] for pair in rank[size]] for rank in by_rank]
                    self._note(f"{call} {mib:.0f} MiB", len(group), zip(*timed, strict=True))

    def _note(self, call: str, rank_count: int, timed: Iterator[tuple[float, ...]]) -> None:
        name = f"{call}, {rank_count} rank{'s' if rank_count > 1 else ''}"
        self.timed[name] += [max(ranks) for ranks in timed]


def measure(bench: Bench, round_count: int) -> Samples:
    samples: Samples = defaultdict(list)
    names = list(bench.cases)
    for number in range(round_count + 1):
        began_s = time.perf_counter()
        turn = number % len(names)  # whatever one case leaves to the next, it is not always that
        measured = {name: bench.cases[name]() for name in names[turn:] + names[:turn]}
        bench.time_publishing()
        if number == 0:
            bench.timed.clear()
        else:
            for name, sample in measured.items():
                samples[name].append(sample)
        what = f"round {number} of {round_count}" if number else "warm-up"
        print(f"{what}: {time.perf_counter() - began_s:.1f} s", file=sys.stderr, flush=True)
    return samples


def results(bench: Bench, samples: Samples) -> Iterator[Row]:
    bases = {
        base: speeds(bench.size_bytes[case], samples[case])
        for base, case in (("nixl", RAW), ("dcp", DCP))
    }
    for case in (COPY, RAW, SAME, COLUMNS, ROWS):
        yield transfer_row(case, bench.size_bytes[case], samples[case], bases)
    for case, stage in ((DCP_WRITE, "write_s"), (DCP_READ, "load_s"), (DCP, "elapsed_s")):
        timed = [{"elapsed_s": sample[stage]} for sample in samples[DCP]]
        yield transfer_row(case, bench.size_bytes[DCP], timed, bases)
    for call in sorted(bench.timed):
        yield call_row(call, bench.timed[call])


def main() -> None:
    options = parse()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("told to end"))
    # Over TCP, if it comes to that, torch_ros asks for these; NIXL by hand is to have them too.
    for variable in ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"):
        os.environ.setdefault(variable, "1m")
    machine = machine_row(options.endpoint)
    with tempfile.TemporaryDirectory(prefix="torch-ros-bench-", dir="/dev/shm") as directory:
        setup = Setup(
            options.endpoint,
            f"bench-{os.getpid()}-{secrets.token_hex(4)}",  # no other run's
            options.mib << 20,
            options.tensors,
            directory,
        )
        with started(setup) as groups:
            bench = Bench(groups)
            rows = [machine, *results(bench, measure(bench, options.rounds))]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if options.json:
        options.json.write_text(lines)
    else:
        print(lines)
    print(*tables(rows), sep="\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of a version; at least 32")
    parser.add_argument("--tensors", type=int, default=100, help="in it, where not sharded")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="PATH", help="rows go here, not to stdout")
    parser.add_argument("--endpoint", default="local", help='"local", or "etcd://host:port"')
    options = parser.parse_args()
    if options.mib < 32 or options.tensors < 1 or options.rounds < 1:
        parser.error("expected at least 32 MiB, 1 tensor and 1 round")
    return options


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
