"""Every exception torch_ros raises on purpose, grouped by what the caller does next.

* TorchRosError
  * UsageError         fix the call; retrying cannot help        (also ValueError)
    * ManifestMismatch   tensors disagree with the version, or with what the caller asked for
    * VersionConflict    the version number cannot be published: a newer one exists
    * ContractBroken     published tensors were written to before they were unpublished
    * ContentChanged     what was read was written to before it was to be served
    * CallMismatch       the ranks of a group called different things
    * NotSupported       a documented option that this release does not have yet
    * RequestTooLarge    a record that is larger than etcd takes
  * NotAvailable       wait, or ask for another version           (also LookupError)
    * VersionNotFound
    * LoanRefused        the version is there, and its lender lends no more now
    * DeadlineExceeded   carries the last reason for waiting      (also TimeoutError)
  * PeerError          another process failed and nothing else was left to try
    * TransferFailed     one transfer between two agents
    * SourceLost         a replica vanished while it was read
    * CorruptWeights     what was read is not what was published
    * CorruptDelta       a delta that was read is not what was made
    * LoanBroken         what was borrowed was written over before it was given back
    * CallAborted        another rank of this group gave up on the call
      * CutOff             it has no etcd, and did not wait for that
    * InstallRejected    a rank of this group could not install a version
  * SeatLost           this process lost its place, and takes it again: call again later
    * Fenced             for good: close the handle and open a new one
  * BackendError       etcd, the fabric or an object store did not answer
    * StoreUnavailable
      * StoreAlarm         it answers, and refuses requests until somebody mends it
    * AccessDenied       TLS, the user or its role; the field `what` says which
    * Contention
    * BucketError        an object store refuses, or does not answer
      * UnreadableVersion  what it should have is gone, or has other bytes
  * FolderError        a folder or file of this host cannot be written
  * UntrustedObject    an object that is more than plain values and tensors
  * ClosedError        used after close(), or in a forked child

DCP sends exceptions between ranks with pickle, and a group call records them in etcd. Fields are
therefore plain (str, int, float), and ``args`` has all of them in the order of the constructor,
also where they were given by name; the message is built from them in ``__str__``.
"""

from dataclasses import dataclass
from typing import Self

from torch_ros.printable import printable


def reason(error: BaseException) -> BaseException:
    """Why `dcp.save` or `dcp.load` failed: the error of the lowest rank that raised one.

    DCP puts the errors of all ranks into one CheckpointException, and six frames of its own around
    each. Any other error is its own reason.
    """
    failures = getattr(error, "failures", None)
    if not failures:
        return error
    first: BaseException = failures[min(failures)][0]
    return first


class TorchRosError(Exception):
    """Base class: ``except TorchRosError`` catches all of ours and nothing else."""

    _message = ""  # for `str.format`; it may name the fields

    def __post_init__(self) -> None:
        """Keep all fields as `args`, where Python puts only those that were given by position."""
        self.args: tuple[str | float, ...] = tuple(vars(self).values())

    def __str__(self) -> str:
        return printable(self._said())

    def _said(self) -> str:
        return self._message.format(self=self) if self._message else super().__str__()


class UsageError(TorchRosError, ValueError):
    """The request can never succeed as made."""


class NotAvailable(TorchRosError, LookupError):
    """Not there now; may be there later."""


class PeerError(TorchRosError):
    """Another process failed."""


@dataclass(eq=False, repr=False)
class SeatLost(TorchRosError):
    """This replica lost its place in the store, and takes it again by itself. Call again later.

    Its processes take their seats again as soon as all of them can reach etcd. `unpublish` gives
    the tensors back meanwhile: bytes that readers get after it has returned do not count for them.
    """

    _message = (
        "replica {self.replica!r} is no longer part of the store: {self.reason}; {self.way_out}"
    )
    way_out = "it takes its place again by itself once all its ranks are back; call again later"

    replica: str
    reason: str


