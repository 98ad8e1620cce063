"""The arguments of `torch-ros`, and what each command is for."""

import argparse
import re
from pathlib import Path

from torch_ros import arguments as checks
from torch_ros import environment
from torch_ros.release import RELEASE

PORT_MAX = 65_535
DIGITS_MAX = 19  # of a version: 2**63 - 1
TIME_MAX_S, UNITS_S = 7 * 86_400.0, {"": 1, "s": 1, "m": 60, "h": 3600}
VERSION = 'a number, "latest" or "latest-<k>"'
DEEP = "how far those are that read: asks their memory, over NIXL"
DELTAS = "at most behind a full version; 0: none, and half the memory"
GRACE = "for readers of what is collected; by default 1h"
NAMES = ("model", "models", "links", "replica")  # of all commands

EXAMPLES = {
    "demo": ("demo",),
    "ls": ("ls", "ls policy", "ls policy 42 --deep", "--json ls policy"),
    "export": ("export --port 9464", "export policy critic --host 0.0.0.0"),
    "top": ("top policy", "top policy --deep"),
    "web": ("web", "web policy --port 0"),
    "why": ("why policy rollout-3", "why policy rollout-3 --version 42"),
    "ready": (  # feature installs {
        "ready --model policy --replica rollout-3",
        "ready --model policy --replica rollout-3 --behind 2",
    ),  # } installs
    "doctor": ("doctor", "doctor --model policy", "doctor --links policy"),
    "gc": ("gc policy", "gc policy --yes"),
    "verify": ("verify policy latest", "verify policy 42 --full --against checkpoints/42"),
    "push": ("push checkpoints/42 --model policy --version 42 --until-held 8",),
    "pull": ("pull policy latest out", "pull policy 42 out --format dcp --select 'model.*'"),
    "archive": ("archive policy s3://bucket/prefix --keep 5", "archive policy /mnt/kept --once"),
    "diff": ("diff policy latest latest-1", "diff policy 42 checkpoints/41"),
}

Commands = argparse._SubParsersAction  # noqa: SLF001  # argparse has no other name for it


def parser() -> argparse.ArgumentParser:
    """`command` names the command that was asked for."""
    made = argparse.ArgumentParser(
        "torch-ros",
        description="The versions of models' weights: who has them; from disk, and to disk.",
        epilog="Exit codes: 0 fine, 1 not fine, 2 usage, 3 etcd cannot be used, 130 Ctrl-C. "
        "Examples: torch-ros COMMAND --help",
    )
    made.add_argument("--version", action="version", version=f"torch-ros {RELEASE}")
    made.add_argument(
        "--endpoint",
        default=environment.value(environment.ENDPOINT) or "local",
        help=f"as for torch_ros.open; by default ${environment.ENDPOINT}, or the etcd of this host",
    )
    made.add_argument("--json", action="store_true", help="values, for programs")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_listing, _add_showing, _add_checking, _add_moving, _add_comparing):
        add(commands)
    return made


def check(asked: argparse.Namespace) -> None:
    """Raises: UsageError: A name has bytes that are no UTF-8, as keys and JSON are."""
    for name in NAMES:
        value = getattr(asked, name, None)
        for each in value if isinstance(value, list) else [value]:
            checks.maybe_text("name", each)


