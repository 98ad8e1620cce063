"""`torch-ros`: the arguments, the exit codes, and tables on a terminal."""

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, TextIO
from urllib.parse import urlsplit

import msgspec

from torch_ros import environment
from torch_ros.cli import asking, clearing, doctor, exporting, headway, links, ls, trace, waiting
from torch_ros.cli.headway import Look
from torch_ros.cli.table import table
from torch_ros.errors import (
    AccessDenied,
    BackendError,
    StoreUnavailable,
    TorchRosError,
    UsageError,
    VersionNotFound,
)
from torch_ros.release import RELEASE
from torch_ros.store.kv import KV

FINE, NOT_FINE, USAGE, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130
SCHEMA = 1  # of what --json prints
WIDTH = 80  # of tables that are piped
EXTRAS = {  # which brings a module
    "prometheus_client": "metrics",
    "rich": "top",
    "safetensors": "cli",
    "starlette": "web",
    "textual": "top",
    "uvicorn": "web",
}
NEEDED = {"nixl", "torch"}  # by torch-ros itself; commands that only ask etcd do without
PORT_MAX = 65_535
TIME_MAX_S, UNITS_S = 7 * 86_400.0, {"": 1, "s": 1, "m": 60, "h": 3600}
DELTAS = "at most behind a full version; 0: none, and half the memory"
DEEP = "how far those are that read: asks their memory, over NIXL"
GRACE = "for readers of what is collected; by default 1h"
CLEAR = "\x1b[H\x1b[2J"
REDRAW_S = 0.3  # at least
AGES_S = 5.0  # after which ages on a screen are too old


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    asked = _parser().parse_args(arguments)
    try:
        code: int = asked.run(asked)
        sys.stdout.flush()
    except BrokenPipeError:  # `torch-ros ls | head`: nobody reads the rest
        _silence(sys.stdout)
        return FINE
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as error:
        return _say(_missing(asked.command, error), USAGE)
    except (UsageError, VersionNotFound) as error:
        return _say(error, USAGE)
    except BackendError as error:
        return _say(error, UNREACHABLE)
    except TorchRosError as error:
        return _say(error, NOT_FINE)
    except OSError as error:  # of the standard output, or of a file
        _silence(sys.stdout)
        return _say(error, NOT_FINE)
    return code


def _silence(out: TextIO) -> None:
    """Drop what it still has: Python writes it once more at the end, and would fail again."""
    with suppress(OSError, ValueError):  # one that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def _missing(command: str, error: ModuleNotFoundError) -> UsageError:
    name = (error.name or "").partition(".")[0]
    if name not in EXTRAS and name not in NEEDED:
        raise error
    found = f"{command} takes {name}, which is not installed"
    how = f"with the extra {EXTRAS[name]}" if name in EXTRAS else "with all that it depends on"
    return UsageError(f"{found}: install torch-ros {how}")


def _say(error: Exception, code: int) -> int:
    sys.stderr.write(f"torch-ros: {error}\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "torch-ros",
        description="The versions of models' weights: who has them; from disk, and to disk.",
        epilog="Exit codes: 0 fine, 1 not fine, 2 usage, 3 etcd cannot be used.",
    )
    parser.add_argument("--version", action="version", version=f"torch-ros {RELEASE}")
    parser.add_argument(
        "--endpoint",
        default=environment.value(environment.ENDPOINT) or "local",
        help=f"as for torch_ros.open; by default ${environment.ENDPOINT}, or the etcd of this host",
    )
    parser.add_argument("--json", action="store_true", help="values, for programs")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listed = commands.add_parser("ls", help="models; or the versions of one, and who has them")
    listed.add_argument("model", nargs="?")
    listed.add_argument("number", nargs="?", type=int, metavar="version")
    listed.add_argument("--watch", action="store_true", help="again at each change, until Ctrl-C")
    listed.add_argument("--deep", action="store_true", help=DEEP)
    listed.set_defaults(run=_ls)
    exported = commands.add_parser("export", help="figures of fleets, for Prometheus")
    exported.add_argument("models", nargs="*", metavar="model", help="by default all")
    exported.add_argument("--port", type=_port, default=9464, help="0: any that is free")
    exported.add_argument("--host", default="127.0.0.1", help="the address to listen at")
    exported.set_defaults(run=_export)
    _add_showing(commands)
    _add_checking(commands)
    _add_moving(commands)
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > PORT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: expected 0 to {PORT_MAX}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 0")
    return int(text)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|m|h)?", text)
    time_s = float(found[1]) * UNITS_S[found[2] or ""] if found else 0.0
    if not 0 < time_s <= TIME_MAX_S:
        expected = "expected 90, 60s, 5m or 1h, up to 168h"
        raise argparse.ArgumentTypeError(f"{text!r} is no time: {expected}")
    return time_s


