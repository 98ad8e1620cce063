"""SGLang: the function behind `--custom-weight-loader torch_ros.integrations.sglang.load`.

Imports nothing of SGLang, which calls `load` in each of its workers.
"""

import json
import logging
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import torch_ros
from torch_ros import arguments
from torch_ros.errors import ManifestMismatch, UsageError
from torch_ros.integrations.landing_plan import missing, state_of
from torch_ros.integrations.parts import parts, read_part
from torch_ros.integrations.recording import record

log = logging.getLogger(__name__)

NAME = "torch_ros"  # of the one tensor that carries a request
NAMED_MAX = 8  # parameters in an error

FIELDS: Mapping[str, arguments.Check] = {  # of a request
    "version": arguments.whole(0, 1 << 62),
    "model": arguments.text,
    "buffer_bytes": arguments.whole(1, 1 << 62),
    "is_complete": arguments.yes_or_no,
}

NamedTensors = Sequence[tuple[str, torch.Tensor]]


def request(
    version: int,
    model: str,
    *,
    options: Mapping[str, Any] | None = None,
    buffer_bytes: int = 256 << 20,
    is_complete: bool = True,
) -> list[tuple[str, torch.Tensor]]:
    """The request that the driver passes to `update_weights_from_tensor`, instead of weights.

        engine.begin_weight_update()
        engine.update_weights_from_tensor(
            request(7, "policy"), load_format="torch_ros.integrations.sglang.load"
        )
        engine.end_weight_update()

    Args:
        version: A number, so that all workers read the same.
        model: The name under which versions are published.
        options: For `torch_ros.open` in the workers; text, numbers and the like.
        buffer_bytes: How many bytes of the version a worker reads at a time.
        is_complete: Refuse a version with which a parameter would stay as it was.

    Raises:
        UsageError: Bad arguments.
    """
    fields = {
        "version": version,
        "model": model,
        "options": dict(options or {}),
        "buffer_bytes": buffer_bytes,
        "is_complete": is_complete,
    }
    arguments.check(fields, FIELDS)
    text = bytearray(json.dumps(fields).encode())
    return [(NAME, torch.frombuffer(text, dtype=torch.uint8))]


def load(model: torch.nn.Module, named_tensors: NamedTensors) -> None:
    """Bring the version that `request` names into an engine, through the engine's own loader.

    SGLang calls it in each worker. A version with which a parameter would stay as it was is
    refused, and so is a model that keeps something derived from its weights; nothing has been
    written then. The handle stays open for the next version of that model.

    SGLang ends the engine when this raises. Make sure of the version first: `handle.wait`.

    Raises:
        UsageError: This is no request; or the model says that it cannot be updated.
        ManifestMismatch: The version lacks tensors for some of the engine's parameters.
        As `ShardHandle.contents` and `read`; after the latter, the engine has a part of it.
    """
    asked, begun_s = _Request.of(named_tensors), time.monotonic()
    for name, module in model.named_modules():
        if (reason := getattr(module, "_derived_weight_cache_error", None)) is not None:
            raise UsageError(f"{name or 'the model'} refuses other weights: {reason}")
    with _lock:
        follower = _follow(asked)
        found = follower.handle.contents(asked.version)
        if asked.is_complete and found.tensors != follower.complete.get(model):
            _check_complete(model, found)
            follower.complete[model] = found.tensors
        load_weights = model.load_weights
        assert callable(load_weights)
        load_weights(_drawn(follower.handle, found, asked.buffer_bytes))
        follower.handle.unregister()
    log.info("version %d loaded in %.3f s", asked.version, time.monotonic() - begun_s)


def close() -> None:
    """Close this process's handle, if there is one. A process that ends does it, too."""
    global _follower  # one per process, as SGLang has one loader per process
    with _lock:
        follower, _follower = _follower, None
        if follower is not None:
            follower.handle.close()


@dataclass(frozen=True, slots=True)
class _Request:
    """The model to follow, the version of it that is wanted, and how to read it."""

    version: int
    model: str
    options: Mapping[str, Any]
    buffer_bytes: int
    is_complete: bool

    @classmethod
    def of(cls, named_tensors: NamedTensors) -> "_Request":
        names = [name for name, _ in named_tensors]
        if names != [NAME]:
            raise UsageError(
                f"update_weights_from_tensor got {names[:NAMED_MAX]}: this loader takes what "
                "torch_ros.integrations.sglang.request makes"
            )
        return cls(**json.loads(bytes(named_tensors[0][1].cpu().tolist())))


@dataclass(frozen=True)
class _Follower:
    """This process's handle, and for each of its models the tensors with which it is complete."""

    asked: _Request
    handle: torch_ros.ShardHandle
    complete: weakref.WeakKeyDictionary[torch.nn.Module, Any] = field(
        default_factory=weakref.WeakKeyDictionary
    )


_lock = threading.Lock()
_follower: _Follower | None = None


def _follow(asked: _Request) -> _Follower:
    """The handle for this model and these options; one for others is closed first."""
    global _follower  # noqa: PLW0603  # as in `close`
    known = _follower
    if known is not None:
        same = (known.asked.model, known.asked.options) == (asked.model, asked.options)
        if same and not known.handle.is_closed:
            return known
        _follower = None
        known.handle.close()
    # Each worker reads for itself: its loader takes its part of each tensor.
    handle = torch_ros.open(asked.model, **{"rank": 0, "world_size": 1, **asked.options})
    _follower = _Follower(asked, handle)
    return _follower


def _drawn(
    handle: torch_ros.ShardHandle, found: torch_ros.Contents, size_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for part in parts(found, size_bytes):
        yield from read_part(handle, found, part, "cpu").items()


def _check_complete(model: torch.nn.Module, found: torch_ros.Contents) -> None:
    """Raises: ManifestMismatch: The loader, which would not say so, would leave parameters out."""
    recording = record(model, found.tensors)
    lacking = missing(recording, state_of(model))
    if not lacking:
        return
    some = ", ".join([*lacking][:NAMED_MAX])
    if recording.failed:  # a loader with threads of its own fails, though it would not with tensors
        log.warning(
            "version %d: cannot tell whether it has all of %s: %s",
            found.version,
            some,
            "; ".join(sorted({recording.staged[fqn] for fqn in recording.failed})),
        )
        return
    raise ManifestMismatch(
        f"version {found.version} in this engine",
        "tensors for all of the engine's parameters",
        f"none for {len(lacking)} of them: {some}",
        "publish all tensors of a checkpoint, under a checkpoint's names",
    )