def _add(
    commands: "Commands[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    examples = "\n".join(f"  torch-ros {each}" for each in EXAMPLES[name])
    return commands.add_parser(
        name,
        help=text,
        description=f"{name}: {text}.",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _port(text: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) > PORT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: expected 0 to {PORT_MAX}")
    return int(text)


def _count(text: str) -> int:
    if (number := _whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1")
    return number


def _whole(text: str) -> int:
    if not re.fullmatch(f"[0-9]{{1,{DIGITS_MAX}}}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 0")
    return int(text)


def seconds(text: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|m|h)?", text)
    time_s = float(found[1]) * UNITS_S[found[2] or ""] if found else 0.0
    if not 0 < time_s <= TIME_MAX_S:
        expected = "expected 90, 60s, 5m or 1h, up to 168h"
        raise argparse.ArgumentTypeError(f"{text!r} is no time: {expected}")
    return time_s


def _add_timeout(command: argparse.ArgumentParser) -> None:
    text = "for the version to come; by default 60s"
    command.add_argument("--timeout", type=seconds, default=60.0, metavar="TIME", help=text)


def _add_listing(commands: "Commands[argparse.ArgumentParser]") -> None:
    _add(commands, "demo", "a trainer and rollouts on this host, of which some are killed")
    listed = _add(commands, "ls", "models; or the versions of one, and who has them")
    listed.add_argument("model", nargs="?")
    listed.add_argument("number", nargs="?", type=_whole, metavar="version")
    listed.add_argument("--watch", action="store_true", help="again at each change, until Ctrl-C")
    listed.add_argument("--deep", action="store_true", help=DEEP)
    exported = _add(commands, "export", "figures of fleets, for Prometheus")
    exported.add_argument("models", nargs="*", metavar="model", help="by default all")
    exported.add_argument("--port", type=_port, default=9464, help="0: any that is free")
    exported.add_argument("--host", default="127.0.0.1", help="the address to listen at")


def _add_showing(commands: "Commands[argparse.ArgumentParser]") -> None:
    """The commands that go on until they are ended."""
    drawn = _add(commands, "top", "a table of a model's replicas, as it changes")
    drawn.add_argument("model")
    drawn.add_argument("--deep", action="store_true", help=DEEP)
    shown = _add(commands, "web", "a page that shows who has which version")
    shown.add_argument("model", nargs="?", help="by default all, of which one is chosen there")
    shown.add_argument("--host", default="127.0.0.1", help="others than this host need a token")
    shown.add_argument("--port", type=_port, default=8265, help="0: any that is free")
    shown.add_argument(
        "--token",
        default=environment.value(environment.WEB_TOKEN),
        help=f"by default ${environment.WEB_TOKEN}, which others on this host do not see",
    )


def _add_checking(commands: "Commands[argparse.ArgumentParser]") -> None:
    blamed = _add(commands, "why", "who holds a replica up, down to the process")
    blamed.add_argument("model")
    blamed.add_argument("replica")
    blamed.add_argument("--version", type=_whole, dest="number", help="that it should have")
    # feature installs {
    probed = _add(commands, "ready", "whether an engine on this host uses a version")
    probed.add_argument("--model", required=True)
    probed.add_argument("--replica", required=True)
    which = probed.add_mutually_exclusive_group()
    which.add_argument("--version", type=_whole, dest="number", help="this one; by default any")
    which.add_argument("--behind", type=_whole, metavar="K", help="at most so many numbers")
    # } installs
    examined = _add(commands, "doctor", "what is wrong with etcd, here, or on the way")
    examined.add_argument("--model", help="the one to look at; by default all")
    examined.add_argument("--links", metavar="MODEL", help="read each of its replicas from here")
    cleared = _add(commands, "gc", "records that nobody alive has left behind")
    cleared.add_argument("model")
    cleared.add_argument("--yes", action="store_true", help="delete them; else they are listed")


def _add_moving(commands: "Commands[argparse.ArgumentParser]") -> None:
    """The commands that take torch."""
    pushed = _add(commands, "push", "publish a checkpoint from disk, where it lies")
    on_disk = "a folder, a file or a 'pattern*' of safetensors"
    pushed.add_argument("checkpoint", type=Path, help=on_disk)
    pushed.add_argument("--model", required=True)
    pushed.add_argument("--version", required=True, type=_whole, dest="number")
    pushed.add_argument("--replica", help="by default push-HOST-PID-RANDOM")
    pushed.add_argument(
        "--until-held", type=_count, metavar="N", help="leave when N others have it"
    )
    pushed.add_argument("--hold", type=seconds, metavar="TIME", help="leave then: 90, 60s, 5m, 1h")
    pulled = _add(commands, "pull", "write a version to disk")
    pulled.add_argument("model")
    pulled.add_argument("number", metavar="version", help=VERSION)
    pulled.add_argument("folder", type=Path)
    pulled.add_argument("--format", choices=("safetensors", "dcp"), default="safetensors")
    pulled.add_argument("--select", action="append", default=[], metavar="PATTERN")
    _add_timeout(pulled)
    archived = _add(commands, "archive", "write versions to a bucket, as they come")
    archived.add_argument("model")
    archived.add_argument("url", help="s3://bucket/prefix, gs://, az://, hf://, a folder")
    archived.add_argument("--keep", type=_count, default=5, metavar="N", help="versions that stay")
    archived.add_argument("--grace", type=seconds, default=3600.0, metavar="TIME", help=GRACE)
    _add_timeout(archived)
    archived.add_argument("--stream", action="store_true", help="without memory for a version")
    archived.add_argument("--deltas", type=_whole, default=32, metavar="N", help=DELTAS)
    archived.add_argument("--encoding", choices=("gaps", "coo"), default="gaps", help="of deltas")
    archived.add_argument("--once", action="store_true", help="the newest version, and end")
    archived.add_argument("--replica", default="archiver", help="one of a name works at a time")
    archived.add_argument("--metrics-port", metavar="[HOST:]PORT", help="figures, for Prometheus")


def _add_comparing(commands: "Commands[argparse.ArgumentParser]") -> None:
    """The commands that take torch, and write nothing."""
    verified = _add(commands, "verify", "whether replicas have the same bits")
    verified.add_argument("model")
    verified.add_argument("number", metavar="version", help=VERSION)
    verified.add_argument("--against", type=Path, metavar="FOLDER", help="of safetensors")
    verified.add_argument("--replica", help="only this one, and one to compare it with")
    verified.add_argument("--full", action="store_true", help="all tensors, not one of 64")
    _add_timeout(verified)
    compared = _add(commands, "diff", "elements that differ between two versions")
    compared.add_argument("model")
    compared.add_argument("one", metavar="version", help=VERSION)
    compared.add_argument("other", metavar="version-or-folder", help="or a checkpoint on disk")
    compared.add_argument("--select", action="append", default=[], metavar="PATTERN")
    _add_timeout(compared)
