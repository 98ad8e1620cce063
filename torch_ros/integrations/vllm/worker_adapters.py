"""LoRA adapters in vLLM's workers: ``torch-ros://MODEL@VERSION`` is a path like any other.

A worker brings the version into a folder in memory, once per host, and vLLM loads it from there,
with all of its own checks. Imports nothing of vLLM before a worker loads an adapter.
"""

import copy
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch_ros
from torch_ros import environment
from torch_ros.errors import ManifestMismatch, UsageError, VersionNotFound
from torch_ros.integrations.adapters import (
    TEXTS,
    BaseContent,
    read_adapter,
    read_config,
    write_files,
    written_base,
)
from torch_ros.integrations.shared_folders import Pinned, pinned
from torch_ros.integrations.vllm.told import tell
from torch_ros.printable import log_of

log: logging.Logger = log_of("vllm.torch_ros")  # vLLM configures its own loggers only

SCHEME = "torch-ros://"
PATH = re.compile(re.escape(SCHEME) + r"(?P<model>.+)@(?P<version>\d+)(?:#(?P<uid>.+))?")
LOAD_S = 30.0  # for a whole load; the engine computes nothing meanwhile
LOOK_S = 5.0  # of it, to look whether the version is there
PINS = "_torch_ros_pins"  # on a worker's manager of adapters: by path

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AdapterPath:
    """The version that a path names, and perhaps its content."""

    model: str
    version: int
    uid: str

    @classmethod
    def of(cls, path: str) -> "AdapterPath":
        """Raises: UsageError: It names no version by its number."""
        match = PATH.fullmatch(path)
        if match is None:
            raise UsageError(
                f"lora_path={path!r}: expected {SCHEME}MODEL@VERSION, and a number: vLLM keeps "
                "what it has loaded under a path, which has to stay the same"
            )
        return cls(match["model"], int(match["version"]), match["uid"] or "")

    def __str__(self) -> str:
        uid = f"#{self.uid}" if self.uid else ""
        return f"{SCHEME}{self.model}@{self.version}{uid}"


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """What an engine core knows of an adapter that its workers have loaded."""

    uid: str
    base: BaseContent | None


def load_adapter(
    worker: Any, request: Any, let_go: Sequence[str], active: str
) -> LoadedAdapter | None:
    """Load an adapter. All workers of an engine call this; the last one raises if one fails.

    Args:
        let_go: Paths of adapters that the engine does not use any more.
        active: The uid of the engine's base; "": it is no version.
    """
    from torch_ros.integrations.vllm.engine import Ranks  # noqa: PLC0415  # it imports vLLM

    try:
        ranks = Ranks(worker.parallel_config)
    except Exception as error:  # on all of them, and there is no group to gather it by
        log.exception("an adapter was not loaded")
        size = worker.parallel_config.world_size
        if worker.rank % size == size - 1:
            raise RuntimeError(tell(error, None)) from error
        return None
    load = _Load(worker, request, ranks.rank, active)
    try:
        found = _as_one(ranks, load.look, lambda: None)
        if found is None:
            return None
        uid = ranks.gather(found)[0]  # all take the content that the first one has found
        loaded = _as_one(ranks, lambda: load.bring(uid), load.undo)
        if loaded is not None:
            load.settle(let_go)
        return loaded
    finally:
        load.close()


def drop_adapter(worker: Any, number: int, let_go: Sequence[str]) -> bool:
    """Take an adapter out of vLLM's memory, and let go of folders."""
    let_go_of(worker.model_runner.lora_manager, let_go)
    return bool(worker.remove_lora(number))


def let_go_of(manager: Any, paths: Sequence[str]) -> None:
    pins: dict[str, Pinned] = vars(manager).get(PINS, {})
    for path in paths:
        if pin := pins.pop(path, None):
            pin.let_go()


def _as_one(ranks: Any, step: Callable[[], T], undo: Callable[[], object]) -> T | None:
    """A step of all workers. If one fails, all undo it, the last one raises, the others get None.

    vLLM reads the answers up to the first failure, and takes the others for those to its next call.
    """
    found, text = None, ""
    try:
        found = step()
    except Exception as error:
        log.exception("an adapter was not loaded")
        text = tell(error, None)
    failures = [each for each in ranks.gather(text) if each]
    if not failures:
        return found
    undo()
    if ranks.rank == ranks.size - 1:
        raise RuntimeError(failures[0])
    return None


