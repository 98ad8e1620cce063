"""The sources of one stream: full ones, one at a time, each by a record on a lease of its own."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from torch_ros.deadline import Deadline
from torch_ros.errors import SourceLost, StoreUnavailable, TorchRosError, VersionNotFound
from torch_ros.features.streams import rules
from torch_ros.protocol import sources
from torch_ros.protocol.group import Group
from torch_ros.protocol.keys import inst_at, replica_of, stream_of
from torch_ros.protocol.reaching import RETRY_S, Sources
from torch_ros.protocol.records import Reader, VersionRef
from torch_ros.protocol.sources import Candidate, Source
from torch_ros.shard.tally import Tally
from torch_ros.store.loops import settle
from torch_ros.store.run import run
from torch_ros.store.session import Session
from torch_ros.store.txn import Put, Ranges, View


@dataclass(frozen=True, slots=True)
class Wanted:
    """A stream, as it was asked for and decided."""

    ref: VersionRef
    fqns: Sequence[str]
    buffer_bytes: int
    timeout_s: float  # for each buffer, while it is filled
    number: int  # of this stream among those of this rank
    only: str = ""  # the replica to read from; "": whichever is best

    @property
    def what(self) -> str:
        return f"stream {self.ref.version}"


class LeasedSources(Sources):
    """Sources that stay attached from one buffer to the next, while their lease lives.

    Args:
        tally: Where lost sources are counted.
    """

    layout: str = ""  # that the last one has to show; "": nobody knows

    def __init__(self, group: Group, wanted: Wanted, tally: Tally, deadline: Deadline) -> None:
        super().__init__(group, group.seat, wanted.ref, deadline)
        self._only, self._tally = wanted.only, tally
        self._name = stream_of(group.seat.inst, wanted.number)
        self._session: Session | None = None

    def fill(self, deadline: Deadline, fetch: Callable[[Source], object]) -> None:
        """`read` another buffer, from the source of the last one while its lease lives.

        The deadline is this buffer's, and each source may be tried again: none was lost in it.
        """
        self.seat, self.deadline, self.tried = self.seating.seat, deadline, Counter()
        if self._session is None or not self._session.is_valid():
            self.end()
        self.read([*self.attached] or [self.another(self._missing())], lambda found: fetch(*found))

    def _missing(self) -> VersionNotFound:
        who = "no replica but this one holds"
        if self._only:
            who = f"replica {self._only!r} does not hold"
        reason = f"{who} it whole, with the content that it had"
        return VersionNotFound(self.seat.keys.model, f"{self.ref.version}", reason)

    @property
    def ranges(self) -> Ranges:
        return rules.choice_ranges(self.seat, self.ref)

    def candidates(self, view: View) -> Mapping[str, Candidate]:
        """The full ones; and learn what layout they have to show, as the version has it now."""
        self.layout = rules.layout(view, self.seat, self.ref)
        return rules.full_ones(view, self.seat, self.ref, self._only)

    def best(self, candidates: Mapping[str, Candidate], suspected: set[str]) -> str:
        return rules.best(candidates, suspected, self.seat)

    def attach(self, place: str) -> Source:
        """Put the reader record, on a lease that ends with this attachment.

        On the rank's own it would outlive a stream that is dropped, and hold its source up.
        """
        seat, ref, inst = self.seat, self.ref, inst_at(place)
        while True:
            self.end()
            session = self._session = self._lease()
            key = seat.keys.reader(ref.run, ref.version, inst, self._name, seat.rank)
            reader = Put(key, Reader(0).encode(), session.lease_id)
            ranges = sources.attach_ranges(seat, ref, place, key)
            rule = partial(rules.attach, seat=seat, ref=ref, place=place, reader=reader)
            steps, check = settle(self.deadline.what, ranges, rule), partial(self._check, session)
            try:
                return run(steps, self.seating.kv, self.deadline, check=check)
            except _LeaseEnded:
                self.deadline.check("the lease of its reader record has ended")

    def _check(self, session: Session) -> None:
        self.deadline.check_open()
        if not session.is_valid():
            raise _LeaseEnded

    def _lease(self) -> Session:
        while True:
            try:
                return Session(
                    self.seating.kv,
                    ttl_s=self.seating.applicant.ttl_s,
                    on_lost=lambda _: None,
                    name=replica_of(self._name),
                )
            except StoreUnavailable as error:
                self.deadline.check(str(error))
                time.sleep(RETRY_S)

    def detach(self, place: str, lost: SourceLost) -> None:
        self.lose([place], lost.what, has_failed=not lost.is_orderly)

    def lose(self, places: Sequence[str], reason: str, *, has_failed: bool = True) -> None:
        """Leave sources; if they have failed, others shall prefer another for a while.

        Those that have only stopped serving, as trainers do, are no worse the next time.
        """
        self.end()
        self._tally.reroutes += 1
        if not has_failed:
            return
        with suppress(TorchRosError):  # load, not safety
            self.suspect(map(inst_at, places), reason)

    def end(self) -> None:
        """Take the reader record back, if there is one: nothing is read, nor in flight."""
        self.attached.clear()
        if self._session is not None:
            self._session.close()
            self._session = None


class _LeaseEnded(Exception):
    pass
