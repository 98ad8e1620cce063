"""`torch-ros web`: one page that shows a fleet as it changes. It reads etcd, and writes nothing."""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import re
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from importlib.resources import files
from types import FrameType
from typing import TextIO

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torch_ros.cli import asking, telling
from torch_ros.cli.ending import told_to_end
from torch_ros.cli.watching import fleets
from torch_ros.errors import BackendError, TorchRosError, UsageError
from torch_ros.protocol.fleet import Fleet
from torch_ros.store.kv import KV

PORT = 8265
QUIET_S = 10.0  # a comment is sent this often, so that both sides notice that the other is gone
ENDS_S = 1  # a page that is shown is not waited for
COOKIE = "torch-ros-token"


def serve(kv: KV, out: TextIO, *, model: str | None, host: str, port: int, token: str) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        UsageError: `port` is taken, or `host` is open to others and there is no token, or that has
            letters that no cookie can carry.
    """
    if not token.isascii():
        raise UsageError("--token: expected ASCII, which a browser sends back as it is")
    if not token and not _is_loopback(host):
        raise UsageError(
            f"others can reach {host!r}: give --token, or leave --host out and use "
            f"ssh -L {port}:127.0.0.1:{port}"
        )
    if model is not None:
        asking.fleet_of(kv, model)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}/{'?token=...' if token else ''}"
    out.write(f"{address}: the page of {model or 'all models'} in {kv.endpoint}; Ctrl-C ends\n")
    out.flush()
    config = uvicorn.Config(
        application(kv, model, token, feeds := _Feeds(kv)),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=ENDS_S,
    )
    with told_to_end():  # uvicorn ends by itself, and passes on what it was told
        _Server(config, feeds).run(sockets=[listening])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def application(
    kv: KV, model: str | None, token: str = "", feeds: "_Feeds | None" = None
) -> ASGIApp:
    """The page and what it asks for: of one model, or of all."""
    page = files("torch_ros.cli").joinpath("page.html").read_text(encoding="utf-8")
    feeds = feeds or _Feeds(kv)

    async def root(_request: Request) -> Response:
        return HTMLResponse(page)

    def models(_request: Request) -> Response:
        try:
            found = [model] if model is not None else asking.models(kv)
        except TorchRosError as error:
            return PlainTextResponse(str(error), 503)
        return JSONResponse({"endpoint": kv.endpoint, "models": found})

    async def events(request: Request) -> Response:
        name = request.query_params.get("model", "")
        if model is not None and name != model:
            return PlainTextResponse(f"this page shows {model!r}, not {name!r}", 404)
        return StreamingResponse(_stream(feeds, name), media_type="text/event-stream")

    app: ASGIApp = Starlette(
        routes=[Route("/", root), Route("/models", models), Route("/events", events)]
    )
    return _Guarded(app, token, _policy(page))


class _Feed:
    """What a watch has told last about a model; for as long as somebody listens."""

    def __init__(self, kv: KV, model: str) -> None:
        self.listeners, self._over = 0, threading.Event()
        self.now: telling.Told | BackendError | None = None
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        threading.Thread(target=self._watch, args=(kv, model), daemon=True).start()

    def _watch(self, kv: KV, model: str) -> None:
        for found in fleets(kv, model, self._over):
            now = telling.told(found) if isinstance(found, Fleet) else found
            try:
                self._loop.call_soon_threadsafe(self._show, now)
            except RuntimeError:  # the server has ended
                return

    def _show(self, now: telling.Told | BackendError) -> None:
        self.now = now
        self._changed.set()
        self._changed = asyncio.Event()

    async def after(self, seen: telling.Told | BackendError | None) -> None:
        """Return when there is something else, or after a while."""
        if self.now is seen:
            try:
                await asyncio.wait_for(self._changed.wait(), QUIET_S)
            except TimeoutError:
                return

    def wake(self) -> None:
        self._loop.call_soon_threadsafe(self._changed.set)

    def end(self) -> None:
        self._over.set()


class _Feeds:
    """One for each model that is shown."""

    def __init__(self, kv: KV) -> None:
        self._kv, self._there, self.is_over = kv, dict[str, _Feed](), False

    def enter(self, model: str) -> _Feed:
        if model not in self._there:
            self._there[model] = _Feed(self._kv, model)
        feed = self._there[model]
        feed.listeners += 1
        return feed

    def leave(self, model: str) -> None:
        feed = self._there[model]
        feed.listeners -= 1
        if not feed.listeners:
            self._there.pop(model).end()

    def end(self) -> None:
        """Let all pages go; for the thread of their loop, a signal's handler too."""
        self.is_over = True
        for feed in self._there.values():
            feed.wake()


class _Server(uvicorn.Server):
    """It lets pages go when it is told to end, and does not wait for them."""

    def __init__(self, config: uvicorn.Config, feeds: _Feeds) -> None:
        super().__init__(config)
        self._feeds = feeds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._feeds.end()
        super().handle_exit(sig, frame)


async def _stream(feeds: _Feeds, model: str) -> AsyncIterator[bytes]:
    """Events for one page: a fleet, then what has changed since the last event."""
    feed = feeds.enter(model)
    shown: telling.Told | None = None
    seen: telling.Told | BackendError | None = None
    try:
        while True:
            await feed.after(seen)
            if feeds.is_over:
                return
            if feed.now is seen:
                yield b":\n\n"
                continue
            seen = feed.now
            if isinstance(seen, telling.Told):
                yield _event("fleet", telling.difference(shown, seen))
                shown = seen
            else:
                yield _event("trouble", {"reason": str(seen)})
    finally:
        feeds.leave(model)


def _event(kind: str, values: Mapping[str, object]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(values))


class _Guarded:
    """Lets in whoever has the token, or comes from this host if there is none.

    A page of somebody else's that has its name lead to this host sends that name: it is refused,
    or it could read what is here.
    """

    def __init__(self, app: ASGIApp, token: str, headers: Mapping[str, str]) -> None:
        self._app, self._token, self._headers = app, token.encode(), headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        refusal = self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> Response | None:
        """An answer in the page's stead."""
        if not self._token:
            if _is_loopback(_host(request)):
                return None
            return PlainTextResponse("this page is for this host; others need --token", 403)
        asked = request.query_params.get("token")
        if asked is not None and self._is_token(asked):
            response = RedirectResponse("/", 303)  # the address is the page's, without the token
            response.set_cookie(COOKIE, asked, httponly=True, samesite="strict")
            return response
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(request.cookies.get(COOKIE, "")) or self._is_token(bearer):
            return None
        return PlainTextResponse("this page needs its token: /?token=...", 401)

    def _is_token(self, asked: str) -> bool:
        return hmac.compare_digest(asked.encode(), self._token)


def _host(request: Request) -> str:
    """The name that the browser was given, without the port."""
    named = re.fullmatch(r"\[(.*)\](?::\d+)?|([^:]*)(?::\d+)?", request.headers.get("host", ""))
    return (named[1] or named[2] or "") if named else ""


def _policy(page: str) -> Mapping[str, str]:
    """Headers that let the page run what is in it, ask this server, and nothing else."""

    def allowed(tag: str) -> str:
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (hashlib.sha256(part.encode()).digest() for part in parts)
        return " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)

    rules = {
        "default-src": "'none'",
        "script-src": allowed("script"),
        "style-src": allowed("style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in rules.items()),
        "cache-control": "no-store",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
