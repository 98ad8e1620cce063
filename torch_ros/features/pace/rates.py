"""Whether a reader keeps pace with what it reads from (docs/protocol/pace.md). Pure."""

import math

PACE_S = 0.05  # for which a reader has to be behind all the time
PACE_BYTES = 256 << 20  # that the relay has to get meanwhile: else it may be waiting itself
CAUGHT_UP_BYTES = 128 << 20  # so little to be read is what is just on its way
PACE_SHARE = 3  # a reader that gets one part of that many, or less, is behind
# Of a window of landings. Of fewer bytes the time is that of the way, and of looking.
LANDINGS, WINDOW_BYTES, WINDOW_S = 8, 32 << 20, 0.01
RATE_SHARE = 4  # three that read from one source get a third each, and none is slow


class Landings:
    """How fast bytes land at a reader while some are on their way, however few its source has.

    A reader looks now and then, so of each landing it knows two times: it took no longer than since
    the landing before, and no less than from the first look that found it on its way to the last.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self.told: float = 0.0  # bytes/s of the slowest window, at least; 0: not known yet
        self.last: float = math.inf  # bytes/s of the last window, at most, without its longest
        self._came_s, self._looks = now_s, list[float]()
        self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        self._since_s = now_s
        self._count = self._bytes = 0
        self._waited_s = self._flown_s = 0.0
        self._longest = 0.0, 0  # seconds, and bytes

    def resume(self, now_s: float) -> None:
        """Nothing was on its way until now."""
        self._came_s = now_s

    def look(self, now_s: float) -> None:
        """Something is on its way."""
        self._looks[1:] = [now_s]

    def land(self, now_s: float, size_bytes: int) -> bool:
        """Note bytes that have landed. Returns whether that ends a window."""
        flown_s = self._looks[-1] - self._looks[0] if self._looks else 0.0
        waited_s, self._came_s = now_s - self._came_s, now_s
        self._looks.clear()
        return self.add(now_s, size_bytes, waited_s, flown_s)

    def add(self, now_s: float, size_bytes: int, waited_s: float, flown_s: float) -> bool:
        """Note bytes that landed, and the two bounds of their time. As `land`."""
        self._count, self._bytes = self._count + 1, self._bytes + size_bytes
        self._waited_s, self._flown_s = self._waited_s + waited_s, self._flown_s + flown_s
        self._longest = max(self._longest, (flown_s, size_bytes))
        is_window = self._count >= LANDINGS and self._bytes >= WINDOW_BYTES
        if not is_window or now_s - self._since_s < WINDOW_S:
            return False
        rate = self._bytes / max(self._waited_s, 1e-9)  # a clock may stand still
        self.told = min(self.told or rate, rate)
        flown_s, size_bytes = self._flown_s - self._longest[0], self._bytes - self._longest[1]
        self.last = size_bytes / flown_s if flown_s > 0 else math.inf
        self._begin(now_s)
        return True


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
        self._was_slow = False

    def is_slower(self, last: float, told: float) -> bool:
        """Whether bytes landed here much more slowly than at the relay, in two windows in a row.

        One alone says nothing: all may have become slow, and the relay not have told it yet.

        Args:
            last: Bytes per second of the last window, at most.
            told: The relay's, at least; 0: not known.
        """
        if not told:
            return False
        was_slow, self._was_slow = self._was_slow, RATE_SHARE * last < told
        if not (was_slow and self._was_slow):
            return False
        self.rate = told
        return True

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
