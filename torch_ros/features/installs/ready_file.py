"""The file by which one rank says which version its engine uses: `ready.py` reads it."""

import logging
import os
from pathlib import Path

import msgspec

from torch_ros.features.installs.ready import RankUse, file_name, folder
from torch_ros.features.installs.records import Install
from torch_ros.p2p.voucher import line_of, started_at
from torch_ros.printable import log_of
from torch_ros.shard.seams import Feature

log: logging.Logger = log_of(__name__)


class ReadyFile(Feature):
    """The file of this process's rank, from the opening of its handle to its closing."""

    def __init__(self, model: str, replica: str, rank: int) -> None:
        pid = os.getpid()
        self._told = RankUse(model, replica, rank, pid, started_at(line_of(pid)), Install())
        self._file: Path | None = None
        try:
            self._file = folder() / f"{file_name(model, replica)}-{rank}"
        except OSError as error:
            log.warning("torch-ros ready cannot learn of replica %r: %s", replica, error)
        self.tell(Install())

    def tell(self, install: Install) -> None:
        """Write down what has changed; readers find the old file, or the new one."""
        if self._file is None:
            return
        told, new = msgspec.structs.replace(self._told, install=install), Path(f"{self._file}.new")
        try:
            new.write_bytes(msgspec.json.encode(told))
            new.replace(self._file)
        except OSError as error:
            log.warning("torch-ros ready has old news of replica %r: %s", told.replica, error)

    def has_closed(self) -> None:
        if self._file is not None and os.getpid() == self._told.pid:
            self._file.unlink(missing_ok=True)
