"""How long it takes to plan what a rank reads, which is done once for two layouts."""

import time

from harness import Setup, say
from report import Report, Row

from torch_ros.costs import HOST_COSTS
from torch_ros.weights.manifest import ChunkRecord, Layout, TensorRecord
from torch_ros.weights.plan import plan

PART = "Planning"
CHUNKS, SIDE = 70_000, 64
STAGING_BYTES = 4 << 20
SECONDS_MAX = 5.0

# Ranks of the source, which is cut by rows; the reader: ranks, and along what it is cut.
CASES = {"1 to 1": (1, 1, 0), "FSDP(8) to 1": (8, 1, 0), "FSDP(8) to TP(8), columns": (8, 8, 1)}


def layout(tensors: int, rank: int, ranks: int, dim: int) -> Layout:
    """Of a rank that has a part of each of so many square matrices."""
    sizes, offsets = [SIDE, SIDE], [0, 0]
    sizes[dim] //= ranks
    offsets[dim] = rank * sizes[dim]
    chunks = (
        ChunkRecord(i, tuple(offsets), tuple(sizes), (sizes[1], 1), spread=True)
        for i in range(tensors)
    )
    records = (TensorRecord(f"t{i:05}", "float32", (SIDE, SIDE), None) for i in range(tensors))
    return Layout(tuple(records), tuple(chunks))


def measure(setup: Setup, report: Report) -> None:
    slowest_s = 0.0
    for case, (source_ranks, ranks, dim) in CASES.items():
        tensors = CHUNKS // source_ranks
        taken_s: list[float] = []
        for _ in range(setup.repeat):
            # New ones: a layout remembers what was found out about it.
            sources = [layout(tensors, rank, source_ranks, 0) for rank in range(source_ranks)]
            target = layout(tensors, 0, ranks, dim)
            began_s = time.perf_counter()
            made = plan(
                sources, target, staging_bytes=STAGING_BYTES, target_rank=0, costs=HOST_COSTS
            )
            taken_s.append(time.perf_counter() - began_s)
        params = {"chunks": CHUNKS, "spans": made.span_count}
        samples = [1e3 * one_s for one_s in taken_s]
        row = report.add(Row(part=PART, what=case, params=params, unit="ms", samples=samples))
        slowest_s = max(slowest_s, row.median / 1e3)
        say(f"  {case}")
    report.expect(f"plan of {CHUNKS:,} chunks", slowest_s, at_most=SECONDS_MAX, unit="s")
