"""The version that a replica's engine uses, as one of its ranks knows it and brings it along."""

from collections.abc import Callable, Mapping

from torch_ros.features.installs.records import NAME, Install, Rejection
from torch_ros.protocol.ledger import Ledger
from torch_ros.protocol.records import Call, Carried, Outcome
from torch_ros.protocol.seat import Seat


class Known:
    """A `Carrier` of a rank's ledger.

    Args:
        is_told: Whether the handle was opened to say so. If a peer's was, this rank learns too.
    """

    def __init__(self, ledger: Ledger, *, is_told: bool) -> None:
        self._ledger, self.is_told = ledger, is_told
        self.tells: Callable[[Install], None] = lambda _: None  # each change, under the lock
        self._install = Install()
        ledger.carriers.append(self)

    @property
    def install(self) -> Install:
        return self._install

    @install.setter
    def install(self, install: Install) -> None:
        self._install = install
        self.tells(install)

    @property
    def carried(self) -> Mapping[str, Carried]:
        return {NAME: self.install.carried} if self.is_told else {}

    def learned(self, call: Call, outcome: Outcome) -> None:
        if call.ref is None:
            return
        if call.asked.verb == "install" and not outcome.said:  # else it is active already
            self.install = self.install.begun(call.ref, call.number)
        elif call.asked.verb == "installed":
            self.install = self.install.left(call.ref)

    def learn(self, install: Install, seat: Seat) -> None:
        """Note what the record says now that it was written from this seat.

        Raises: SeatLost: The seat is lost, and this rank may have told its peers something else.
        """
        with self._ledger.lock:
            self._ledger.check_still(seat)
            if self.install.attempt <= install.attempt:
                self.install = install

    def left_badly(self, attempt: int, rejection: Rejection) -> None:
        """Note that this rank has, which nobody else may know."""
        with self._ledger.lock:
            if self.install.attempt == attempt:
                self.install = self.install.refused(rejection)
                self._ledger.changed()
