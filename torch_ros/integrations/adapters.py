"""LoRA adapters as versions: each adapter is a small model, under the names that PEFT saves.

Beside its tensors a version has PEFT's configuration, and the content of the base that it fits, as
bytes. Imports nothing of PEFT.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

import torch_ros
from torch_ros.checkpoints import framing
from torch_ros.errors import ManifestMismatch, NotSupported, UsageError, VersionNotFound
from torch_ros.integrations.landing_plan import has_nan, no_numbers
from torch_ros.printable import some

CONFIG = "adapter_config.json"  # PEFT's files
TENSORS = "adapter_model.safetensors"
BASE = "torch_ros_base.json"
TEXTS = (CONFIG, BASE)
PREFIX = "base_model.model."  # of each name in PEFT's files
MATRIX = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")  # of its names
WRAPPED = re.compile(r"(\.base_layer)+$")  # of a module of which PEFT trains several parameters
PADDED_BYTES = 256  # texts take a multiple, so that most versions have the layout of the last one
CONFIG_BYTES_MAX = 1 << 20
BUFFER_BYTES = 64 << 20
NAMED_MAX = 8  # names in a message

# Fields of PEFT's configuration by which an adapter is more than its matrices A and B; and the
# values with which it is not.
MORE: Mapping[str, Sequence[object]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
}


@dataclass(frozen=True, slots=True)
class BaseContent:
    """The content of a base: an adapter fits that of its own alone."""

    version: int
    run: str
    uid: str


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that was read, in host memory."""

    contents: torch_ros.Contents
    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]  # PEFT's
    base: BaseContent | None  # None: it fits any


def adapter_tensors(model: torch.nn.Module, adapter: str = "default") -> dict[str, torch.Tensor]:
    """The matrices of a LoRA adapter under the names that PEFT saves, as they are in the model.

    Nothing is copied, and DTensors stay sharded. What else PEFT may save is left out: the base's
    own embedding, of an adapter of embeddings.

    Args:
        model: A `peft.PeftModel`, or a model of transformers with adapters of PEFT; sharded by
            FSDP2 or not.
        adapter: Its name in the model.

    Raises:
        UsageError: The model has no such adapter.
        NotSupported: It is no LoRA adapter, or it is more than its matrices (DoRA, biases,
            `modules_to_save`, trained tokens), or several are active at once; or transformers has
            split the model by a `tp_plan`, so that plain tensors are perhaps parts.
    """
    _vet(model, adapter)
    own = re.compile(rf"(.+\.lora_(?:embedding_)?[AB])\.{re.escape(adapter)}(\.weight)?")
    more = re.compile(rf"\.lora_\w+\.{re.escape(adapter)}(\.|$)")
    found, others = {}, []
    for given, tensor in model.state_dict().items():
        name = given.replace("_orig_mod.", "")  # torch.compile's
        if match := own.fullmatch(name):
            saved = match[1] + (match[2] or "")
            found[saved if saved.startswith(PREFIX) else PREFIX + saved] = tensor
        elif more.search(name):
            others.append(name)
    if others:
        raise NotSupported(
            f"adapter {adapter!r} with {some(others, NAMED_MAX)}",
            "train an adapter of plain LoRA, or merge it and publish the base",
        )
    if not found:
        raise UsageError(f"adapter {adapter!r}: expected matrices lora_A and lora_B, found none")
    if not all(isinstance(one, DTensor) for one in found.values()) and (split := _split(model)):
        raise NotSupported(
            f"adapter {adapter!r} beside a tp_plan of transformers, which splits "
            f"{some(split, NAMED_MAX)}",
            "shard the model by FSDP2, or merge the adapter and publish the base",
        )
    return found


def publish_adapter(
    handle: torch_ros.ShardHandle,
    version: int,
    model: torch.nn.Module,
    *,
    adapter: str = "default",
    base: torch_ros.Contents | None = None,
    timeout_s: float | None = None,
) -> bool:
    """Publish a copy of a LoRA adapter as a version. Collective: on all ranks of the handle.

        code = torch_ros.open("code")
        publish_adapter(code, step, model)

    The copy is in host memory. The next step may write to the adapter as soon as this returns, and
    the version stays until the next one, or until `unpublish` or `close`.

    Args:
        handle: Of a model that has the adapter's name, and nothing else.
        version: As for `ShardHandle.publish`.
        model: As for `adapter_tensors`; and so `adapter`.
        base: The content of the base that it fits, as `contents` of the base's handle says it: an
            engine refuses the adapter while its own base is another. None: it fits any.

    Returns:
        As `ShardHandle.publish_copy`.

    Raises:
        UsageError, NotSupported: As `adapter_tensors`. Nothing was published then.
        ManifestMismatch: The matrices are not of the rank that the configuration says.
        TorchRosError: As `ShardHandle.publish_copy`.
    """

    def made() -> Mapping[str, torch.Tensor]:  # within the call: one rank's error ends it on all
        tensors, config = adapter_tensors(model, adapter), _config_of(model, adapter)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        require_ranks(f"adapter {adapter!r}", shapes, config)
        fits = None if base is None else asdict(BaseContent(base.version, base.run, base.uid))
        return {**tensors, CONFIG: _written(config), BASE: _written(fits)}

    return handle.publish_copy(version, made, to="cpu", timeout_s=timeout_s)


