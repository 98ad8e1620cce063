"""Serve a process's own figures: by a call, or as the environment says."""

import functools
import logging
import os

from torch_ros import environment
from torch_ros.errors import UsageError
from torch_ros.metrics.handles import HandleCollector
from torch_ros.metrics.ready import ready_here  # feature installs
from torch_ros.metrics.server import Ready, nobody_is_ready, start
from torch_ros.printable import log_of

log: logging.Logger = log_of(__name__)

LOOPBACK = "127.0.0.1"
PORT_MAX = 65_535


def serve(port: int = 0, *, host: str = LOOPBACK) -> int:
    """Serve the figures of this process's handles, at /metrics, until it ends.

    `/ready/MODEL/REPLICA` answers probes, as `torch_ros.ready_page`, of these handles' replicas.
    For processes that serve no figures of their own; others register a `HandleCollector`. Daemon
    threads answer. A child of `fork` does not serve.

    Args:
        port: 0: any that is free.
        host: The address to listen at. The page has no password: beyond loopback it is for
            networks that may see the names of models and replicas.

    Returns:
        The port.

    Raises:
        UsageError: The port is taken, or no such host is this one.
    """
    ready: Ready = nobody_is_ready
    ready = ready_here  # feature installs
    server, _ = start(HandleCollector(), host, port, ready)
    log.info("figures at http://%s:%d/metrics", host, server.server_port)
    return server.server_port


@functools.cache
def serve_as_told() -> None:
    """Once, where the environment says; a job does not fail for want of figures.

    On a host with several ranks each takes the port above, by torchrun's local rank.
    """
    told = environment.value(environment.METRICS_PORT)
    try:
        host, port = address(told)
        above = int(os.environ.get("LOCAL_RANK", "0")) if port else 0
        serve(port + above, host=host)
    except (UsageError, ValueError) as error:
        log.warning("no figures are served, %s=%r: %s", environment.METRICS_PORT, told, error)


def address(told: str) -> tuple[str, int]:
    """Host and port of "PORT" or "HOST:PORT".

    Raises: UsageError: It is neither.
    """
    host, _, port = told.rpartition(":")
    if not port.isdecimal() or int(port) > PORT_MAX:
        raise UsageError("expected PORT, or HOST:PORT")
    return host or LOOPBACK, int(port)
