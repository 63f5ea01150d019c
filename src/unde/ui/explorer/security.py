"""Who may talk to the page: its own browser tab, with the token, at the host it was opened at, in small requests."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from starlette.responses import JSONResponse, PlainTextResponse

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
EVERYWHERE = ("0.0.0.0", "::", "")
SMALL, LARGE = 2**18, 2**24  # bytes of a request: of any, and of one that carries a picture
PICTURES = "/api/picture"
OPEN = ("/static/",)  # code that is the same for everybody

# Scripts and styles of its own alone; pictures inside of the page. Styles on elements are lengths of bars.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types unde"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",  # the token is in the address
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Refused(Exception):
    """A request that is not answered, with the status and the line that say why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Guard:
    """In front of everything: refuses whoever is not the page, and bounds what the rest is sent."""

    def __init__(self, app: App, token: str, host: str = "127.0.0.1") -> None:
        self.app, self.token, self.host = app, token, host
        names = {*LOOPBACK, _bracketed(host)}
        if host in EVERYWHERE:  # asked for once: looking a name up can take seconds
            names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1008})
                return
            await self.app(scope, receive, send)
            return
        guarded = _with_headers(send)
        try:
            headers = {name.decode("latin-1").lower(): v.decode("latin-1") for name, v in scope["headers"]}
            self.check(scope, headers)
            limit = LARGE if scope["path"] == PICTURES else SMALL
            _check_length(headers, limit)
            await self.app(scope, _bounded(receive, limit), guarded)
        except Refused as e:
            api = scope["path"].startswith("/api/")
            answer = (
                JSONResponse({"error": str(e)}, e.status) if api else PlainTextResponse(f"{e}\n", e.status)
            )
            await answer(scope, receive, guarded)

    def check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raises Refused unless host, origin and token are right."""
        here = headers.get("host", "")
        if not self._known(here, scope):
            raise Refused(421, f"this server does not go by the name {here[:100]!r}")
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        foreign = origin is not None and origin != f"{scope.get('scheme', 'http')}://{here}"
        followed = scope["path"] == "/" and scope["method"] == "GET"  # a link that somebody keeps elsewhere
        if foreign or (site not in ("same-origin", "none") and not followed):
            raise Refused(403, "requests from other pages are not answered")
        if scope["path"].startswith(OPEN):
            return
        sent = headers.get("x-unde-token")
        if sent is None and scope["path"] == "/":
            sent = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if not hmac.compare_digest((sent or "").encode(), self.token.encode()):
            raise Refused(
                403,
                "this address lacks the token of this run: open the one that `unde serve` printed. "
                "What follows # in a link works behind it too",
            )

    def _known(self, here: str, scope: Scope) -> bool:
        """Whether a Host header names this server. Its port is not asked for: an SSH tunnel has one of its own."""
        name = here.lower() if here.endswith("]") or ":" not in here else here.lower().rpartition(":")[0]
        names = set(self._names)
        if self.host in EVERYWHERE:
            bound = scope.get("server") or ("", None)  # the address at which the request came in
            names.add(_bracketed(str(bound[0])))
        return name in names - {_bracketed(address) for address in EVERYWHERE}


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host.lower()


def _check_length(headers: Mapping[str, str], limit: int) -> None:
    sent = headers.get("content-length", "0")
    if not sent.isascii() or not sent.isdigit() or int(sent[:20]) > limit:
        raise _too_large(limit)


def _too_large(limit: int) -> Refused:
    return Refused(
        413, f"too much at once: at most {limit // 1024:,} kB here. Send a shorter text or a smaller file"
    )


def _bounded(receive: Receive, limit: int) -> Receive:
    """The same, ended where more comes than was announced."""
    seen = 0

    async def bounded() -> MutableMapping[str, Any]:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise _too_large(limit)
        return message

    return bounded


def _with_headers(send: Send) -> Send:
    async def guarded(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", []), *own]}
        await send(message)

    return guarded
