"""Sources in processes of their own, which hostile readers may try to hurt."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from features.tcp.hostile import MODES, Card, Ended, Reader, regions_of
from kit import until

from puppets import Puppets

PROGRAM = Path(__file__).parents[1] / "survival/source.py"


class Source:
    """A source of regions; see survival/source.py for what it can be asked."""

    def __init__(self, puppets, *, environment=None, **options):
        self.process = puppets.start(
            PROGRAM, json.dumps(options), talks=True, **(environment or {})
        )
        assert self.hear() == "here"
        self.sizes, self.pid, self.filled = options["sizes"], self.process.pid, {}
        self.way = options.get("way", "tcp")
        self.connection = bytes.fromhex(self.ask("card"))
        self.card, self.regions = Card.read(self.connection), []
        for descriptor, address, size in self.ask("where"):
            name, [start], [end] = regions_of(bytes.fromhex(descriptor))
            assert (start, end) == (address, address + size)
            self.regions.append((name, address, size))
        sockets = self.count_sockets()
        for mode in MODES:  # so that all is there that a source makes when it is first asked
            self.reader(mode).line.sock.close()
        until(lambda: self.count_sockets() == sockets, 20, by=self.process)
        self.threads, self.files = self.ask("threads"), self.count("fd")

    def hear(self):
        return json.loads(self.process.hear())

    def ask(self, *words):
        self.process.tell(*words)
        return self.hear()

    def count(self, what):
        """How many descriptors ("fd") or threads ("task") it has."""
        return len(list(Path(f"/proc/{self.pid}/{what}").iterdir()))

    def count_sockets(self):
        count = 0
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                count += str(link.readlink()).startswith("socket:")
        return count

    def reader(self, mode="near", **options):
        """A reader that has met it."""
        return Reader(self.card, mode, **options).meet()

    def try_reader(self, mode):
        """A reader that has met it; None if there was no room for it."""
        reader = Reader(self.card, mode)
        with contextlib.suppress(Ended):
            reader.knock()
            if reader.is_welcome() and reader.hear():
                reader.prove()
                return reader
        reader.line.sock.close()
        return None

    def register(self, number):
        """Register a region once more; what a reader asks for."""
        name, _, _ = regions_of(bytes.fromhex(self.ask("register", number)))
        return name, *self.regions[number][1:]

    def fill(self, number, value):
        """Write one value all over a region."""
        self.ask("fill", number, value)
        self.filled[number] = np.full(self.sizes[number], value, np.uint8)

    def restore(self, number):
        self.ask("restore", number)
        self.filled.pop(number, None)

    def pattern(self, number):
        """The bytes that the region has."""
        if number in self.filled:
            return self.filled[number]
        return np.random.default_rng(number).integers(0, 256, self.sizes[number], np.uint8)

    def assert_is_well(self):
        """It serves as before, nothing was written, and nothing is left of those who were here."""
        assert self.process.poll() is None, self.process.end_of_log()
        for mode in MODES:
            with self.reader(mode) as reader:
                assert reader.read(self.regions[0]) == self.pattern(0).tobytes()
        assert self.ask("is_untouched")
        assert self.ask("threads") == self.threads
        until(lambda: self.count("fd") == self.files, 20, by=self.process)
        log = self.process.end_of_log()
        assert "Traceback" not in log, log


@pytest.fixture(scope="module")
def start_for_all(tmp_path_factory):
    """Start a source that all tests of a file use."""
    made = Puppets(tmp_path_factory.mktemp("puppets"))
    yield lambda **options: Source(made, **options)
    made.close()


@pytest.fixture
def start(started):
    """Start a source of this test."""
    return lambda **options: Source(started, **options)


@pytest.fixture(scope="module")
def shared(request, start_for_all):
    """A source of all tests of a file, with regions of the file's SIZES."""
    return start_for_all(sizes=request.module.SIZES)


@pytest.fixture
def source(shared):
    """The same source, which is well after each test."""
    yield shared
    shared.assert_is_well()
