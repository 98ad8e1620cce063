"""A connection to etcd: channels, TLS, users, and the reasons of errors. Decides nothing.

The only module that imports grpc.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from random import uniform
from typing import Any, NoReturn

import grpc  # type: ignore[import-untyped]

from torch_ros.errors import (
    NO_ANSWER,
    NO_LEADER,
    REFUSED,
    AccessDenied,
    ClosedError,
    RequestTooLarge,
    StoreAlarm,
    StoreUnavailable,
    UsageError,
)
from torch_ros.printable import log_of
from torch_ros.store import forking, member
from torch_ros.store.aside import Aside
from torch_ros.store.credentials import Tls, User, bytes_of, pem_of
from torch_ros.store.member import HAS_LEADER, A, Member, Metadata, Method, Status
from torch_ros.store.txn import (
    Changes,
    Entry,
    Follow,
    NoneNewer,
    Range,
    Read,
    Reply,
    T,
    Txn,
    View,
    Watch,
)

log: logging.Logger = log_of(__name__)

CHANNEL_OPTIONS = (
    # A proxy that the environment names for the web does not know the hosts of a cluster.
    ("grpc.enable_http_proxy", 0),
    # An etcd that restarts is found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 2000),  # despite its name: what one attempt may take
    # A host that vanished is noticed in 8 s. etcd disconnects clients that ping more often than
    # every 5 s, or without an open call.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),  # without it, a minute instead
    ("grpc.http2.max_pings_without_data", 0),
    # Whether a request that was lost may be sent again is not for grpc to decide.
    ("grpc.enable_retries", 0),
    # Replies are bounded by etcd's quota; grpc's own 4 MiB would cut large ranges off.
    ("grpc.max_receive_message_length", -1),
)
# etcd ends a stream at the deadline too, with another code and sometimes a little earlier.
WATCH_SLACK_S = 0.05
WATCH_BEGINS_S = 1.0  # a member that has not begun to watch by then is away

# Between two looks whether there is a leader; then twice, four and eight times that. An election
# takes a second or two, and thousands of processes must not disturb it.
ELECTION_S, DOUBLED_MAX = 0.1, 3

CLOSE_S = 2.0  # for grpc to end what is under way; then it is left to its threads

LOGINS_MAX = 3  # in one call: tokens end by themselves, and with some changes of users and roles
# What etcd says when it wants a token, or another one. Nothing was applied then.
TOKEN_REFUSED = ("invalid auth token", "user name is empty", "revision of auth store is old")
# What is said of a request that nobody has applied: no member could be connected to, or only one
# that does not vote yet, or has lost the others. Another member may do it.
NOT_SENT = (
    NO_LEADER,
    "failed to connect to all addresses",
    "DNS resolution failed",
    "errors resolving",
    "not supported for learner",
)
# What etcd refuses all requests with, or all that write, while it goes on renewing leases.
ALARMS = (("database space exceeded", "NOSPACE"), ("corrupt cluster", "CORRUPT"))
TOO_LARGE = ("request is too large", "received message larger than max")
# etcd has understood the request, so another member would say the same.
ANSWERS = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)
SILENCES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
REASONS = (
    ("Connection refused", REFUSED),
    ("errors resolving|DNS resolution failed", "the host name is not known"),
    ("Hostname Verification", "it is for another host name"),
    # Whoever hangs up with bytes of ours unread resets the connection; so the handshake is first.
    ("Handshake read failed|WRONG_VERSION_NUMBER", "it hangs up; does it speak TLS?"),
    (
        "failed to connect.*(Socket closed|recvmsg:Connection reset)",
        "it hangs up; does it want TLS (etcds://)?",
    ),
    ("Connection reset", "connection reset"),
    ("for learner", "a learner, which takes no requests; name a voting member"),
    ("context deadline exceeded", NO_ANSWER),
    (NO_LEADER, NO_LEADER),
    ("too many requests", "it has too many requests under way"),
    ("ping timeout", "no answer"),
    # Its host connects for a program that is stopped, too.
    ("before receiving SETTINGS frame", "it takes connections and says nothing; does it hang?"),
    ("SETTINGS frame|Received http2 header", "something answered, but it is not etcd v3"),
)

SERVER, CLIENT = "server certificate", "client certificate"
NOW = 0  # as the start of a watch


class EtcdKV:
    """A `KV` in etcd, over one connection at a time. Not usable in a child of ``fork()``.

    Args:
        hosts: "host:port" of members of one cluster. One is used for as long as it answers, then
            the next. No request is sent to two of them, unless it certainly never left.
        tls: For etcd's TLS; without it nothing is encrypted.
        user: Logs in with the first request, and again whenever etcd forgets that it did.

    Raises: UsageError: A file that `tls` names cannot be read, or used; or this process was forked
        while its parent was within gRPC.
    """

    tls: Tls | None

    def __init__(
        self, hosts: Sequence[str], *, tls: Tls | None = None, user: User | None = None
    ) -> None:
        self.endpoint: str = ("etcds://" if tls else "etcd://") + ",".join(hosts)
        self.tls, self._user = tls, user
        self._pid = os.getpid()
        self._is_closed = False
        self._token: str | None = None  # "": etcd has no users
        self._was_in = False  # logged in, once
        self._login = threading.Lock()
        self._aside = Aside(f"torch_ros asks {self.endpoint}")
        # A channel each: grpc would check the certificates of all for the name of one of them,
        # and would stay with a member that answers but has lost the others.
        forking.begin(self)
        self._members = self._aside.run(partial(_members, hosts, tls))
        self._current = 0

    def read(self, request: Read, *, timeout_s: float) -> View:
        return self._call(Member.read, request, timeout_s)

    def commit(self, txn: Txn, *, timeout_s: float) -> Reply:
        try:
            return self._call(Member.commit, txn, timeout_s)
        except _LeaseEndedError:  # so nothing was applied
            return Reply(applied=False, rev=self.read(Read(()), timeout_s=timeout_s).rev)

    def wait(self, watch: Watch, *, timeout_s: float) -> bool:
        # etcd goes through its past for a new watch only every 100 ms, and tells it nothing before.
        # So each range is watched from now on too; what came before that `_wait` asks for.
        starts = [(range_, rev) for rev in (NOW, watch.after_rev + 1) for range_ in watch.ranges]
        return self._watched(partial(self._wait, watch, starts, timeout_s, lambda _: True))

    def follow(self, request: Follow, *, timeout_s: float) -> Changes | None:
        """The changes that one watch tells of; None: it broke, and may have missed some."""
        ranges, rev = request.ranges, request.after_rev
        news: dict[str, Entry | None] = {}

        def is_news(events: Sequence[Any]) -> bool:
            nonlocal rev
            for event in events:
                key, rev, entry = member.changed(event)
                if any(key in range_ for range_ in ranges):
                    news[key] = entry
            return bool(news)

        # One watch, over all that lies between them: the events of several have no common order.
        # Those of one revision come together.
        all_ = Range(min(r.start for r in ranges), max(r.end for r in ranges))
        watch = Watch((all_,), rev, request.reason)
        is_over = self._watched(partial(self._wait, watch, [(all_, rev + 1)], timeout_s, is_news))
        return None if is_over and not news else Changes(rev, news)

    def _watched(self, wait: Callable[[_Watching], bool]) -> bool:
        """Have `wait` done aside; where Ctrl-C ends the call here, end the watch there, too."""
        self._check_open()
        watching = _Watching()

        def waits() -> bool:
            with forking.within(is_watch=True):
                return wait(watching)

        try:
            return self._aside.run(waits)
        except BaseException as error:
            if not isinstance(error, Exception):  # raised by a signal handler, here
                self._aside.leave(watching.end)
            raise

    def _wait(
        self,
        watch: Watch,
        starts: Sequence[tuple[Range, int]],
        timeout_s: float,
        is_enough: Callable[[Sequence[Any]], bool],
        watching: _Watching,
    ) -> bool:
        """Follow a watch until some events are enough, or for a reason to look again.

        False: time is over. `starts`: each range, and the revision from which on it is watched.
        """
        deadline = time.monotonic() + timeout_s
        index, created = self._current, 0
        try:
            token = self._log_in(deadline)
            call = self._members[index].watch(starts, timeout=timeout_s, metadata=_metadata(token))
            for reply in watching.begin(call):
                if reply.canceled and not reply.compact_revision:
                    # Perhaps for want of a token or a role; then this renews the one, or raises.
                    self._has_newer(watch, timeout_s=max(1.0, deadline - time.monotonic()))
                    return True
                # A store that was wiped counts from 1 again: its events would come much too late.
                rev = reply.header.revision
                is_over = reply.canceled or rev < watch.after_rev
                if is_over or (not reply.created and is_enough(reply.events)):
                    return True
                created += reply.created
                # The last of several watches has begun; the one of `follow` tells all by itself.
                has_begun = reply.created and 1 < created == len(starts)
                is_late = has_begun and rev > watch.after_rev  # something came before `NOW`
                if is_late and self._has_newer(watch, timeout_s=deadline - time.monotonic()):
                    return True
        except grpc.RpcError as error:
            self._check_open()
            is_over = time.monotonic() >= deadline - WATCH_SLACK_S
            if not is_over or (timeout_s > WATCH_BEGINS_S and created < len(starts)):
                self._note(index, error)  # it failed, or has not even begun to watch
            return not is_over
        except ValueError:
            self._check_open()  # as in `_call`
            raise
        except StoreUnavailable:
            return True  # of the login; whoever looks again is told the same
        finally:
            watching.end()
        return True

    def grant(self, ttl_s: int, *, timeout_s: float) -> tuple[int, int]:
        return self._call(Member.grant, ttl_s, timeout_s)

    def keep_alive(self, lease_id: int, *, timeout_s: float) -> int:
        granted_s = self._call(Member.keep_alive, lease_id, timeout_s)
        if granted_s is None:
            raise StoreUnavailable(self.endpoint, timeout_s, "the stream ended without an answer")
        return granted_s

    def revoke(self, lease_id: int, *, timeout_s: float) -> None:
        with contextlib.suppress(_LeaseEndedError):
            self._call(Member.revoke, lease_id, timeout_s)

    def status(self, *, timeout_s: float) -> Status:
        """The member that is asked at present, as it says itself."""
        return self._call(Member.status, None, timeout_s)

    def alarms(self, *, timeout_s: float) -> tuple[str, ...]:
        return self._call(Member.alarms, None, timeout_s)

    def close(self) -> None:
        self._is_closed = True
        # The threads of grpc do not exist in a child of fork(): closing would wait for them.
        if os.getpid() == self._pid and not self._aside.close(self._close_members, CLOSE_S):
            log.info("%s: its connection is not closed after %g s", self.endpoint, CLOSE_S)

    def _close_members(self) -> None:
        with forking.within():
            for each in self._members:
                each.channel.close()
        forking.end(self)

    def _has_newer(self, watch: Watch, *, timeout_s: float) -> bool:
        """Whether something was written after the watch's revision. Deletions do not show."""
        guards = tuple(NoneNewer(range_, watch.after_rev) for range_ in watch.ranges)
        try:
            return not self.commit(Txn(guards), timeout_s=timeout_s).applied
        except StoreUnavailable:
            return True

    # One call

    def _call(self, method: Method[A, T], request: A, timeout_s: float) -> T:
        """Make a request, in a thread that no signal reaches. Its errors are ours."""
        self._check_open()
        try:
            deadline = time.monotonic() + timeout_s
            return self._aside.run(partial(self._send_as_user, method, request, deadline))
        except grpc.RpcError as error:
            self._check_open()
            self._raise(error, request, timeout_s)
        except ValueError:
            self._check_open()  # grpc's error for a channel that another thread just closed
            raise

    def _send_as_user(self, method: Method[A, T], request: A, deadline: float) -> T:
        """Send it with a token; etcd refuses tokens that it forgot, and then has done nothing."""
        logins_left = LOGINS_MAX if self._user else 0
        while True:
            token = self._log_in(deadline)
            try:
                return self._send(method, request, deadline, token)
            except grpc.RpcError as error:
                logins_left -= 1
                if logins_left < 0 or not _says(error, *TOKEN_REFUSED):
                    raise
                if self._token == token:  # else another thread has a new one already
                    self._token = None

    def _send(self, method: Method[A, T], request: A, deadline: float, token: str) -> T:
        """The answer of one member. The next one is asked only if the request never left.

        Otherwise it may have been applied, and would be a second time. As long as one of them says
        that it has no leader, all are asked again, round after round.
        """
        failures: list[grpc.RpcError] = []
        start, everyone = self._current, len(self._members)
        for step in count():  # one member at each
            index = (start + step) % everyone
            left_s = deadline - time.monotonic()
            if failures and left_s <= 0:  # the first is sent: grpc says that its time is over
                break
            try:
                with forking.within():
                    return method(
                        self._members[index], request, timeout=left_s, metadata=_metadata(token)
                    )
            except grpc.RpcError as error:
                self._note(index, error)
                failures = [*failures, error][-everyone:]
                if not _says(error, *NOT_SENT):
                    break
            if index == (start - 1) % everyone:  # a round is over
                if not any(_says(error, NO_LEADER) for error in failures):
                    break
                pause_s = ELECTION_S * 2 ** min(step // everyone, DOUBLED_MAX)
                pause_s *= uniform(0.5, 1.5)  # noqa: S311  # no secret
                time.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))
        raise _telling(failures)

    def _note(self, index: int, error: Any) -> None:
        """Turn to the next member after `error` from this one, if that may help."""
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            # An etcd that was wiped does not refuse a token from its future, but waits for it.
            self._token = None
        if error.code() not in ANSWERS and self._current == index:
            self._current = (index + 1) % len(self._members)

    def _log_in(self, deadline: float) -> str:
        """The token for the next request; "" if there are no users."""
        if self._user is None:
            return ""
        token = self._token
        if token is not None:
            return token
        timeout_s = deadline - time.monotonic()
        if not self._login.acquire(timeout=max(0.0, timeout_s)):
            raise StoreUnavailable(self.endpoint, timeout_s, "another thread logs in")
        try:
            if self._token is None:
                self._token = self._authenticate(self._user, deadline)
            return self._token
        finally:
            self._login.release()

    def _authenticate(self, user: User, deadline: float) -> str:
        """A token; "": etcd has no users.

        A file that is gone after the first login is a denial, after which a session tries again: it
        may just be exchanged.
        """
        try:
            # An error about how it is encoded would have it whole.
            password = bytes_of(user.password_file).decode(errors="replace").rstrip("\r\n")
        except UsageError as error:
            if not self._was_in:
                raise
            advice = "put it back; it is read anew for each login"
            raise AccessDenied(self.endpoint, "user", str(error), advice) from error
        try:
            token = self._send(Member.authenticate, (user.name, password), deadline, "")
        except grpc.RpcError as error:
            if _says(error, "authentication is not enabled"):
                log.warning(
                    "%s has no users, so that everybody may write to it; user %r was not needed",
                    *(self.endpoint, user.name),
                )
                return ""
            if error.code() not in ANSWERS:
                raise
            reason = f"user {user.name!r}, or the password in {user.password_file}, is wrong"
            advice = "check TORCH_ROS_ETCD_USER and TORCH_ROS_ETCD_PASSWORD_FILE"
            raise AccessDenied(self.endpoint, "user", reason, advice) from error
        self._was_in = True
        return token

    # Errors

    def _raise(self, error: Any, request: Any, timeout_s: float) -> NoReturn:
        """Raise ours for grpc's error: the first case that fits, by what a person has to mend."""
        details = error.details() or ""
        match error.code():
            case grpc.StatusCode.NOT_FOUND:
                raise _LeaseEndedError from error
            case grpc.StatusCode.PERMISSION_DENIED:
                raise self._role_denied(request) from error
            case _ if alarm := next((name for sign, name in ALARMS if sign in details), ""):
                raise StoreAlarm(self.endpoint, alarm) from error
            case _ if _says(error, *TOO_LARGE):
                raise RequestTooLarge(self.endpoint, *member.largest(request)) from error
            case _ if _says(error, *TOKEN_REFUSED):
                raise self._user_denied(error) from error
            case grpc.StatusCode.INVALID_ARGUMENT:
                raise UsageError(f"{self.endpoint} refused a request: {details}") from error
            case _ if what := _denial(error):
                raise self._certificate_denied(what, error) from error
            case _:
                raise StoreUnavailable(self.endpoint, timeout_s, _reason(error)) from error

    def _role_denied(self, request: Any) -> AccessDenied:
        who = f"user {self._user.name!r}" if self._user else "the user that the certificate names"
        common = os.path.commonprefix(member.keys(request))  # noqa: RUF071  # keys are not paths
        prefix = common[: common.rfind("/") + 1]
        does, may = ("write", "readwrite") if member.writes(request) else ("read", "read")
        reason = f"{who} may not {does} all keys that begin with {prefix!r}"
        grant = f"etcdctl role grant-permission ROLE --prefix=true {may} {shlex.quote(prefix)}"
        advice = f"{grant} (readwrite, to publish or replicate; docs/SECURITY.md)"
        return AccessDenied(self.endpoint, "role", reason, advice)

    def _user_denied(self, error: Any) -> AccessDenied:
        if self._user:
            reason = f"etcd takes no token of user {self._user.name!r} ({error.details()})"
            advice = "look at etcd's log"
        else:
            reason = "etcd has users, and none was named"
            advice = "set TORCH_ROS_ETCD_USER and TORCH_ROS_ETCD_PASSWORD_FILE"
        return AccessDenied(self.endpoint, "user", reason, advice)

    def _certificate_denied(self, what: str, error: Any) -> AccessDenied:
        tls = self.tls or Tls()
        if what == SERVER:
            reason = f"etcd's is not accepted ({_reason(error)})"
            ca = tls.ca or "the authorities that grpc brings"
            advice = f"expected one for this host, signed by {ca}; check TORCH_ROS_ETCD_CA"
        elif tls.cert:
            reason = f"etcd does not accept {tls.cert} ({_reason(error)})"
            advice = "is it in date, for clients, and of etcd's CA? Check TORCH_ROS_ETCD_CERT"
        else:
            reason = "etcd asks for one, and none was named"
            advice = "set TORCH_ROS_ETCD_CERT and TORCH_ROS_ETCD_KEY"
        return AccessDenied(self.endpoint, what, reason, advice)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"{self.endpoint} was closed")
        if os.getpid() != self._pid:
            raise ClosedError(f"{self.endpoint} was opened before fork(); open it again here")


