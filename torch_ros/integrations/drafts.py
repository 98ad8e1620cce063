"""An engine's draft model, which goes to each version before the engine does."""

import logging
from collections.abc import Callable
from typing import Protocol

from torch_ros.integrations.together import Together
from torch_ros.printable import log_of

log: logging.Logger = log_of(__name__)


class Draft(Protocol):
    """The installer of a draft model, as its engine's installer sees it."""

    def install(self, version: int | str, timeout_s: float) -> object:
        """As `Installer.install`."""

    def remember(self) -> Callable[[], None]:
        """As `Installer.remember`."""


class DraftFirst:
    """Takes a draft along, there and back, if there is one. Collective.

    Args:
        is_part: Versions of the engine have it; else it goes to the latest of a model of its own.

    Attributes:
        is_to_blame: The last failure was one of the draft, and not of its engine's version.
    """

    def __init__(self, draft: Draft | None, ranks: Together, *, is_part: bool) -> None:
        self._draft, self._all, self._is_part = draft, ranks, is_part
        self._put_back: Callable[[], None] | None = None
        self.is_to_blame = False

    def go_to(self, number: int, timeout_s: float) -> None:
        """Bring the version into the draft; what that had is kept until the end."""
        if (draft := self._draft) is None:
            return
        version = number if self._is_part else "latest"
        self._put_back = self._all.step(draft.remember)
        self.is_to_blame = True
        self._all.step(lambda: draft.install(version, timeout_s))
        self.is_to_blame = False

    def go_back(self) -> None:
        """Give the draft back what it had, as its engine has not come to the new version."""
        put_back, self._put_back, self.is_to_blame = self._put_back, None, False
        if put_back is None:
            return
        try:
            self._all.step(put_back)
        except Exception:
            log.exception(
                "its draft has another version, of which the engine accepts fewer tokens; update it"
            )

    def stay(self) -> None:
        """Keep the new version, and nothing of the one before."""
        self._put_back = None
