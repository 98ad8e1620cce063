"""`torch-ros`: the arguments, the exit codes, and tables on a terminal."""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import TextIO
from urllib.parse import urlsplit

from torch_ros.cli import (
    asking,
    clearing,
    doctor,
    exporting,
    headway,
    links,
    ls,
    output,
    parsing,
    ready,  # feature installs
    waiting,
)
from torch_ros.cli.headway import Look
from torch_ros.cli.waits import seat_lost
from torch_ros.errors import (
    BackendError,
    TorchRosError,
    UsageError,
    VersionNotFound,
)
from torch_ros.fleet.fleet import Fleet
from torch_ros.printable import silence
from torch_ros.store.endpoint import connect
from torch_ros.store.kv import KV

FINE, NOT_FINE, USAGE, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130
EXTRAS = {  # which brings a module
    "obstore": "bucket",
    "prometheus_client": "metrics",
    "rich": "top",
    "safetensors": "cli",
    "starlette": "web",
    "textual": "top",
    "uvicorn": "web",
}
NEEDED = {"nixl", "torch"}  # by torch-ros itself; commands that only ask etcd do without
DEMO_ENDS = (
    "",
    "In your own job:",
    '    handle = torch_ros.open("policy"); handle.register(model)    # both ends',
    "    handle.guard(optimizer); handle.publish(step)                # the trainer, each step",
    '    for version in handle.follow("latest"): ...                  # a rollout',
    'or dcp.save and dcp.load, with ROSWriter(step) and ROSReader("latest").',
)
CLEAR = "\x1b[H\x1b[2J"
REDRAW_S = 0.3  # at least
AGES_S = 5.0  # after which ages on a screen are too old
AWAY_S = 0.5  # between two questions to an etcd that does not answer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    output.prepare()
    try:
        asked = parsing.parser().parse_args(arguments)
        parsing.check(asked)
        code = COMMANDS[asked.command](asked)
        sys.stdout.flush()
    except BrokenPipeError:  # `torch-ros ls | head`: nobody reads the rest
        silence(sys.stdout)
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
    except MemoryError as error:
        return _say(f"there is too little memory: {error}", NOT_FINE)
    except OSError as error:  # of the standard output, or of a file
        silence(sys.stdout)
        return _say(error, NOT_FINE)
    return code


def _missing(command: str, error: ModuleNotFoundError) -> UsageError:
    name = (error.name or "").partition(".")[0]
    if name not in EXTRAS and name not in NEEDED:
        raise error
    found = f"{command} takes {name}, which is not installed"
    how = (
        f"with the extra {EXTRAS[name]}, or tools, which has all"
        if name in EXTRAS
        else "with all that it depends on"
    )
    return UsageError(f"{found}: install torch-ros {how}")


def _say(error: Exception | str, code: int) -> int:
    output.complain(error)
    return code


def _demo(asked: argparse.Namespace) -> int:
    if asked.json:
        raise UsageError("demo is a story for people; for programs: torch_ros.open")
    if asked.endpoint.startswith("memory:"):
        raise UsageError("demo starts processes, which share no memory://: expected an etcd")
    with closing(connect(asked.endpoint, timeout_s=asking.ANSWER_S)) as kv:  # starts "local"
        where = kv.endpoint
    from torch_ros.demo import acts  # noqa: PLC0415  # it takes torch, for seconds

    model, say = f"demo-{os.getpid()}", partial(output.say, sys.stdout)
    say(f"A trainer and two rollouts of model {model!r} meet in {where}.", "")
    acts.perform(model, asked.endpoint, say)
    say(*DEMO_ENDS)
    return FINE


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
        output.say_json(sys.stdout, asdict(found))
    else:
        output.say(sys.stdout, *waiting.lines(found))
        if others:
            output.say(sys.stdout, f"  model {asked.model!r}{asking.meant(asked.model, others)}")
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
        values = {"url": url, "port": port, "endpoint": kv.endpoint, "models": models}
        output.say_json(sys.stdout, values)
    else:
        of = ", ".join(models) or "all models"
        output.say(sys.stdout, f"{url}: {what} of {of} in {kv.endpoint}; Ctrl-C ends")


def _top(asked: argparse.Namespace) -> int:
    if asked.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("top draws on a terminal; for programs: torch-ros --json ls MODEL")
    from torch_ros.cli import top  # noqa: PLC0415  # the extra top

    with closing(asking.connected(asked.endpoint)) as kv, _looking(kv, asked) as look:
        top.show(kv, asked.model, look)
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
    probed: Sequence[links.Link] = ()
    if asked.links and not facts.silence:
        from torch_ros.cli import probing  # noqa: PLC0415  # it takes torch, for seconds

        probed = probing.probe(asked, facts.models[0].hosts)
    found += links.slow(probed)
    if asked.json:
        output.say_json(sys.stdout, {"findings": found, "links": links.ranked(probed)})
    else:
        output.say(sys.stdout, *doctor.lines(found))
        if asked.links:
            _table(sys.stdout, links.HEADER, links.rows(probed), "no link was probed")
    if facts.silence:
        return UNREACHABLE
    return FINE if doctor.is_well(found) else NOT_FINE


