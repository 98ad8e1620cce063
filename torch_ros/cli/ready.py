"""`torch-ros ready`: whether the engine of a replica on this host uses a version, for probes."""

# feature installs {
import argparse
import sys
from contextlib import closing

from torch_ros.cli import output, parsing
from torch_ros.errors import BackendError, UsageError
from torch_ros.features.installs import ready
from torch_ros.protocol.records import VersionRef

FINE, NOT_FINE, USAGE = 0, 1, 2
ANSWER_S = 0.5  # of etcd, which is asked with --behind alone


def main() -> int:
    """Run the command of this process's arguments, without what other commands take to start."""
    output.prepare()
    try:
        asked = parsing.parser().parse_args()
        parsing.check(asked)
        return run(asked)
    except UsageError as error:
        output.complain(error)
        return USAGE
    except OSError as error:  # of the standard output, or of the files
        output.complain(error)
        return NOT_FINE


def run(asked: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    told = ready.all_told(asked.model, asked.replica)
    found = ready.in_use(told, [ready.state_of(each) for each in told])
    version, reason = (None, found) if isinstance(found, str) else (found.version, "")
    if not isinstance(found, str):
        newest = None if asked.behind is None else _newest(asked)
        reason = ready.lack_of(found, asked.number, newest, asked.behind or 0)
    if asked.json:
        values = {"is_ready": not reason, "version": version, "reason": reason}
        output.say_json(sys.stdout, values)
    else:
        output.say(sys.stdout, f"not ready: {reason}" if reason else f"ready: version {version}")
    return NOT_FINE if reason else FINE


def _newest(asked: argparse.Namespace) -> VersionRef | None:
    """The newest version that is offered; None: etcd does not say, which makes nobody unready."""
    from torch_ros.cli import asking  # noqa: PLC0415  # it takes grpc, for a quarter of a second

    try:
        with closing(asking.connected(asked.endpoint, ANSWER_S)) as kv:
            return asking.fleet(kv, asked.model, ANSWER_S).latest
    except BackendError as error:
        output.complain(f"nobody knows how far behind it is: {error}")
        return None


# } installs
