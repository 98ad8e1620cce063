"""`torch-ros ready`: whether the engine of a replica on this host uses a version, for probes."""

# feature installs {
import argparse
import sys

from torch_ros.cli import output, parsing
from torch_ros.errors import UsageError
from torch_ros.features.installs import ready
from torch_ros.protocol.records import VersionRef

FINE, NOT_FINE, USAGE = 0, 1, 2


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
    probe = ready.Probe(asked.model, asked.replica, asked.number, asked.behind)

    def newest() -> VersionRef | None:
        from torch_ros.fleet.ready_page import newest_at  # noqa: PLC0415  # it takes time

        return newest_at(asked.endpoint, asked.model)

    found = ready.decide(probe, ready.all_told(asked.model, asked.replica), newest)
    if found.doubt:
        output.complain(found.doubt)
    if asked.json:
        version, reason = found.version, found.reason
        values = {"is_ready": not reason, "version": version, "reason": reason}
        output.say_json(sys.stdout, values)
    elif found.reason:
        output.say(sys.stdout, f"not ready: {found.reason}")
    else:
        output.say(sys.stdout, f"ready: version {found.version}")
    return NOT_FINE if found.reason else FINE


# } installs
