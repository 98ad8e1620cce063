"""The weights of a vLLM model: how they were loaded, what became of them, how they are reloaded."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import update_wrapper
from itertools import pairwise
from typing import Any

import torch
from vllm.distributed.parallel_state import get_dp_group
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    _layerwise_process,
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from torch_ros.errors import ManifestMismatch
from torch_ros.integrations.landing_plan import Geometry, Obstacle, changed, state_of
from torch_ros.integrations.landings import Recording
from torch_ros.integrations.recording import record
from torch_ros.integrations.seams import Contents, Weights
from torch_ros.printable import log_of

log: logging.Logger = log_of("vllm.torch_ros")  # vLLM configures its own loggers only

DERIVED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
HEAD = "lm_head.weight"
LAYERS = ("num_hidden_layers", "num_nextn_predict_layers")  # in a configuration; of a draft model
PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)  # use the weight that was loaded


class VLLMModel:
    """One worker's model. Its live parameters keep their addresses, which CUDA graphs know.

    Args:
        proves: Parameters of which nobody knows what vLLM makes of them may land once a version
            that vLLM has loaded turns out to lie as it would.
        is_mapped_anew: Sleep takes the memory away behind our back.
        is_dummy: Nothing was ever loaded, so that padding has what it was allocated with.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        model_config: Any,
        device: torch.device,
        *,
        proves: bool,
        is_mapped_anew: bool,
        is_dummy: bool,
    ) -> None:
        self.model = model
        self.load_weights: Callable[[Weights], Any] = model.load_weights  # type: ignore[assignment]
        self._model_config, self._device = model_config, device
        self._proves, self._is_mapped_anew, self._is_dummy = proves, is_mapped_anew, is_dummy
        self._loaded: dict[str, Geometry] = {}  # as vLLM allocates it, before it loads
        self._past_loaders: frozenset[str] = frozenset()  # modules that a model writes to by itself

    def state(self) -> dict[str, torch.Tensor]:
        return state_of(self.model)

    # Recording

    def record(self, contents: Contents) -> Recording:
        with torch.device(self._device):
            initialize_layerwise_reload(self.model)
            try:
                _unwrap(self.model)
                loaded = state_of(self.model)
                self._loaded = {name: Geometry.of(one) for name, one in loaded.items()}
                with _Noted.loaders_of(self.model) as noted:
                    recording = record(self.model, contents, self._load)
                self._past_loaders = frozenset(_modules_past(noted, recording))
                optional = self._optional()
            finally:
                _put_back(self.model)
        self._warn_of_head(contents)
        unwritten = {n: count for n, count in recording.unwritten.items() if n not in optional}
        return replace(recording, unwritten=unwritten)

    def _warn_of_head(self, contents: Contents) -> None:
        """Say that a published head is not used where vLLM uses the embedding in its place."""
        heads = [fqn for fqn in contents if self._is_tied(fqn)]
        if heads:
            log.warning(
                "%s: not read, since the engine's config.json ties it to the embedding; expected "
                "the same elements: if they differ, set tie_word_embeddings to false there",
                heads[0],
            )

    def _is_tied(self, fqn: str) -> bool:
        config = self._model_config.hf_text_config
        return fqn.endswith(HEAD) and bool(getattr(config, "tie_word_embeddings", False))

    def _optional(self) -> set[str]:
        """Scales of caches, for which vLLM has a value where a checkpoint has none."""
        return {
            name
            for path, module in self.model.named_modules()
            if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)
            for name, _ in module.named_parameters(path, recurse=False)
        }

    def may_lack(self, fqn: str) -> bool:
        """Whether vLLM makes it itself, or leaves it to a draft model, or to another engine."""
        config, parts = self._model_config.hf_text_config, fqn.split(".")
        number = {one: int(n) for one, n in pairwise(parts) if n.isdecimal()}
        layers, drafts = (getattr(config, name, None) or 0 for name in LAYERS)
        is_drafted = 0 <= number.get("layers", -1) - layers < drafts
        is_drafted |= any(part.startswith("mtp") for part in parts)  # as Qwen3-Next and MiMo do
        return (
            self._is_tied(fqn)
            or is_drafted
            or fqn.endswith(DERIVED)
            or self._is_elsewhere(parts, number)
        )

    def _is_elsewhere(self, parts: Sequence[str], number: Mapping[str, int]) -> bool:
        """Whether an engine beside this one may have this expert."""
        if "experts" not in parts or get_dp_group().world_size == 1:
            return False
        count: int = self._model_config.get_num_experts()
        return number.get("experts", 0) < count

    def obstacles(self, recording: Recording) -> dict[str, Obstacle]:
        state = self.state()
        if self._is_mapped_anew:
            return dict.fromkeys(state, Obstacle("sleep mode maps the engine's memory anew"))
        found = {name: Obstacle(PADDED, is_provable=True) for name in self._padded(recording)}
        owners: dict[int, list[tuple[str, Obstacle | None]]] = {}
        for path, module in self.model.named_modules():
            for name, one in module.named_parameters(path, recurse=False):
                owners.setdefault(one.data_ptr() or id(one), []).append((name, self._judge(module)))
        for named in owners.values():  # by memory: a tied module's obstacle is that of all
            if judged := [one for _, one in named if one is not None]:
                worst = min(judged, key=lambda one: one.is_provable)
                found |= {name: worst for name, _ in named}
        found |= self._derived()
        return found | changed(self._loaded, state)

    def _padded(self, recording: Recording) -> Iterable[str]:
        return recording.filled if self._is_dummy else ()

    def _judge(self, module: torch.nn.Module) -> Obstacle | None:
        """The reason against landing in a module's own parameters."""
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            backend = method.unquantized_backend
            if backend == UnquantizedMoeBackend.TRITON:
                return None
            return Obstacle(f"experts of backend {backend.value}", is_provable=self._proves)
        if type(method) in PLAIN:
            linear = module.__dict__.get("cpu_linear")
            if getattr(linear, "__closure__", None):
                return Obstacle("the CPU backend keeps a packed copy")
            return None
        if method is not None or hasattr(module, "process_weights_after_loading"):
            made_by = type(module if method is None else method).__name__
            return Obstacle(f"{made_by} may make something else of it", is_provable=self._proves)
        return None

    def _derived(self) -> dict[str, Obstacle]:
        """Parameters below a module that makes something of them at the end of a load: MLA."""
        found: dict[str, Obstacle] = {}
        for module in self.model.modules():
            if hasattr(module, "process_weights_after_loading"):
                reason = f"{type(module).__name__} keeps what it derives from it"
                below = {id(one) for child in module.children() for one in child.parameters()}
                found |= {
                    name: Obstacle(reason)
                    for name, one in self.model.named_parameters(remove_duplicate=False)
                    if id(one) in below
                }
        return found

    # Loading

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        return self.load_weights(iter(weights))

    def load(self, modules: Iterable[str], weights: Weights) -> None:
        """Run vLLM's layerwise reload over these modules; all others stay as they are."""
        modules = sorted(modules)
        chosen = [self.model.get_submodule(path) for path in modules]
        attention = [one for one in self.model.modules() if is_deferred_attention_layer(one)]
        part = torch.nn.ModuleList([*chosen, *attention])
        with torch.device(self._device):
            initialize_layerwise_reload(part)
            try:
                past = [self.model.get_submodule(path) for path in self._past_loaders & {*modules}]
                for module in past:
                    materialize_layer(module, get_layerwise_info(module))
                # Tensors wait for the rest of their module; our buffers do not.
                self._load((fqn, tensor.clone()) for fqn, tensor in weights)
                for module in past:
                    if (info := get_layerwise_info(module)).can_load():
                        _layerwise_process(module, info)
                self._require_loaded(chosen)
                finalize_layerwise_reload(part, self._model_config)
            except BaseException:
                _put_back(part)
                raise
            self._process_again(chosen)

    def _require_loaded(self, modules: Sequence[torch.nn.Module]) -> None:
        """Raise if vLLM would keep one of these as it was: it warns only, where it notices."""
        names = {id(module): name for name, module in self.model.named_modules()}
        for module in modules:
            info = get_layerwise_info(module)
            if info.can_load() and info.load_numel_total and info.load_numel <= 0:
                raise ManifestMismatch(
                    f"module {names[id(module)]!r} of this engine",
                    f"{info.load_numel_total} elements",
                    "none, when its loader had run",
                    "publish the missing tensors too, under the names of a checkpoint",
                )

    def _process_again(self, loaded: Sequence[torch.nn.Module]) -> None:
        """Do what vLLM's reload leaves out.

        Of modules that share a parameter it processes those that got a name of their own. Kernels
        of experts on CPUs pack their weights once, and a reload puts plain ones in their place.
        """
        uses = Counter(
            id(one) for module in self.model.modules() for one in module.parameters(recurse=False)
        )
        shared = {id(one) for module in loaded for one in module.parameters(recurse=False)}
        shared = {one for one in shared if uses[one] > 1}
        for module in self.model.modules():
            method = getattr(module, "quant_method", None)
            own = {id(one) for one in module.parameters(recurse=False)}
            if own & shared and isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(module)
        for module in loaded:
            method = getattr(module, "quant_method", None)
            if (
                isinstance(method, UnquantizedFusedMoEMethod)
                and method.unquantized_backend == UnquantizedMoeBackend.CPU
            ):
                method.moe_kernel.fused_experts.process_weights_after_loading(module)


