"""The board and the alert rules ask for figures that are there, by labels that they have."""

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from scraping import address, exporting, samples

import torch_ros.bucket
from puppets.servers import free_port
from torch_ros.bucket.archive import Archiver
from torch_ros.metrics import serve
from torch_ros.metrics.archivers import ArchiveCollector
from torch_ros.metrics.server import serving

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
ALERTS = FOLDER / "alerts.yml"
BOARD = json.loads((FOLDER / "board.json").read_text())
SELECTED = re.compile(r"(torch_ros_\w+)(?:\{([^}]*)\})?")
LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")
OF_TARGETS = {"instance", "job"}  # labels that Prometheus adds

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("promtool") and shutil.which("prometheus")),
    reason="Prometheus is not installed: apt install prometheus",
)


def of_board():
    """Each query of the board, with the labels of its legend."""
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"], set(LEGEND.findall(target["legendFormat"]))


def of_alerts():
    return re.findall(r"^\s+expr: (.+)$", ALERTS.read_text(), re.MULTILINE)


def asked(query):
    """The figures of a query, each with the labels that it is selected by."""
    for name, labels in SELECTED.findall(query):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels))


@pytest.fixture
def served(opened, endpoint):
    """The places of a small fleet's figures, with a rollout that feeds an engine."""
    trainer, rollout = opened("trainer"), opened("rollout", installs=True)
    trainer.register({"w": torch.full((4,), 1.0)})
    trainer.publish(1)
    with rollout.installing(1):
        rollout.read(1, {"w": torch.empty(4)})
    reader = opened("reader", {"w": torch.empty(4)})
    bucket = torch_ros.bucket.open("memory://board", trainer.model)
    archiver = Archiver(opened("archiver", spot=True), bucket, keep=1)
    archiver.totals.retries["BucketError"] += 1
    figures = serving(ArchiveCollector(archiver), "127.0.0.1", 0)
    with exporting(endpoint) as (_, said), figures as archived:
        pages = [said, f"at http://127.0.0.1:{serve()}/metrics", f"at {archived}"]
        yield pages, trainer.model, partial(step, trainer, reader)


def step(trainer, reader):
    """A version more."""
    reader.update()
    trainer.unpublish()
    trainer.publish((trainer.version or reader.version or 0) + 1)


@pytest.fixture
def there(served):
    """The labels of all figures."""
    found, (pages, _, step) = {}, served
    step()
    for said in pages:
        for each in samples(said):
            found.setdefault(each.name, set()).update(each.labels)
    return found


@pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
@pytest.mark.long
def test_each_figure_of_a_query_is_there_with_its_labels(there):
    queries = [*of_board(), *((query, set()) for query in of_alerts())]
    for query, legend in queries:
        figures = list(asked(query))
        assert figures, query
        for name, labels in figures:
            assert name in there, query
            assert labels <= there[name], query
        assert legend <= set().union(*(there[name] for name, _ in figures)) | OF_TARGETS, query
    variable = BOARD["templating"]["list"][1]["query"]
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable).groups()
    assert label in there[name]


def test_a_board_is_one_that_grafana_takes():
    panels = BOARD["panels"]
    assert len(panels) >= 12
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert {panel["datasource"]["uid"] for panel in panels} == {"$datasource"}


@pytest.mark.parametrize("figure", ["torch_ros_reads_via_total", "torch_ros_read_via_bytes_total"])
def test_a_board_tells_in_full_from_by_deltas(figure):
    found = [legend for query, legend in of_board() if figure in dict(asked(query))]
    assert found == [{"via"}]


def test_operations_tells_of_each_alert():
    text = (FOLDER.parents[1] / "docs" / "OPERATIONS.md").read_text()
    names = re.findall(r"alert: (\w+)", ALERTS.read_text())
    assert names
    assert [name for name in names if f"| `{name}` |" not in text] == []


# With Prometheus itself


@contextmanager
def prometheus(folder, addresses):
    """A server that scrapes each second; a function that asks it."""
    targets = ", ".join(f"'{urllib.parse.urlsplit(each).netloc}'" for each in addresses)
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"rule_files: ['{ALERTS}']\n"
        "scrape_configs:\n"
        "  - job_name: torch_ros\n"
        f"    static_configs: [{{targets: [{targets}]}}]\n"
    )
    listens = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/records",
        f"--web.listen-address={listens}",
    ]

    def ask(path, **parameters):
        url = f"http://{listens}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield ask
    finally:
        process.terminate()
        process.wait()


