"""`/ready/MODEL/REPLICA` over HTTP: what `torch-ros ready` says, for servers on its host."""

# feature installs {
import json
import math
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from urllib.parse import parse_qsl, unquote

from torch_ros import environment
from torch_ros.errors import BackendError, TorchRosError, UsageError
from torch_ros.features.installs import ready
from torch_ros.features.installs.ready import Probe, ReadyAnswer
from torch_ros.fleet.fleet import Fleet, fleet_ranges
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.records import VersionRef
from torch_ros.store.kv import KV
from torch_ros.store.txn import Read

FORM = (
    "/ready/MODEL/REPLICA, perhaps with ?version=V or ?behind=K, a whole number from 0; "
    "names are percent-encoded, a slash in one as %2F"
)
READY, MALFORMED, NOT_READY = 200, 400, 503
ANSWER_S = 0.5  # of etcd, without which an engine is ready
FRESH_S = 1.0  # for so long etcd's answer is kept: anybody may ask, and as often as he likes

Newest = Callable[[], VersionRef | None]  # it asks etcd

_asking = threading.Lock()  # etcd is asked one question at a time
_answers: dict[tuple[str, str], tuple[float, VersionRef | BackendError | None]] = {}


def ready_page(target: str, *, endpoint: str = "") -> tuple[int, str]:
    """Answer `GET /ready/MODEL/REPLICA`, for a server of yours on the host of an engine.

    It decides as `torch-ros ready` does, and reads this user's files on this host, of whatever
    replica is named: 200 if it is ready, else 503, also for a name that nobody here has. It may
    wait a second for etcd if it is asked with `?behind=K`, and needs no etcd otherwise.

    Args:
        target: The path of the request and its query, percent-encoded as they came.
        endpoint: Of the etcd; "": where `TORCH_ROS_ENDPOINT` says.

    Returns:
        The status, and JSON with `is_ready`, `version` and `reason`. 400: a target of another form.
    """
    where = endpoint or environment.value(environment.ENDPOINT) or "local"
    return answer(target, lambda probe: partial(_lately, where, probe.model))


def answer(target: str, knows: Callable[[Probe], Newest | None]) -> tuple[int, str]:
    """As `ready_page`.

    Args:
        knows: How the newest version of a model is found out; None: this server tells nothing of
            that replica, as if nobody here had its name.
    """
    try:
        probe = _probe(target)
    except UsageError as error:
        return MALFORMED, _json(ReadyAnswer(None, str(error)))
    try:
        newest = knows(probe)
        told = ready.all_told(probe.model, probe.replica) if newest else []
        found = ready.decide(probe, list(map(ready.shown, told)), newest or (lambda: None))
    except (OSError, TorchRosError) as error:
        return NOT_READY, _json(ReadyAnswer(None, str(error).partition(":")[0]))
    return NOT_READY if found.reason else READY, _json(found)


def _lately(endpoint: str, model: str) -> VersionRef | None:
    """As `newest_at`, whose answer or failure holds for `FRESH_S`."""
    with _asking:
        asked_s, found = _answers.get((endpoint, model), (-math.inf, None))
        if time.monotonic() - asked_s >= FRESH_S:
            try:
                found = newest_at(endpoint, model)
            except BackendError as error:
                found = error
            _answers[endpoint, model] = time.monotonic(), found
    if isinstance(found, BackendError):
        raise found
    return found


def newest_at(endpoint: str, model: str) -> VersionRef | None:
    """As `newest_in`, of a store that is not started for this."""
    return Fleet.at(model, endpoint=endpoint, timeout_s=ANSWER_S).latest


def newest_in(kv: KV, model: str) -> VersionRef | None:
    """The newest version that is offered.

    Raises: BackendError: The store does not say within `ANSWER_S`.
    """
    keys = Keys(model)
    return Fleet.of(kv.read(Read(fleet_ranges(keys)), timeout_s=ANSWER_S), keys).latest


def _json(found: ReadyAnswer) -> str:
    reason = found.reason or found.doubt.partition(":")[0]  # etcd's address is not for everybody
    values = {"is_ready": not found.reason, "version": found.version, "reason": reason}
    return json.dumps(values)


def _probe(target: str) -> Probe:
    path, _, query = target.partition("?")
    parts = path.rstrip("/").split("/")
    options = parse_qsl(query, keep_blank_values=True)
    is_known = all(name in {"version", "behind"} for name, _ in options)
    is_whole = all(re.fullmatch("[0-9]{1,20}", number) for _, number in options)
    is_named = len(parts) == 4 and parts[:2] == ["", "ready"] and all(parts[2:])
    if not (is_named and is_known and is_whole and len(options) <= 1):
        raise UsageError(f"expected {FORM}")
    model, replica = map(unquote, parts[2:])
    return Probe(model, replica, **{name: int(number) for name, number in options})


# } installs