def _moved(module: str, asked: argparse.Namespace) -> int:
    """A command that writes lines as it goes, of a module that takes torch, for seconds."""
    run = getattr(import_module(f"torch_ros.cli.{module}"), asked.command)
    run(asked, sys.stdout)
    return FINE


def _diff(asked: argparse.Namespace) -> int:
    from torch_ros.cli import moving  # noqa: PLC0415

    found = moving.diff(asked)
    if asked.json:
        output.say_json(sys.stdout, {"versions": found.versions, "tensors": found.differences})
    else:
        output.say_table(sys.stdout, ls.DIFFERENCES, ls.differences(found.differences))
        output.say(sys.stdout, f"{found}")
    return NOT_FINE if found.differences else FINE


def _watch(kv: KV, asked: argparse.Namespace, out: TextIO, look: Look | None) -> int:
    """The list at each change: on a terminal in the same place, else one after the other.

    Once it was shown, it goes on while etcd is away.
    """
    is_shown = is_away = False
    while True:
        try:
            rev = asking.revision(kv)
            if out.isatty() and not asked.json:
                out.write(CLEAR)
            code = _list(kv, asked, out, look)
            if not out.isatty() and not asked.json:
                output.say(out, "")
            if code != FINE:
                return code
            is_shown, is_away = True, False
            time.sleep(REDRAW_S)  # a burst of changes is one
            asking.await_change(kv, asked.model, rev, AGES_S if out.isatty() else math.inf)
        except BackendError as error:
            if not is_shown:
                raise
            if not is_away:
                _say(f"{error}; it goes on", FINE)
            is_away = True
            time.sleep(AWAY_S)


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
        output.say_json(sys.stdout, {"is_deleted": asked.yes, "leftovers": rows})
        return FINE
    output.say(sys.stdout, *(f"{each.key}  {each.reason}" for each in left))
    end = "deleted" if asked.yes else "left behind; --yes deletes them" if left else "left behind"
    output.say(sys.stdout, f"{len(left)} records of model {asked.model!r} {end}")
    return FINE


def _verify(asked: argparse.Namespace) -> int:
    from torch_ros.cli import verifying  # noqa: PLC0415

    found = verifying.verify(asked)
    if asked.json:
        output.say_json(sys.stdout, asdict(found))
    else:
        rows = ls.unverified(found.deviations, found.unlike)
        output.say_table(sys.stdout, ls.UNVERIFIED, rows)
        unread = (f"{name} was not read: {why}" for name, why in found.left.items())
        output.say(sys.stdout, *unread, f"{found}")
    return FINE if found.is_same else NOT_FINE


def _list(kv: KV, asked: argparse.Namespace, out: TextIO, look: Look | None) -> int:
    if asked.model is None:
        return _list_models(kv, out, is_json=asked.json)
    fleet = asking.fleet_of(kv, asked.model)
    made, lost = look(fleet) if look else {}, asking.lost(kv, fleet)
    if asked.json:
        reads = {"reads": headway.listed(made)} if look else {}
        output.say_json(out, {"models": [fleet], "lost": lost, **reads})
        return FINE
    rows = ls.versions(fleet, asked.number, made)
    if asked.number is not None and not rows:
        there = ", ".join(str(each.ref.version) for each in fleet.versions) or "none"
        raise UsageError(f"model {asked.model!r} has no version {asked.number}; it has {there}")
    if asked.number is None:
        rows += ls.without_version(fleet, lost)
    output.say_table(out, ls.VERSIONS, rows)
    if not fleet.versions:
        output.say(out, f"no version of model {asked.model!r}")
    if asked.number is None:
        output.say(out, *ls.behind(fleet))
        output.say(out, *(f"{name}: {seat_lost(ranks)}" for name, ranks in lost.items()))
    return FINE


def _list_models(kv: KV, out: TextIO, *, is_json: bool) -> int:
    """All that can be read; a model of another release does not hide the others."""
    found = exporting.fleets(kv).values()
    fleets = [each for each in found if isinstance(each, Fleet)]
    code = max(
        (_say(each, NOT_FINE) for each in found if not isinstance(each, Fleet)), default=FINE
    )
    if is_json:
        output.say_json(out, {"models": fleets})
    else:
        _table(out, ls.MODELS, ls.models(fleets), f"no model in {kv.endpoint}")
    return code


def _table(out: TextIO, header: Sequence[str], rows: ls.Rows, nothing: str) -> None:
    output.say_table(out, header, rows)
    if not rows:
        output.say(out, nothing)


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "demo": _demo,
    "ls": _ls,
    "export": _export,
    "top": _top,
    "web": _web,
    "why": _why,
    "ready": ready.run,  # feature installs
    "doctor": _doctor,
    "gc": _gc,
    "verify": _verify,
    "push": partial(_moved, "moving"),
    "pull": partial(_moved, "moving"),
    "archive": partial(_moved, "archiving"),
    "diff": _diff,
}
