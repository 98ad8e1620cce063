"""Whether a reader keeps pace with what it reads from (docs/PROTOCOL.md#a-slow-reader). Pure."""

PACE_S = 0.05  # for which a reader has to be behind all the time
PACE_BYTES = 256 << 20  # that the relay has to get meanwhile: else it may be waiting itself
CAUGHT_UP_BYTES = 128 << 20  # so little to be read is what is just on its way
PACE_SHARE = 3  # a reader that gets one part of that many, or less, is behind


class Pace:
    """One reader and one source.

    Args:
        rate: The bytes per second that another source got, which this one is compared with too.
    """

    def __init__(self, rate: float = 0.0) -> None:
        self.rate: float = rate
        self._since: tuple[float, int, int] | None = (
            None  # when it lagged first, and what there was
        )

    def is_behind(self, now_s: float, landed: int, shown: int) -> bool:
        """Whether much less has landed, while there was more to be read, than a relay has got.

        Args:
            landed: The bytes that count.
            shown: Those of them, and of those that are still to be read, that the relay has.
        """
        if shown - landed <= CAUGHT_UP_BYTES:
            self._since = None
            return False
        self._since = self._since or (now_s, landed, shown)
        since_s, landed_then, shown_then = self._since
        took_s = now_s - since_s
        came = max(shown - shown_then, self.rate * took_s)
        if took_s < PACE_S or came < PACE_BYTES:
            return False
        self._since, self.rate = (now_s, landed, shown), came / took_s
        return PACE_SHARE * (landed - landed_then) <= came
