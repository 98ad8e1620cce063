"""From one sharding to another, beside the same sharding at both ends."""

from collections.abc import Callable, Sequence
from functools import partial

import tensors as contents
from harness import Actors, Child, Sample, Setup, ask_all, rounds, started
from ours import ALONE, Rollout, Trainer
from report import Report, Row, ratio, speeds

PART = "Resharding"
RANKS = 2

SAME = "FSDP(2) to FSDP(2)"
ROWS = "FSDP(2) to TP(2), rows (Shard(0))"
COLUMNS = "FSDP(2) to TP(2), columns (Shard(1))"
TO_FSDP = "TP(2), columns, to FSDP(2)"
SAME_ALONE = "1 to 1"
TO_ONE = "FSDP(2) to 1"

# Case: the model, the reader, how many processes read, what it is compared with.
CASES = {
    SAME: ("fsdp", "fsdp", 2, None),
    ROWS: ("fsdp", "rows", 2, SAME),
    COLUMNS: ("fsdp", "columns", 2, SAME),
    TO_FSDP: ("tp", "back", 2, SAME),
    SAME_ALONE: ("whole", "alone", 1, None),
    TO_ONE: ("fsdp", "one", 1, SAME_ALONE),
}
LEAST = {ROWS: 0.8, COLUMNS: 0.35}


def source(setup: Setup, rank: int) -> Actors:
    mesh, size_bytes = contents.join(setup.directory, "sources", rank, RANKS), setup.size_bytes
    actors = {
        "fsdp": Trainer(setup, "fsdp", contents.sharded(size_bytes, mesh, 0)),
        "tp": Trainer(setup, "tp", contents.sharded(size_bytes, mesh, 1)),
    }
    if rank == 0:
        actors["whole"] = Trainer(setup, "whole", contents.matrices(size_bytes), **ALONE)
    return actors


def reader(setup: Setup, rank: int) -> Actors:
    mesh, size_bytes = contents.join(setup.directory, "readers", rank, RANKS), setup.size_bytes
    # Who reads gives its tensors back before the next one reads: two can share them.
    rows = contents.sharded(size_bytes, mesh, 0)
    columns = contents.sharded(size_bytes, mesh, 1)
    actors = {
        "fsdp": Rollout(setup, "fsdp", "fsdp", rows),
        "rows": Rollout(setup, "fsdp", "rows", rows),
        "columns": Rollout(setup, "fsdp", "columns", columns),
        "back": Rollout(setup, "tp", "back", rows),
    }
    if rank == 0:
        whole = contents.matrices(size_bytes)
        actors["one"] = Rollout(setup, "fsdp", "one", whole, **ALONE)
        actors["alone"] = Rollout(setup, "whole", "alone", whole, **ALONE)
    return actors


def measure(setup: Setup, report: Report) -> None:
    builds = {
        f"{name} {rank}": partial(build, setup, rank)
        for name, build in (("source", source), ("reader", reader))
        for rank in range(RANKS)
    }
    with started(builds) as children:
        sources, readers = children[:RANKS], children[RANKS:]
        size_bytes = sources[0].ask("whole", "size_bytes")
        samples = rounds(setup.repeat, {case: _case(case, sources, readers) for case in CASES})
    elapsed_s = {case: [s["elapsed_s"] for s in taken] for case, taken in samples.items()}
    found = {case: speeds(size_bytes, taken) for case, taken in elapsed_s.items()}
    for case, (*_, processes, base) in CASES.items():
        ratios = {} if base is None else {f"of {base}": ratio(found[case], found[base])}
        amplification = samples[case][0]["bytes_read"] / size_bytes
        params = {"MiB": size_bytes >> 20, "readers": processes, "read": f"{amplification:.2f}x"}
        row = Row(
            part=PART, what=case, params=params, unit="GB/s", samples=found[case], ratios=ratios
        )
        report.add(row)
        if base is not None and case in LEAST:
            what = f"{case}, of {base}"
            report.expect(what, ratio(found[case], found[base]), at_least=LEAST[case])


def _case(case: str, sources: Sequence[Child], readers: Sequence[Child]) -> Callable[[], Sample]:
    model, rollout, processes, _ = CASES[case]
    owners = sources if model != "whole" else sources[:1]
    reading = readers[:processes]

    def once() -> Sample:
        [version, *_] = ask_all(owners, model, "write")
        ask_all(owners, model, "publish")
        samples = ask_all(reading, rollout, "replicate", version)
        ask_all(reading, rollout, "verify", version)
        ask_all(reading, rollout, "let_go")
        slowest = max(samples, key=lambda sample: sample["elapsed_s"])
        return {**slowest, "bytes_read": sum(sample["bytes_read"] for sample in samples)}

    return once