def read_adapter(
    handle: torch_ros.ShardHandle, contents: torch_ros.Contents, timeout_s: float | None = None
) -> Adapter:
    """Read an adapter of this content, by a handle of one rank.

    Its matrices come last: what the configuration tells is refused before.

    Raises:
        ManifestMismatch: The version is no adapter, its matrices are not of the rank that its
            configuration says, or it has a NaN.
        VersionNotFound: The number was published anew since.
        TorchRosError: As `ShardHandle.stream`.
    """
    config, base = read_config(handle, contents, timeout_s)
    names = [name for name in contents.tensors if name not in TEXTS]
    tensors = _streamed(handle, contents, names, timeout_s)
    for name, tensor in tensors.items():
        if has_nan(tensor):
            raise no_numbers(name, contents.version, handle.model)
    return Adapter(contents, tensors, config, base)


def read_config(
    handle: torch_ros.ShardHandle, contents: torch_ros.Contents, timeout_s: float | None = None
) -> tuple[Mapping[str, Any], BaseContent | None]:
    """Read PEFT's configuration of an adapter, and the base that it fits; and no matrix.

    Raises:
        TorchRosError: As `read_adapter`, which alone looks for a NaN.
    """
    names, what = contents.tensors, f"version {contents.version} of model {handle.model!r}"
    for text in TEXTS:
        if text not in names or names[text][1].numel() > CONFIG_BYTES_MAX:
            raise ManifestMismatch(
                what,
                f"an adapter, with {text} of at most {CONFIG_BYTES_MAX} bytes",
                f"{some(sorted(names), NAMED_MAX)}",
                "publish it by torch_ros.integrations.adapters.publish_adapter",
            )
    texts = _streamed(handle, contents, TEXTS, timeout_s)
    config, fits = (_read(what, text, texts[text]) for text in TEXTS)
    shapes = {name: shape for name, (_, shape) in names.items() if name not in TEXTS}
    require_ranks(what, shapes, config)
    return config, fits and BaseContent(**fits)


def _streamed(
    handle: torch_ros.ShardHandle,
    contents: torch_ros.Contents,
    names: Sequence[str],
    timeout_s: float | None,
) -> dict[str, torch.Tensor]:
    version = contents.version
    with handle.stream(version, names, buffer_bytes=BUFFER_BYTES, timeout_s=timeout_s) as stream:
        if stream.uid != contents.uid:
            reason = "it was published again meanwhile; ask anew"
            raise VersionNotFound(handle.model, str(version), reason)
        return {name: tensor.clone() for name, tensor in stream}


def write_files(adapter: Adapter, folder: Path) -> None:
    """Write the files of PEFT into a folder, and beside them the base that it fits."""
    shapes = framing.described(adapter.tensors)
    with (folder / TENSORS).open("wb") as file:
        file.write(framing.header(shapes, {"format": "pt"}))
        for view in framing.contents(shapes, iter(adapter.tensors.items())):
            file.write(view)
    (folder / CONFIG).write_text(json.dumps(adapter.config))
    (folder / BASE).write_text(json.dumps(adapter.base and asdict(adapter.base)))


def written_base(folder: Path) -> BaseContent | None:
    """The base that the adapter fits whose files are there."""
    fits = json.loads((folder / BASE).read_text())
    return fits and BaseContent(**fits)


