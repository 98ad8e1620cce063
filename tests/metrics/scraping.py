"""Start `torch-ros export` as a process, and scrape what is served."""

import os
import re
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

from prometheus_client.parser import text_string_to_metric_families

PROGRAM = (  # also where a shell's & had Ctrl-C ignored
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from torch_ros.cli.main import main; code = main(sys.argv[1:]); "
    "sys.exit(9 if {'torch', 'nixl'} & set(sys.modules) else code)"
)


@contextmanager
def exporting(endpoint, *arguments, **environment):
    command = [sys.executable, "-c", PROGRAM, "--endpoint", endpoint, "export", "--port=0"]
    process = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        said = process.stdout.readline()
        yield process, said
    finally:
        process.kill()
        process.communicate()


def address(said):
    return re.search(r"http://\S+metrics", said)[0]


def samples(said):
    with urllib.request.urlopen(address(said), timeout=20) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return [sample for family in families for sample in family.samples]


def scrape(said):
    """The values, by their names and labels' values."""
    return {(each.name, *each.labels.values()): each.value for each in samples(said)}
