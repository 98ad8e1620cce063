"""Questions of several features' tests about copies in host memory."""

from kit import feature

from torch_ros.features.retention.flow import Retention
from torch_ros.features.retention.host_copies import Copies


def copies_of(handle) -> Copies:
    """The copies in host memory that the handle's shard has put aside."""
    return feature(handle, Retention).copies
