"""The port of figures: who may ask, and how many at a time."""

import socket
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from torch_ros.metrics import server


class One(Collector):
    def collect(self):
        yield GaugeMetricFamily("one", "One.", value=1)


def answer(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as it:
            return it.status, it.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_page_of_another_name_gets_no_figures_of_this_host(host):
    with server.serving(One(), host, 0) as url:
        port = url.rpartition(":")[2].partition("/")[0]
        assert answer(url)[0] == 200
        assert "one 1.0" in answer(url, Host=f"localhost:{port}")[1]
        code, said = answer(url, Host=f"evil.example:{port}")
        assert (code, "one 1.0" in said, "localhost" in said) == (403, False, True)


def test_a_port_for_other_hosts_is_asked_by_any_name():
    with server.serving(One(), "0.0.0.0", 0) as url:
        port = url.rpartition(":")[2].partition("/")[0]
        assert answer(f"http://127.0.0.1:{port}/", Host="trainer-0.jobs.svc:9464")[0] == 200


@pytest.mark.long
def test_connections_that_send_nothing_take_a_few_threads_and_no_scrape():
    before = threading.active_count()
    with server.serving(One(), "127.0.0.1", 0) as url, ExitStack() as stack:
        port = int(url.rpartition(":")[2].partition("/")[0])
        for _ in range(10 * server.CONNECTIONS_MAX):
            half_open = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            half_open.sendall(b"GET /metrics")
        assert answer(url)[0] == 200
        assert threading.active_count() - before <= 3 * server.CONNECTIONS_MAX


def test_a_connection_that_stays_silent_is_closed(monkeypatch):
    monkeypatch.setattr(server._Handler, "timeout", 0.1)
    with server.serving(One(), "127.0.0.1", 0) as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as silent:
            assert silent.recv(1) == b""
