"""`attach`: an offline `vllm.LLM` that goes from version to version when it is told to."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Literal, Self

import torch_ros
from torch_ros import arguments
from torch_ros.errors import NotSupported, TorchRosError
from torch_ros.integrations.from_bucket import BucketVersions
from torch_ros.integrations.vllm import core
from torch_ros.integrations.vllm.latest import tried_again
from torch_ros.integrations.vllm.offline_adapters import AttachedAdapter
from torch_ros.integrations.vllm.told import hear

BEGIN = ("generate", "chat", "enqueue", "enqueue_chat")  # vLLM's calls by which requests come
ENGINES_ONLY = ("retain", "spot")  # options that the handle of this process is opened without


def attach(
    llm: Any,
    *,
    model: str,
    replica: str | None = None,
    bucket: str | None = None,
    options: Mapping[str, Any] | None = None,
    pause: Literal["keep", "wait", "abort"] = "keep",
    **init_info: Any,
) -> "Attached":
    """Let an engine follow a model.

    Args:
        llm: A `vllm.LLM` made with ``weight_transfer_config={"backend": "torch_ros"}``. Its weights
            may be ``load_format="dummy"``: the first `update` brings all of them.
        model: The name under which versions are published.
        replica: The name of this engine; needed if it has several workers.
        bucket: The URL of a bucket, if the engine shares nothing else with the trainer; instead of
            `replica` and `options`. The extra `bucket` is needed here and in the workers.
        options: The other options of `torch_ros.open`, for each worker's handle.
        pause: How vLLM treats requests that run when an update begins: they keep their tokens and
            go on afterwards, when vLLM has computed these anew with the new weights; are finished
            first; or are aborted.
        behind_max: So many numbers the engine may be behind the newest version that can be read,
            when requests come: `llm.generate`, `chat`, `enqueue` and `enqueue_chat` make an
            `update` first if it is further behind, in an older run, or has no version. They raise
            what that raises, and what `fleet` does while etcd is away, and hand out nothing then.
            None: `update` alone brings versions.
        init_info: `behind_max`, and the other fields of `ROSInitInfo`: buffer_bytes, direct, relay,
            on_failure, cast, ignore, draft, draft_model, timeout_s.

    Raises:
        TorchRosError: As `torch_ros.open`, and for what cannot be: EPLB, relay with sleep mode.

    Example:
        with attach(llm, model="policy", replica="vllm-0") as policy:
            policy.update("latest")
            outputs = llm.generate(prompts)
    """
    place = {"replica": replica, "bucket": bucket, "options": dict(options or {})}
    behind_max = init_info.pop("behind_max", None)
    arguments.optional(arguments.whole(0, 1 << 50))("behind_max", behind_max)
    info = {"model": model, **place, **init_info}
    return Attached(llm, info, pause, behind_max)


def _versions(info: Mapping[str, Any]) -> torch_ros.ShardHandle | BucketVersions:
    """The versions that there are, as the engine's driver sees them."""
    if info["bucket"] is not None:
        return BucketVersions(info["bucket"], info["model"])
    return _reader(info["model"], info["options"])


def _reader(model: str, options: Mapping[str, Any]) -> torch_ros.ShardHandle:
    shared = {name: one for name, one in options.items() if name not in ENGINES_ONLY}
    return torch_ros.open(model, **shared, spot=True, rank=0, world_size=1)


