"""How often a content was tried in a row, and how long an engine waits before it tries again.

Decisions alone: the time comes from the caller.
"""

from dataclasses import dataclass

from torch_ros.errors import BackendError, ClosedError, SeatLost, TorchRosError

IN_A_ROW = 3  # failures that may be bad luck, such as a source that left
FIRST_S = 1.0  # the wait after so many; each further failure doubles it
LONGEST_S = 60.0  # so that an engine goes on within a minute of whatever mends it
DOUBLINGS = 9  # more than lead to the longest
ELSEWHERE = (SeatLost, BackendError, ClosedError)  # the content is not to blame


@dataclass(frozen=True, slots=True)
class Tries:
    """Failures in a row to bring one content into an engine."""

    uid: str = ""
    failures: int = 0
    again_s: float = 0.0  # when the content may be tried again
    error: Exception | None = None  # the last one, without what was tried: that is much memory

    def failed(self, uid: str, error: Exception, now_s: float) -> "Tries":
        """These, and one more failure. Another content begins anew."""
        if isinstance(error, ELSEWHERE):
            return self
        failures = self.failures + 1 if uid == self.uid else 1
        over = failures - IN_A_ROW
        wait_s = min(LONGEST_S, FIRST_S * 2.0 ** min(over, DOUBLINGS)) if over >= 0 else 0.0
        is_ours = isinstance(error, TorchRosError)
        bare = type(error)(*error.args) if is_ours else RuntimeError(str(error))
        return Tries(uid, failures, now_s + wait_s, bare)

    def refusal(self, uid: str, now_s: float) -> Exception | None:
        """The error with which this content is refused now; None: try it."""
        return self.error if uid == self.uid and now_s < self.again_s else None

    def is_told(self) -> bool:
        """Whether this failure is the one of which a warning speaks."""
        return self.failures == IN_A_ROW
