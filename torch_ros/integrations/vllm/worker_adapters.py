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
from torch_ros.integrations.adapters import BaseContent, read_adapter, write_files, written_base
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


def load_adapter(worker: Any, request: Any, let_go: Sequence[str]) -> LoadedAdapter | None:
    """Load an adapter. All workers of an engine call this; the last one raises if one fails.

    Args:
        let_go: Paths of adapters that the engine does not use any more.
    """
    from torch_ros.integrations.vllm.engine import Ranks  # noqa: PLC0415  # it imports vLLM

    ranks = Ranks(worker.parallel_config)
    load = _Load(worker, request, ranks.rank)
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

    def __init__(self, worker: Any, request: Any, rank: int) -> None:
        self._worker, self._request, self._rank = worker, request, rank
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
        if path.uid and self._request.lora_path in self._pins:
            return path.uid
        return self._look(path).uid

    def _look(self, path: AdapterPath) -> torch_ros.Contents:
        if self._contents is None:
            handle = self._open(path.model)
            there = handle.list(timeout_s=LOOK_S)
            if path.version not in there:  # nobody waits for it: the engine would stand still
                reason = f"there are {sorted(there) or 'none'}"
                raise VersionNotFound(path.model, str(path.version), reason)
            self._contents = handle.contents(path.version, timeout_s=LOOK_S)
        if path.uid not in ("", self._contents.uid):
            raise VersionNotFound(path.model, str(path.version), "it was published again")
        return self._contents

    def _open(self, model: str) -> torch_ros.ShardHandle:
        if self._handle is None:
            engine = getattr(self._worker, "weight_transfer_engine", None)
            options = getattr(engine, "reading_options", None)
            if options is None and not environment.value(environment.ENDPOINT):
                raise UsageError(
                    f"no endpoint to find adapter {model!r} at: attach the engine, or set "
                    f"{environment.ENDPOINT}"
                )
            options = {**(options or {}), "timeout_s": LOOK_S}
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
    require_fit(request.lora_path, manager._adapter_manager, found.loras)  # noqa: SLF001
    return found


def require_fit(what: str, manager: Any, matrices: Mapping[str, Any]) -> None:
    """Refuse what vLLM would use without a word: a matrix without a place, or of another size.

    Raises:
        ManifestMismatch: The adapter was trained on another model.
    """
    sizes = dict(_sizes(manager))
    for name, one in matrices.items():
        if ".experts" in name:  # which vLLM keeps in an order of its own
            continue
        is_elsewhere = name not in sizes and _is_partial(manager)
        a, b = (
            None if matrix is None else tuple(matrix.shape) for matrix in (one.lora_a, one.lora_b)
        )
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
