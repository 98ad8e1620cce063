"""transformers: a live model's tensors under the names of a checkpoint, which engines load."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

import torch_ros
from torch_ros.boxes import Offsets
from torch_ros.errors import NotSupported
from torch_ros.integrations.landings import LandedBox
from torch_ros.integrations.recording import record


def checkpoint_names(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that `save_pretrained` would write, by their names in the files, as views.

    transformers 5 fuses parameters that checkpoints keep apart, such as the experts of a layer;
    engines know the names of checkpoints. Pass the result to `register`: it names the model's own
    memory, this rank's where a tensor is a DTensor, and nothing is copied. A model whose
    parameters get other memory needs to be asked again; `guard(optimizer)` finds that.

    Args:
        model: A transformers.PreTrainedModel, of release 5 or newer; sharded by FSDP2 or not.

    Raises:
        NotSupported: transformers computes what it writes, or a fused parameter is sharded in
            several parts per rank. Gather such a model, and publish copies.
    """
    live = _saved(model)
    meta = {fqn: _like(tensor) for fqn, tensor in live.items()}
    shapes = _converted(model, meta)
    if list(shapes) == list(live) and all(shapes[fqn] is meta[fqn] for fqn in live):
        return live
    names = list(shapes)
    target = torch.nn.Module()
    for number, made in enumerate(shapes.values()):
        target.register_buffer(f"t{number}", _like(made))

    def write(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        made = _converted(model, dict(weights))
        for number, fqn in enumerate(names):
            target.get_buffer(f"t{number}").copy_(made[fqn])

    contents = {fqn: (tensor.dtype, tuple(tensor.shape)) for fqn, tensor in live.items()}
    recording = record(target, contents, write)
    if recording.staged or recording.unused or recording.buffers:
        reasons = sorted(set(recording.staged.values())) or ["it leaves tensors out"]
        raise NotSupported(
            f"checkpoint_names({type(model).__name__}): {'; '.join(reasons)[:300]}",
            "gather the tensors that save_pretrained writes, and publish_copy them",
        )
    boxes: dict[str, dict[Offsets, torch.Tensor]] = {fqn: {} for fqn in names}
    for fqn, landing in recording.landings.items():
        for box in landing.boxes:
            name = names[int(box.parameter.removeprefix("t"))]
            is_in_order = all(dim in {None, own} for own, dim in enumerate(box.dims))
            if is_in_order and shapes[name].shape == live[fqn].shape == box.sizes:
                boxes[name] = {(): live[fqn]}  # as it is
            else:
                boxes[name] |= _views(fqn, live[fqn], box)
    return {
        name: those[()] if () in those else torch_ros.Chunked(made.shape, made.dtype, those)
        for (name, made), those in zip(shapes.items(), boxes.values(), strict=True)
    }


def _saved(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The live tensors that are written: of those that are tied, one."""
    state = {
        fqn: tensor
        for fqn, tensor in model.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    left_out = {*ignored, *(fqn for fqn, source in tied.items() if source in state)}
    return {fqn: tensor for fqn, tensor in state.items() if fqn not in left_out}


def _converted(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415  # lazy

    made: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)  # type: ignore[arg-type]
    return made


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _views(fqn: str, tensor: torch.Tensor, box: LandedBox) -> dict[Offsets, torch.Tensor]:
    """This process's parts of a box of a live tensor, by their offsets in the checkpoint's."""
    found = {}
    for begin, part in _parts(fqn, tensor):
        offsets, view = list(box.at), part
        for own, dim in enumerate(box.dims):
            first = max(box.offsets[own], begin[own])
            last = min(box.offsets[own] + box.sizes[own], begin[own] + part.shape[own])
            view = view.narrow(own, max(0, first - begin[own]), max(0, last - first))
            if dim is not None:
                offsets[dim] += first - box.offsets[own]
        if view.numel() == 0:
            continue
        sizes, strides = [1] * len(box.within), [1] * len(box.within)
        for own, dim in enumerate(box.dims):
            if dim is not None:
                sizes[dim], strides[dim] = view.shape[own], view.stride(own)
        found[tuple(offsets)] = view.as_strided(sizes, strides, view.storage_offset())
    return found


def _parts(fqn: str, tensor: torch.Tensor) -> Iterator[tuple[Offsets, torch.Tensor]]:
    """This process's part of a tensor, with its offsets in the whole."""
    if not isinstance(tensor, DTensor):
        yield (0,) * tensor.dim(), tensor.detach()
        return
    if any(isinstance(placement, _StridedShard) for placement in tensor.placements):
        raise NotSupported(
            f"checkpoint_names: {fqn!r} is sharded as {tensor.placements}",
            "shard fused parameters along one mesh dimension, or publish copies",
        )
    for chunk in tensor.__create_chunk_list__():  # type: ignore[no-untyped-call]
        yield tuple(chunk.offsets), tensor.to_local().detach()
