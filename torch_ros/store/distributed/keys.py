"""The etcd keys of an `EtcdStore`, and its one record.

Below ``/torch-ros-store/PREFIX/``, with K for a key, percent-encoded:

* ``lease``            the lease that the job's records hang on; it hangs on itself
* ``keys/K``           the value of K: ``=`` and its bytes, or ``#`` and which blob has them
* ``blobs/K!ID/N``     a piece of a value that is too large for one request
* ``marks/CLIENT/N``   which write of CLIENT was the last to apply, one for each of its threads
"""

from dataclasses import dataclass
from urllib.parse import quote

from torch_ros.store.txn import Range, under

ROOT = "/torch-ros-store"


@dataclass(frozen=True, slots=True)
class StoreKeys:
    prefix: str

    @property
    def _root(self) -> str:
        return f"{ROOT}/{quote(self.prefix, safe='')}"

    def lease(self) -> str:
        return f"{self._root}/lease"

    def marks(self, client: str) -> Range:
        return under(f"{self._root}/marks/{client}/")

    def mark(self, client: str, slot: int) -> str:
        return f"{self._root}/marks/{client}/{slot}"

    def everything(self) -> Range:
        return under(f"{self._root}/keys/")

    def value(self, key: bytes) -> str:
        return f"{self._root}/keys/{_quoted(key)}"

    def blobs(self, key: bytes) -> Range:
        return under(f"{self._root}/blobs/{_quoted(key)}!")

    def blob(self, key: bytes, name: str) -> Range:
        return under(f"{self.blobs(key).start}{name}/")

    def piece(self, key: bytes, name: str, index: int) -> str:
        return f"{self.blob(key, name).start}{index:06d}"


def _quoted(key: bytes) -> str:
    return quote(key, safe="/")


@dataclass(frozen=True, slots=True)
class Blob:
    name: str  # of a value that is too large for one request
    pieces: int  # how many lie under it

    def record(self) -> bytes:
        return f"#{self.name} {self.pieces}".encode()


def inline(value: bytes) -> bytes:
    return b"=" + value


def parsed(record: bytes) -> bytes | Blob:
    if record[:1] == b"=":
        return record[1:]
    name, pieces = record[1:].decode().split()
    return Blob(name, int(pieces))
