"""The server that Prometheus scrapes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from torch_ros.errors import UsageError


def start(collector: Collector, host: str, port: int) -> tuple[WSGIServer, threading.Thread]:
    """Serve what a collector draws, by daemon threads.

    Args:
        port: 0: any that is free.

    Raises:
        UsageError: The port is taken, or no such host is this one.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        return start_http_server(port, host, registry)
    except OSError as error:
        raise UsageError(f"cannot listen at {host}:{port}: {error.strerror or error}") from error


@contextmanager
def serving(collector: Collector, host: str, port: int) -> Iterator[str]:
    """As `start`, until the block is left. Yields the address."""
    server, thread = start(collector, host, port)
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
