"""The server that Prometheus scrapes."""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from torch_ros.errors import UsageError
from torch_ros.metrics.loopback import host_and_port, is_loopback

CONNECTIONS_MAX = 16  # a thread each; Prometheus keeps one or two
SILENT_S = 5.0  # after which a connection on which nothing comes is closed
NOT_OURS = b"these figures are for this host: ask for them by localhost or 127.0.0.1\n"

TARGET = "torch_ros.target"  # of a request, as it came: WSGI has names unquoted, with their slashes

Page = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Ready = Callable[[str], tuple[int, str]]  # for a target, the status and JSON


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S

    def get_environ(self) -> dict[str, Any]:
        return {**super().get_environ(), TARGET: self.path}

    def log_message(self, *_: object) -> None:
        """Scrapes are not worth a line."""


class _Server(ThreadingMixIn, WSGIServer):
    """So many connections at a time: the oldest gives its place to a new one."""

    daemon_threads = True

    def __init__(self, *given: Any) -> None:
        self._lock, self._there = threading.Lock(), dict[socket.socket, None]()
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._there) >= CONNECTIONS_MAX:
                self._there.pop(oldest := next(iter(self._there)))
                with suppress(OSError):  # it has gone by itself
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread ends, and closes it
            self._there[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._there.pop(request, None)
        super().shutdown_request(request)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _guarded(page: Page) -> Page:
    """For askers that mean this host: a page of somebody else's may have its name lead here."""

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if is_loopback(host_and_port(environ.get("HTTP_HOST", ""))[0]):
            return page(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain")])
        return [NOT_OURS]

    return guarded


def _beside(page: Page, ready: Ready) -> Page:
    """The answers to probes, below /ready/, and a page for all other paths."""

    def routed(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if not f"{environ[TARGET]}/".startswith("/ready/"):
            return page(environ, start_response)
        status, said = ready(environ[TARGET])
        headers = {"Content-Type": "application/json", "Cache-Control": "no-store"}
        headers["Content-Length"] = str(len(body := said.encode()))
        start_response(f"{status} {HTTPStatus(status).phrase}", list(headers.items()))
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    return routed


def nobody_is_ready(_: str) -> tuple[int, str]:
    """The answer of a process without engines: a probe that asks it has the wrong port."""
    return 404, '{"is_ready": false, "reason": "no engine is here: ask the port of its process"}'


def start(
    collector: Collector, host: str, port: int, ready: Ready = nobody_is_ready
) -> tuple[WSGIServer, threading.Thread]:
    """Serve what a collector draws, by daemon threads.

    At a loopback address, only for those who ask for that by name.

    Args:
        port: 0: any that is free.
        ready: The answers to probes.

    Raises:
        UsageError: The port is taken, or no such host is this one.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    page = _beside(make_wsgi_app(registry), ready)
    page = _guarded(page) if is_loopback(host) else page
    kind = _Server6 if ":" in host else _Server
    try:
        server = make_server(host, port, page, kind, _Handler)
    except (OSError, OverflowError) as error:  # a rank's port may be above the highest
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen at {host}:{port}: {reason}") from error
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    return server, thread


@contextmanager
def serving(
    collector: Collector, host: str, port: int, ready: Ready = nobody_is_ready
) -> Iterator[str]:
    """As `start`, until the block is left. Yields the address."""
    server, thread = start(collector, host, port, ready)
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
