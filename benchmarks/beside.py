"""torch_ros beside its peers, which are the files of benchmarks/peers, on one host.

In each round, each peer has a turn in each case, in processes of its own, while no other has any.
A turn that is over its limit is ended, is said, and is not tried again. Every element that
arrives is verified. Times are from the trainer's call until the last rollout has the version in
its own tensors. Figures are of use only from cores that do nothing else. Progress goes to stderr.
"""

import argparse
import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from harness import etcd_at, say
from matplotlib.figure import Figure
from report import machine
from style import OURS as OURS_COLOUR
from style import STYLE, THEIRS
from turn import CASES, MARK

HERE = Path(__file__).parent
PEERS = sorted(path.stem for path in (HERE / "peers").glob("*.py") if path.stem != "__init__")
OURS = "ros"  # the peer that ratios are to
TITLES = {
    "one": "One trainer, one rollout",
    "four": "One trainer, four rollouts at once",
    "resharded": "Two ranks of a trainer, by rows, to one rollout",
}
LOOKS, LOOK_S = 100, 0.05  # a process that ends may have started another
CLEANER = "torch_shm_manag"  # the kernel cuts names
COLUMNS = (
    "last rollout has it, ms",
    "of torch_ros",
    "trainer held, ms",
    "it may write, ms",
    "MiB beyond the tensors",
    "at most",
)


def run(given: argparse.Namespace, header: Mapping[str, Any]) -> dict[str, Any]:
    """Turns by case and peer, or an error; after each of them, the file is written anew."""
    found: dict[str, dict[str, Any]] = {case: {} for case in given.cases}
    for number in range(given.rounds):
        first = number % len(given.peers)
        for case in given.cases:
            for peer in given.peers[first:] + given.peers[:first]:
                told = found[case].setdefault(peer, {"turns": []})
                if "error" in told:
                    continue
                say(f"round {number + 1} of {given.rounds}: {case}, {peer}")
                turn = turn_of(peer, case, given)
                if "error" in turn:
                    say(f"  {turn['error']}")
                told |= {name: turn[name] for name in turn.keys() - {"samples", "beyond"}}
                if "samples" in turn:
                    told["turns"].append({"samples": turn["samples"], "beyond": turn["beyond"]})
                if given.out:
                    given.out.write_text(as_json(header, found))
    return found


def turn_of(peer: str, case: str, given: argparse.Namespace) -> dict[str, Any]:
    """One that is not done within the limit, or fails, is an error in words."""
    mark = f"{MARK}={secrets.token_hex(8)}"
    with (
        # A turn that is ended leaves files in memory: they go with its directory.
        tempfile.TemporaryDirectory(prefix="beside-", dir="/dev/shm") as directory,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
    ):
        told = ["--size-mib", str(given.size_mib), "--repeat", str(given.repeat)]
        program = [sys.executable, str(HERE / "turn.py")]
        command = [*program, peer, case, *told, "--directory", directory]
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, env=environment(mark), start_new_session=True
        )
        try:
            status = process.wait(given.limit_s)
        except subprocess.TimeoutExpired:
            return {"error": f"not done within {given.limit_s:g} s"}
        finally:
            end_marked(mark)
            process.wait()
        output.seek(0)
        errors.seek(0)
        if status:
            return {"error": last_words(errors) or f"exit status {status}"}
        return json.loads(output.read().splitlines()[-1])


