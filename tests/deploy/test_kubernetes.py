"""The chart and the plain manifests: what the API takes, what the code says, and what runs."""

import base64
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from functools import partial
from itertools import chain

import pytest
from kit import until

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: extra `deploy`")
pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: `deploy`")

import helm_python
import kubernetes_validate
import yaml
from pods import Pods, Refused
from rendering import KUBERNETES, PLAIN, ROOT, VALUES, objects, plain, rendered

from puppets.servers import etcd_programs
from torch_ros import environment
from torch_ros.channels.addresses import parse_listen
from torch_ros.cli import parsing
from torch_ros.release import RELEASE

RELEASES = ("1.30", "1.37")  # the oldest that the chart takes, and the newest that is here
OF_OPERATOR = "monitoring.coreos.com/v1"  # no schema of these is in a registry
ALL = [pytest.param("", id="default")] + [
    pytest.param(path.read_text(), id=path.stem) for path in VALUES
]
CHART = KUBERNETES / "chart"


def refusals(each, release):
    try:
        kubernetes_validate.validate(each, release, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{each['kind']} {each['metadata']['name']}: {error.message}"]
    return []


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("values", ALL)
def test_the_api_takes_what_is_rendered(values, release):
    there = [each for each in rendered(values) if each["apiVersion"] != OF_OPERATOR]
    assert len(there) >= 12
    assert list(chain.from_iterable(refusals(each, release) for each in there)) == []


def test_a_field_that_the_api_does_not_know_is_refused():
    [pod] = (each for each in rendered() if each["kind"] == "Deployment")
    pod["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    assert refusals(pod, RELEASES[-1])


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_each_value_of_a_file_is_one_of_the_chart(path):
    known = yaml.safe_load((CHART / "values.yaml").read_text())
    unknown = [
        f"{part}.{name}"
        for part, given in yaml.safe_load(path.read_text()).items()
        for name in (given if isinstance(given, dict) else ())
        if name not in known[part]
    ]
    assert unknown == []


def test_helm_finds_no_fault_in_the_chart():
    found = helm_python.lint(str(CHART))
    assert not [each for each in found["messages"] if "icon is recommended" not in str(each)]


@pytest.mark.parametrize(
    ("values", "told"),
    [("model: a/b", "letters, digits"), ("etcd: {enabled: false}", "name your etcd")],
)
def test_values_that_cannot_work_are_refused(values, told):
    with pytest.raises(helm_python.HelmRenderError, match=told):
        rendered(values)


@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_manifests_are_what_the_chart_renders(name):
    assert (KUBERNETES / "plain" / name).read_text() == plain(name)


@pytest.mark.parametrize("folder", ["deploy/kubernetes/plain", "examples/monitoring"])
def test_kustomize_takes_the_plain_manifests(folder):
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        ["kubectl", "kustomize", ROOT / folder], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = objects(done.stdout)
    assert found
    assert list(chain.from_iterable(refusals(each, RELEASES[-1]) for each in found)) == []


def test_board_and_alerts_are_those_of_the_examples():
    found = {each["kind"]: each for each in rendered("monitoring: {operator: true, board: true}")}
    examples = ROOT / "examples" / "monitoring"
    assert found["ConfigMap"]["data"]["torch-ros.json"] == (examples / "board.json").read_text()
    alerts = yaml.safe_load((examples / "alerts.yml").read_text())
    assert found["PrometheusRule"]["spec"] == alerts


# What the chart repeats of the code


def test_image_and_chart_are_of_this_release():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    found = {chart["version"], chart["appVersion"], values["image"]["tag"]}
    assert found == {RELEASE}
    assert f"torch-ros:{RELEASE} " in (KUBERNETES / "README.md").read_text()


def pods(there):
    """The name of each pod's owner, and its spec."""
    for each in there:
        if "template" in each.get("spec", {}):
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


def component(each):
    return each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]


@pytest.mark.parametrize("values", ALL)
def test_each_variable_is_one_of_the_library(values):
    ours = {value for value in vars(environment).values() if str(value).startswith("TORCH_ROS_")}
    for _, spec in pods(rendered(values)):
        for container in spec["containers"]:
            given = [each["name"] for each in container["env"]]
            assert {name for name in given if name.startswith("TORCH_ROS_")} <= ours
            assert len(given) == len(set(given))


def test_commands_of_the_library_are_ones_that_it_takes(monkeypatch):
    specs = dict(pods(rendered()))
    [exporter] = specs["torch-ros-exporter"]["containers"]
    asked = parsing.parser().parse_args(exporter["command"][1:])
    assert (asked.command, asked.port) == ("export", exporter["ports"][0]["containerPort"])
    assert asked.port == parsing.parser().parse_args(["export"]).port  # where others look for it
    [rollout] = specs["torch-ros-rollout"]["containers"]
    probe = rollout["readinessProbe"]["exec"]["command"][2]
    words = probe.removeprefix("exec torch-ros ").replace('"', "").split()
    assert parsing.parser().parse_args(words).command == "ready"


def numbers(ports):
    return {
        number
        for each in ports
        for number in range(each["port"], each.get("endPort", each["port"]) + 1)
    }


@pytest.mark.parametrize("values", ALL)
def test_policies_open_the_ports_that_pods_listen_on_and_no_others(values):
    there = rendered(values)
    policies = [each for each in there if each["kind"] == "NetworkPolicy"]
    [closed] = (each for each in policies if each["metadata"]["name"] == "torch-ros-closed")
    assert closed["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in closed["spec"]
    for each in there:
        if each["kind"] not in {"StatefulSet", "Deployment"}:
            continue
        [container] = each["spec"]["template"]["spec"]["containers"]
        listens = {port["containerPort"] for port in container["ports"]}
        for variable in container["env"]:
            if variable["name"] == environment.LISTEN:
                listens |= set(parse_listen(variable["value"]).ports)
        opened = set()
        for policy in policies:
            its = policy["spec"]["podSelector"].get("matchExpressions", [{"values": ()}])
            if component(each) in its[0]["values"]:
                for rule in policy["spec"].get("ingress", ()):
                    opened |= numbers(rule.get("ports", ()))
        # One policy opens the figures of all kinds of pods; nobody else listens there.
        figures = {9464, *range(9400, 9408)}
        assert listens <= opened, each["metadata"]["name"]
        assert opened - listens <= figures, each["metadata"]["name"]


def test_clients_of_engines_find_those_that_are_ready():
    there = [each for each in rendered("rollout: {port: 8000}") if each["kind"] == "Service"]
    found = {
        each["metadata"]["name"]: each["spec"]
        for each in there
        if each["spec"]["selector"]["app.kubernetes.io/component"] == "rollout"
    }
    assert found["torch-ros-engines"]["ports"] == [{"name": "http", "port": 8000}]
    assert "publishNotReadyAddresses" not in found["torch-ros-engines"]
    assert found["torch-ros-rollout"]["publishNotReadyAddresses"]  # for who updates an engine


def test_monitors_find_a_service_with_each_of_their_ports():
    there = rendered("monitoring: {operator: true}\ntrainer: {processes: 2}")
    [monitor] = (each["spec"] for each in there if each["kind"] == "ServiceMonitor")
    wanted = monitor["selector"]["matchLabels"].items()
    found = {
        port["name"]
        for each in there
        if each["kind"] == "Service" and wanted <= each["metadata"]["labels"].items()
        for port in each["spec"]["ports"]
    }
    assert {each["port"] for each in monitor["endpoints"]} == {"figures-0", "figures-1", "metrics"}
    assert {each["port"] for each in monitor["endpoints"]} <= found


def test_alerts_come_from_the_first_release_alone():
    second = yaml.safe_load((KUBERNETES / "values" / "second-model.yaml").read_text())
    second["monitoring"]["operator"] = True
    kinds = [each["kind"] for each in rendered(yaml.safe_dump(second), "critic")]
    assert "ServiceMonitor" in kinds
    assert "PrometheusRule" not in kinds
    assert "PrometheusRule" in [each["kind"] for each in rendered("monitoring: {operator: true}")]


def test_what_is_not_trainer_or_rollout_may_go_to_nodes_of_its_own():
    there = dict(pods(rendered("nodeSelector: {pool: cpus}\ntolerations: [{key: cpus}]")))
    chosen = {name for name, spec in there.items() if spec.get("nodeSelector") == {"pool": "cpus"}}
    assert chosen == {"torch-ros-etcd", "torch-ros-exporter", "torch-ros-role-1"}
    assert all(there[name]["tolerations"] == [{"key": "cpus"}] for name in chosen)


@pytest.mark.parametrize("values", ALL)
def test_pod_security_may_be_restricted(values):
    """What IPC_LOCK is for a user who is not root: nothing, and refused."""
    for name, spec in pods(rendered(values)):
        for container in spec["containers"]:
            assert not container["securityContext"]["capabilities"].get("add"), name


def test_the_readme_is_short_and_its_files_are_there():
    text = (KUBERNETES / "README.md").read_text()
    assert len(re.findall(r"\S*\w\S*", text)) < 700
    for path in re.findall(r"deploy/[\w./-]+|examples/[\w./-]+", text):
        assert (ROOT / path).exists(), path
    assert {path.name for path in VALUES} <= set(re.findall(r"[\w-]+\.yaml", text))


# The processes of the default manifests


def secrets_of(folder):
    """What secrets.sh says, the second time: certificates and passwords stay what they were."""
    command = [KUBERNETES / "secrets.sh", "torch-ros", folder / "keys"]
    said = [subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)]
    assert said[0] == said[1]
    made = objects(said[0].decode())
    assert list(chain.from_iterable(refusals(each, RELEASES[-1]) for each in made)) == []
    return {"critic-etcd-model": {"password": b"of-critic"}} | {
        each["metadata"]["name"]: {
            file: base64.b64decode(content) for file, content in each["data"].items()
        }
        for each in made
    }


@pytest.fixture
def role(running_etcd, tmp_path):
    """Run role.sh for `policy`, and etcdctl as somebody, on an etcd whose clients show nothing."""
    passwords = {"ROOT_PASSWORD_FILE": "root", "PASSWORD_FILE": "ros-policy"}
    files = {variable: tmp_path / name for variable, name in passwords.items()}
    for path in files.values():
        path.write_text(path.name)
    with running_etcd(tmp_path / "etcd", "--bcrypt-cost", "4") as server:
        environment = {
            "PATH": f"{etcd_programs()}:{os.environ['PATH']}",
            "ETCDCTL_API": "3",
            "ETCDCTL_ENDPOINTS": server.host,
            "MODEL": "policy",
            "MODEL_USER": "ros-policy",
            **{variable: str(path) for variable, path in files.items()},
        }

        def run(*command, user=None):
            login = {"ETCDCTL_USER": f"{user}:{user}"} if user else {}
            words = command or ("sh", CHART / "files" / "role.sh")
            return subprocess.run(
                words, env=environment | login, capture_output=True, text=True, timeout=30
            )

        yield run


def test_a_user_is_made_again_where_clients_show_no_certificate(role):
    """etcd then takes nobody's word for its health but a user's."""
    for _ in range(2):
        done = role()
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_user_reads_no_keys_of_a_longer_name(role):
    """Nor where the role was once given a prefix without an end."""
    assert role().returncode == 0
    old = ("--prefix=true", "readwrite", "/torch-ros-store/torchrun%2Fpolicy")
    grant = ("etcdctl", "role", "grant-permission", "ros-policy", *old)
    assert role(*grant, user="root").returncode == 0
    theirs = "/torch-ros-store/torchrun%2Fpolicy-2/state"
    assert role("etcdctl", "get", theirs, user="ros-policy").returncode == 0
    assert role().returncode == 0
    done = role("etcdctl", "get", theirs, user="ros-policy")
    assert done.returncode != 0
    assert "permission denied" in done.stderr
    for key in ("torchrun%2Fpolicy/state", "torchrun%2Fpolicy%2Fround/state", "policy/state"):
        mine = f"/torch-ros-store/{key}"
        assert role("etcdctl", "put", mine, "1", user="ros-policy").returncode == 0, key


def test_a_wrong_password_of_root_is_said(role, tmp_path):
    assert role().returncode == 0
    (tmp_path / "root").write_text("wrong")
    script = (CHART / "files" / "role.sh").read_text()
    done = role("sh", "-c", re.sub("^until.*?^done$", "", script, flags=re.DOTALL | re.MULTILINE))
    assert done.returncode == 1
    assert "invalid user ID or password" in done.stderr


def test_an_etcd_that_is_full_is_not_ended(running_etcd, tmp_path):
    [container] = dict(pods(rendered()))["torch-ros-etcd"]["containers"]
    with running_etcd(tmp_path / "etcd", "--quota-backend-bytes", "16384") as server:
        command = [etcd_programs() / "etcdctl", f"--endpoints={server.host}", "put", "a"]
        until(lambda: subprocess.run([*command, "b" * 9000], capture_output=True).returncode)
        at = f"http://127.0.0.1:{server.metrics_port}"
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(at + "/health?serializable=true")
        for probe in ("startupProbe", "livenessProbe"):
            path = container[probe]["httpGet"]["path"]
            assert urllib.request.urlopen(at + path).status == 200


@pytest.fixture
def cluster(tmp_path):
    if not shutil.which("unshare") or not shutil.which("nsenter") or not shutil.which("ip"):
        pytest.skip("unshare, nsenter or ip is not installed")
    names = {f"torch-ros-etcd-{n}.torch-ros-etcd": f"127.0.1.{n + 1}" for n in range(3)}
    try:
        with Pods(tmp_path, secrets_of(tmp_path), names) as made:
            yield made
    except Refused as error:
        pytest.skip(f"no network of its own: {error}")


def test_a_client_passes_for_no_server_nor_member(tmp_path):
    """A certificate is good for what it was made for; none has an address of this machine."""
    secrets_of(tmp_path)
    keys = tmp_path / "keys"

    def is_good(name, ca, use):
        command = ["openssl", "verify", "-purpose", use, "-CAfile", keys / f"{ca}.crt"]
        return subprocess.run([*command, keys / f"{name}.crt"], capture_output=True).returncode == 0

    good = {
        (name, ca, use)
        for name in ("server", "client", "peer")
        for ca in ("ca", "peer-ca")
        for use in ("sslserver", "sslclient")
        if is_good(name, ca, use)
    }
    assert good == {
        ("server", "ca", "sslserver"),
        ("server", "ca", "sslclient"),
        ("client", "ca", "sslclient"),
        ("peer", "peer-ca", "sslserver"),
        ("peer", "peer-ca", "sslclient"),
    }
    for name in ("server", "client", "peer"):
        show = ["openssl", "x509", "-noout", "-text", "-in", keys / f"{name}.crt"]
        shown = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        assert "IP Address" not in shown
        assert ("DNS:" in shown) == (name != "client")


@pytest.mark.timeout(100)
def test_members_take_one_another_and_the_user_is_made(cluster):
    specs = dict(pods(rendered()))
    for n in range(3):
        cluster.start(f"torch-ros-etcd-{n}", f"127.0.1.{n + 1}", specs["torch-ros-etcd"])
    assert cluster.run("role", "127.0.2.1", specs["torch-ros-role-1"]) == 0, cluster.said("role")
    # Nobody has opened it yet: etcd let the user in, by the certificate of clients.
    look = ["torch-ros", "ls", "policy"]
    said = cluster.run("look", "127.0.6.1", specs["torch-ros-exporter"], look)
    assert said == 2, cluster.said("look")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_processes_of_the_manifests_work_together(cluster):
    specs = dict(pods(rendered()))
    etcd, role = specs["torch-ros-etcd"], specs["torch-ros-role-1"]
    for n in range(3):
        cluster.start(f"torch-ros-etcd-{n}", f"127.0.1.{n + 1}", etcd)
    for _ in range(2):  # it may be repeated
        assert cluster.run("role", "127.0.2.1", role) == 0, cluster.said("role")
    trainer = cluster.start("torch-ros-trainer-0", "127.0.3.1", specs["torch-ros-trainer"])
    spec = specs["torch-ros-rollout"]
    named = {f"torch-ros-rollout-{n}": f"127.0.4.{n + 1}" for n in range(2)}
    rollouts = [cluster.start(name, at, spec) for name, at in named.items()]
    probe = spec["containers"][0]["readinessProbe"]["exec"]["command"]

    def is_ready(name):
        return cluster.run(name, named[name], spec, probe) == 0

    for name in named:
        until(partial(is_ready, name), limit_s=100, pause_s=0.5)
    exporter = specs["torch-ros-exporter"]
    cluster.start("exporter", "127.0.5.1", exporter)
    url = "http://127.0.5.1:9464/metrics"
    code = f"import urllib.request as r; print(r.urlopen({url!r}).read().decode())"
    ask = ["python", "-c", code]
    until(lambda: cluster.run("scrape", "127.0.6.1", exporter, ask) == 0, limit_s=30, pause_s=0.2)
    assert "torch_ros_fleet_replicas{" in cluster.said("scrape")
    # Another model has a user of its own; nobody has opened it yet.
    values = (KUBERNETES / "values" / "second-model.yaml").read_text()
    critic = dict(pods(rendered(values, "critic")))
    assert cluster.run("critic-role", "127.0.2.2", critic["critic-role-1"]) == 0
    look = ["torch-ros", "ls", "critic"]
    assert cluster.run("critic", "127.0.6.1", critic["critic-exporter"], look) == 2
    assert cluster.run("denied", "127.0.6.1", exporter, look) == 3
    assert "no access to etcd" in cluster.said("denied")
    assert [cluster.end(each) for each in rollouts] == [0, 0]
    assert all("has left" in cluster.said(name) for name in named)
    assert cluster.end(trainer) == 0
    assert not is_ready("torch-ros-rollout-0")
