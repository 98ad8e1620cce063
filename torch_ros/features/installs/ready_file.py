"""The file by which one rank says which version its engine uses: `ready.py` reads it."""

import logging
import os
from contextlib import suppress

import msgspec

from torch_ros.features.installs.ready import RankUse, file_name, folder
from torch_ros.features.installs.records import Install
from torch_ros.p2p.voucher import line_of, started_at
from torch_ros.printable import log_of
from torch_ros.shard.seams import Feature

log: logging.Logger = log_of(__name__)


class ReadyFile(Feature):
    """The file of this process's rank, from the opening of its handle to its closing.

    Args:
        start: What all ranks of one start have in common, and no other start has.
    """

    def __init__(self, model: str, replica: str, rank: int, start: str) -> None:
        self._name, self._replica, self._start = (
            f"{file_name(model, replica)}-{rank}",
            replica,
            start,
        )
        self._pid, self._rank, self._written = os.getpid(), rank, b""
        self.tell(Install())

    def tell(self, install: Install) -> None:
        """Write down what has changed; readers find the old file, or the new one."""
        try:
            file, started = folder() / self._name, started_at(line_of(self._pid))
            use = RankUse(self._start, self._rank, self._pid, started, install)
            self._written, new = msgspec.json.encode(use), file.with_suffix(f".{self._pid}.new")
            try:
                new.write_bytes(self._written)
                new.replace(file)
            except OSError:  # the disk is full: better no file than an old one
                for each in (new, file):
                    each.unlink(missing_ok=True)
                raise
        except OSError as error:
            log.warning("torch-ros ready has no news of replica %r: %s", self._replica, error)

    def has_closed(self) -> None:
        """Take the file along, unless another start has written its own there."""
        if os.getpid() == self._pid:
            with suppress(OSError):
                file = folder() / self._name
                if file.read_bytes() == self._written:
                    file.unlink()