@dataclass(eq=False, repr=False)
class Fenced(SeatLost):
    """This replica lost its place for good: close this handle and open a new one.

    Another start of the replica has taken its name, or a peer closed its handle (`is_orderly`).
    `unpublish` still gives the tensors back.
    """

    way_out = "close this handle and open a new one"

    is_orderly: bool = False


class BackendError(TorchRosError):
    """etcd, the fabric or an object store did not answer."""


class ClosedError(TorchRosError):
    """Used after ``close()``, or in a child of ``fork()``."""


@dataclass(eq=False, repr=False)
class ManifestMismatch(UsageError):
    """Tensors disagree with the version they are published as, or read from."""

    _message = "{self.what}: expected {self.expected}, found {self.found}; {self.advice}"

    what: str
    expected: str
    found: str
    advice: str


@dataclass(eq=False, repr=False)
class VersionConflict(UsageError):
    """Versions only grow within a run, and one number never means two contents."""

    _message = (
        "model {self.model!r}: version {self.version} cannot be published in run "
        "{self.run!r}: {self.reason}; publish a higher number, or open the handle with "
        "run='new' to start over after a rollback"
    )

    model: str
    version: int
    run: str
    reason: str


@dataclass(eq=False, repr=False)
class ContractBroken(UsageError):
    """Published tensors were written to before they were unpublished.

    Readers may have got a mixture. The version is no longer offered. `unpublish` also withdraws it,
    so that no replica passes it on.
    """

    _message = (
        "version {self.version} was overwritten while it was published: {self.reason}; it is "
        "unpublished now; {self.advice}"
    )

    version: int
    reason: str
    advice: str


@dataclass(eq=False, repr=False)
class ContentChanged(UsageError):
    """Tensors that were read are not what they were, and so are not served. Nothing is offered."""

    _message = (
        "version {self.version} is not served: tensor {self.fqn!r} is not what was read; something "
        "has written to it since (a step in place after the load, a merged adapter); read it "
        "again, and serve it before anything writes"
    )

    version: int
    fqn: str


@dataclass(eq=False, repr=False)
class CallMismatch(UsageError):
    """The ranks of a group must make the same calls in the same order."""

    replica: str
    call: int
    asked: str  # by `rank`
    decided: str  # by the ranks that came first
    rank: int = -1  # that found the mismatch; -1: the one that raises this
    behind: int = 0  # how many more calls its peers have made

    def _said(self) -> str:
        who = f"rank {self.rank}" if self.rank >= 0 else "this rank"
        calls = "call" if self.behind == 1 else "calls"
        behind = f", {self.behind} {calls} behind them" if self.behind else ""
        return (
            f"call {self.call} of replica {self.replica!r} is {self.decided!r} for the ranks that "
            f"came first, but {who} calls {self.asked!r}{behind}: all ranks must make the same "
            "calls in the same order. Look for a call that only some ranks make, or that raised on "
            "one of them. If this goes on, close and reopen the handles of all ranks"
        )


@dataclass(eq=False, repr=False)
class NotSupported(UsageError):
    """A documented option that this release does not have yet."""

    _message = "{self.what} is not supported in this release; {self.advice}"

    what: str
    advice: str


@dataclass(eq=False, repr=False)
class RequestTooLarge(UsageError):
    """etcd refused a request for its size. Nothing was applied."""

    _message = (
        "etcd at {self.endpoint} refused a request as too large: {self.size_bytes} bytes are for "
        "{self.key!r}; it takes 1.5 MiB in all, unless it is started with more "
        "--max-request-bytes"
    )

    endpoint: str
    key: str  # the largest
    size_bytes: int


@dataclass(eq=False, repr=False)
class VersionNotFound(NotAvailable):
    """No replica holds this version whole."""

    _message = "model {self.model!r} has no readable version {self.version}: {self.reason}"

    model: str
    version: str
    reason: str


