"""`Gate`: a server of vLLM answers 503 while its engine has no whole version of its weights.

Start the server with ``--middleware torch_ros.integrations.vllm.gate.Gate``. The engine core
refuses requests by itself once it follows a model; the gate says why, and to ask again, and also
closes for an engine of dummy weights that follows no model yet. GET `/ready/MODEL/REPLICA` says
what `torch-ros ready` says. Imports nothing of vLLM.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import torch_ros
from torch_ros.integrations.vllm.core import EMPTY, FIRST, NO_VERSION, log

Message = MutableMapping[str, Any]  # of ASGI; and so below
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

WAIT_S = 1.0  # for the engine to say what it has; within an update it says nothing
FRESH_S = 5.0  # how long an answer counts: another server may have updated the engine

# POSTs after which the engine may have other weights, or another name for them. All that is in
# neither list is gated, so that a path of a newer vLLM is, too.
CHANGING = frozenset(
    [
        "/init_weight_transfer_engine",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/weight_checker",  # which may set all weights to zero
        "/collective_rpc",
        "/scale_elastic_ep",
        "/fault_tolerance/apply",
    ]
)
UNGATED = CHANGING | {
    "/start_weight_update",
    "/start_draft_weight_update",
    "/shutdown_weight_transfer_engine",
    "/pause",
    "/resume",
    "/sleep",
    "/wake_up",
    "/abort_requests",
    "/release_kv_cache_memory",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/start_profile",
    "/stop_profile",
    "/tokenize",
    "/detokenize",
    "/ping",
    "/is_scaling_elastic_ep",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}
UNGATED_ENDS = ("/render", "/derender", "/cancel", "/count_tokens")  # they ask no weights

LACKING = (
    "the engine has no whole version of its weights: none has come yet, or an update has failed "
    "and its log says why; ask again once an update has succeeded"
)
UNSURE = (
    "the engines behind this server have different versions of their weights, or do not answer; "
    "ask again once an update has succeeded on all of them"
)


class Gate:
    """An ASGI middleware: 503 for all that asks weights, while there is no whole version.

    It asks the engine at the first request, and again after `FRESH_S`, each call that may change
    the weights and each answer of 500 or more. While it is closed it asks at every request, once
    for all that wait. GETs, such as `/health`, and calls that drive the engine pass. Probes are
    answered here, before vLLM looks at an API key.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._reason: str | None = LACKING  # None: open
        self._fresh_until_s = 0.0  # what was answered last
        self._question: asyncio.Task[None] | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = _path(scope)
        if path.startswith("/ready/") and scope.get("method") in {"GET", "HEAD"}:
            status, said = await asyncio.to_thread(torch_ros.ready_page, _target(scope))
            await _say(send, status, said, {"cache-control": "no-store"})
            return
        if _is_gated(scope, path) and (engine := _engine(scope)) is not None:
            await self._look(engine)
            if self._reason is not None:
                await _refuse(scope, receive, send, self._reason)
                return
            await self._app(scope, receive, self._noticing(send))
            return
        try:
            await self._app(scope, receive, send)
        finally:
            if path in CHANGING:
                self._fresh_until_s = 0.0

    def _noticing(self, send: Send) -> Send:
        """As `send`; after an error the engine is asked again."""

        async def noticing(message: Message) -> None:
            if message.get("status", 0) >= 500:  # of HTTP
                self._fresh_until_s = 0.0
            await send(message)

        return noticing

    async def _look(self, engine: Any) -> None:
        """Ask the engine, unless it is known to have a version; wait for its answer `WAIT_S`.

        An engine that does not answer is in an update, and has what it had until that fails: the
        requests wait in the engine, as with vLLM alone.
        """
        if self._question is None:
            if self._reason is None and time.monotonic() < self._fresh_until_s:
                return
            self._question = asyncio.ensure_future(self._ask(engine))
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._question), WAIT_S)

    async def _ask(self, engine: Any) -> None:
        self._fresh_until_s = time.monotonic() + FRESH_S
        try:
            version = await engine.get_weight_version()
        except Exception as error:  # noqa: BLE001  # engines disagree, or one has ended
            if self._reason != UNSURE:
                log.warning("the engine does not say which version it has: %r", error)
            self._reason = UNSURE
        else:
            was_empty = engine.vllm_config.load_config.load_format in EMPTY
            has_none = version == NO_VERSION or (version == FIRST and was_empty)
            self._reason = LACKING if has_none else None
        finally:
            self._question = None


def _engine(scope: Message) -> Any:
    """vLLM's client of the engine; None: a server that has none, and renders prompts."""
    return getattr(scope["app"].state, "engine_client", None)


def _path(scope: Message) -> str:
    path: str = scope.get("path", "")
    return path.removeprefix(scope.get("root_path", "")).rstrip("/")


def _target(scope: Message) -> str:
    """The path with its escapes, by which a slash in a name is told from one between two."""
    raw = scope.get("raw_path") or quote(scope["path"]).encode()
    path = raw.decode("latin-1").removeprefix(quote(scope.get("root_path", "")))
    return f"{path}?{scope.get('query_string', b'').decode('latin-1')}"


def _is_gated(scope: Message, path: str) -> bool:
    if scope["type"] == "websocket":
        return True
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    return path not in UNGATED and not path.endswith(UNGATED_ENDS)


async def _refuse(scope: Message, receive: Receive, send: Send, reason: str) -> None:
    error = {"message": reason, "type": "ServiceUnavailableError", "param": None, "code": 503}
    kind = "http.response"
    if scope["type"] == "websocket":
        await receive()  # the wish to connect
        kind = "websocket.http.response"  # an extension that uvicorn has, which vLLM runs on
    await _say(send, 503, json.dumps({"error": error}), {"retry-after": "1"}, kind)


async def _say(
    send: Send, status: int, said: str, more: Mapping[str, str], kind: str = "http.response"
) -> None:
    """Send JSON; the server leaves the body out where the request was a HEAD."""
    body = said.encode()
    headers = {"content-type": "application/json", "content-length": f"{len(body)}", **more}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": f"{kind}.start", "status": status, "headers": pairs})
    await send({"type": f"{kind}.body", "body": body})
