"""Adapters of an offline engine: each goes from version to version when it is told to."""

import itertools
from contextlib import suppress
from functools import partial
from typing import Any

import torch_ros
from torch_ros.integrations.vllm.latest import tried_again
from torch_ros.integrations.vllm.told import hear
from torch_ros.integrations.vllm.worker_adapters import AdapterPath

_ids = itertools.count(1 << 20)  # vLLM knows adapters by them; a program counts its own from 1


class AttachedAdapter:
    """An adapter that an offline engine loads, swaps and drops; what `Attached.adapter` returns."""

    def __init__(self, llm: Any, handle: torch_ros.ShardHandle) -> None:
        self._llm, self._handle, self._uid = llm, handle, ""
        self.request: Any = None
        """vLLM's `LoRARequest`, for `llm.generate(..., lora_request=...)`; None: none is loaded."""
        self.version: int | None = None
        """The version that is loaded."""

    def update(self, version: int | str = "latest", *, timeout_s: float | None = None) -> bool:
        """Load `version` if another one is loaded, and drop that one. The base stays as it is.

        Each version has a request of its own. Not while another thread is in a call of the engine.

        Returns:
            Whether `request` is another one than before.

        Raises:
            ManifestMismatch: The adapter fits another base than the engine has, or another model.
            UsageError: vLLM refuses it.
            TorchRosError: As `ShardHandle.contents` and `stream`.

        After an error, the version before is loaded still.
        """
        return tried_again(version, partial(self._go_to, version, timeout_s))

    def drop(self) -> None:
        """Take the adapter out of the engine; a later `update` loads one again."""
        request, self.request, self.version, self._uid = self.request, None, None, ""
        if request is not None:
            self._llm.llm_engine.remove_lora(request.lora_int_id)

    def close(self) -> None:
        """Drop it, and ask for no version any more. May be called again."""
        with suppress(Exception):  # an engine that has ended has no adapter
            self.drop()
        self._handle.close()

    def _go_to(self, version: int | str, timeout_s: float | None) -> bool:
        from vllm.lora.request import LoRARequest  # noqa: PLC0415  # vLLM is here

        contents = self._handle.contents(version, timeout_s=timeout_s)
        if contents.uid == self._uid:
            return False
        model, number = self._handle.model, contents.version
        path = AdapterPath(model, number, contents.uid)
        request = LoRARequest(f"{model}@{number}", next(_ids), str(path))
        try:
            self._llm.llm_engine.add_lora(request)
        except Exception as error:
            if (heard := hear(error)) is None:
                raise
            raise heard[0] from error
        self.drop()
        self.request, self.version, self._uid = request, number, contents.uid
        return True
