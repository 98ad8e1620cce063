"""verl: the checkpoint engine "torch_ros". Importing this module puts it into verl's registry."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import torch

import torch_ros
from torch_ros.errors import UsageError
from torch_ros.integrations.gathered import GatheredCopy

Weights = Iterable[tuple[str, torch.Tensor]]


class ROSCheckpointEngine:
    """verl's actors copy the tensors that they gather, and publish them; its rollouts read these.

    In verl's configuration `rollout.checkpoint_engine.backend` is "torch_ros", and
    `custom_backend_module` is "torch_ros.integrations.verl". verl makes one engine in each worker.
    Handles are opened at the first update and stay open: verl builds its process group at every
    update, which costs nothing then.

    Args:
        bucket_size: verl's: how many bytes of a version a rollout holds at a time.
        is_master: verl's; not needed.
        model: The name under which versions are published. None: one of this job's own. Name one to
            let others follow, and for each job another.
        options: For `torch_ros.open`.
        actor_device: Where the actors' copies lie, all of them together one model; None: on their
            own device.
        rollout_device: Where verl gets the tensors that a rollout has read into host memory; None:
            on its accelerator, if it has one.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,  # noqa: ARG002, FBT002  # verl's signature
        *,
        model: str | None = None,
        options: Mapping[str, Any] | None = None,
        actor_device: str | None = "cpu",
        rollout_device: str | None = None,
    ) -> None:
        self._bucket_size, self._model, self._options = bucket_size, model, dict(options or {})
        self._actor_device, self._rollout_device = actor_device, rollout_device
        self._job = f"verl-{secrets.token_hex(4)}"  # that of the first actor counts
        self._last = 0  # the newest version that was sent or received
        self._place: object = None  # that the handle was opened for
        self._handle: torch_ros.ShardHandle | None = None
        self._copy: GatheredCopy | None = None
        self._installing = ExitStack()  # of a rollout, until verl has updated all of them

    def prepare(self) -> dict[str, Any]:
        """Tell verl what the other workers need to know, if this is the first actor."""
        return {"model": self._model or self._job, "job": self._job, "last": self._last}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Make the actors ranks of one replica, and each rollout a replica of its own."""
        actors, rollouts = actor_wg_world_size, rollout_world_size

        def those(ranks: Sequence[int], world_size: int, *, is_actor: bool) -> dict[str, list[Any]]:
            each = {"is_actor": is_actor, "world_size": world_size, "first_actor": metadata[0]}
            same = {name: [value] * len(ranks) for name, value in each.items()}
            return {"rank": list(ranks), **same}

        return (
            those(range(actors), actors, is_actor=True),
            those([0] * rollouts, 1, is_actor=False),
        )

    def init_process_group(
        self, *, is_actor: bool, rank: int, world_size: int, first_actor: Mapping[str, Any]
    ) -> None:
        """Open a handle, at the first time. Collective among the actors."""
        model, job = first_actor["model"], first_actor["job"]
        self._last = first_actor["last"]
        place = (is_actor, rank, world_size, model, job)
        if place == self._place:
            return
        self.close()
        seat: dict[str, Any] = {"rank": rank, "world_size": world_size}
        own = {"replica": f"{job}-actors", "run": "new"} if is_actor else {"installs": True}
        seat |= own
        self._handle, self._place = torch_ros.open(model, **(seat | self._options)), place
        self._copy = GatheredCopy(self._handle, self._actor_device) if is_actor else None

    async def send_weights(
        self, weights: Weights, global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish what verl has gathered, as the version that the rollouts wait for.

        Every actor draws all tensors, and copies its share. They stay published until the next
        update, for rollouts that join meanwhile.

        Returns:
            verl's metrics: seconds, bytes of this actor's share, the version.
        """
        if self._copy is None:
            raise UsageError("send_weights: verl has not made this worker an actor")
        begun_s, version = time.monotonic(), self._next(global_steps)
        size = self._copy.publish(version, weights)
        self._last = version
        return {
            "torch_ros/publish_s": time.monotonic() - begun_s,
            "torch_ros/bytes": float(size),
            "torch_ros/version": float(version),
        }

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Read the version that the actors publish, and yield its tensors, sorted by name.

        Half a bucket is read while verl passes the other half on. A tensor is valid until the next
        one is asked for.
        """
        if self._handle is None:
            raise UsageError("receive_weights: verl has not called init_process_group")
        version = self._next(global_steps)
        found = await asyncio.to_thread(self._handle.contents, version)
        # Without check_available, torch built with CUDA answers "cuda" on a host that has no GPU.
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = self._rollout_device or accelerator or "cpu"
        half = max(1, self._bucket_size // 2)
        with ExitStack() as block:
            await asyncio.to_thread(block.enter_context, self._handle.installing(version))
            stream = await asyncio.to_thread(
                self._handle.stream, version, found.tensors, buffer_bytes=half
            )
            with stream:
                while True:
                    # Only a buffer's first one may have to be waited for.
                    is_there = stream.left_in_buffer > 0
                    item = next(stream) if is_there else await asyncio.to_thread(next, stream, None)
                    if item is None:
                        break
                    yield item[0], item[1].to(device)
            self._last, self._installing = version, block.pop_all()

    def finalize(self) -> None:
        """Say that a rollout uses what it has read, and let go of it: verl has updated them all.

        Handles, and an actor's copies, stay as they are.
        """
        if self._handle is not None and self._copy is None:
            self._installing.close()
            self._handle.unregister()

    def close(self) -> None:
        """Close the handle, if one is open. verl does not call this; a process closes at exit."""
        handle, self._handle, self._place, self._copy = self._handle, None, None, None
        if handle is not None:
            handle.close()

    def _next(self, global_steps: int | None) -> int:
        # verl may name no step, go back to an older one, and update twice at the same one: once
        # for each set of rollouts.
        return max(self._last + 1, global_steps or 0)


def register() -> None:
    """Put the engine into verl's registry. May be called again."""
    from verl.checkpoint_engine import (  # type: ignore[import-not-found]  # noqa: PLC0415
        CheckpointEngine,
        CheckpointEngineRegistry,
    )

    CheckpointEngine.register(ROSCheckpointEngine)
    CheckpointEngineRegistry.register("torch_ros")(ROSCheckpointEngine)


if find_spec("verl") is not None:
    register()
