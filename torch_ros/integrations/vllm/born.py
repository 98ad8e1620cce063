"""Engines that are born with a version: the loader behind vLLM's ``load_format="torch_ros"``.

vLLM makes the model, the loader reads the first version into it, in place, and vLLM makes of the
weights what it computes with. `ROSWeightTransferEngine` goes on from there.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import vllm._custom_ops as ops
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.model_executor.layers import utils
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

from torch_ros import arguments
from torch_ros.errors import NotSupported, UsageError
from torch_ros.integrations.landing_plan import Obstacle, changed
from torch_ros.integrations.landings import Recording
from torch_ros.integrations.seams import Contents, Weights
from torch_ros.integrations.together import Together
from torch_ros.integrations.vllm.core import BACKEND
from torch_ros.integrations.vllm.engine import BORN, ROSInitInfo, ROSWeightTransferEngine
from torch_ros.integrations.vllm.first import FirstVersion
from torch_ros.integrations.vllm.model import VLLMModel
from torch_ros.printable import log_of

log: logging.Logger = log_of("vllm.torch_ros")  # vLLM configures its own loggers only


@dataclass
class ROSBornInfo(ROSInitInfo):
    """How an engine is born: vLLM's `model_loader_extra_config`.

    Attributes:
        version: The first one, as for `replicate`. An engine that starts again takes what this
            means by then.
        wait_s: For how long the start waits for it, as a trainer between two versions has none; for
            another one if it does not fit; and for etcd, beyond `timeout_s`. It waits again after a
            read that failed, yet all of it ends within `wait_s` and `timeout_s`. None: until there
            is one, with a log line a minute. vLLM's server gives up its engine after
            VLLM_ENGINE_READY_TIMEOUT_S.

    The rest is as for `ROSInitInfo`.
    """

    version: int | str = "latest"
    wait_s: float | None = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.text("model", self.model)
        arguments.seconds("timeout_s", self.timeout_s)
        arguments.optional(arguments.seconds)("wait_s", self.wait_s)
        if self.draft is not None or self.draft_model is not None:
            raise UsageError("draft, draft_model: not there; no engine is born with a draft model")
        if isinstance(self.version, str):
            arguments.text("version", self.version)  # which the first look at it reads
        else:
            arguments.whole(0, 1 << 62)("version", self.version)

    @classmethod
    def of(cls, config: Any) -> "ROSBornInfo":
        """Raises: UsageError: A field that is not there, is missing, or has no such value."""
        if not isinstance(config, Mapping):
            raise UsageError(f"model_loader_extra_config={config!r}: expected a mapping")
        names = [one.name for one in fields(cls)]
        if unknown := sorted(config.keys() - {*names}):
            raise UsageError(
                f"model_loader_extra_config: {', '.join(unknown)}: expected some of {names}"
            )
        if "model" not in config:
            raise UsageError(
                "model_loader_extra_config: no model: expected the name under which versions are "
                'published, such as {"model": "policy"}'
            )
        return cls(**config)

    @property
    def init_info(self) -> ROSInitInfo:
        """The same, as a driver may pass it to vLLM's calls later."""
        return ROSInitInfo(**{one.name: getattr(self, one.name) for one in fields(ROSInitInfo)})


class ROSModelLoader(BaseModelLoader):
    """Loads the first version from torch_ros, and no checkpoint files.

    A version that is not there, or does not fit, is none: the engine starts, refuses requests, and
    takes a later one through vLLM's calls.

    Raises:
        UsageError, NotSupported: The configuration is wrong; also as `torch_ros.open`.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._info = ROSBornInfo.of(load_config.model_loader_extra_config)
        self._vllm_config: Any = None
        self._born: BornEngine | None = None

    def download_model(self, model_config: Any) -> None:
        """Nothing: configuration and tokenizer are all that is needed of the model's folder."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """Make a model with the version, and leave it to the transfer engine."""
        require_alone(vllm_config)
        if vllm_config.weight_transfer_config is None:
            vllm_config.weight_transfer_config = WeightTransferConfig(backend=BACKEND)
        self._vllm_config = vllm_config
        try:
            model: torch.nn.Module = super().load_model(vllm_config, model_config, prefix)
            assert self._born is not None
            self._born.end()
        except BaseException:
            if self._born is not None:
                self._born.shutdown()
            raise
        return model

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Read the version, if there is one, into a model that vLLM has just made."""
        # vLLM ties embeddings for good if those of one version are equal, as zeros are.
        model_config.word_embeddings_untied_by_checkpoint = False
        config = self._vllm_config
        # Where vLLM has made the model; it loads outside of that device's context.
        device = torch.device(self.load_config.device or config.device_config.device)
        self._born = BornEngine(config.weight_transfer_config, config, device, model)
        self._born.begin(self._info)


def require_alone(vllm_config: Any) -> None:
    """Refuse engines with parts or neighbours that would have other weights.

    Raises: NotSupported: With what to do instead.
    """
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if speculative and speculative.draft_model_config is not speculative.target_model_config:
        raise NotSupported(
            f"load_format='torch_ros' with a draft model ({speculative.method})",
            "start the engine with another load_format, and update it",
        )
    transfer = vllm_config.weight_transfer_config
    if transfer is not None and transfer.backend != BACKEND:
        raise NotSupported(
            f"load_format='torch_ros' with updates by {transfer.backend!r}, which writes to what "
            "peers may read",
            f"pass weight_transfer_config={{'backend': '{BACKEND}'}}, or none",
        )
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        raise NotSupported(
            "load_format='torch_ros' with a KV connector, which may hold what other weights have "
            "computed",
            "start the engine with load_format='dummy', and update it: that drops its caches",
        )
    if parallel.data_parallel_size > 1:
        raise NotSupported(
            "load_format='torch_ros' with engines that share their experts, since each would be "
            "born with a version of its own",
            "start them with load_format='dummy', and update them together",
        )


def require_plain_loading(model: torch.nn.Module) -> None:
    """Refuse a model whose loader does more than to load.

    Raises: NotSupported: With what to do instead.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "uses_meta_device", False):
            raise NotSupported(
                f"load_format='torch_ros' with {type(method).__name__}, which quantises what is "
                "loaded",
                "start the engine with load_format='dummy', and update it",
            )


