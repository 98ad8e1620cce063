"""Going to "latest" while a trainer takes each version back before an engine has read it."""

from collections.abc import Callable

from torch_ros.errors import SourceLost, VersionNotFound

TRIES = 10


def tried_again(version: int | str, go_to: Callable[[], bool]) -> bool:
    """The answer of `go_to`; again, if a version that is no number went meanwhile."""
    tries = TRIES if isinstance(version, str) else 1
    while True:
        tries -= 1
        try:
            return go_to()
        except (VersionNotFound, SourceLost):
            if not tries:
                raise
