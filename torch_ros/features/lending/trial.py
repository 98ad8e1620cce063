"""Whether this process may borrow from another one of this host: a part of `cli.trial`."""

from torch_ros.features.lending.memory import LentMemory, Loan, NotLent
from torch_ros.p2p.voucher import Neighbour

WAY = "lending"
WORD = 7  # of the content that is lent
SIZE_BYTES = 4096


def show(agent: str) -> object:
    """Lend something to all that come, for as long as the answer is kept."""
    lent = LentMemory(agent, SIZE_BYTES)
    lent.begin()
    lent.end(0)
    lent.name(WORD)
    lent.open()
    return lent


def is_open(stranger: Neighbour) -> bool:
    """Raises: OSError: It cannot be borrowed."""
    try:
        return Loan(stranger, WORD).is_intact
    except NotLent as error:
        raise OSError("its open files cannot be seen") from error