class _Load:
    """The load of one adapter by one worker."""

    def __init__(self, worker: Any, request: Any, rank: int, active: str) -> None:
        self._worker, self._request, self._rank, self._active = worker, request, rank, active
        self._manager: Any = getattr(worker.model_runner, "lora_manager", None)
        self._handle: torch_ros.ShardHandle | None = None
        self._contents: torch_ros.Contents | None = None
        self._until_s = time.monotonic() + LOAD_S
        self._pin: Pinned | None = None  # that of this load
        self._before: Pinned | None = None  # that of the path until now

    @property
    def _pins(self) -> dict[str, Pinned]:
        pins: dict[str, Pinned] = vars(self._manager).setdefault(PINS, {})
        return pins

    def look(self) -> str:
        """The uid of the content, if this is the first worker; refuses what cannot be."""
        if self._manager is None:
            raise UsageError("no adapters: start the engine with enable_lora=True")
        if self._request.load_inplace:
            raise UsageError(
                "load_inplace=True: vLLM would read the adapter anew in each step; load each "
                "version under a name of its own"
            )
        path = AdapterPath.of(self._request.lora_path)
        if self._rank > 0:
            return ""
        pin = self._pins.get(self._request.lora_path) if path.uid else None
        if pin is not None:
            self._require_base(written_base(pin.path))
            return path.uid
        contents = self._look(path)
        config, base = read_config(self._open(path.model), contents, self._left_s)
        self._require_base(base)
        shapes = {name: shape for name, (_, shape) in contents.tensors.items() if name not in TEXTS}
        require_allowed(self._request.lora_path, self._manager, shapes, config)
        return contents.uid

    def _require_base(self, base: BaseContent | None) -> None:
        if (error := base_mismatch(self._request.lora_path, base, self._active)) is not None:
            raise error

    def _look(self, path: AdapterPath) -> torch_ros.Contents:
        if self._contents is None:
            self._require_there(path)
            self._contents = self._open(path.model).contents(path.version, timeout_s=LOOK_S)
        if path.uid not in ("", self._contents.uid):
            raise VersionNotFound(path.model, str(path.version), "it was published again")
        return self._contents

    def _require_there(self, path: AdapterPath) -> None:
        """Refuse a version that nobody has, before a handle of its name leaves records behind.

        Nobody waits for it: the engine would stand still.
        """
        endpoint = self._options(path.model).get("endpoint")
        fleet = torch_ros.Fleet.at(path.model, endpoint=endpoint, timeout_s=LOOK_S)
        run = fleet.latest and fleet.latest.run
        offered = (each.ref for each in fleet.versions if each.is_offered)
        there = sorted({ref.version for ref in offered if ref.run == run})
        if path.version not in there:
            reason = f"there are {there or 'none'}"
            raise VersionNotFound(path.model, str(path.version), reason)

    def _options(self, model: str) -> dict[str, Any]:
        engine = getattr(self._worker, "weight_transfer_engine", None)
        options = getattr(engine, "reading_options", None)
        if options is None and not environment.value(environment.ENDPOINT):
            raise UsageError(
                f"no endpoint to find adapter {model!r} at: attach the engine, or set "
                f"{environment.ENDPOINT}"
            )
        return {**(options or {}), "timeout_s": LOOK_S}

    def _open(self, model: str) -> torch_ros.ShardHandle:
        if self._handle is None:
            options = self._options(model)
            self._handle = torch_ros.open(model, **options, spot=True, rank=0, world_size=1)
        return self._handle

    def bring(self, uid: str) -> LoadedAdapter:
        """Have vLLM load the adapter from its folder, which is written first where it is not."""
        name, path = self._request.lora_path, AdapterPath.of(self._request.lora_path)

        def write(folder: Path) -> None:
            contents = self._look(AdapterPath(path.model, path.version, uid))
            write_files(read_adapter(self._open(path.model), contents, self._left_s), folder)

        pin, self._before = pinned(uid, write, self._left_s), self._pins.get(name)
        if self._before is not None and self._before.path != pin.path:
            pin.let_go()
            raise UsageError(
                f"{name}: this engine has another content of that number, of an earlier run: load "
                f"{name}#{uid}, or drop the other one"
            )
        self._pin = self._pins[name] = pin
        if self._before is None:  # vLLM may have the number of an earlier load still
            self._manager.remove_adapter(self._request.lora_int_id)
        if "_load_adapter" not in vars(self._manager):
            own = self._manager._load_adapter  # noqa: SLF001  # vLLM's name
            self._manager._load_adapter = partial(_load, self._manager, own)  # noqa: SLF001
        self._worker.add_lora(self._request)
        return LoadedAdapter(uid, written_base(pin.path))

    @property
    def _left_s(self) -> float:
        return max(0.001, self._until_s - time.monotonic())

    def undo(self) -> None:
        """Have what there was before."""
        if self._pin is None:
            return
        if self._before is not None:
            self._pins[self._request.lora_path] = self._before
        else:
            self._manager.remove_adapter(self._request.lora_int_id)
            del self._pins[self._request.lora_path]
        self._pin.let_go()

    def settle(self, let_go: Sequence[str]) -> None:
        """Let go of the folders that nobody needs any more."""
        if self._before is not None:
            self._before.let_go()
        let_go_of(self._manager, let_go)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close(linger_s=0)


