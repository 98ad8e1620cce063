"""The way of the samples: a bounded queue in the launcher, which its children reach by TCP.

A job of many hosts has something of its own here; torch_ros moves weights only.
"""

import os
import queue
import secrets
import threading
from multiprocessing.managers import BaseManager
from typing import Any

SIZE = 4  # groups; a full queue makes rollouts wait


def serve() -> dict[str, str]:
    """Begin, in a thread of this process. The environment by which children find it."""
    samples: queue.Queue[Any] = queue.Queue(SIZE)
    key = secrets.token_hex()
    manager = BaseManager(("127.0.0.1", 0), key.encode())
    manager.register("samples", lambda: samples)
    server = manager.get_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert isinstance(server.address, tuple)
    return {"SAMPLES_PORT": str(server.address[1]), "SAMPLES_KEY": key}


def connect() -> "queue.Queue[Any]":
    """A proxy of the queue, for one thread."""
    address = ("127.0.0.1", int(os.environ["SAMPLES_PORT"]))
    manager = BaseManager(address, os.environ["SAMPLES_KEY"].encode())
    manager.register("samples")
    manager.connect()
    samples: queue.Queue[Any] = manager.samples()  # type: ignore[attr-defined]
    return samples
