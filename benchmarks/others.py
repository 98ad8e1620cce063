"""Those who move the same weights in other ways, and how fast the machine is at all."""

import os
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensors as contents
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import seconds
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from torch_ros.channels.meeting import TcpIdentity

POLL_S = 0.001
CONNECT_S = 30.0


class Copy:
    """torch's copy within one process, between tensors that were copied a moment ago."""

    def __init__(self, sources: contents.Tensors, targets: contents.Tensors) -> None:
        self._sources, self._targets = sources, targets

    def copy(self, version: int) -> float:
        contents.write(self._sources, version)
        self._copy()
        return seconds(self._copy)

    def _copy(self) -> None:
        for fqn, target in self._targets.items():
            target.copy_(self._sources[fqn])

    def close(self) -> None:
        pass


class RawSource:
    """NIXL by hand, as plain as it gets."""

    def __init__(self, name: str, tensors: contents.Tensors, *, tcp_only: bool = False) -> None:
        self._agent, self._tensors = _agent(name, tcp_only=tcp_only), tensors
        self._spans = contents.spans(tensors)
        self._agent.register_memory(self._spans, "DRAM")
        self._is_read = threading.Event()
        threading.Thread(target=self._progress, daemon=True).start()

    def offer(self) -> tuple[bytes, np.ndarray]:
        return self._agent.get_agent_metadata(), self._spans

    def write(self, version: int) -> None:
        contents.write(self._tensors, version)

    def begin(self) -> None:
        """Make progress: without any, the reader's connection is never made."""
        self._is_read.set()

    def end(self) -> None:
        self._is_read.clear()

    def _progress(self) -> None:
        while self._is_read.wait():
            self._agent.get_new_notifs()
            time.sleep(POLL_S)

    def close(self) -> None:
        self.end()


class RawReader:
    """One descriptor per tensor; the handle is prepared once and posted again and again."""

    def __init__(self, name: str, tensors: contents.Tensors, *, tcp_only: bool = False) -> None:
        self._agent, self._tensors = _agent(name, tcp_only=tcp_only), tensors
        self._spans = contents.spans(tensors)
        self._agent.register_memory(self._spans, "DRAM")
        self._handle: Any = None

    def connect(self, metadata: bytes, sources: np.ndarray) -> None:
        peer = self._agent.add_remote_agent(metadata)
        into, of = (self._agent.get_xfer_descs(spans, "DRAM") for spans in (self._spans, sources))
        self._handle = self._agent.initialize_xfer("READ", into, of, peer)

    def read(self) -> float:
        return seconds(self._read)

    def _read(self) -> None:
        state = self._agent.transfer(self._handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(self._handle)
        assert state == "DONE"

    def verify(self, version: int) -> None:
        contents.verify(self._tensors, version)

    def close(self) -> None:
        self._agent.release_xfer_handle(self._handle)


def _agent(name: str, *, tcp_only: bool) -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # read as it is loaded
    from nixl import nixl_agent, nixl_agent_config  # noqa: PLC0415

    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
    # What torch_ros asks UCX for, so that the difference is not this.
    tuned = "TCP_TX_SEG_SIZE=1m,TCP_RX_SEG_SIZE=1m"
    agent.create_backend("UCX", {"engine_config": f"TLS=tcp,{tuned}" if tcp_only else tuned})
    return agent


class Files:
    """Through a filesystem: save in the one process, load in the other, each in its usual way."""

    def __init__(self, tensors: contents.Tensors) -> None:
        self._tensors = dict(tensors)

    def save_dcp(self, path: Path) -> float:
        writer = FileSystemWriter(path)
        return seconds(lambda: dcp.save(self._tensors, storage_writer=writer, no_dist=True))

    def load_dcp(self, path: Path) -> float:
        reader = FileSystemReader(path)
        return seconds(lambda: dcp.load(self._tensors, storage_reader=reader, no_dist=True))

    def save_safetensors(self, path: Path) -> float:
        return seconds(lambda: save_file(self._tensors, path / "model.safetensors"))

    def load_safetensors(self, path: Path) -> float:
        """Into the model's own tensors, as all others; `load_file` alone maps the file."""
        return seconds(lambda: self._load_safetensors(path / "model.safetensors"))

    def _load_safetensors(self, path: Path) -> None:
        for fqn, tensor in load_file(path).items():
            self._tensors[fqn].copy_(tensor)

    def close(self) -> None:
        pass


class Broadcast:
    """gloo, from rank 0 of the process group."""

    def __init__(self, tensors: contents.Tensors) -> None:
        self._tensors = tensors

    def broadcast(self) -> float:
        dist.barrier()
        return seconds(self._broadcast)

    def _broadcast(self) -> None:
        for tensor in self._tensors.values():
            dist.broadcast(tensor, 0)

    def close(self) -> None:
        pass


class Socket:
    """One TCP connection over loopback."""

    def __init__(self, tensors: contents.Tensors) -> None:
        self._buffers = [memoryview(t.view(torch.uint8).numpy()) for t in tensors.values()]
        self._listening: socket.socket | None = None
        self._connection: socket.socket | None = None

    def listen(self) -> int:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(CONNECT_S)
        return self._listening.getsockname()[1]

    def connect(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))

    def accept(self) -> None:
        assert self._listening is not None
        self._connection, _ = self._listening.accept()
        self._connection.settimeout(None)

    def send(self) -> float:
        return seconds(self._send)

    def _send(self) -> None:
        assert self._connection is not None
        for buffer in self._buffers:
            self._connection.sendall(buffer)

    def receive(self) -> float:
        return seconds(self._receive)

    def _receive(self) -> None:
        assert self._connection is not None
        for buffer in self._buffers:
            filled = 0
            while filled < len(buffer):
                received = self._connection.recv_into(buffer[filled:])
                assert received, "the other end has closed"
                filled += received

    def close(self) -> None:
        for opened in (self._connection, self._listening):
            if opened is not None:
                opened.close()


class TlsSocket(Socket):
    """The same in TLS 1.3, by `ssl`."""

    def connect(self, port: int) -> None:
        """Return once the other end has accepted."""
        super().connect(port)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        assert self._connection is not None
        self._connection = context.wrap_socket(self._connection)

    def accept(self) -> None:
        super().accept()
        assert self._connection is not None
        self._connection = TcpIdentity().context.wrap_socket(self._connection, server_side=True)