PADDED = "its padding was never loaded"


class _Noted:
    """The loader of one tensor, which notes that it was called."""

    def __init__(self, loader: Callable[..., Any]) -> None:
        self.loader, self.is_called = loader, False
        update_wrapper(self, loader)

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.is_called = True
        return self.loader(*args, **named)

    def __eq__(self, other: object) -> bool:  # models compare it with vLLM's default
        return bool(self.loader == other)

    def __hash__(self) -> int:
        return hash(self.loader)

    @classmethod
    @contextmanager
    def loaders_of(cls, model: torch.nn.Module) -> Iterator[dict[str, "_Noted"]]:
        """Those of all tensors that vLLM has put on meta, by name, for as long as the block."""
        noted, tensors = dict[str, _Noted](), state_of(model)
        for name, one in tensors.items():
            loader = getattr(one, "weight_loader", None)
            if one.is_meta and loader is not None:
                noted[name] = loader if isinstance(loader, cls) else cls(loader)
                one.weight_loader = noted[name]  # type: ignore[attr-defined]
        try:
            yield noted
        finally:
            for name, loader in noted.items():
                tensors[name].weight_loader = loader.loader  # type: ignore[attr-defined]


def _modules_past(noted: Mapping[str, _Noted], recording: Recording) -> Iterator[str]:
    """The modules with a tensor that a model writes to without the tensor's loader.

    vLLM's reload counts, and keeps, what goes through loaders.
    """
    landed = {box.parameter for one in recording.landings.values() for box in one.boxes}
    for name in landed.union(*recording.targets.values()):
        if name in noted and not noted[name].is_called:
            yield name.rpartition(".")[0]


def _unwrap(model: torch.nn.Module) -> None:
    """Give parameters the loaders back that vLLM wraps for a reload."""
    for module in model.modules():
        for one in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            loader = getattr(one, "weight_loader", None)
            while getattr(loader, "__name__", "") == "online_process_loader":
                loader = loader.__wrapped__  # type: ignore[union-attr]
                one.weight_loader = loader  # type: ignore[attr-defined]


def _put_back(model: torch.nn.Module) -> None:
    """Give modules that are not loaded yet the tensors that they had."""
    _unwrap(model)
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload  # noqa: SLF001  # vLLM's names
    for module in model.modules():
        info = get_layerwise_info(module)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(module, info)
            info.reset()
    _unwrap(model)