def _add_timeout(command: argparse.ArgumentParser) -> None:
    text = "for the version to come; by default 60s"
    command.add_argument("--timeout", type=_seconds, default=60.0, metavar="TIME", help=text)


def _add_showing(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The commands that go on until they are ended."""
    drawn = commands.add_parser("top", help="a table of a model's replicas, as it changes")
    drawn.add_argument("model")
    drawn.add_argument("--deep", action="store_true", help=DEEP)
    drawn.set_defaults(run=_top)
    traced = commands.add_parser("trace", help="a file for Perfetto: who read what when, from whom")
    traced.add_argument("model", nargs="?", help="to watch; with --merge by default all")
    until = traced.add_mutually_exclusive_group()
    until.add_argument("--for", type=_seconds, dest="for_s", metavar="TIME", help="by default 60s")
    until.add_argument(
        "--version", type=int, dest="number", help="until all have it, or a newer one"
    )
    until.add_argument("--merge", type=Path, metavar="FOLDER", help=f"of ${environment.TRACE}")
    traced.add_argument("--out", type=Path, metavar="FILE", help="by default the standard output")
    traced.set_defaults(run=_trace)
    shown = commands.add_parser("web", help="a page that shows who has which version")
    shown.add_argument("model", nargs="?", help="by default all, of which one is chosen there")
    shown.add_argument("--host", default="127.0.0.1", help="others than this host need a token")
    shown.add_argument("--port", type=_port, default=8265, help="0: any that is free")
    shown.add_argument(
        "--token",
        default=environment.value(environment.WEB_TOKEN),
        help=f"by default ${environment.WEB_TOKEN}, which others on this host do not see",
    )
    shown.set_defaults(run=_web)


def _add_moving(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The commands that take torch."""
    pushed = commands.add_parser("push", help="publish a checkpoint from disk, where it lies")
    on_disk = "a folder, a file or a 'pattern*' of safetensors"
    pushed.add_argument("checkpoint", type=Path, help=on_disk)
    pushed.add_argument("--model", required=True)
    pushed.add_argument("--version", required=True, type=int, dest="number")
    pushed.add_argument("--replica", help="by default push-HOST-PID-RANDOM")
    pushed.add_argument(
        "--until-held", type=_count, metavar="N", help="leave when N others have it"
    )
    pushed.add_argument("--hold", type=_seconds, metavar="TIME", help="leave then: 90, 60s, 5m, 1h")
    pushed.set_defaults(run=_push)
    pulled = commands.add_parser("pull", help="write a version to disk")
    pulled.add_argument("model")
    pulled.add_argument("number", metavar="version", help='a number, "latest" or "latest-<k>"')
    pulled.add_argument("folder", type=Path)
    pulled.add_argument("--format", choices=("safetensors", "dcp"), default="safetensors")
    pulled.add_argument("--select", action="append", default=[], metavar="PATTERN")
    _add_timeout(pulled)
    pulled.set_defaults(run=_pull)
    archived = commands.add_parser("archive", help="write versions to a bucket, as they come")
    archived.add_argument("model")
    archived.add_argument("url", help="s3://bucket/prefix, gs://, az://, hf://, a folder")
    archived.add_argument("--keep", type=_count, default=5, metavar="N", help="versions that stay")
    archived.add_argument("--grace", type=_seconds, default=3600.0, metavar="TIME", help=GRACE)
    _add_timeout(archived)
    archived.add_argument("--stream", action="store_true", help="without memory for a version")
    archived.add_argument("--deltas", type=_whole, default=32, metavar="N", help=DELTAS)
    archived.add_argument("--encoding", choices=("gaps", "coo"), default="gaps", help="of deltas")
    archived.add_argument("--once", action="store_true", help="the newest version, and end")
    archived.add_argument("--replica", default="archiver", help="one of a name works at a time")
    archived.add_argument("--metrics-port", metavar="[HOST:]PORT", help="figures, for Prometheus")
    archived.set_defaults(run=_archive)
    compared = commands.add_parser("diff", help="elements that differ between two versions")
    compared.add_argument("model")
    compared.add_argument("one", metavar="version", help='a number, "latest" or "latest-<k>"')
    compared.add_argument("other", metavar="version-or-folder", help="or a checkpoint on disk")
    compared.add_argument("--select", action="append", default=[], metavar="PATTERN")
    _add_timeout(compared)
    compared.set_defaults(run=_diff)


def _add_checking(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    blamed = commands.add_parser("why", help="who holds a replica up, down to the process")
    blamed.add_argument("model")
    blamed.add_argument("replica")
    blamed.add_argument("--version", type=int, dest="number", help="that it should have")
    blamed.set_defaults(run=_why)
    examined = commands.add_parser("doctor", help="what is wrong with etcd, here, or on the way")
    examined.add_argument("--model", help="the one to look at; by default all")
    examined.add_argument("--links", metavar="MODEL", help="read each of its replicas from here")
    examined.set_defaults(run=_doctor)
    cleared = commands.add_parser("gc", help="records that nobody alive has left behind")
    cleared.add_argument("model")
    cleared.add_argument("--yes", action="store_true", help="delete them; else they are listed")
    cleared.set_defaults(run=_gc)
    verified = commands.add_parser("verify", help="whether replicas have the same bits")
    verified.add_argument("model")
    verified.add_argument("number", metavar="version", help='a number, "latest" or "latest-<k>"')
    verified.add_argument("--against", type=Path, metavar="FOLDER", help="of safetensors")
    verified.add_argument("--replica", help="only this one, and one to compare it with")
    verified.add_argument("--full", action="store_true", help="all tensors, not one of 64")
    _add_timeout(verified)
    verified.set_defaults(run=_verify)


def _ls(asked: argparse.Namespace) -> int:
    if asked.deep and asked.model is None:
        raise UsageError("ls --deep takes a model")
    with closing(asking.connected(asked.endpoint)) as kv, _looking(kv, asked) as look:
        if asked.watch:
            return _watch(kv, asked, sys.stdout, look)
        return _list(kv, asked, sys.stdout, look)


@contextmanager
def _looking(kv: KV, asked: argparse.Namespace) -> Iterator[Look | None]:
    """Says how far reads are; without --deep, None."""
    if not asked.deep:
        yield None
        return
    asking.fleet_of(kv, asked.model)
    from torch_ros.cli.deep import Depths  # noqa: PLC0415  # it takes torch and NIXL, for seconds

    with closing(Depths(kv, asked.model)) as depths:
        yield depths.look


def _why(asked: argparse.Namespace) -> int:
    with closing(asking.connected(asked.endpoint)) as kv:
        found = asking.why(kv, asked.model, asked.replica, asked.number)
        others = asking.others(kv, asked.model) if found.kind == "version" else ()
    if asked.json:
        _print_json(asdict(found), sys.stdout)
    else:
        _print_lines(waiting.lines(found), sys.stdout)
        if others:
            sys.stdout.write(f"  model {asked.model!r}{asking.meant(asked.model, others)}\n")
    return FINE if found.kind == "nothing" else NOT_FINE


def _export(asked: argparse.Namespace) -> int:
    with closing(asking.connected(asked.endpoint)) as kv:
        exporting.export(kv, asked, partial(_tell_where, asked, kv, "figures", asked.models))
    return FINE


def _tell_where(
    asked: argparse.Namespace, kv: KV, what: str, models: Sequence[str], url: str
) -> None:
    """The one line of a command that serves: it is listening."""
    if asked.json:
        port = urlsplit(url).port
        _print_json(
            {"url": url, "port": port, "endpoint": kv.endpoint, "models": models}, sys.stdout
        )
    else:
        of = ", ".join(models) or "all models"
        sys.stdout.write(f"{url}: {what} of {of} in {kv.endpoint}; Ctrl-C ends\n")
    sys.stdout.flush()


def _top(asked: argparse.Namespace) -> int:
    if asked.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("top draws on a terminal; for programs: torch-ros --json ls MODEL")
    from torch_ros.cli import top  # noqa: PLC0415  # the extra top

    with closing(asking.connected(asked.endpoint)) as kv, _looking(kv, asked) as look:
        top.show(kv, asked.model, look)
    return FINE


def _trace(asked: argparse.Namespace) -> int:
    if asked.model is None and asked.merge is None:
        raise UsageError("trace takes a model to watch, or --merge FOLDER")
    told = trace.trace(asked)
    if asked.json and asked.out:
        return _print_json({"file": trace.readable(asked.out), **told}, sys.stdout)
    _print_lines(trace.lines(told, asked.out), sys.stdout if asked.out else sys.stderr)
    return FINE


def _web(asked: argparse.Namespace) -> int:
    from torch_ros.cli import web  # noqa: PLC0415  # the extra web

    with closing(asking.connected(asked.endpoint)) as kv:
        web.serve(
            kv,
            partial(_tell_where, asked, kv, "the page", [asked.model] if asked.model else []),
            model=asked.model,
            host=asked.host,
            port=asked.port,
            token=asked.token,
        )
    return FINE


def _doctor(asked: argparse.Namespace) -> int:
    from torch_ros.cli import examining  # noqa: PLC0415  # it takes numpy, for a tenth of a second

    asked.model = asked.links or asked.model
    facts = examining.examine(asked.endpoint, asked.model)
    found = doctor.findings(facts)
    probed = _probed(asked, facts) if asked.links and not facts.silence else ()
    found += links.slow(probed)
    if asked.json:
        _print_json({"findings": found, "links": links.ranked(probed)}, sys.stdout)
    else:
        _print_lines(doctor.lines(found), sys.stdout)
        if asked.links:
            _print_table(links.HEADER, links.rows(probed), sys.stdout, "no link was probed")
    if facts.silence:
        return UNREACHABLE
    return FINE if doctor.is_well(found) else NOT_FINE


def _probed(asked: argparse.Namespace, facts: doctor.Facts) -> Sequence[links.Link]:
    from torch_ros.cli import probing  # noqa: PLC0415  # it takes torch, for seconds

    return probing.probe(asked, facts.models[0].hosts)


def _push(asked: argparse.Namespace) -> int:
    from torch_ros.cli import moving  # noqa: PLC0415  # it takes torch, for seconds

    moving.push(asked, sys.stdout)
    return FINE


def _pull(asked: argparse.Namespace) -> int:
    from torch_ros.cli import moving  # noqa: PLC0415

    moving.pull(asked, sys.stdout)
    return FINE


def _archive(asked: argparse.Namespace) -> int:
    from torch_ros.cli import archiving  # noqa: PLC0415

    archiving.archive(asked, sys.stdout)
    return FINE


def _diff(asked: argparse.Namespace) -> int:
    from torch_ros.cli import moving  # noqa: PLC0415

    found = moving.diff(asked)
    if asked.json:
        _print_json({"tensors": [asdict(each) for each in found.differences]}, sys.stdout)
    else:
        if rows := ls.differences(found.differences):
            _print_table(ls.DIFFERENCES, rows, sys.stdout, "")
        sys.stdout.write(f"{found}\n")
    return NOT_FINE if found.differences else FINE


def _watch(kv: KV, asked: argparse.Namespace, out: TextIO, look: Look | None) -> int:
    """The list at each change: on a terminal in the same place, else one after the other."""
    while True:
        rev = asking.revision(kv)
        if out.isatty() and not asked.json:
            out.write(CLEAR)
        code = _list(kv, asked, out, look)
        if not out.isatty() and not asked.json:
            out.write("\n")
        out.flush()
        if code != FINE:
            return code
        time.sleep(REDRAW_S)  # a burst of changes is one
        asking.await_change(kv, asked.model, rev, AGES_S if out.isatty() else math.inf)


def _gc(asked: argparse.Namespace) -> int:
    with closing(asking.connected(asked.endpoint)) as kv:
        asking.require(kv, asked.model)
        look = clearing.clear if asked.yes else clearing.found
        left = look(kv, asked.model)
    if asked.json:
        rows = [  # JSON cannot have bytes that are no UTF-8; such a key may
            {"key": each.key.encode(errors="backslashreplace").decode(), "reason": each.reason}
            for each in left
        ]
        return _print_json({"is_deleted": asked.yes, "leftovers": rows}, sys.stdout)
    _print_lines((f"{each.key}  {each.reason}" for each in left), sys.stdout)
    end = "deleted" if asked.yes else "left behind; --yes deletes them" if left else "left behind"
    sys.stdout.write(f"{len(left)} records of model {asked.model!r} {end}\n")
    return FINE


def _verify(asked: argparse.Namespace) -> int:
    from torch_ros.cli import verifying  # noqa: PLC0415

    found = verifying.verify(asked)
    if asked.json:
        _print_json(asdict(found), sys.stdout)
    else:
        rows = ls.unverified(found.deviations, found.unlike)
        if rows:
            _print_table(ls.UNVERIFIED, rows, sys.stdout, "")
        unread = (f"{name} was not read: {why}" for name, why in found.left.items())
        _print_lines(unread, sys.stdout)
        sys.stdout.write(f"{found}\n")
    return FINE if found.is_same else NOT_FINE


def _list(kv: KV, asked: argparse.Namespace, out: TextIO, look: Look | None) -> int:
    if asked.model is None:
        return _list_models(kv, out, is_json=asked.json)
    fleet = asking.fleet_of(kv, asked.model)
    made = look(fleet) if look else {}
    if asked.json:
        reads = {"reads": headway.listed(made)} if look else {}
        return _print_json({"models": [asdict(fleet)], **reads}, out)
    rows = ls.versions(fleet, asked.number, made)
    if asked.number is not None and not rows:
        there = ", ".join(str(each.ref.version) for each in fleet.versions) or "none"
        raise UsageError(f"model {asked.model!r} has no version {asked.number}; it has {there}")
    _print_table(ls.VERSIONS, rows, out, f"no version of model {asked.model!r}")
    if asked.number is None:
        _print_lines(ls.behind(fleet), out)
    return FINE


def _list_models(kv: KV, out: TextIO, *, is_json: bool) -> int:
    """All that can be read; a model of another release does not hide the others."""
    fleets, code = [], FINE
    for model in asking.models(kv):
        try:
            fleets.append(asking.fleet(kv, model))
        except BackendError as error:
            if isinstance(error, StoreUnavailable | AccessDenied):
                raise
            code = _say(error, NOT_FINE)
    if is_json:
        _print_json({"models": [asdict(fleet) for fleet in fleets]}, out)
    else:
        _print_table(ls.MODELS, ls.models(fleets), out, f"no model in {kv.endpoint}")
    return code


def _print_json(values: dict[str, Any], out: TextIO) -> int:
    text = msgspec.json.encode({"schema": SCHEMA, **values}, enc_hook=str).decode()
    out.write(f"{text}\n")
    return FINE


def _print_lines(lines: Iterable[str], out: TextIO) -> None:
    out.writelines(f"{ls.printable(line)}\n" for line in lines)


def _print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], out: TextIO, nothing: str
) -> int:
    if not rows:
        out.write(f"{nothing}\n")
        return FINE
    width = get_terminal_size().columns if out.isatty() else WIDTH
    out.writelines(f"{line}\n" for line in table(header, _printable(rows), width))
    return FINE


def _printable(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    return [[ls.printable(cell) for cell in row] for row in rows]
