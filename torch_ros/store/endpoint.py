"""From the text that says where the store is to the `KV` that it means."""

import logging
import re
import time
from urllib.parse import parse_qsl

from torch_ros import environment
from torch_ros.errors import REFUSED, StoreUnavailable, UsageError
from torch_ros.local import etcd as local
from torch_ros.printable import log_of
from torch_ros.store.credentials import Tls, User
from torch_ros.store.etcd import EtcdKV
from torch_ros.store.kv import KV
from torch_ros.store.txn import Read

log: logging.Logger = log_of(__name__)

ANSWER_S_MAX = 10.0
RETRY_S = 0.2
HOST = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})")
FORMS = '"etcd://host:port[,host:port]", with TLS "etcds://...", "local" or "memory://[name]"'
# What may stand behind the hosts, as in "?ca=/etc/ca.pem&user=me", or else in the environment.
OPTIONS = {
    "ca": environment.ETCD_CA,
    "cert": environment.ETCD_CERT,
    "key": environment.ETCD_KEY,
    "user": environment.ETCD_USER,
    "password_file": environment.ETCD_PASSWORD_FILE,
}
TLS_OPTIONS = ("ca", "cert", "key")


def located(endpoint: str) -> str:
    """Where `endpoint` is, for those who start none: "local" is this user's etcd on this host.

    Raises: StoreUnavailable: None runs.
    """
    if endpoint != "local":
        return endpoint
    running = local.running()
    if running is None:
        raise StoreUnavailable("local", 0.0, "no etcd of this user runs on this host")
    return f"etcd://{running.host}"


def connect(endpoint: str, *, timeout_s: float) -> KV:
    """The store at `endpoint`; it has answered, and knows the user if there is one.

    `docs/OPERATIONS.md` ("Endpoints") has the forms of `endpoint`. "local" is started if it does
    not run.

    Raises:
        UsageError: `endpoint` is none of these, names a file that cannot be used, or there is no
            etcd to start.
        AccessDenied: A certificate, the user or the password is wrong.
        StoreUnavailable: Nothing answered within `timeout_s`, or 10 s unless it is "local", or not
            as etcd does; or nobody listened there for all of `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    kv = opened(endpoint, timeout_s)
    # The one on this host has just answered; however slow it is, nobody else is meant.
    answer_s = timeout_s if endpoint == "local" else ANSWER_S_MAX
    try:
        _await_answer(kv, deadline, answer_s)
    except BaseException:
        kv.close()
        raise
    return kv


def _await_answer(kv: KV, deadline: float, answer_s: float) -> None:
    """Ask; again while nobody listens: etcd may be started together with those who need it."""
    is_told = False
    while True:
        left_s = deadline - time.monotonic()
        try:
            # Nothing is read: a role may be limited to a prefix that is not known here.
            kv.read(Read(()), timeout_s=min(max(left_s, RETRY_S), answer_s))
        except StoreUnavailable as error:
            if error.reason != REFUSED or left_s < RETRY_S:
                raise
            if not is_told:
                log.warning("%s; waiting for it, at most %.0f s", error, left_s)
            is_told = True
            time.sleep(RETRY_S)
        else:
            return


def opened(endpoint: str, timeout_s: float = 0.0) -> KV:
    """The store at `endpoint`, as of `connect`, but nothing there is asked; "local" is started."""
    if endpoint == "local":
        return EtcdKV([local.ensure(timeout_s)])
    scheme, _, rest = endpoint.partition("://")
    hosts, _, query = rest.partition("?")
    if scheme in {"etcd", "etcds"} and "@" in hosts:
        raise UsageError(
            "a user and password do not belong into an endpoint, which ends up in logs; set "
            f"{OPTIONS['user']} and {OPTIONS['password_file']}"
        )
    if scheme in {"etcd", "etcds"} and all(map(_is_host, hosts.split(","))):
        return _open_etcd(hosts.split(","), query, is_tls=scheme == "etcds")
    if endpoint.startswith("memory://"):
        from torch_ros.memory.store import named  # noqa: PLC0415  # nobody else needs it

        return named(rest)
    # What stands before an @, or behind a ?, may be a password.
    found = re.sub(r".*@", "...@", endpoint, flags=re.DOTALL)
    found = re.sub(r"\?.*", "?...", found, flags=re.DOTALL)
    raise UsageError(f"the endpoint is {found!r}; it has to be {FORMS}{_meant(endpoint)}")


def _meant(endpoint: str) -> str:
    """The endpoint that was meant by the forms in which others name an etcd."""
    scheme, _, hosts = endpoint.rpartition("://")
    if scheme not in {"", "http", "https"} or not all(map(_is_host, hosts.split(","))):
        return ""
    return f"; did you mean etcd{'s' if scheme == 'https' else ''}://{hosts}?"


def _open_etcd(hosts: list[str], query: str, *, is_tls: bool) -> EtcdKV:
    """The store of these hosts; its options are in the query, or else in the environment."""
    named = dict(parse_qsl(query, keep_blank_values=True))
    if not named.keys() <= OPTIONS.keys():  # not repeated: it may be a password
        raise UsageError(f"the endpoint has an option that is none of {', '.join(OPTIONS)}")
    if not is_tls and any(name in named for name in TLS_OPTIONS):
        raise UsageError("the endpoint names certificates and not TLS; write etcds://")
    value = {name: named.get(name) or environment.value(OPTIONS[name]) for name in OPTIONS}
    tls = Tls(value["ca"], value["cert"], value["key"]) if is_tls else None
    if bool(value["user"]) != bool(value["password_file"]):
        raise UsageError(
            "a user of etcd and the file with its password belong together, and only one of them "
            f"was named; set both of {OPTIONS['user']} and {OPTIONS['password_file']}, or neither"
        )
    user = User(value["user"], value["password_file"]) if value["user"] else None
    kv = EtcdKV(hosts, tls=tls, user=user)
    if user and not tls:
        log.warning("the password of user %r goes to %s unencrypted", user.name, kv.endpoint)
    return kv


def _is_host(text: str) -> bool:
    found = HOST.fullmatch(text)
    return found is not None and 0 < int(found[2]) < 65536
