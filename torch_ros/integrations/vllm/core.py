"""vLLM's engine core, which schedules requests: it notices that the weights are others.

Workers update weights, and vLLM leaves the rest to whoever drives it: what the old weights have
computed stays in its caches, `/weight_info` says what it was told last, and requests are answered
whatever the weights are. An engine that has no whole version *lacks* one: it refuses requests, and
does not resume those that it has kept. Imports nothing of vLLM.
"""

import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch_ros.errors import NotAvailable, NotSupported
from torch_ros.integrations.vllm import core_adapters
from torch_ros.integrations.vllm.told import heard_of_weights, tell
from torch_ros.printable import log_of

log: logging.Logger = log_of("vllm.torch_ros")  # vLLM configures its own loggers only

CORE = "vllm.v1.engine.core"
NO_VERSION = "none"  # the weight version of an engine that has no whole version
FIRST = "default"  # vLLM's own, of the weights that it has started with
BACKEND = "torch_ros"  # also the load format of engines that are born with a version
EMPTY = ("dummy", BACKEND)  # load formats of engines that may start without one
BY_HAND = "loaded by hand"
LACK = "_torch_ros_lack"  # on a core: why it lacks a version; "": one has come; at first: unset
UNASKED = "none yet: this vLLM does not say what it was born with"
DUMMY = "none yet: it was started with dummy weights"
DISCARDING = 2  # the level of sleep from which on vLLM keeps no weights
WAY_OUT = "update it to a version, or load all weights by `reload_weights`, then resume it"
ONLY_WAY_OUT = "update it to a version, then resume it"  # of engines without files of weights
NO_FILES = NotSupported(
    "reload_weights with load_format='torch_ros', which reads no files",
    "update the engine to a version",
)
MISSING = (
    "vLLM's engine core has no %s: expected it, to refuse requests while there is no version; "
    "pause the engine after an update that failed"
)


def watch() -> None:
    """Wrap the methods of vLLM's engine core by which each update and each request comes.

    Calls come offline and over HTTP, on each engine of a data parallel group. `watch` may be called
    again, and has no effect in a process that has not loaded the core.
    """
    if (core := sys.modules.get(CORE)) is not None:
        watch_class(getattr(core, "EngineCore", None))


def watch_class(kind: Any) -> None:
    """Wrap the methods of a class of engine cores, once, as far as it has them."""
    for name, call in WATCHED.items():
        own = getattr(kind, name, None)
        if own is not None and not getattr(own, "is_watched", False):
            setattr(kind, name, _watched(own, call))
    if not hasattr(kind, "collective_rpc"):  # no call will tell that an engine is ours
        log.warning(MISSING, "collective_rpc")


def _watched(own: Any, call: Callable[..., Any]) -> Any:
    @wraps(own)
    def watched(core: Any, *args: Any, **named: Any) -> Any:
        return call(own, core, *args, **named)

    watched.is_watched = True  # type: ignore[attr-defined]
    return watched


def _call(own: Any, core: Any, method: Any, *args: Any, **named: Any) -> Any:
    """Call all workers, and note what becomes of their weights."""
    if method not in NOTED or not _is_ours(core):
        return own(core, method, *args, **named)
    if method == "init_weight_transfer_engine":
        own(core, show_draft)
    if method == "reload_weights":
        _require_files(core, *args, **named)
    if method in OVERWRITING:  # past the model's own load_weights, perhaps
        own(core, withdraw)
    try:
        found = own(core, method, *args, **named)
    except Exception as error:
        is_quiet = method in OVERWRITING or isinstance(error, TimeoutError)  # says nothing of them
        if is_quiet or heard_of_weights(error):
            _lose(core, f"none: {method} has failed in the middle")
        raise
    NOTED[method](core, lambda look: own(core, look))
    return found


def _require_files(core: Any, _: Any = None, args: Any = (), kwargs: Any = None) -> None:
    """Refuse to reload what vLLM has no files of, while the engine still has its version."""
    given = next(iter(args), None) or (kwargs or {}).get("weights_iterator")
    if core.vllm_config.load_config.load_format == BACKEND and given is None:
        raise RuntimeError(tell(NO_FILES, None))


def _is_ours(core: Any) -> bool:
    transfer = getattr(core.vllm_config, "weight_transfer_config", None)
    return BACKEND in (getattr(transfer, "backend", None), core.vllm_config.load_config.load_format)


# What becomes of the weights


