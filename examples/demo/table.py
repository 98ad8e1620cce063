"""What the processes of one run measured, as a table."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

CAPTION = """
What each version cost. The trainer: to unpublish the version before it, once its readers were
done, and to publish it. A reader: ms for the whole call, GB/s while bytes moved. The slowest of
a group's ranks counts; the lines above are of rank 0.
"""
HEAD = (
    f"{'version':>7} {'loss':>6} {'unpublish':>11} {'publish':>11}   "
    f"{'reader':15} {'source':15} {'MB':>6} {'ms':>7} {'GB/s':>6}"
)

Line = dict[str, Any]


def print_table(directory: Path) -> None:
    lines = [
        json.loads(line)
        for path in sorted(directory.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    replicas = {line["replica"]: line["role"] for line in lines}
    published: dict[int, list[Line]] = defaultdict(list)
    reads: dict[int, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if "loss" in line:
            published[line["version"]].append(line)
        else:
            reads[line["version"]][line["role"]].append(line)

    print(CAPTION, HEAD, sep="\n")
    for version, by_rank in published.items():
        left = _published(version, by_rank)
        right = [_read(role, replicas, ranks) for role, ranks in reads[version].items()]
        print(left, f"\n{' ' * len(left)} ".join(right))
    losses = [by_rank[0]["loss"] for by_rank in published.values()]
    print(f"\nThe loss went from {losses[0]:.2f} to {losses[-1]:.2f}. ", end="")
    print("Every tensor that was read is, bit for bit, what the trainer had.")


def _published(version: int, by_rank: list[Line]) -> str:
    unpublish_ms = 1e3 * max(line["unpublish_s"] for line in by_rank)
    publish_ms = 1e3 * max(line["publish_s"] for line in by_rank)
    loss = by_rank[0]["loss"]
    return f"{version:7} {loss:6.2f} {unpublish_ms:8.1f} ms {publish_ms:8.1f} ms  "


def _read(role: str, replicas: dict[str, str], by_rank: list[Line]) -> str:
    source = replicas[by_rank[0]["source"]]
    size_mb = sum(line["size_bytes"] for line in by_rank) / 1e6
    elapsed_ms = 1e3 * max(line["elapsed_s"] for line in by_rank)
    transfer_ms = 1e3 * max(line["transfer_s"] for line in by_rank)
    return f"{role:15} {source:15} {size_mb:6.1f} {elapsed_ms:7.1f} {size_mb / transfer_ms:6.2f}"
