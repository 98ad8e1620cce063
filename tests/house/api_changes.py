"""Refuses a commit that breaks the public API without a word in CHANGELOG.md.

python tests/house/api_changes.py [REF]    since the last tag; while there is none, the last commit
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]
COLOURS = re.compile(r"\x1b\[\d+m")
PACKAGE, FACES = "torch_ros", ("", "bucket", "dcp", "store")


def git(root, *command):
    return subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=False)


def last_release(root):
    return git(root, "describe", "--tags", "--abbrev=0").stdout.strip() or "HEAD~1"


def homes(package) -> Iterator[str]:
    """Where the things are defined that `__all__` names; all of `errors`."""
    for face in FACES:
        module = package[face] if face in package.members else package
        for name in module.exports or ():
            member = module.members[str(name)]
            yield member.target_path if member.is_alias else member.path


def broken(root, ref) -> list[str]:
    old = griffe.load_git(PACKAGE, ref=ref, repo=root)
    new = griffe.load(PACKAGE, search_paths=[root], try_relative_path=False)
    public = {*homes(old), *homes(new)}
    found = {
        (breakage.obj.path, COLOURS.sub("", breakage.explain(griffe.ExplanationStyle.ONE_LINE)))
        for face in FACES
        if not face or face in old.members.keys() & new.members.keys()
        for breakage in griffe.find_breaking_changes(
            old[face] if face else old, new[face] if face else new
        )
    }
    return sorted(
        said
        for path, said in found
        if any(path == home or path.startswith((f"{home}.", f"{home}(")) for home in public)
    )


def main(root, ref="") -> int:
    ref = ref or last_release(root)
    if git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").returncode:
        print(f"the public API is not compared: there is no {ref} here")
        return 0
    found = broken(root, ref)
    print(*found, sep="\n", end="\n" if found else "")
    if found and not git(root, "diff", "--quiet", ref, "--", "CHANGELOG.md").returncode:
        print(f"this breaks the public API of {ref}, and CHANGELOG.md does not say so")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(ROOT, *sys.argv[1:]))
