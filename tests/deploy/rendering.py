"""The chart, rendered by Helm's own library; `python tests/deploy/rendering.py` writes plain/."""

from pathlib import Path

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
VALUES = sorted((KUBERNETES / "values").glob("*.yaml"))
PLAIN = {
    "torch-ros.yaml": (None, ("etcd", "role", "members", "monitoring", "network")),
    "monitoring.yaml": ("monitoring: {operator: true, exporter: false}", ("monitoring",)),
}
FIRST_LINE = "# Rendered from ../chart; tests/deploy/rendering.py writes it.\n"


def texts(values="", name="torch-ros"):
    """What each template becomes for values, by its name."""
    with helm_python.Chart.load(str(KUBERNETES / "chart")) as chart:
        given = helm_python.values_from_yaml(values) if values else {}
        made = chart.render(given, name=name, namespace="any", revision=1, is_install=True)
    return {Path(path).stem: text for path, text in made.items()}


def objects(text):
    return [each for each in yaml.safe_load_all(text) if each]


def rendered(values="", name="torch-ros"):
    return [each for text in texts(values, name).values() for each in objects(text)]


def plain(name):
    """The text of a file of plain/."""
    values, templates = PLAIN[name]
    made = texts(values or "")
    parts = (made[each].strip("\n-").strip() for each in templates)
    lines = "\n---\n".join(parts).splitlines()
    return FIRST_LINE + "\n".join(line.rstrip() for line in lines if line.strip()) + "\n"


if __name__ == "__main__":
    for file in PLAIN:
        (KUBERNETES / "plain" / file).write_text(plain(file))