def answered(ask, query, until_s, step):
    while True:
        try:
            found = ask("query", query=query)["result"]
            if found and not any(each["value"][1] == "NaN" for each in found):
                return found
        except (ConnectionError, urllib.error.URLError):
            pass  # it starts, or has no scrape yet
        step()
        assert time.monotonic() < until_s, query
        time.sleep(0.2)


@needs_prometheus
@pytest.mark.long
@pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
def test_prometheus_answers_each_query_and_knows_each_rule(served, tmp_path):
    until_s = time.monotonic() + 60
    pages, model, step = served
    with prometheus(tmp_path, map(address, pages)) as ask:
        for query, _ in of_board():
            query = query.replace("$model", model).replace("$__rate_interval", "30s")
            assert answered(ask, query, until_s, step), query
        [group] = ask("rules")["groups"]
        found = {rule["name"]: (rule["health"], rule["state"]) for rule in group["rules"]}
        while {health for health, _ in found.values()} == {"unknown"}:
            assert time.monotonic() < until_s
        # The trainer's only copy is there for less than a minute.
        names = re.findall(r"alert: (\w+)", ALERTS.read_text())
        expected = dict.fromkeys(names, "inactive") | {"TorchRosOnlyCopy": "pending"}
        found = {}
        while found != expected:
            assert time.monotonic() < until_s, found
            [group] = ask("rules")["groups"]
            found = {rule["name"]: rule["state"] for rule in group["rules"]}
            assert "err" not in {rule["health"] for rule in group["rules"]}
            time.sleep(0.2)


FIRES = [  # alert, series, its values each 5 s, seconds at which it fires, and at which it does not
    ("TorchRosOnlyCopy", 'torch_ros_fleet_only_copy{model="m"}', "0 1x20", 70, 60),
    ("TorchRosOnlyCopy", 'torch_ros_fleet_only_copy{model="m"}', "1x20 0x5", 100, 110),
    ("TorchRosBehind", 'torch_ros_fleet_max_behind{model="m"}', "4x20", 60, 50),
    ("TorchRosBehind", 'torch_ros_fleet_max_behind{model="m"}', "4x12 3x20", 60, 120),
    ("TorchRosEtcdDown", "torch_ros_fleet_etcd_up", "1 0x20", 20, 15),
    ("TorchRosDraining", 'torch_ros_fleet_draining_seconds{model="m"}', "0 25 30 35", 15, 10),
    (
        "TorchRosInstallRejected",
        'torch_ros_fleet_installs{model="m",state="rejected"}',
        "0 1",
        5,
        0,
    ),
    ("TorchRosCorrupt", 'torch_ros_corrupt_total{model="m"}', "0 0 0 1 1", 15, 10),
    ("TorchRosCutOff", 'torch_ros_etcd_up{model="m"}', "0x20", 30, 25),
    ("TorchRosOtherRelease", 'torch_ros_fleet_readable{model="m"}', "1 0", 5, 0),
    ("TorchRosNoFigures", "torch_ros_fleet_etcd_up", "1 stale", 130, 100),
]


@needs_prometheus
@pytest.mark.parametrize(("alert", "series", "values", "fires_s", "is_quiet_s"), FIRES)
def test_an_alert_fires_when_it_should(tmp_path, alert, series, values, fires_s, is_quiet_s):
    query = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
    expected = [
        {"expr": query, "eval_time": f"{fires_s}s", "exp_samples": [{"labels": "{}", "value": 1}]},
        {"expr": query, "eval_time": f"{is_quiet_s}s", "exp_samples": []},
    ]
    test = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "5s",
        "tests": [
            {
                "interval": "5s",
                "input_series": [{"series": series, "values": values}],
                "promql_expr_test": expected,
            }
        ],
    }
    (tmp_path / "test.yml").write_text(json.dumps(test))  # JSON is YAML
    done = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_each_alert_has_been_seen_to_fire():
    assert {row[0] for row in FIRES} == set(re.findall(r"alert: (\w+)", ALERTS.read_text()))