class _LeaseEndedError(Exception):
    """The lease that a request names has ended; nothing was applied."""


class _Watching:
    """One watch, which another thread may end."""

    def __init__(self) -> None:
        self._call: Any = None
        self._is_over = False

    def begin(self, call: Any) -> Any:
        self._call = call
        if self._is_over:
            call.cancel()
        return call

    def end(self) -> None:
        self._is_over = True
        if self._call is not None:
            self._call.cancel()


def _members(hosts: Sequence[str], tls: Tls | None) -> list[Member]:
    if tls:
        credentials = grpc.ssl_channel_credentials(*pem_of(tls))
        make = partial(grpc.secure_channel, credentials=credentials)
    else:
        make = grpc.insecure_channel
    # Channels of the same options share connections, also one that a child has from its parent.
    options = (*CHANNEL_OPTIONS, ("torch_ros.process", os.getpid()))
    # An unknown name is reported by the first call.
    with forking.within():
        return [Member(make(f"dns:///{host}", options=options)) for host in hosts]


def _metadata(token: str) -> Metadata:
    return (*HAS_LEADER, ("token", token)) if token else HAS_LEADER


def _says(error: Any, *signs: str) -> bool:
    return any(sign in (error.details() or "") for sign in signs)


def _telling(failures: Sequence[Any]) -> Any:
    """The failure that tells a person most: the last one, unless that is only silence.

    Then it is one of a refused certificate, or of a cluster without a leader, if there is one.
    """
    last = failures[-1]
    if last.code() not in SILENCES:
        return last
    lonely = (error for error in failures if _says(error, NO_LEADER))
    return next(filter(_denial, failures), None) or next(lonely, last)


def _denial(error: Any) -> str:
    """Whose certificate the other side refused; "" if it was not that."""
    details = error.details() or ""
    if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification" in details:
        return SERVER
    alert = details.partition("_ALERT_")[2]
    return CLIENT if "CERTIFICATE" in alert or "UNKNOWN_CA" in alert else ""


def _reason(error: Any) -> str:
    details = error.details() or ""
    if found := re.search(r"(?:VERIFY_FAILED: |_ALERT_)([\w ]+)", details):
        return found[1].replace("_", " ").lower()
    for sign, reason in REASONS:
        if re.search(sign, details):
            return reason
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return NO_ANSWER
        case grpc.StatusCode.UNIMPLEMENTED:
            return "something answered, but it is not etcd v3"
        case code:
            return f"{code.name}: {details}"
