"""`torch-ros web`: one page that shows a fleet as it changes. It reads etcd, and writes nothing."""

import asyncio
import base64
import hashlib
import hmac
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from importlib.resources import files
from types import FrameType

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
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
from torch_ros.errors import BackendError, TorchRosError, UsageError
from torch_ros.fleet.fleet import Fleet
from torch_ros.metrics.loopback import host_and_port, is_loopback
from torch_ros.store.kv import KV

QUIET_S = 10.0  # a comment is sent this often, so that both sides notice that the other is gone
ENDS_S = 1  # a page that is shown is not waited for
STREAMS_MAX = 200  # each takes a connection; a page has one


def serve(
    kv: KV, tell: Callable[[str], None], *, model: str | None, host: str, port: int, token: str
) -> None:
    """Serve the page until Ctrl-C; `tell` is given the address.

    Raises: UsageError: `port` is taken, or `host` is open to others and there is no token.
    """
    if not token and not is_loopback(host):
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
    tell(f"http://{shown}:{listening.getsockname()[1]}/{'?token=...' if token else ''}")
    config = uvicorn.Config(
        application(kv, model, token, feeds := _Feeds(kv)),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=ENDS_S,
    )
    with told_to_end():  # uvicorn ends by itself, and passes on what it was told
        _Server(config, feeds).run(sockets=[listening])


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
            found = [model] if model is not None else asking.liveliest(kv)
        except TorchRosError as error:
            return PlainTextResponse(str(error), 503)
        return JSONResponse({"endpoint": kv.endpoint, "models": found})

    async def events(request: Request) -> Response:
        name = request.query_params.get("model", "")
        if reason := await run_in_threadpool(_missing, kv, model, name):
            return PlainTextResponse(reason, 404)
        if feeds.listeners >= STREAMS_MAX:
            return PlainTextResponse(f"{STREAMS_MAX} pages are open; close some", 503)
        return _Events(feeds, name)

    app: ASGIApp = Starlette(
        routes=[Route("/", root), Route("/models", models), Route("/events", events)]
    )
    return _Guarded(app, token, _policy(page))


def _missing(kv: KV, shown: str | None, name: str) -> str:
    """The reason for which there is nothing to show; "": there may be something."""
    if shown is not None:
        return "" if name == shown else f"this page shows {shown!r}, not {name!r}"
    try:
        asking.require(kv, name)
    except UsageError as error:
        return str(error)
    except BackendError:  # its feed tells that
        pass
    return ""


class _Feed:
    """The last word of a watch about a model; for as long as somebody listens."""

    def __init__(self, kv: KV, model: str) -> None:
        self.listeners, self._over = 0, threading.Event()
        self.now: telling.Told | BackendError | None = None
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        threading.Thread(target=self._watch, args=(kv, model), daemon=True).start()

    def _watch(self, kv: KV, model: str) -> None:
        for found in asking.fleets(kv, model, self._over):
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

    @property
    def listeners(self) -> int:
        return sum(feed.listeners for feed in self._there.values())

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


class _Events(StreamingResponse):
    """The stream for one page, which listens from now until it has been sent."""

    def __init__(self, feeds: _Feeds, model: str) -> None:
        super().__init__(_stream(feeds, feeds.enter(model)), media_type="text/event-stream")
        self._leave = partial(feeds.leave, model)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


async def _stream(feeds: _Feeds, feed: _Feed) -> AsyncIterator[bytes]:
    """Events for one page: a fleet, then what has changed since the last event."""
    shown: telling.Told | None = None
    seen: telling.Told | BackendError | None = None
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
        host, port = host_and_port(request.headers.get("host", ""))
        if not self._token:
            if is_loopback(host):
                return None
            return PlainTextResponse("this page is for this host; others need --token", 403)
        # A browser sends cookies to every port of a host: this one must not show them the token.
        name = f"torch-ros-{port}"
        pass_ = hmac.new(self._token, name.encode(), "sha256").hexdigest()
        if self._is_token(request.query_params.get("token", "").encode()):
            response = RedirectResponse("/", 303)  # the address is the page's, without the token
            response.set_cookie(name, pass_, httponly=True, samesite="strict")
            return response
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        is_known = hmac.compare_digest(request.cookies.get(name, "").encode(), pass_.encode())
        if is_known or self._is_token(bearer.encode("latin-1")):  # the bytes that were sent
            return None
        return PlainTextResponse("this page needs its token: /?token=...", 401)

    def _is_token(self, asked: bytes) -> bool:
        return hmac.compare_digest(asked, self._token)


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