def _start(own: Any, core: Any, *args: Any, **named: Any) -> Any:
    """Note, once the workers have loaded, which version the engine was born with."""
    found = own(core, *args, **named)
    if core.vllm_config.load_config.load_format == BACKEND:
        said = core.collective_rpc(born)
        version, uid, lack = said[0]
        if len(set(said)) > 1:
            lack = lack or f"several: its workers say {', '.join(sorted(map(str, said)))}"
        if lack:
            _lack(core, f"none: {lack}")
            _require_refusals(core)
        else:
            _have(core, version, uid)
    return found


def _require_refusals(core: Any) -> None:
    """Fail the start of a pooling model: vLLM has no answer by which that refuses a request."""
    if core.vllm_config.model_config.runner_type == "pooling":
        lack = _lack_of(core)
        raise NotAvailable(
            f"this engine: expected a version to start with, found {lack}; a pooling model cannot "
            "refuse requests: publish one first, or let the start wait for it, by wait_s"
        )


def _sleep(own: Any, core: Any, level: int = 1, *args: Any, **named: Any) -> Any:
    """Sleep, and have no version from then on if that discards the weights."""
    is_last = level >= DISCARDING and _is_ours(core)
    if is_last:
        core.collective_rpc(withdraw)
    asleep = own(core, level, *args, **named)
    if is_last:
        lack = f"none: sleep at level {level} has discarded it"
        if asleep is None:
            _lose(core, lack)
        else:  # once requests have ended that it waits for
            asleep.add_done_callback(lambda _: _lose(core, lack))
    return asleep


def _attached(core: Any, _: Any) -> None:
    """Dummy weights are no version, whatever vLLM calls them."""
    if missing := [name for name in WATCHED if not hasattr(core, name)]:
        log.warning(MISSING, ", ".join(missing))
    if core.vllm_config.load_config.load_format in EMPTY and not hasattr(core, LACK):
        _lose(core, DUMMY)


def _updated(core: Any, ask: Any) -> None:
    found = ask(installed)
    versions = sorted({str(version) for version, _ in found})
    differ = f"several: its workers have {', '.join(versions)}" if len(versions) > 1 else ""
    _take(core, versions[0], differ, found[0][1])


def _reloaded(core: Any, _: Any) -> None:
    """Take the weights that somebody has loaded by hand for whole."""
    _take(core, BY_HAND)


def _zeroed(core: Any, _: Any) -> None:
    _lose(core, "none: reset_weights has set them to zero")


def _take(core: Any, label: str, lack: str = "", uid: str = "") -> None:
    """Have a version, once nothing is left of what older weights have computed.

    Args:
        uid: Of its content: adapters of others are refused from then on.

    Raises:
        RuntimeError: It has none, with a `NotAvailable` told in it.
    """
    if lack := lack or _kept(core):
        _lose(core, lack)
        raise RuntimeError(tell(_refusal(core), None))
    _have(core, label, uid)
    if names := list(core_adapters.misfits(core)):
        log.warning("%d requests end: their adapters fit another base", len(names))
        for request in core.scheduler.finish_requests(names, _failed()):
            _end(core, request)


def _have(core: Any, label: str, uid: str) -> None:
    setattr(core, LACK, "")
    setattr(core, core_adapters.ACTIVE, uid)
    core.set_weight_version(label)


def _kept(core: Any) -> str:
    """Drop all caches; requests that are kept are computed anew. Says what vLLM does not drop."""
    reason = "requests or a connector hold some"
    try:
        if core.reset_prefix_cache(True, True):  # noqa: FBT003  # vLLM's signature
            core.reset_encoder_cache()
            return ""
    except RuntimeError as error:
        reason = str(error)
    return f"a cache of older weights beside new ones ({reason}): end the requests that hold it"


def _lose(core: Any, lack: str) -> None:
    """Note that the engine has no whole version, and end its requests, unless none is computed.

    vLLM goes on computing after a pause in any mode but "keep". Requests that are kept are computed
    anew after the next update.
    """
    _lack(core, lack)
    is_still = core.scheduler.pause_state.name == "PAUSED_ALL"
    if not is_still and not core.is_pooling_model:
        for request in core.scheduler.finish_requests(None, _failed()):
            _end(core, request)


def _lack(core: Any, lack: str) -> None:
    core.set_weight_version(NO_VERSION)
    setattr(core, LACK, lack)
    log.warning("requests are refused: %s", _refusal(core))


