"""The base of a change: the content that a handle held until the call that reads the next one."""

from dataclasses import dataclass

from torch_ros.protocol.records import VersionRef
from torch_ros.transfer.registered import LocalState


@dataclass(frozen=True, slots=True)
class Base:
    """A version, and the tensors that have it."""

    ref: VersionRef
    registered: LocalState
