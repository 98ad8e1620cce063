"""Content from which every 64-bit word says which version it is of, and where it belongs."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

STRIDE = 0x9E3779B97F4A7C15  # odd: no two positions of a version have the same word
MASK = 2**64 - 1
BLOCK = 1 << 17  # words compared at a time: they fit into the cache

Words = npt.NDArray[np.uint64]


def signature(version: int) -> int:
    """What a version's word at position 0 is (splitmix64)."""
    x = (version + 1) * STRIDE & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


class Pattern:
    """Fills and checks tensors of as many words each, which the caller numbers."""

    def __init__(self, words: int) -> None:
        self._steps = np.arange(words, dtype=np.uint64) * np.uint64(STRIDE)

    def _start(self, number: int, version: int) -> np.uint64:
        position = number * len(self._steps)
        return np.uint64((signature(version) + position * STRIDE) & MASK)

    def fill(self, tensors: dict[int, Words], version: int) -> None:
        for number, words in tensors.items():
            np.add(self._steps, self._start(number, version), out=words)

    def torn(self, tensors: dict[int, Words], version: int) -> str:
        """Where the content is not that of `version`, and what it is there; "": nowhere."""
        for number, words in tensors.items():
            start = self._start(number, version)
            for at in range(0, len(words), BLOCK):
                found = words[at : at + BLOCK] - self._steps[at : at + BLOCK]
                wrong = np.flatnonzero(found != start)
                if len(wrong):
                    first = int(found[wrong[0]])
                    origin = self._version_of(number, first, range(version + 1000))
                    return (
                        f"word {at + int(wrong[0])} of tensor {number} is {origin} "
                        f"({len(wrong)} such words in the next {len(found)})"
                    )
        return ""

    def _version_of(self, number: int, start: int, candidates: Sequence[int]) -> str:
        known = (v for v in candidates if int(self._start(number, v)) == start)
        return next((f"of version {v}" for v in known), "of no version")