class Attached:
    """An engine that follows a model; what `attach` returns."""

    def __init__(
        self, llm: Any, info: dict[str, Any], pause: str, behind_max: int | None = None
    ) -> None:
        core.watch()  # vLLM may run it in this very process
        self._llm, self._pause, self._replica = llm, pause, info["replica"]
        self._info, self._adapters = info, dict[str, AttachedAdapter]()
        self._active: int | None = None  # by the last error
        self._sequence = ""  # of `version`: within it "latest" never goes back
        self._is_closed = False
        self._handle: torch_ros.ShardHandle | BucketVersions
        self.version: int | None = None
        """The version that the engine answers with; None: none, and it stays paused."""
        self._asked("init_weight_transfer_engine", {"init_info": info})
        try:
            self._handle = _versions(info)
            self._recall()
        except BaseException:
            self._asked("shutdown_weight_transfer_engine")
            raise
        self._bounded = [] if behind_max is None else [each for each in BEGIN if hasattr(llm, each)]
        for name in self._bounded:
            setattr(llm, name, self._keeping_up(getattr(llm, name), behind_max or 0))

    def update(self, version: int | str = "latest", *, timeout_s: float | None = None) -> bool:
        """Go to `version` if the engine has another one; "latest" never goes back within a run.

        If the trainer takes "latest" back before the engine has read it, the engine goes to the
        one that is latest then. Generation pauses meanwhile, and what the old weights have
        computed is dropped from all caches. Not while another thread is in a call of the engine.

        Returns:
            Whether the engine has another version than before.

        Raises:
            TorchRosError: The error of the lowest worker that failed. If the engine still has its
                version it goes on with that; else it stays paused and refuses requests, `version`
                is None, and a later `update` may succeed.
        """
        return tried_again(version, partial(self._go_to, version, timeout_s))

    def adapter(self, model: str) -> AttachedAdapter:
        """The LoRA adapter that is published as `model`; the same object each time.

            code = policy.adapter("code")
            code.update()
            llm.generate(prompts, lora_request=code.request)

        The engine was made with ``enable_lora=True``. `close` drops its adapters.

        Raises:
            NotSupported: The engine follows a bucket.
            TorchRosError: As `torch_ros.open`.
        """
        if self._info["bucket"] is not None:
            raise NotSupported("an adapter beside a bucket", "attach the engine to its etcd")
        if model not in self._adapters:
            handle = _reader(model, self._info["options"])
            self._adapters[model] = AttachedAdapter(self._llm, handle)
        return self._adapters[model]

    def close(self) -> None:
        """Let go of the model: the engine keeps its weights, and offers them to nobody.

        May be called again, when the engine follows another one.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for name in self._bounded:
            vars(self._llm).pop(name, None)
        for adapter in self._adapters.values():
            adapter.close()
        self._handle.close()
        self._asked("shutdown_weight_transfer_engine")

    def _go_to(self, version: int | str, timeout_s: float | None) -> bool:
        contents = self._handle.contents(version, timeout_s=timeout_s)
        found, has = contents.version, self.version
        # In a bucket a lower number may be newer, and a number come again.
        is_bucket = isinstance(self._handle, BucketVersions)
        sequence = contents.uid if is_bucket else contents.run
        if has is not None and sequence == self._sequence:
            is_older = isinstance(version, str) and found < has
            if (found == has or is_older) and not self._is_withdrawn(timeout_s):
                return False
        self._llm.sleep(level=0, mode=self._pause)
        self.version = None
        try:
            self._update(found, timeout_s)
        except TorchRosError:
            if self._active is not None:
                self._resume()
            self.version = self._active
            raise
        self._resume()
        self.version, self._sequence = found, sequence
        return True

    def _keeping_up(self, own: Callable[..., Any], behind_max: int) -> Callable[..., Any]:
        """A call of vLLM's that begins with an update if the engine is too far behind."""

        @wraps(own)
        def keeping_up(*args: Any, **named: Any) -> Any:
            if self.version is None or self._is_behind(behind_max):
                self.update("latest")
            return own(*args, **named)

        return keeping_up

    def _is_behind(self, most: int) -> bool:
        has = self.version or 0
        if isinstance(self._handle, BucketVersions):
            stored = self._handle.contents("latest")
            return stored.uid != self._sequence and not 0 < stored.version - has <= most
        newest = self._handle.fleet().latest
        if newest is None:  # the trainer is between two versions
            return False
        return newest.run != self._sequence or newest.version - has > most

    def _recall(self) -> None:
        """Go on from the version that an engine with a name has, as one that was born with it."""
        if isinstance(self._handle, BucketVersions) or self._replica is None:
            return
        told = self._handle.installs().get(self._replica)
        has = told.active if told is not None else None
        if has is not None and self._llm.get_weight_version() != core.NO_VERSION:
            self.version, self._sequence = has.version, has.run

    def _is_withdrawn(self, timeout_s: float | None) -> bool:
        """Whether somebody has loaded weights by hand, as far as an engine without a name tells."""
        if isinstance(self._handle, BucketVersions):
            return False
        told = self._handle.installs(timeout_s=timeout_s).get(self._replica or "")
        return told is not None and told.active is None

    def _update(self, version: int, timeout_s: float | None) -> None:
        info = {"version": version, "timeout_s": timeout_s}
        self._asked("start_weight_update")
        try:
            self._asked("update_weights", {"update_info": info})
        except Exception:
            with suppress(Exception):  # the session of those that did not raise
                self._llm.finish_weight_update()
            raise
        self._asked("finish_weight_update", str(version))

    def _resume(self) -> None:
        self._asked("wake_up", ["scheduling"])

    def _asked(self, call: str, *args: object) -> None:
        try:
            getattr(self._llm, call)(*args)
        except Exception as error:
            heard = hear(error)
            if heard is None:
                raise
            told, self._active = heard
            raise told from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
