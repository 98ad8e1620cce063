"""Tab in a shell: argcomplete asks for what could come next, in the place of a command."""

import argparse
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from torch_ros.cli import parsing
from torch_ros.errors import TorchRosError

ANSWER_S = 1.0  # of etcd: somebody waits with a finger on the key
NOT_INSTALLED = 2
FOLDERS = {"other", "url"}  # arguments that may be one


def complete() -> int:
    """Print what could come next, and end the process; it returns where argcomplete is missing."""
    try:
        import argcomplete  # noqa: PLC0415  # the extra tools
    except ModuleNotFoundError:
        return NOT_INSTALLED
    # Its type asks for a class that its code does not need.
    argcomplete.autocomplete(parsing.parser(), default_completer=_candidates)  # type: ignore[arg-type]
    return 0


def _candidates(
    *, prefix: str, action: argparse.Action, parsed_args: argparse.Namespace, **_: object
) -> Iterable[str]:
    """Files, and the names that etcd has; a name with control characters is not for a shell."""
    if action.type is Path or action.dest in FOLDERS:
        from argcomplete.completers import FilesCompleter  # noqa: PLC0415

        return FilesCompleter()(prefix)
    return filter(str.isprintable, _names(action.dest, parsed_args))


def _names(wanted: str, asked: argparse.Namespace) -> Iterable[str]:
    """No etcd, or one that refuses, completes nothing."""
    if wanted not in parsing.NAMES:
        return ()
    from torch_ros.cli import asking  # noqa: PLC0415  # it takes grpc, for half a second

    try:
        with closing(asking.connected(asked.endpoint, ANSWER_S)) as kv:
            if wanted == "replica":
                return sorted(asking.fleet(kv, asked.model, ANSWER_S).replicas)
            return asking.models(kv, ANSWER_S)
    except TorchRosError:
        return ()