@dataclass(eq=False, repr=False)
class LoanRefused(NotAvailable):
    """A replica has the version in memory that it may lend, and lends no more of it now."""

    _message = (
        "version {self.version} of model {self.model!r} is not lent by replica {self.replica!r}: "
        "{self.reason}; borrow the next version, replicate this one, or {self.advice}"
    )

    model: str
    version: int
    replica: str
    reason: str
    advice: str


@dataclass(eq=False, repr=False)
class DeadlineExceeded(NotAvailable, TimeoutError):
    """The call's ``timeout_s`` ran out; `reason` is what it last waited for."""

    _message = "{self.what} did not finish within {self.timeout_s:g} s: {self.reason}"

    what: str
    timeout_s: float
    reason: str


@dataclass(eq=False, repr=False)
class TransferFailed(PeerError):
    """Bytes could not be read from another agent."""

    _message = "reading from agent {self.agent!r}: {self.reason}"

    agent: str
    reason: str


@dataclass(eq=False, repr=False)
class SourceLost(PeerError):
    """A source vanished while it was read, and no other was left.

    Bytes that were read so far are in the target tensors; treat their content as undefined.
    """

    is_orderly = False  # it has only stopped serving: nothing failed, so nobody suspects it

    _message = (
        "lost replica {self.replica!r} ({self.what}){self.progress}, and no other replica has the "
        "version; call again later"
    )

    replica: str
    what: str
    bytes_done: int = 0
    bytes_total: int = 0  # 0: it was lost before it was known how much there is to read

    @property
    def progress(self) -> str:
        """How far the read was; "" if who found the loss does not count bytes."""
        return f" after {self.bytes_done} of {self.bytes_total} bytes" if self.bytes_total else ""

    def orderly(self) -> Self:
        self.is_orderly = True
        return self


@dataclass(eq=False, repr=False)
class CorruptWeights(PeerError):
    """Digests disagree: what this replica read is not what was published.

    Other sources were tried. The tensors' content is undefined; nothing is held.
    """

    _message = (
        "tensor {self.fqn!r} of model {self.model!r} version {self.version}, {self.origin}, "
        "is not what was published; publish a new version, and look "
        "for tensors that are written to while published (open with check_contract=True)"
    )

    model: str
    version: int
    fqn: str
    source: str  # "": deltas have brought a part, and what they were applied to may be wrong

    @property
    def origin(self) -> str:
        return f"read from replica {self.source!r}" if self.source else "brought by deltas"


@dataclass(eq=False, repr=False)
class CorruptDelta(PeerError):
    """A delta contradicts itself, its digest, or the chunk that it was made of.

    Found before any of it was applied: read the version in full.
    """

    _message = (
        "{self.what}: expected {self.expected}, found {self.found}; nothing of it was applied: "
        "read the version in full"
    )

    what: str
    expected: str
    found: str


@dataclass(eq=False, repr=False)
class LoanBroken(PeerError):
    """A borrowed copy was written over before the block was left: its lock was lost, as by a fork.

    Bytes that were used inside the block may be a mixture of two versions.
    """

    _message = (
        "version {self.version} of model {self.model!r}, borrowed from replica {self.replica!r}, "
        "was written over before it was given back; do not use what was computed from it, and "
        "borrow again; use one release of torch_ros for all processes of a model"
    )

    model: str
    version: int
    replica: str


@dataclass(eq=False, repr=False)
class CallAborted(PeerError):
    """Another rank of this group failed for a reason of its own, so the call failed for all."""

    _message = (
        "{self._what} of replica {self.replica!r} was given up by rank {self.rank}: {self.reason}"
    )

    replica: str
    call: int  # 0: `open`
    rank: int
    reason: str

    @property
    def _what(self) -> str:
        return f"call {self.call}" if self.call else "open"


class CutOff(CallAborted):
    """The rank is cut off from etcd and did not wait for it, as `store_wait_s` allows."""

    def __init__(self, replica: str, call: int, rank: int, /) -> None:
        super().__init__(replica, call, rank, "it is cut off from etcd, and does not wait")
        self.args = (replica, call, rank)


