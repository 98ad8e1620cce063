"""SGLang: the function behind `--custom-weight-loader torch_ros.integrations.sglang.load`.

Imports nothing of SGLang, which calls `load` in each of its workers.
"""

import json
import logging
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import torch_ros
from torch_ros import arguments
from torch_ros.errors import UsageError
from torch_ros.integrations.adapters import read_adapter
from torch_ros.integrations.installation import Installer, InstallOptions
from torch_ros.integrations.landing_plan import Geometry, Obstacle, changed, state_of
from torch_ros.integrations.landings import Recording
from torch_ros.integrations.recording import record
from torch_ros.integrations.seams import Contents, Weights
from torch_ros.printable import log_of

log: logging.Logger = log_of(__name__)

NAME = "torch_ros"  # of the one tensor that carries a request
NAMED_MAX = 8  # names in an error

# SGLang's names: classes whose loaders copy, and note nothing about it.
PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
PLAIN_EXPERTS = "UnquantizedFusedMoEMethod"

FIELDS: Mapping[str, arguments.Check] = {  # of a request
    "version": arguments.whole(0, 1 << 62),
    "model": arguments.text,
    "buffer_bytes": arguments.whole(1, 1 << 40),
    "is_complete": arguments.yes_or_no,
    "timeout_s": arguments.seconds,
}

NamedTensors = Sequence[tuple[str, torch.Tensor]]


