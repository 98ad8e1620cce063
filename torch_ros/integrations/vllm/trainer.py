"""The trainer's side of vLLM's own handshake: publishes, and has vLLM's engines follow."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

import torch_ros
from torch_ros.errors import UsageError
from torch_ros.integrations.vllm.sources import tensors_of


@dataclass
class ROSTrainerInitInfo(TrainerInitInfo):
    """How a trainer publishes.

    Attributes:
        model: The name under which versions are published.
        options: Of `torch_ros.open`, for the trainer's handle on each rank.
        engine: The other fields of the engines' `ROSInitInfo`, such as ``{"options": {"replica":
            "vllm-0"}}``.
    """

    backend: ClassVar[str] = "torch_ros"

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


class ROSTrainerWeightTransferEngine(TrainerWeightTransferEngine[ROSTrainerInitInfo]):
    """Publishes a `WeightSource`, and drives one engine, or several behind one client.

    A `ModuleSource` is published from where it lies, sharded as it is: nothing is gathered; so are
    the pieces of a source that has `iter_local`. Any other source is iterated, and its tensors are
    kept until `send_weights` returns.

    Frameworks that start a trainer engine of vLLM use it. Without one, `publish` is all that a
    trainer need do: engines read by themselves.
    """

    init_info_cls = ROSTrainerInitInfo

    def __init__(
        self,
        handle: "torch_ros.ShardHandle",
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource,
        rank: int,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=rank == 0)
        self.handle, self.rank = handle, rank
        self.version: int = max(handle.list(), default=0)
        """The version that was sent last, or was there before."""

    @classmethod
    def trainer_init(
        cls,
        init_info: ROSTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        if source is None:
            raise UsageError("no source: pass the weights to publish, such as ModuleSource(model)")
        handle = torch_ros.open(init_info.model, **init_info.options)
        try:
            if init_info.is_sender:
                info = {"model": init_info.model, **init_info.engine}
                client.init_weight_transfer_engine(info)
        except BaseException:
            handle.close()
            raise
        return cls(handle, client=client, source=source, rank=init_info.rank)

    def send_weights(self) -> None:
        """Publish the next version, and return once the engines have it.

        Called on every rank. Afterwards the weights may be written.
        """
        version, handle = self.version + 1, self.handle
        handle.register(self._tensors())
        try:
            handle.publish(version)
            self._together(lambda: self._drive(version))
            self.version = version
        finally:
            handle.unpublish()
            handle.unregister()

    def shutdown(self) -> None:
        self.handle.close()

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        if isinstance(self.source, ModuleSource):
            return dict(self.source._module.named_parameters())  # noqa: SLF001  # its only attribute
        return dict(tensors_of(self.source, self.rank))

    def _drive(self, version: int) -> None:
        self.client.start_weight_update()
        try:
            self.client.update_weights({"version": version})
        except Exception:
            with suppress(Exception):  # the session of workers that did not fail
                self.client.finish_weight_update()
            raise
        self.client.finish_weight_update(str(version))

    def _together(self, drive: Any) -> None:
        """Have the sender do it, and wait for it on all ranks: an `unpublish` counts for all."""
        failed: list[Any] = [None]
        if self.is_sender:
            try:
                drive()
            except Exception as error:  # noqa: BLE001  # raised below, on all ranks
                failed = [error]
        if self.handle.world_size > 1:
            told = [f"{failed[0]}" if failed[0] else None]
            torch.distributed.broadcast_object_list(told, src=0)
            failed = failed if self.is_sender else [RuntimeError(told[0])] if told[0] else [None]
        if failed[0] is not None:
            raise failed[0]
