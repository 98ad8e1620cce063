"""Whether this process may borrow from another one of this host: a part of `cli.trial`."""

from collections.abc import Callable, Mapping
from typing import Any

from torch_ros.features.lending.memory import LentMemory, Loan, NotLent
from torch_ros.p2p.voucher import Neighbour

WORD = 7  # of the content that is lent
SIZE_BYTES = 4096


def show(agent: str) -> tuple[int, object]:
    """Lend something to all that come, for as long as the second answer is kept."""
    lent = LentMemory(agent, SIZE_BYTES)
    lent.begin()
    lent.end(0)
    lent.name(WORD)
    lent.open()
    return WORD, lent


def _is_lent(stranger: Neighbour, word: int) -> bool:
    try:
        return Loan(stranger, word).is_intact
    except NotLent as error:
        raise OSError("its open files cannot be seen") from error


WAYS: Mapping[str, Callable[[Neighbour, Any], bool]] = {"lending": _is_lent}