def _load(manager: Any, own: Callable[[Any], Any], request: Any) -> Any:
    """Stand in the place of vLLM's `_load_adapter`, also within a step, when it comes again."""
    pin = vars(manager).get(PINS, {}).get(request.lora_path)
    if pin is None:
        return own(request)
    local = copy.copy(request)
    local.lora_path = str(pin.path)
    try:
        found = own(local)
    except Exception as error:
        raise UsageError(f"{request.lora_path}: vLLM refuses it: {error}") from error
    shapes = {name: (_shape(one.lora_a), _shape(one.lora_b)) for name, one in found.loras.items()}
    require_fit(request.lora_path, manager._adapter_manager, shapes)  # noqa: SLF001
    return found


def _shape(matrix: Any) -> Sequence[int] | None:
    return None if matrix is None else tuple(matrix.shape)


def base_mismatch(what: str, base: BaseContent | None, active: str) -> ManifestMismatch | None:
    """The reason against an adapter of this base, in an engine whose base has the uid `active`."""
    if base is None or base.uid == active:
        return None
    return ManifestMismatch(
        f"the base of {what}",
        f"version {base.version} of run {base.run!r}",
        "another version in this engine" if active else "weights that are no version",
        "update the engine to that version, or load an adapter for the one that it has",
    )


def require_allowed(
    what: str, manager: Any, shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any]
) -> None:
    """Refuse an adapter of which no matrix was read: as vLLM would, and as `require_fit`.

    Args:
        manager: vLLM's, of one worker.
        shapes: Of the matrices, by PEFT's names.
        config: PEFT's.
    """
    from vllm.lora.peft_helper import PEFTHelper  # noqa: PLC0415  # a worker has it
    from vllm.lora.utils import parse_fine_tuned_lora_name  # noqa: PLC0415

    inner: Any = manager._adapter_manager  # noqa: SLF001  # vLLM's name
    mapper = getattr(inner.model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    skipped = getattr(inner.model, "lora_skip_prefixes", None) or ()
    found: dict[str, dict[bool, Sequence[int]]] = {}
    try:
        PEFTHelper.from_dict(dict(config)).validate_legal(manager.lora_config)
        for name, shape in shapes.items():
            if not any(f".{one}" in name or name.startswith(one) for one in skipped):
                module, is_a = parse_fine_tuned_lora_name(name, mapper)
                found.setdefault(module, {})[is_a] = tuple(shape)
    except Exception as error:
        raise UsageError(f"{what}: vLLM refuses it: {error}") from error
    both = {module: (one.get(True), one.get(False)) for module, one in found.items()}
    require_fit(what, inner, both)


def require_fit(
    what: str,
    manager: Any,
    matrices: Mapping[str, tuple[Sequence[int] | None, Sequence[int] | None]],
) -> None:
    """Refuse what vLLM would use without a word: a matrix without a place, or of another size.

    Args:
        matrices: The shapes of A and B of each layer, by vLLM's names.

    Raises:
        ManifestMismatch: The adapter was trained on another model.
    """
    sizes = dict(_sizes(manager))
    for name, (a, b) in matrices.items():
        if ".experts" in name:  # which vLLM keeps in an order of its own
            continue
        is_elsewhere = name not in sizes and _is_partial(manager)
        expected = sizes.get(name)
        if is_elsewhere or (expected is None and name in sizes):
            continue
        if expected is None or a is None or b is None or (a[1], b[0]) != expected:
            raise ManifestMismatch(
                f"{name!r} of {what}",
                f"a linear layer of {expected}" if expected else "a layer of that name",
                f"A and B of {a} and {b}",
                "train the adapter on the model that this engine has",
            )


def _sizes(manager: Any) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """The size of each layer to which vLLM adds matrices, and of each part of a fused one.

    None: the layer does not say.
    """
    for name, module in manager.modules.items():
        base: Any = module.base_layer
        inner, outer = getattr(base, "input_size", None), getattr(base, "output_size", None)
        yield name, None if inner is None or outer is None else (inner, outer)
        parts, outers = manager.packed_modules.get(name, ()), _outers(base)
        for number, part in enumerate(parts):
            is_known = inner is not None and len(outers) == len(parts)
            yield part, (int(inner or 0), outers[number]) if is_known else None


def _outers(base: Any) -> Sequence[int]:
    """The sizes of what a fused layer computes, before workers repeat keys and values."""
    if (heads := getattr(base, "total_num_kv_heads", None)) is not None:
        keys, values = heads * base.head_size, heads * getattr(base, "v_head_size", base.head_size)
        return base.total_num_heads * base.head_size, keys, values
    return getattr(base, "output_sizes", ())


def _is_partial(manager: Any) -> bool:
    """Whether other layers are another worker's, or are left out because the engine was told so."""
    if manager.lora_config.target_modules is not None:
        return True
    return any(type(one).__name__ == "PPMissingLayer" for one in manager.model.modules())