def environment(mark: str) -> dict[str, str]:
    name, _, value = mark.partition("=")
    paths = [str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    mine = {**os.environ, name: value, "PYTHONPATH": ":".join(paths)}
    # Torch's threads would share the cores with those of other processes; nothing is for others.
    mine |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if (verbs := Path(sys.prefix) / "verbs").is_dir():  # a library that Mooncake wants even for TCP
        mine["LD_LIBRARY_PATH"] = str(verbs)
    return mine


def end_marked(mark: str) -> None:
    """End all processes of a turn: services leave its session, and are started by others."""
    for look in range(LOOKS):
        if not (found := list(marked(mark))):
            return
        for process in found:
            with contextlib.suppress(OSError):  # it has ended
                # torch's removes the shared memory of the others once they are dead, and ends.
                is_cleaning = CLEANER in Path(f"/proc/{process}/comm").read_text()
                if not is_cleaning or look >= LOOKS // 2:
                    os.kill(process, signal.SIGKILL)
        time.sleep(LOOK_S)


def marked(mark: str) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


def last_words(lines: Iterable[str]) -> str:
    """The last line of a traceback."""
    return ([line.strip() for line in lines if line.strip()] or [""])[-1][:300]


# For people


def tables(found: Mapping[str, Any]) -> Iterator[str]:
    for case, told in found.items():
        yield f"## {TITLES[case]}\n"
        yield f"| | {' | '.join(COLUMNS)} |"
        yield "| --- |" + " ---: |" * len(COLUMNS)
        rounds = told.get(OURS, {}).get("turns", [])
        ran = [each for each in told.values() if each["turns"] and "error" not in each]
        for each in sorted(ran, key=lambda each: overall(each["turns"], "last")[0]):
            yield f"| {each['name']} ({each['package']}) | {' | '.join(cells(each, rounds))} |"
        yield ""
        for peer, each in told.items():
            if "error" in each:
                yield f"- {each.get('name', peer)} did not run: `{each['error']}`"
        left = [each for each in told.values() if not each["turns"] and "error" not in each]
        if left:
            yield f"- Left to their users by: {', '.join(each['name'] for each in left)}"
        yield ""


def cells(told: Mapping[str, Any], ours: Sequence[Any]) -> Iterator[str]:
    turns = told["turns"]
    yield spread(*overall(turns, "last"))
    own = [median_of(turn, "last") for turn in ours]
    theirs = [median_of(turn, "last") for turn in turns]
    ratios = [one / other for one, other in zip(theirs, own, strict=False)]
    yield spread(median(ratios), min(ratios), max(ratios), decimals=2) if ratios else ""
    yield spread(*overall(turns, "held"), decimals=1)
    yield spread(*overall(turns, "may write"))
    for when in ("between versions", "peak"):
        yield f"{median(turn['beyond'][when] for turn in turns):,.0f}"


def overall(turns: Sequence[Any], what: str) -> tuple[float, float, float]:
    """The median of all exchanges, and the least and greatest of a round, in ms."""
    each = [1e3 * median_of(turn, what) for turn in turns]
    of_all = [1e3 * sample[what] for turn in turns for sample in turn["samples"]]
    return median(of_all), min(each), max(each)


def median_of(turn: Mapping[str, Any], what: str) -> float:
    return median(sample[what] for sample in turn["samples"])


def spread(middle: float, low: float, high: float, *, decimals: int = 0) -> str:
    return f"{middle:,.{decimals}f} ({low:,.{decimals}f}..{high:,.{decimals}f})"


def draw(found: Mapping[str, Any], file: Path) -> None:
    """A panel for each case, a point for each peer, whose line is the range of the rounds."""
    ran = {
        case: sorted(
            (overall(each["turns"], "last"), each["name"])
            for each in told.values()
            if each["turns"] and "error" not in each
        )
        for case, told in found.items()
    }
    with mpl.rc_context(STYLE):
        counts = [max(len(rows), 1) for rows in ran.values()]
        figure = Figure(figsize=(7.5, 0.9 * len(ran) + 0.22 * sum(counts)), layout="constrained")
        laid = {"squeeze": False, "sharex": True, "height_ratios": counts}
        panels = figure.subplots(len(ran), 1, **laid)[:, 0]
        for axes, (case, rows) in zip(panels, ran.items(), strict=True):
            for place, ((middle, low, high), name) in enumerate(rows):
                colour = OURS_COLOUR if name.startswith("torch_ros") else THEIRS
                axes.plot([low, high], [place, place], color=colour)
                axes.plot(middle, place, "o", color=colour)
            axes.set_yticks(range(len(rows)), [name for _, name in rows])
            axes.invert_yaxis()
            axes.set_xscale("log")
            axes.grid(axis="y", color="#e0e0e0", linewidth=0.5)
            axes.set_title(TITLES[case], fontsize=9, loc="left")
        panels[-1].set_xlabel("ms until the last rollout has the version")
        figure.savefig(file, metadata={"Date": None}, facecolor="white")


def as_json(header: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """An object, in which each peer of each case has a line of its own."""
    cases = ",\n".join(
        f"{json.dumps(case)}: {{\n"
        + ",\n".join(f"{json.dumps(peer)}: {json.dumps(each)}" for peer, each in told.items())
        + "}"
        for case, told in found.items()
    )
    return f'{{"header": {json.dumps(header)},\n"cases": {{\n{cases}}}}}\n'


def main() -> None:
    given = parse()
    if given.show:
        found = json.loads(given.show.read_text())["cases"]
        draw(found, given.show.with_suffix(".svg"))
        print(*tables(found), sep="\n")
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("told to end"))
    with etcd_at("local"):
        header = machine("local") | {"command": shlex.join(["beside.py", *sys.argv[1:]])}
    found = run(given, header)
    print(*tables(found), sep="\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mib", type=int, default=1024, help="of a version; at least 1")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each peer in each case")
    parser.add_argument("--repeat", type=int, default=5, help="exchanges of a turn that count")
    parser.add_argument("--limit-s", type=float, default=180.0, help="of a turn")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS, metavar="PEER")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--out", type=Path, help="where the findings go, in JSON")
    parser.add_argument("--show", type=Path, help="tables of such a file, and a picture beside it")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