def require_ranks(
    what: str, shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any]
) -> None:
    """Raises: ManifestMismatch: A matrix without its other one, or of another rank than said."""
    ranks: dict[str, dict[str, int]] = {}
    for name, shape in shapes.items():
        match = MATRIX.fullmatch(name)
        if match is None or len(shape) < 2:
            _refuse(what, "matrices lora_A and lora_B alone", f"{name!r} of shape {[*shape]}")
        ranks.setdefault(match[1], {})[match[2]] = shape[0 if match[2] == "A" else 1]
    for module, both in ranks.items():
        if len({*both.values()}) != 1 or len(both) != 2:
            _refuse(what, f"A and B of one rank for {module!r}", f"{both}")
        name = module.removeprefix(PREFIX)
        try:
            expected, is_many = _ranks_of(name, config)
        except (re.error, ValueError, TypeError, AttributeError) as error:
            _refuse(what, f"a rank_pattern for {module!r} as PEFT writes it", f"{error!r}")
        found = both["A"]
        if not any(found == one or (is_many and found % one == 0) for one in expected):
            texts = " or ".join(map(str, sorted(expected)))
            _refuse(what, f"matrices of rank {texts} for {module!r}", f"{both}")


def _refuse(what: str, expected: str, found: str) -> NoReturn:
    advice = "publish the adapter with the configuration that it was trained with"
    raise ManifestMismatch(what, expected, found, advice)


def _ranks_of(name: str, config: Mapping[str, Any]) -> tuple[set[int], bool]:
    """The ranks that a module's matrices may have, and whether they may be of many, side by side.

    Those of a parameter are: PEFT has them under the name of its module, and goes by its own name.
    """
    module = WRAPPED.sub("", name)
    there = (one.rpartition(".") for one in config.get("target_parameters") or ())
    parameters = [
        f"{module}.{one}" for of, _, one in there if not of or f".{module}".endswith(f".{of}")
    ]
    return {_rank_of(one, config) for one in parameters or [name]}, bool(parameters)


def _rank_of(name: str, config: Mapping[str, Any]) -> int:
    """As PEFT has it: the first pattern counts that is the end of the name."""
    patterns = (config.get("rank_pattern") or {}).items()
    ends = (rank for pattern, rank in patterns if re.match(rf"(.*\.)?({pattern})$", name))
    rank = int(next(ends, config["r"]))
    if rank < 1:
        raise ValueError(f"a rank of {rank}")
    return rank


def _vet(model: torch.nn.Module, adapter: str) -> None:
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping) or adapter not in configs:
        there = sorted(configs) if isinstance(configs, Mapping) else "no adapters of PEFT"
        raise UsageError(
            f"adapter {adapter!r}: expected it in this {type(model).__name__}, found {there}"
        )
    config = _config_of(model, adapter)
    more = [f"{name}={config[name]!r}" for name, no in MORE.items() if config.get(name) not in no]
    if config.get("peft_type") != "LORA":
        more.insert(0, f"peft_type={config.get('peft_type')!r}")
    if more:
        raise NotSupported(
            f"adapter {adapter!r} with {', '.join(more)}",
            "train an adapter of plain LoRA, or merge it and publish the base",
        )
    active = _active(model)
    if len(active) > 1:
        raise NotSupported(
            f"adapter {adapter!r} while {', '.join(active)} are active at once",
            "activate one: an engine adds one adapter to its base",
        )


def _split(model: torch.nn.Module) -> list[str]:
    """The modules on which transformers, or PEFT, has noted that they are split."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if vars(module).get("_tp_info") is not None or (vars(module).get("_tp_size") or 1) > 1
    ]


def _active(model: torch.nn.Module) -> Sequence[str]:
    active = getattr(model, "active_adapters", ())
    found = active() if callable(active) else active  # a property of PEFT, a method of transformers
    return [found] if isinstance(found, str) else list(found)


def _config_of(model: Any, adapter: str) -> dict[str, Any]:
    """What PEFT writes; sets in an order that is the same on all ranks."""
    given: Mapping[str, Any] = model.peft_config[adapter].to_dict()
    plain = {
        name: sorted(value) if isinstance(value, set | frozenset) else value
        for name, value in given.items()
    }
    made: dict[str, Any] = json.loads(json.dumps({**plain, "inference_mode": True}, default=_plain))
    return made


def _plain(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, Iterable) else str(value)


def _written(value: object) -> torch.Tensor:
    text = json.dumps(value).encode()
    padded = bytearray(text + b" " * (-len(text) % PADDED_BYTES))
    return torch.frombuffer(padded, dtype=torch.uint8)


def _read(what: str, name: str, text: torch.Tensor) -> Any:
    try:
        found = json.loads(bytes(text.numpy()))
        if name == BASE:
            return found and asdict(BaseContent(**found))
        if not isinstance(found, dict) or int(found["r"]) < 1:
            raise ValueError("expected a rank r of at least 1")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestMismatch(
            what, f"{name} as PEFT writes it", f"{error!r}", "publish it by publish_adapter"
        ) from error
    return found
