"""Counts the lines of the package's parts, of its tests and of its benchmarks.

python tests/house/lines.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ("store", "protocol", "weights", "p2p", "transfer", "shard", "dcp")
BESIDE = ("store/distributed",)  # torch.distributed on etcd


def lines(*paths):
    files = {file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))}
    return sum(len(file.read_text().splitlines()) for file in files)


def counts(root=ROOT):
    """Lines by part: the core with the ground, each feature, what stands on top, and the tests."""
    package = root / "torch_ros"
    ground = [path for path in package.glob("*.py") if not path.name.startswith("__")]
    beside = lines(*(package / name for name in BESIDE))
    core = lines(*ground, *(package / name for name in CORE)) - beside
    features = {
        f"features/{path.parent.name}": lines(path.parent)
        for path in sorted(package.glob("features/*/__init__.py"))
    }
    total = lines(package)
    on_top = total - core - beside - sum(features.values())
    tests = {name: lines(root / name) for name in ("tests", "benchmarks", "examples")}
    return {
        "core": core,
        **features,
        "torch.distributed on etcd": beside,
        "on top": on_top,
        "package": total,
        **tests,
    }


def main():
    for name, count in counts().items():
        print(f"{name:28}{count:8,}")


if __name__ == "__main__":
    sys.exit(main())
