"""vLLM's engine core, which schedules requests: it notices that the weights are others.

Workers update weights, and vLLM leaves the rest to whoever drives it: what the old weights have
computed stays in its caches, and `/weight_info` says what it was told last. `watch` wraps one
method of the engine core, by which every update comes, offline and over HTTP, on each engine of a
data parallel group. Imports nothing of vLLM.
"""

import sys
from functools import wraps
from typing import Any

from torch_ros.errors import NotAvailable
from torch_ros.integrations.vllm.told import heard_of_weights, tell

CORE = "vllm.v1.engine.core"
NO_VERSION = "none"  # the weight version of an engine that has no whole version
FIRST = "default"  # vLLM's own, of the weights that it has started with


def watch() -> None:
    """Wrap vLLM's engine core, if this process has loaded it. May be called again."""
    if (core := sys.modules.get(CORE)) is not None:
        watch_class(core.EngineCore)


def watch_class(kind: Any) -> None:
    """Wrap `collective_rpc` of a class of engine cores, once."""
    rpc = kind.collective_rpc
    if getattr(rpc, "is_watched", False):
        return

    @wraps(rpc)
    def collective_rpc(core: Any, method: Any, *args: Any, **named: Any) -> Any:
        if method not in NOTED or not _is_ours(core):
            return rpc(core, method, *args, **named)
        try:
            found = rpc(core, method, *args, **named)
        except Exception as error:
            if heard_of_weights(error):
                core.set_weight_version(NO_VERSION)
            raise
        NOTED[method](core, lambda look: rpc(core, look))
        return found

    collective_rpc.is_watched = True  # type: ignore[attr-defined]
    kind.collective_rpc = collective_rpc


def _is_ours(core: Any) -> bool:
    config = getattr(core.vllm_config, "weight_transfer_config", None)
    return getattr(config, "backend", None) == "torch_ros"


def _attached(core: Any, _: Any) -> None:
    """Dummy weights are no version, whatever vLLM calls them."""
    is_dummy = core.vllm_config.load_config.load_format == "dummy"
    if is_dummy and core.get_weight_version() == FIRST:
        core.set_weight_version(NO_VERSION)


def _updated(core: Any, ask: Any) -> None:
    """Drop what older weights have computed; running requests are computed anew.

    Raises:
        RuntimeError: Something is kept, with a `NotAvailable` told in it.
    """
    versions = {str(version) for version in ask(installed)}
    core.set_weight_version(versions.pop() if len(versions) == 1 else NO_VERSION)
    reason = "requests or a connector hold some"
    try:
        is_reset = core.reset_prefix_cache(True, True)  # noqa: FBT003  # vLLM's signature
    except RuntimeError as error:
        is_reset, reason = False, str(error)
    if not is_reset:
        kept = NotAvailable(
            "the engine has the new weights, and a KV cache of the old ones, which vLLM does not "
            f"drop ({reason}); keep it paused, end the requests that hold it, and update again"
        )
        raise RuntimeError(tell(kept, None))
    core.reset_encoder_cache()


def installed(worker: Any) -> int | None:
    """The version that a worker has."""
    version: int | None = worker.weight_transfer_engine.active
    return version


NOTED = {"init_weight_transfer_engine": _attached, "update_weights": _updated}