@dataclass(eq=False, repr=False)
class InstallRejected(PeerError):
    """A rank of this group failed within `installing`. The replica is active at no version.

    The engine's weights may be a mixture. Install again; if the old weights are intact, or back,
    say so by an empty block: `with handle.installing(old): pass`.
    """

    _message = (
        "version {self.version} was not installed in replica {self.replica!r}: rank {self.rank}: "
        "{self.reason}; install it again, or bring the old weights back and install those"
    )

    replica: str
    version: int
    rank: int
    reason: str


REFUSED = "connection refused"
NO_ANSWER = "no answer"
NO_LEADER = "no leader"


@dataclass(eq=False, repr=False)
class StoreUnavailable(BackendError):
    """etcd did not answer, or refused. A commit that was sent may have been applied."""

    endpoint: str
    timeout_s: float
    reason: str

    def _said(self) -> str:
        if self.reason == NO_LEADER:
            return (
                f"etcd at {self.endpoint} has no leader: more than half of its members have to "
                "run and to reach one another"
            )
        found = f"did not answer ({self.reason})"
        if self.reason == NO_ANSWER:
            found = f"did not answer within {self.timeout_s:g} s"
        elif self.reason == REFUSED:
            found = "refused the connection"
        return f"etcd at {self.endpoint} {found}; check that it runs and that the endpoint is right"


class StoreAlarm(StoreUnavailable):
    """etcd has an alarm: it refuses requests until somebody has mended it. Leases are renewed."""

    _ways_out = {  # noqa: RUF012  # never written to
        "NOSPACE": "its database is full: compact and defragment it, then `etcdctl alarm disarm`",
        "CORRUPT": "its members have different data: replace the odd one (`etcdctl endpoint "
        "hashkv`), then `etcdctl alarm disarm`",
    }

    alarm: str  # "NOSPACE" or "CORRUPT"

    def __init__(self, endpoint: str, alarm: str, /) -> None:
        super().__init__(endpoint, 0.0, f"its alarm {alarm}")
        self.args, self.alarm = (endpoint, alarm), alarm

    @property
    def advice(self) -> str:
        way_out = self._ways_out.get(self.alarm, "look at its log")
        return f"{way_out} (docs/OPERATIONS.md, An etcd that refuses)"

    def _said(self) -> str:
        return f"etcd at {self.endpoint} refuses requests, by its alarm {self.alarm}: {self.advice}"


@dataclass(eq=False, repr=False)
class AccessDenied(BackendError):
    """etcd does not let this process in, or is not the etcd that it should be.

    `what` is "server certificate", "client certificate", "user" or "role".
    """

    _message = "no access to etcd at {self.endpoint}: {self.what}: {self.reason}; {self.advice}"

    endpoint: str
    what: str
    reason: str
    advice: str


@dataclass(eq=False, repr=False)
class Contention(BackendError):
    """Every attempt lost its race."""

    _message = "{self.what} lost {self.attempts} races in a row; call again"

    what: str
    attempts: int


@dataclass(eq=False, repr=False)
class BucketError(BackendError):
    """An object store did not do as asked.

    `key` counts from the URL; "" stands for all of it.
    """

    _message = "bucket {self.url}: {self.key!r}: {self.reason}; {self.advice}"

    url: str
    key: str
    reason: str
    advice: str


class UnreadableVersion(BucketError):
    """An object of a version is gone, or has other bytes than were archived: it stays so."""


@dataclass(eq=False, repr=False)
class FolderError(TorchRosError):
    """A folder, or a file in it, cannot be written: the disk is full, or this user may not."""

    _message = "{self.folder}: {self.reason}; {self.advice}"

    folder: str
    reason: str
    advice: str


@dataclass(eq=False, repr=False)
class UntrustedObject(TorchRosError):
    """An object in a version takes more than plain values and tensors, or costs too much."""

    _message = (
        "object {self.fqn!r} was refused ({self.reason}); "
        "if you trust every process that publishes this model, pass "
        "ROSReader(..., trust_objects=True)"
    )

    fqn: str
    reason: str
