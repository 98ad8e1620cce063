"""Versions that a handle reads without becoming a source of them: `contents` and `read`."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from torch_ros.protocol.versions import Spec
from torch_ros.shard.checkpoint import Load, LoadRequest
from torch_ros.shard.core import Shard
from torch_ros.shard.finding import Contents, find
from torch_ros.shard.report import ReadReport
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.local import local_chunks
from torch_ros.weights.manifest import Layout


class Given:
    """The destination of a read: the tensors that its caller has."""

    def __init__(self, named_tensors: Mapping[str, torch.Tensor]) -> None:
        self._named = named_tensors

    def fill(self, _: Sequence[Layout]) -> LocalState:
        return LocalState(local_chunks(self._named), {}, {})

    def vet(self) -> None:
        """Nothing to do: no object is read."""


class Reads:
    """The reads of one handle that are no replications."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def contents(self, version: int | str, timeout_s: float | None) -> Contents:
        shard, spec = self._shard, Spec.parse(version)
        deadline = shard.deadline(f"contents {version}", timeout_s)
        return Contents.of(shard.busy(lambda: find(shard, spec, deadline)))

    def read(
        self,
        version: int | str,
        named_tensors: Mapping[str, torch.Tensor],
        timeout_s: float | None,
    ) -> ReadReport:
        shard, given = self._shard, Given(named_tensors)
        request = LoadRequest(version, None, given, is_served=False, verb="read", keeps=True)
        deadline = shard.deadline(request.asked, timeout_s)
        flow = Load(shard, request, deadline).run
        return shard.busy(partial(shard.as_one, request.asked, flow))
