"""Mooncake's store over TCP: objects in a segment of the trainer's, put and read in batches."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mooncake.store import MooncakeDistributedStore

import peers

HOST = "127.0.0.1"
BUFFER_BYTES = 128 << 20
READY_S = 30.0


@contextmanager
def master(place: peers.Place) -> Iterator[None]:
    program = Path(sys.prefix) / "bin" / "mooncake_master"
    ports = [f"--rpc_port={place.port}", "--enable_metric_reporting=false", "--metrics_port=0"]
    with (Path(place.directory) / "master.log").open("w") as log:
        process = subprocess.Popen([program, *ports], stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def joined(place: peers.Place, tensors: peers.Tensors, segment_bytes: int) -> Any:
    """Return a store in which the tensors are registered."""
    store = MooncakeDistributedStore()
    where = (HOST, "P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, "tcp", "", f"{HOST}:{place.port}")
    deadline_s = time.monotonic() + READY_S
    while store.setup(*where):
        assert time.monotonic() < deadline_s, "no master answers"
        time.sleep(0.2)
    for tensor in tensors.values():
        assert store.register_buffer(tensor.data_ptr(), tensor.nbytes) == 0
    return store


def spans(tensors: peers.Tensors) -> tuple[list[int], list[int]]:
    held = tensors.values()
    return [tensor.data_ptr() for tensor in held], [tensor.nbytes for tensor in held]


class Trainer(peers.Trainer):
    def __init__(self, place: peers.Place, rank: int, tensors: peers.Tensors) -> None:
        super().__init__(place, rank, tensors)
        self._store = joined(place, tensors, 2 * place.size_bytes)
        self._keys: list[str] = []

    def publish(self, version: int) -> list[str]:
        self._keys = [f"{version}/{fqn}" for fqn in self.tensors]
        assert not any(self._store.batch_put_from(self._keys, *spans(self.tensors)))
        return self._keys

    def forget(self) -> None:
        for key in self._keys:
            assert self._store.remove(key, True) == 0  # though lately read

    def close(self) -> None:
        self._store.close()


class Rollout(peers.Rollout):
    def __init__(self, place: peers.Place, rank: int, tensors: peers.Tensors) -> None:
        super().__init__(place, rank, tensors)
        self._store = joined(place, tensors, 0)

    def receive(self, version: int, tickets: Sequence[list[str]]) -> None:  # noqa: ARG002
        [keys] = tickets
        addresses, sizes = spans(self.tensors)
        assert self._store.batch_get_into(keys, addresses, sizes) == sizes

    def close(self) -> None:
        self._store.close()


PEER = peers.Peer(
    name="Mooncake's store, TCP",
    package="mooncake-transfer-engine-non-cuda",
    trainer=Trainer,
    rollout=Rollout,
    lends=False,
    services=master,
)
