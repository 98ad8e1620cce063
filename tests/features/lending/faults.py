"""Faults to plant where copies are lent and borrowed."""

import fcntl

from faults import answers, fault, instead
from planting import changed

from torch_ros.features.lending import borrowing
from torch_ros.store.loops import Wait


@instead("a lent buffer is filled again", "LentMemory.close", scenario="stays")
def _(close, self):
    self.is_closed = True
    return True


@instead("a borrower locks nothing", "Loan.__init__", scenario="stays")
def _(init, self, *args):
    init(self, *args)
    fcntl.flock(self._fd, fcntl.LOCK_UN)


@fault(
    "the name of a content is not looked at again once it is locked",
    "_word",
    scenario="locked late",
)
def _(word):
    seen = {}
    return lambda fd: seen.setdefault(fd, word(fd))


answers(
    "the fill is not cleared before a content is written", "LentMemory.begin", scenario="lost lock"
)


@fault("who leaves does not look at the fill", "Loan.is_intact", scenario="lost lock")
def _(is_intact):
    return True


@instead(
    "the fill is looked at before the devices are done", "Loans.leave", scenario="kernels last"
)
def _(leave, self):
    is_intact = all(loan.is_intact for loan in self.loans)
    with changed("Loan.is_intact", lambda _: is_intact):
        leave(self)


@instead("who leaves unlocks before it looks at the fill", "Loans.leave", scenario="left in order")
def _(leave, self):
    for loan in self.loans:
        loan.end()
    borrowing.time.sleep(1.0)
    leave(self)


answers("what was left stays locked", "Loan.end", scenario="left in order")


@instead("what is lent already does not count", "Lender.lend", scenario="bound")
def _(lend, self, copy):
    self._open.clear()
    lend(self, copy)


@instead("what is not published any more can be borrowed still", "Lender.lend", scenario="bound")
def _(lend, self, copy):
    were_open = [each for each in self._open if not each.is_closed]
    lend(self, copy)
    for each in were_open:
        if each.is_closed:
            each.open()


@fault("who waits to borrow watches versions only", "_until_one_lends", scenario="lends late")
def _(until_one_lends):
    return lambda keys, ref: Wait(until_one_lends(keys, ref).reason, (keys.versions(),))


@fault(
    "a copy has no name until its rank knows the end", "OwnWord.show_nothing", scenario="lends late"
)
def _(show_nothing):
    return lambda self, mark, *_: show_nothing(self, mark)
