"""The server that Prometheus scrapes."""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from torch_ros.errors import UsageError


@contextmanager
def serving(collector: Collector, host: str, port: int) -> Iterator[str]:
    """Serve what a collector draws, by threads of its own, until the block is left.

    Args:
        port: 0: any that is free.

    Yields:
        Its address.

    Raises:
        UsageError: The port is taken, or no such host is this one.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise UsageError(f"cannot listen at {host}:{port}: {error.strerror or error}") from error
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
