"""LoRA adapters in vLLM's engine core: they are loaded between steps, and checked per request.

vLLM loads an adapter that it lacks within a step, where an error ends the engine. Here the first
request of an adapter loads it before, and ends with an error if that fails. Imports no vLLM.
"""

import time
from collections.abc import Iterator
from typing import Any

from torch_ros.errors import ManifestMismatch, NotSupported, UsageError
from torch_ros.integrations.vllm.told import tell
from torch_ros.integrations.vllm.worker_adapters import (
    SCHEME,
    AdapterPath,
    LoadedAdapter,
    base_mismatch,
    drop_adapter,
    load_adapter,
)

KEPT = 16  # adapters that stay on the host, those used last; more if vLLM keeps more
FAILED_S = 5.0  # a path that could not be loaded is refused at once for so long
LOADED = "_torch_ros_adapters"  # on a core: `LoadedAdapter` by path, in the order of their use
PATHS = "_torch_ros_paths"  # on a core: the path of each of vLLM's numbers
FAILED = "_torch_ros_failed"  # on a core: what failed last, until when it is refused, and why
ACTIVE = "_torch_ros_base"  # on a core: the uid of the base that it has; "": nobody knows


def add(own: Any, core: Any, request: Any) -> bool:
    """Load an adapter in all workers; one of ours is refused if its base is another than theirs.

    Raises:
        RuntimeError: An error of ours is told in it.
    """
    if not request.lora_path.startswith(SCHEME):
        return bool(own(core, request))
    _load(core, request)
    return True


def remove(own: Any, core: Any, number: int) -> bool:
    """Drop an adapter; its folder goes too, unless another number has it."""
    paths = _paths(core)
    path = paths.pop(number, None)
    if path is None or path not in _loaded(core):
        return bool(own(core, number))
    gone = [] if path in paths.values() or path in _running(core) else [path]
    found = core.collective_rpc(drop_adapter, None, (number, gone))
    for one in gone:
        del _loaded(core)[one]
    return all(found)


def refusal(core: Any, request: Any) -> str:
    """The reason against answering a request with its adapter, which is loaded if it is not; ""."""
    lora = getattr(request, "lora_request", None)
    if lora is None or not lora.lora_path.startswith(SCHEME):
        return ""
    loaded, path = _loaded(core), lora.lora_path
    is_known = path in loaded and _paths(core).get(lora.lora_int_id, path) == path
    asked = (path, lora.lora_int_id, getattr(core, ACTIVE, ""))
    failed, until_s, why = getattr(core, FAILED, (None, 0.0, ""))
    if failed == asked and time.monotonic() < until_s:
        return str(why)
    try:
        if not is_known or lora.load_inplace:
            _load(core, lora)
    except Exception as error:  # noqa: BLE001  # of this request, and not of the engine
        setattr(core, FAILED, (asked, time.monotonic() + FAILED_S, str(error)))
        return str(error)
    _paths(core)[lora.lora_int_id] = path
    loaded[path] = loaded.pop(path)  # the one that was used last
    return str(_misfit(core, path) or "")


def misfits(core: Any) -> Iterator[str]:
    """The requests whose adapters fit another base than the engine has by now."""
    for name, request in core.scheduler.requests.items():
        lora = getattr(request, "lora_request", None)
        if lora is not None and _misfit(core, lora.lora_path) is not None:
            yield name


def _loaded(core: Any) -> dict[str, LoadedAdapter]:
    found: dict[str, LoadedAdapter] = vars(core).setdefault(LOADED, {})
    return found


def _paths(core: Any) -> dict[int, str]:
    found: dict[int, str] = vars(core).setdefault(PATHS, {})
    return found


def _load(core: Any, request: Any) -> None:
    loaded, path, number = _loaded(core), request.lora_path, request.lora_int_id
    has = _paths(core).get(number, path)
    try:
        AdapterPath.of(path)
        if core.is_pooling_model:
            raise NotSupported(f"{path} for a pooling model", "merge the adapter into its base")
        if has != path:  # vLLM would answer with what it has
            raise UsageError(f"{path}: number {number} is that of {has}: take one of its own")
    except UsageError as error:
        raise RuntimeError(tell(error, None)) from error
    surplus = _surplus(core, path)
    asked = (request, surplus, getattr(core, ACTIVE, ""))
    found: LoadedAdapter = core.collective_rpc(load_adapter, None, asked)[0]
    for one in surplus:
        del loaded[one]
    for other in [each for each, its in _paths(core).items() if its in surplus]:
        del _paths(core)[other]
    loaded[path] = found
    _paths(core)[number] = path


def _surplus(core: Any, path: str) -> list[str]:
    """The paths of adapters that nobody has used for long."""
    others, running = [one for one in _loaded(core) if one != path], _running(core)
    config = getattr(core.vllm_config, "lora_config", None)
    most = max(KEPT, getattr(config, "max_cpu_loras", 0) or 0)
    oldest = others[: max(0, len(others) + 1 - most)]
    return [one for one in oldest if one not in running]


def _running(core: Any) -> set[str]:
    """The paths of adapters that requests have."""
    loras = (getattr(one, "lora_request", None) for one in core.scheduler.requests.values())
    return {lora.lora_path for lora in loras if lora is not None}


def _misfit(core: Any, path: str) -> ManifestMismatch | None:
    adapter = _loaded(core).get(path)
    base = None if adapter is None else adapter.base
    return base_mismatch(path, base, getattr(core, ACTIVE, ""))