class NewModel(VLLMModel):
    """A model that vLLM has made: until it is loaded, all parameters lie as loaders want them."""

    is_loaded: bool = False

    def record(self, contents: Contents) -> Recording:
        recording = super().record(contents)
        if not self.is_loaded:
            self._pad(recording, contents)
        return recording

    def _pad(self, recording: Recording, contents: Contents) -> None:
        """Have padding made by the loader, which is not asked about tensors read in place."""
        padded = [
            fqn
            for fqn, landing in recording.landings.items()
            if any(box.parameter in recording.filled for box in landing.boxes)
        ]
        if padded:
            with torch.device(self._device):
                self._load((fqn, _zeros(*contents[fqn])) for fqn in padded)

    def obstacles(self, recording: Recording) -> dict[str, Obstacle]:
        if self.is_loaded or self._is_mapped_anew:
            return super().obstacles(recording)
        return changed(self._loaded, self.state())

    def load(self, modules: Iterable[str], weights: Weights) -> None:
        if self.is_loaded:
            super().load(modules, weights)
            return
        with torch.device(self._device):
            self._load((fqn, tensor.clone()) for fqn, tensor in weights)  # it may keep some a while

    def is_kept(self) -> bool:
        """Whether vLLM is known to go on with all parameters as they have been loaded."""
        optional = self._optional()
        owners = [
            (module, one)
            for path, module in self.model.named_modules()
            for name, one in module.named_parameters(path, recurse=False)
            if name not in optional
        ]
        is_changed = any(self._judge(module) or _is_packed_next(one) for module, one in owners)
        return not is_changed and not self._derived()

    def end(self, *, has_version: bool) -> None:
        """Take it for loaded, and for what vLLM has made of that."""
        self.is_loaded, self._is_dummy = True, not has_version

    def clear(self) -> None:
        """Set what no version has come to, to zero; scales of caches keep vLLM's own value."""
        kept = self._optional()
        for name, one in self.model.named_parameters():
            if name not in kept:
                one.data.zero_()


def _is_packed_next(weight: torch.Tensor) -> bool:
    """Whether vLLM for CPUs is about to pack it, by what `dispatch_cpu_unquantized_gemm` asks."""
    if weight.device.type != "cpu" or weight.ndim != 2:
        return False
    is_small = utils.check_cpu_sgl_kernel(*weight.shape, weight.dtype)
    return bool(ops._supports_onednn or is_small or current_platform.is_zen_cpu())  # noqa: SLF001


def _zeros(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return torch.zeros(tuple(shape), dtype=dtype, device="cpu")


class BornEngine(ROSWeightTransferEngine):
    """The transfer engine until vLLM makes its own, which goes on with all that this one has."""

    model_kind = NewModel

    def begin(self, info: ROSBornInfo) -> None:
        """Bring the first version into the model, or note why there is none. On all ranks."""
        began_s = time.monotonic()
        require_plain_loading(self.model)
        together = Together(self._ranks.rank, self._ranks, None)
        together.step(lambda: self._vet(info))
        first = FirstVersion(together, info.version, info.wait_s, info.timeout_s)
        self.lack = first.open(lambda: self._open(info), self.shutdown)
        if (installer := self._installer) is not None:
            how = installer.options
            # Served once vLLM has done with it; and there is nothing to keep.
            installer.options = replace(how, relay=False, on_failure="refuse")
            self.lack = first.bring(installer)
            installer.options = how
            if self.lack or not how.relay or not self._new.is_kept():
                installer.let_go()  # else all of it would be there twice while vLLM packs it
        self._born_with, self._took_s = info.init_info, time.monotonic() - began_s
        if self.lack:
            name = self._who or info.replica or "the engine"
            log.warning("%s starts without a version: %s", name, self.lack)
            self._new.clear()

    def end(self) -> None:
        """Offer the version, if it still lies where it was read, and wait with the model."""
        self._new.end(has_version=not self.lack)
        is_source = self._installer is not None and self._installer.settle(self._timeout_s)
        if not self.lack:
            what = "offered to others" if is_source else "offered to nobody"
            log.info("%s, after %.2f s: %s; %s", self._who, self._took_s, self.report, what)
        self.model.__dict__[BORN] = self

    @property
    def _new(self) -> NewModel:
        assert isinstance(self._weights, NewModel)
        return self._weights