def born(worker: Any) -> tuple[str, str, str]:
    """The version that a worker was born with, the uid of its content; or why it has none."""
    engine = worker.weight_transfer_engine
    return str(engine.active), engine.uid, engine.lack


def installed(worker: Any) -> tuple[int | None, str]:
    """The version that a worker has, and the uid of its content."""
    engine = worker.weight_transfer_engine
    return engine.active, engine.uid


def show_draft(worker: Any) -> None:
    """Show a worker's engine the draft model, which vLLM tells it of in drafts' updates alone."""
    look = getattr(worker, "get_draft_model", None)  # not in every release
    worker.weight_transfer_engine.draft = look() if look is not None else None


def withdraw(worker: Any) -> None:
    """Offer the weights of a worker to nobody, and take them for none of its versions."""
    worker.weight_transfer_engine.withdraw()


NOTED = {
    "init_weight_transfer_engine": _attached,
    "update_weights": _updated,
    "reload_weights": _reloaded,
    "reset_weights": _zeroed,
}
OVERWRITING = ("reload_weights", "reset_weights")  # calls of vLLM's own, which fail anywhere


# What becomes of requests


def _version(own: Any, core: Any) -> Any:
    """A driver may have named the next version before it came to know that the update failed."""
    return NO_VERSION if _lack_of(core) else own(core)


def _add(own: Any, core: Any, request: Any, *args: Any, **named: Any) -> None:
    """Take a request, and end it if no version is there: so vLLM frees what peers keep for it.

    vLLM answers it with its error. It has no answer for one of pooling that has failed.
    """
    own(core, request, *args, **named)
    if core.is_pooling_model:
        return
    if not (lack := _lack_of(core)) and (lack := core_adapters.refusal(core, request)):
        log.warning("request %s is refused: %s", request.request_id, lack)
    if lack:
        core.scheduler.finish_requests([request.request_id], _failed())
        _end(core, request)


def _resume(own: Any, core: Any) -> Any:
    """Refuse to go on with requests that were kept, unless the weights are whole again.

    Engines that share their experts wait for each other in vLLM's call, and would answer by parts
    of each other's weights: if one of them lacks a version, all refuse.
    """
    lack = bool(_lack_of(core))
    group = getattr(core, "dp_group", None)
    if group is not None and _is_ours(core):
        lack = core.vllm_config.parallel_config.has_unfinished_dp(group, lack)
    if lack:
        raise RuntimeError(tell(_refusal(core), None))
    return own(core)


def _lack_of(core: Any) -> str:
    """The reason why it lacks a version; "": it has one, as far as anybody knows.

    An engine that is born with one says so; a vLLM in which it cannot has none until an update.
    """
    is_unasked = core.vllm_config.load_config.load_format == BACKEND and not hasattr(core, LACK)
    return UNASKED if is_unasked else str(getattr(core, LACK, ""))


def _refusal(core: Any) -> NotAvailable:
    lack = _lack_of(core) or "none on an engine beside it"
    way_out = ONLY_WAY_OUT if core.vllm_config.load_config.load_format == BACKEND else WAY_OUT
    return NotAvailable(
        f"this engine: expected a whole version of its weights, found {lack}; {way_out}"
    )


def _failed() -> Any:
    return sys.modules[CORE].RequestStatus.FINISHED_ERROR


def _end(core: Any, request: Any) -> None:
    """Tell the process that has sent a request, or this one, that it has failed."""
    if (tell_client := getattr(core, "_send_error_outputs_to_client", None)) is not None:
        tell_client([request.request_id], request.client_index)
        return
    step, vllm = core.step_fn, sys.modules[CORE]

    def step_once() -> Any:
        core.step_fn = step
        error, name = vllm.FinishReason.ERROR, request.request_id
        output = vllm.EngineCoreOutput(name, [], finish_reason=error)
        outputs = vllm.EngineCoreOutputs(outputs=[output], finished_requests={name})
        return {0: outputs}, False

    core.step_fn = step_once


WATCHED: dict[str, Callable[..., Any]] = {
    "_initialize_kv_caches": _start,  # the first method that is called once workers have loaded
    "collective_rpc": _call,
    "get_weight_version": _version,
    "add_request": _add,
    "add_lora": core_adapters.add,
    "remove_lora": core_adapters.remove,
    "resume_scheduler": _resume,
    "sleep": _sleep,
}
