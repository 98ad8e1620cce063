"""How fast weights get from process to process, beside what else people use on one host.

Runs all parts, writes docs/benchmarks: results.json, README.md and its pictures; prints what was
aimed at and what was found. Progress goes to stderr. Some 9 GiB of memory at the default size.
"""

import argparse
import os
import secrets
import shlex
import signal
import sys
import tempfile
from pathlib import Path

# torch's threads would share the cores with those of the other processes.
os.environ["OMP_NUM_THREADS"] = "1"
# Nothing here is for other hosts.
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import borrow
import checkpoint
import fanout
import footprint
import huge_pages
import one_to_one
import planning
import plots
import resharding
import steady
import streams
import tcp
from harness import ChildFailed, Setup, etcd_at, say
from report import Report, as_json, by_part, machine, page, table, target_table

PARTS = {
    "one-to-one": one_to_one,
    "resharding": resharding,
    "planning": planning,
    "fanout": fanout,
    "steady": steady,
    "streams": streams,
    "borrow": borrow,
    "huge-pages": huge_pages,
    "tcp": tcp,
    "footprint": footprint,
    "dcp": checkpoint,
}
DOCUMENTS = Path(__file__).parents[1] / "docs" / "benchmarks"


def main() -> None:
    given = parse()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("told to end"))
    with etcd_at(given.endpoint):
        header = machine(given.endpoint) | {"command": shlex.join(["bench.py", *sys.argv[1:]])}
        report = Report()
        for part in given.only:
            say(part)
            with tempfile.TemporaryDirectory(prefix="torch-ros-bench-", dir="/dev/shm") as files:
                name = f"bench-{secrets.token_hex(4)}"  # no other run's
                setup = Setup(given.endpoint, name, given.size_mib, given.repeat, files)
                PARTS[part].measure(setup, report)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "results.json").write_text(as_json(header, report))
        plots.draw([row.as_json() for row in report.rows], given.out)
        (given.out / "README.md").write_text(page(header, report))
        say(f"written to {given.out}")
    else:
        for rows in by_part(report.rows).values():
            print(*table(rows), "", sep="\n")
    print(*target_table(report.targets), sep="\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mib", type=int, default=1024, help="of a version; at least 32")
    parser.add_argument("--repeat", type=int, default=5, help="rounds that count")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument(
        "--out", type=Path, help="where the report goes; docs/benchmarks, if all parts are run"
    )
    parser.add_argument("--endpoint", default="local", help='"local", or "etcd://host:port"')
    given = parser.parse_args()
    if given.size_mib < 32 or given.repeat < 1:
        parser.error("expected at least 32 MiB and 1 round")
    if given.out is None and given.only == list(PARTS):
        given.out = DOCUMENTS
    return given


if __name__ == "__main__":
    try:
        main()
    except ChildFailed as failed:
        sys.exit(str(failed))
    except KeyboardInterrupt:
        sys.exit("interrupted")