def request(
    version: int,
    model: str,
    *,
    options: Mapping[str, Any] | None = None,
    buffer_bytes: int = 256 << 20,
    is_complete: bool = True,
    timeout_s: float = 300.0,
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
        buffer_bytes: The size of each of the two buffers through which tensors go that are not
            read in place.
        is_complete: Refuse a version with which a parameter would stay as it was. False: nobody
            looks where the loader puts what, and it gets all tensors.
        timeout_s: For the version to come and to be read, in each worker.

    Raises:
        UsageError: Bad arguments.
    """
    asked = asdict(
        _Request(version, model, dict(options or {}), buffer_bytes, is_complete, timeout_s)
    )
    arguments.check(asked, FIELDS)
    text = bytearray(json.dumps(asked).encode())
    return [(NAME, torch.frombuffer(text, dtype=torch.uint8))]


def load(model: torch.nn.Module, named_tensors: NamedTensors) -> None:
    """Bring the version that `request` names into an engine, between SGLang's begin and end.

    SGLang calls it in each worker. Tensors are read into the parameters to which the model's own
    loader would copy them; those for which it would do more are given to it. A version with which
    a parameter would stay as it was is refused, and so is a model that keeps something derived from
    its weights; nothing has been written then. The handle stays open for the next version.

    SGLang ends the engine when this raises. Make sure of the version first: `handle.wait`.

    Raises:
        UsageError: This is no request; or the model says that it cannot be updated.
        ManifestMismatch: The version lacks tensors for some of the engine's parameters.
        As `ShardHandle.contents`, `read` and `stream`; after the latter two, the engine has a part
            of it.
    """
    asked = _Request.of(named_tensors)
    for name, module in model.named_modules():
        if (reason := getattr(module, "_derived_weight_cache_error", None)) is not None:
            raise UsageError(f"{name or 'the model'} refuses other weights: {reason}")
    with _lock:
        follower = _follow(asked)
        report = follower.installer(model, asked).install(asked.version, asked.timeout_s)
        # SGLang may put other memory in the place of what was read into.
        follower.handle.unregister()
        if report.direct and callable(fix_up := getattr(model, "post_load_weights", None)):
            fix_up()  # as SGLang's own loaders do that leave `load_weights` out
    log.info("%s: %s", follower.handle.replica, report)


def load_adapter(
    engine: Any,
    model: str,
    version: int,
    *,
    options: Mapping[str, Any] | None = None,
    timeout_s: float = 300.0,
) -> str:
    """Load a LoRA adapter into an `sglang.Engine` that was made with ``enable_lora=True``.

        name = load_adapter(engine, "code", 7)
        engine.generate(prompts, lora_path=name)
        engine.unload_lora_adapter(name)

    The process of the engine's driver reads it; no file is written. Tried against the source of
    SGLang alone.

    Args:
        model: The name under which the adapter is published.
        options: Of `torch_ros.open`.

    Returns:
        The name under which SGLang has it: MODEL@VERSION.

    Raises:
        UsageError: SGLang refuses it.
        TorchRosError: As `torch_ros.open`, and as `read_adapter`.
    """
    place: dict[str, Any] = {"rank": 0, "world_size": 1, "spot": True, "linger_s": 0}
    with torch_ros.open(model, **{**place, **(options or {})}) as handle:
        contents = handle.contents(version, timeout_s=timeout_s)
        adapter = read_adapter(handle, contents, timeout_s)
    name = f"{model}@{contents.version}"
    done = engine.load_lora_adapter_from_tensors(name, dict(adapter.tensors), dict(adapter.config))
    if not done.success:
        raise UsageError(f"adapter {name}: SGLang refuses it: {done.error_message}")
    return name


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
    timeout_s: float

    @classmethod
    def of(cls, named_tensors: NamedTensors) -> "_Request":
        names = [name for name, _ in named_tensors]
        if names != [NAME]:
            raise UsageError(
                f"update_weights_from_tensor got {names[:NAMED_MAX]}: this loader takes what "
                "torch_ros.integrations.sglang.request makes"
            )
        return cls(**json.loads(bytes(named_tensors[0][1].cpu().tolist())))


class _Model:
    """One worker's model, while SGLang updates it.

    Its parameters are then as the model's loader expects them. At the end SGLang makes of them what
    its kernels use, whoever has written them.
    """

    def __init__(self, model: torch.nn.Module, *, is_complete: bool) -> None:
        self.model, self._is_complete = model, is_complete
        self._recorded: dict[str, Geometry] = {}

    def state(self) -> dict[str, torch.Tensor]:
        return state_of(self.model)

    def record(self, contents: Contents) -> Recording:
        self._recorded = {name: Geometry.of(one) for name, one in self.state().items()}
        if self._is_complete:
            return record(self.model, contents)
        staged = dict.fromkeys(contents, "is_complete=False")
        return Recording({}, staged, frozenset(), {}, (), {}, {}, (), ())

    def obstacles(self, recording: Recording) -> dict[str, Obstacle]:
        state = self.state()
        found = {name: Obstacle(PADDED, is_provable=True) for name in recording.filled}
        reasons = {
            id(one): reason
            for module in self.model.modules()
            if (reason := _obstacle(module)) is not None
            for one in module.parameters(recurse=False)
        }
        found |= {n: Obstacle(reasons[id(one)]) for n, one in state.items() if id(one) in reasons}
        return found | changed(self._recorded, state)

    def may_lack(self, fqn: str) -> bool:  # noqa: ARG002  # whichever
        """SGLang's workers do not know of each other: the rest of a tensor may be another's."""
        return True

    def load(self, modules: Iterable[str], weights: Weights) -> None:  # noqa: ARG002  # all
        load_weights = self.model.load_weights
        assert callable(load_weights)
        # Loaders keep tensors until they have others, or until their threads get to them.
        load_weights((fqn, tensor.clone()) for fqn, tensor in weights)


PADDED = "its padding was never loaded"  # perhaps, if the engine began with load_format="dummy"


def _obstacle(module: torch.nn.Module) -> str | None:
    """The reason against writing a module's own parameters behind the back of their loaders."""
    method = getattr(module, "quant_method", None)
    if method is None or (kind := type(method).__name__) in PLAIN:
        return None
    if kind != PLAIN_EXPERTS:
        return f"{kind} may make something else of it"
    context = sys.modules.get("sglang.srt.runtime_context")
    moves = context is not None and bool(context.get_server_args().enable_eplb)
    return "EPLB moves experts" if moves else None


@dataclass(frozen=True)
class _Follower:
    """This process's handle, and what brings versions into each of its models."""

    asked: _Request
    handle: torch_ros.ShardHandle
    installers: dict[tuple[torch.nn.Module, bool], Installer] = field(default_factory=dict)

    def installer(self, model: torch.nn.Module, asked: _Request) -> Installer:
        # Nothing is offered to others: when the update ends, SGLang may change it.
        options = InstallOptions(asked.buffer_bytes, relay=False, on_failure="refuse")
        key = (model, asked.is_complete)
        if key not in self.installers:
            engine = _Model(model, is_complete=asked.is_complete)
            self.installers[key] = Installer(self.handle, engine, options, teller=self.handle)
        self.installers[key].options = options
        return self.installers[key]


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
    place: dict[str, Any] = {"rank": 0, "world_size": 1, "installs": True}
    handle = torch_ros.open(asked.model, **{**place, **asked.options})
    _follower = _Follower(asked, handle)
    return _follower
