"""What the processes of one run measured, as a table."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

HEAD = (
    "version   loss   unpublish    publish   reader           source               MB"
    "       ms   GB/s"
)

Line = dict[str, Any]


def print_table(directory: Path) -> None:
    lines = [
        json.loads(line)
        for path in sorted(directory.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    roles = {line["replica"]: line["role"] for line in lines}
    print(HEAD)
    for version in sorted({line["version"] for line in lines}):
        of_version = [line for line in lines if line["version"] == version]
        published = [line for line in of_version if "loss" in line]
        reads = defaultdict(list)
        for line in of_version:
            if "source" in line:
                reads[line["role"]].append(line)
        left = _published(version, published)
        for reader, by_rank in reads.items():
            print(left + _read(reader, roles[by_rank[0]["source"]], by_rank))
            left = " " * len(left)


def _published(version: int, by_rank: list[Line]) -> str:
    unpublish_ms = 1e3 * max(line["unpublish_s"] for line in by_rank)
    publish_ms = 1e3 * max(line["publish_s"] for line in by_rank)
    return (
        f"{version:7}   {by_rank[0]['loss']:4.2f}   {unpublish_ms:6.1f} ms  {publish_ms:6.1f} ms   "
    )


def _read(reader: str, source: str, by_rank: list[Line]) -> str:
    size_mb = sum(line["size_bytes"] for line in by_rank) / 1e6
    elapsed_ms = 1e3 * max(line["elapsed_s"] for line in by_rank)
    transfer_ms = 1e3 * max(line["transfer_s"] for line in by_rank)
    speed = f"{elapsed_ms:6.1f}   {size_mb / transfer_ms:4.2f}"
    return f"{reader:15}  {source:15}  {size_mb:6.1f}   {speed}"
