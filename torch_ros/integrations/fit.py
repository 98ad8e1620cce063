"""Whether a version fits an engine, as far as one rank sees it from its recording."""

import logging
from collections.abc import Mapping

import torch

from torch_ros.errors import ManifestMismatch
from torch_ros.integrations.landing_plan import missing
from torch_ros.integrations.landings import Recording
from torch_ros.printable import log_of, some

log: logging.Logger = log_of(__name__)

NAMED_MAX = 8  # names in a message


def require_fit(
    name: str, recording: Recording, state: Mapping[str, torch.Tensor], *, casts: bool
) -> None:
    """Refuse a version with which a part of the engine would stay as it was, or be wrong.

    Args:
        name: Of the version, for people.
        state: The engine's parameters and buffers.
        casts: The engine's loader may cast.

    Raises: ManifestMismatch
    """
    if lacking := missing(recording, state):
        failed = [f"{fqn}: {recording.staged[fqn]}" for fqn in sorted(recording.failed)]
        parts = [f"{fqn} ({count} elements)" for fqn, count in lacking.items()]
        found = f"nothing for {some(parts, NAMED_MAX)}", some(failed, NAMED_MAX)
        raise ManifestMismatch(
            f"{name} in this engine",
            "tensors for all of the engine's parameters",
            "; ".join(filter(None, found)),
            "publish the missing tensors too, under the names of a checkpoint",
        )
    cast = [fqn for fqn, reason in recording.staged.items() if reason.startswith("cast ")]
    lost = [*recording.failed, *recording.unused]
    for fqn in cast:
        scales = [one for one in lost if one.startswith(fqn)]
        if scales and recording.staged[fqn].startswith("cast from torch.float8"):
            raise ManifestMismatch(
                f"{name} in this engine",
                f"a place for {scales[0]!r}, by which {fqn!r} is multiplied",
                f"none, and {recording.staged[fqn]}",
                "give the engine the quantization_config of such weights, or publish others",
            )
    if cast and not casts:
        raise ManifestMismatch(
            f"{name} in this engine",
            "the engine's dtypes",
            f"{some(cast, NAMED_MAX)}, {recording.staged[cast[0]]}",
            "publish_copy(transform=Cast(...)) publishes them as that; cast=True installs them",
        )
    if cast:
        log.warning("%s: the engine casts %s", name, some(cast, NAMED_MAX))
    if recording.failed:  # refused next, unless the engine may be without it
        failed = [f"{fqn} ({recording.staged[fqn]})" for fqn in sorted(recording.failed)]
        log.warning("%s: the engine has no place for %s", name, some(failed, NAMED_MAX))
