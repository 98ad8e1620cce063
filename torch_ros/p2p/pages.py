"""The pages that memory of this process consists of."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch_ros.spans import Region


class Pages:
    """Told of memory that peers may read, and may change its pages. This one leaves them alone."""

    @property
    def is_on(self) -> bool:
        """Whether it does anything."""
        return False

    def ask(self, regions: Sequence[Region]) -> None:
        """Nobody has touched this memory yet."""

    def follow(
        self, regions: Sequence[Region], bytes_left: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """This memory is shown from now on, in place of what was followed before. The memory may be
        freed at any time.

        Args:
            regions: Host memory; none: nothing is shown.
            bytes_left: What must stay as it is, by the reason; for a report.
        """
