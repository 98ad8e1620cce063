"""`torch-ros verify`: whether each replica has what it says that it has, bit for bit."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch_ros
from torch_ros.checkpoints.compared import (
    Deviation,
    Difference,
    Digests,
    deviations,
    digests_of,
    unlike,
)
from torch_ros.checkpoints.mapped import mapped
from torch_ros.checkpoints.written import BUFFER_BYTES, BUFFER_S, require_same
from torch_ros.cli.moving import opened
from torch_ros.errors import NotAvailable, SourceLost, UsageError, VersionNotFound
from torch_ros.printable import some
from torch_ros.protocol.versions import as_spec

PUBLISHED = "(as published)"
SAMPLED_OF = 64  # one tensor of so many is looked at, unless all are


@dataclass(frozen=True, slots=True)
class Verified:
    """The end of `torch-ros verify`.

    Attributes:
        replicas: Those of which all that was asked for was read.
        left: Those that went meanwhile, and why.
        unlike: Tensors that the checkpoint has in another form, or not at all.
        against: "files"; "digests": those that the publisher has published; "replicas": each other.
    """

    version: int
    run: str
    replicas: Sequence[str]
    read_count: int
    tensor_count: int
    deviations: Sequence[Deviation]
    unlike: Sequence[Difference] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    against: Literal["files", "digests", "replicas"] = "replicas"

    @property
    def is_same(self) -> bool:
        return not self.deviations and not self.unlike

    def __str__(self) -> str:
        share = f"{self.read_count} of {self.tensor_count} tensors"
        odd = len({each.name for each in self.deviations}) + len(self.unlike)
        end = f"{odd} differ" if odd else "all the same"
        end += " as published" if self.against == "digests" and not odd else ""
        return f"version {self.version}, {share} of {some(self.replicas)}: {end}"


def verify(asked: argparse.Namespace) -> Verified:
    """Read the replicas that hold a version, one after the other, and compare their digests.

    With files, or with the digests of the publication, where it has those of every bit; else with
    each other's.

    Raises: UsageError: There is nobody to read from, or nothing to compare with.
    """
    disk = str(asked.against) if asked.against else ""
    if disk:
        mapped(asked.against)  # a folder that is none is said before a version is waited for
    with opened(asked, None, "verify", spot=True) as handle:
        contents = handle.contents(as_spec(asked.number), timeout_s=asked.timeout)
        holders = _holders(handle, contents, asked.replica, is_alone=bool(disk))
        names = _sample(list(contents.tensors), is_full=asked.full)
        odd, found = list[Difference](), dict[str, Digests]()
        if disk:
            found[disk], odd = _on_disk(asked.against, contents, names)
        left, published = dict[str, str](), dict[str, int]()
        for replica in holders:
            try:
                found[replica], told = _read(handle, contents, names, replica)
            except (SourceLost, NotAvailable) as error:
                left[replica] = str(error)
            else:
                published = published or dict(told)
    replicas = [name for name in found if name != disk]
    right = disk
    if not disk and replicas and published.keys() >= {*names}:
        right, found[PUBLISHED] = PUBLISHED, {name: published[name] for name in names}
    if left and (not replicas or len(found) < 2):
        raise VersionNotFound(asked.model, str(contents.version), f"it went meanwhile: {left}")
    if len(found) < 2:
        raise UsageError(
            f"only {some(holders)} holds version {contents.version} of {asked.model!r}, so there "
            "is nothing to compare; name a checkpoint on disk: --against FOLDER"
        )
    return Verified(
        version=contents.version,
        run=contents.run,
        replicas=replicas,
        read_count=len(names),
        tensor_count=len(contents.tensors),
        deviations=list(deviations(found, [right] if right else ())),
        unlike=odd,
        left=left,
        against="files" if disk else "digests" if right else "replicas",
    )


def _holders(
    handle: torch_ros.ShardHandle,
    contents: torch_ros.Contents,
    replica: str | None,
    *,
    is_alone: bool,
) -> Sequence[str]:
    """The replicas to read, those first that are right in doubt: publishers."""
    fleet = handle.fleet()
    held = [
        each
        for each in fleet.held
        if (each.ref.run, each.ref.uid) == (contents.run, contents.uid) and each.is_offered
    ]
    held.sort(key=lambda each: (each.replica == replica, each.kind != "original", each.replica))
    names = list(dict.fromkeys(each.replica for each in held))
    what = f"version {contents.version} of {handle.model!r}"
    if replica is not None and replica not in names:
        raise UsageError(f"replica {replica!r} does not hold {what}; {some(names)} do")
    if replica is not None:
        names = [replica] if is_alone else list(dict.fromkeys([*names[:1], replica]))
    return names


def _sample(names: list[str], *, is_full: bool) -> Sequence[str]:
    if is_full:
        return names
    return sorted(random.sample(names, -(-len(names) // SAMPLED_OF)))  # another one each time


def _read(
    handle: torch_ros.ShardHandle, contents: torch_ros.Contents, names: Sequence[str], replica: str
) -> tuple[Digests, Digests]:
    """Those of the bits that it has, and those of the version that it passes on."""
    with handle.stream(
        contents.version, names, buffer_bytes=BUFFER_BYTES, timeout_s=BUFFER_S, source=replica
    ) as stream:
        require_same(handle.model, contents, stream.uid)
        return digests_of(stream), stream.published_digests


def _on_disk(
    folder: Path, contents: torch_ros.Contents, names: Sequence[str]
) -> tuple[Digests, list[Difference]]:
    there = mapped(folder)
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in there.items()}
    odd = list(unlike(contents.tensors, shapes))
    odd_names = {each.name for each in odd}
    both = [name for name in names if name not in odd_names]
    return digests_of((name, there[name]) for name in both), odd
