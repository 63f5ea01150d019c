"""The addresses behind the page. Answers are JSON; what went wrong is one line in it."""

from __future__ import annotations

import json
import secrets
import socket
import webbrowser
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from unde import console
from unde.errors import UndeError
from unde.markup import Html, el, join, text
from unde.ui.explorer.catalogue import FORMATS, Catalogue
from unde.ui.explorer.jobs import BackgroundJob, Unanswered
from unde.ui.explorer.query_builder import Inquiry
from unde.ui.explorer.security import EVERYWHERE, LOOPBACK, PICTURES, Guard, Refused
from unde.ui.explorer.session import Session
from unde.ui.report.items import DIFFERS
from unde.ui.report.page import CSS
from unde.ui.report.queries import RIGHT, WRONG
from unde.ui.report.tokens import key

STATIC = Path(__file__).parent / "static"
KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
STEP = 0.25  # seconds that a request waits for a job before it says how far it is
ENTRIES = 120  # examples in one answer
Sent = Mapping[str, Any]  # by a request: its JSON object, or what is in its address


def application(session: Session, token: str, host: str = "127.0.0.1") -> Starlette:
    """The page of a session, behind its guard."""
    return Starlette(
        routes=_Addresses(session).routes(),
        middleware=[Middleware(Guard, token=token, host=host)],
        exception_handlers=dict.fromkeys((UndeError, HTTPException, Exception), _failed),
    )


class _Addresses:
    """What each address answers; handlers take what was sent and return JSON or a response."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.files = {p.name: p.read_bytes() for p in STATIC.iterdir() if p.suffix in KINDS}
        self.files["explorer.css"] = CSS.encode() + self.files["explorer.css"]

    def routes(self) -> list[Route]:
        get = {
            "/": self.page,
            "/static/{name}": self.static,
            "/api/session": self.describe,
            "/api/line": self.line,
            "/api/queries": self.queries,
            "/api/example": self.example,
            "/api/jobs/{id}": self.job,
            "/api/marks": self.marks,
            "/api/export": self.export,
        }
        post = {
            "/api/ask": self.ask,
            "/api/influenced": self.influenced,
            "/api/shade": lambda sent: self._submit(lambda job: self.session.shade(sent, job), quiet=True),
            "/api/baseline": lambda sent: self._submit(lambda job: self.session.compare(sent, job)),
            "/api/read": self.read,
            "/api/rank": self.session.rank,
            "/api/examples": self.examples,
            "/api/find": self.find,
            "/api/mark": self.mark,
        }
        return [
            *(_route("GET", path, _read_address, handler) for path, handler in get.items()),
            *(_route("POST", path, _read_json, handler) for path, handler in post.items()),
            _route("POST", "/api/jobs/{id}/cancel", _read_address, self.cancel),
            _route("POST", PICTURES, Request.body, self.session.builder.keep),
        ]

    def page(self, sent: Sent) -> Response:
        return HTMLResponse(page(self.session.title, len(self.session.index), self.session.calibration))

    def static(self, sent: Sent) -> Response:
        name = sent["name"]
        if name not in self.files:
            raise HTTPException(404, "no such file")
        return Response(self.files[name], media_type=KINDS[Path(name).suffix])

    def describe(self, sent: Sent) -> Any:
        return self.session.describe() | {"queue": len(self.session.jobs)}

    def line(self, sent: Sent) -> Any:
        return {"queue": len(self.session.jobs), "marks": self.session.marks.version}

    # --- asking -----------------------------------------------------------------------------------------

    def ask(self, sent: Sent) -> Response:
        inquiry = Inquiry.read(sent)
        return self._submit(lambda job: self.session.ask(inquiry, job))

    def influenced(self, sent: Sent) -> Response:
        at = self.session.train.check(sent.get("at"))
        return self._submit(lambda job: self.session.influenced(at, sent, job))

    def read(self, sent: Sent) -> Response:
        what, of = sent.get("what"), self._catalogue(sent)
        if what not in ("texts", "labels"):
            raise UndeError("read what? Expected texts or labels")
        return self._submit(lambda job: of.read(what, job))

    def _submit(self, work: Callable[[BackgroundJob], Any], quiet: bool = False) -> Response:
        return Json({"job": self.session.jobs.submit(work, quiet).id}, 202)

    def job(self, sent: Sent) -> Any:
        jobs = self.session.jobs
        job = jobs.find(sent["id"])
        job.wait(STEP)
        known = {"state": job.state, "ahead": jobs.position(job), "queue": len(jobs)}
        if job.state == "done":
            return known | {"result": job.result}
        if job.state == "failed":
            return known | {"error": job.error}
        return known | {"doing": job.doing, "done": job.done, "total": job.total}

    def cancel(self, sent: Sent) -> Any:
        self.session.jobs.cancel(self.session.jobs.find(sent["id"]))
        return {}

    # --- seeing -----------------------------------------------------------------------------------------

    def _catalogue(self, sent: Sent) -> Catalogue:
        where = sent.get("where", "train")
        if where == "pool":
            return self.session.answer(sent.get("answer")).of
        if isinstance(where, str) and where in self.session.roles:
            return self.session.roles[where]
        if where != "train":
            raise UndeError(f"no examples called {str(where)[:40]!r}: expected train, eval, learn or pool")
        return self.session.train

    def examples(self, sent: Sent) -> Any:
        of, wanted = self._catalogue(sent), sent.get("at")
        if not isinstance(wanted, list) or len(wanted) > ENTRIES:
            raise UndeError(f"which examples? Expected at most {ENTRIES} positions")
        return [of.entry(at) for at in wanted]

    def queries(self, sent: Sent) -> Any:
        where, start = sent.get("role", "eval"), _position(sent.get("from", "0"))
        if where not in (*self.session.roles, "train"):
            raise UndeError(f"this setup has no {where[:20]}_queries")
        if not isinstance(start, int):
            raise UndeError(f"from {start[:20]!r}: expected a position")
        of = self._catalogue({"where": where})
        return [of.entry(at) for at in range(start, min(start + 24, len(of)))]

    def example(self, sent: Sent) -> Any:
        train = self.session.train
        at = train.check(_position(sent.get("at", "")))
        return train.entry(at) | {"whole": train.whole(at), "mark": self.session.marks.all().get(at)}

    def find(self, sent: Sent) -> Any:
        name = sent.get("name")
        if not isinstance(name, str) or not name.strip():
            raise UndeError("which training example? Give its id or its position")
        return {"at": self.session.train.find(name)}

    # --- marking ----------------------------------------------------------------------------------------

    def marks(self, sent: Sent) -> Any:
        marks = self.session.marks
        return {"version": marks.version, "marks": marks.all(), "listed": marks.rows()}

    def mark(self, sent: Sent) -> Any:
        self.session.marks.put(self.session.train.check(sent.get("at")), sent.get("mark"))
        return {"version": self.session.marks.version}

    def export(self, sent: Sent) -> Response:
        format = sent.get("format", "csv")
        return Response(self.session.marks.export(format), media_type=FORMATS[format])


def _route(
    method: str, path: str, read: Callable[[Request], Awaitable[Any]], handler: Callable[[Any], Any]
) -> Route:
    """An address whose requests are read by `read` and answered by `handler` in a thread."""

    async def answer(request: Request) -> Response:
        result = await run_in_threadpool(handler, await read(request))
        return result if isinstance(result, Response) else Json(result)

    return Route(path, answer, methods=[method])


async def _read_address(request: Request) -> dict[str, str]:
    return {**request.query_params, **request.path_params}


def _position(text: str) -> int | str:
    """A number of an address; other texts as they are."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else text


class Json(JSONResponse):
    """In ASCII: a text may hold half of a character, which is no UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


async def _read_json(request: Request) -> dict[str, Any]:
    """The JSON object of a request."""
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise UndeError("this is no JSON") from None
    if not isinstance(body, dict):
        raise UndeError("expected a JSON object")
    return body


async def _failed(request: Request, error: Exception) -> Response:
    """What went wrong, in one line."""
    if isinstance(error, (Refused, ClientDisconnect)):
        raise error
    if isinstance(error, Unanswered):
        return Json({"error": str(error), **error.remedy}, error.status)
    if isinstance(error, UndeError):
        return Json({"error": str(error)}, 400)
    if isinstance(error, HTTPException):
        return Json({"error": error.detail or "not found"}, error.status_code)
    console.note(f"{request.url.path}: {type(error).__name__}: {error}")
    return Json({"error": f"{type(error).__name__}: {error}"}, 500)


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens, before anything else takes time."""
    if not 0 <= port < 2**16:
        raise UndeError(f"port {port}: expected 0 (any that is free) to 65535")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        raise UndeError(
            f"no address for the host {host!r} ({e.strerror or e}): expected one of this machine"
        ) from None
    made = socket.socket(family, kind, proto)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
        made.listen(128)
    except OSError as e:
        made.close()
        if isinstance(e, PermissionError):
            raise UndeError(f"port {port} may not be used by you: choose one from 1024 on (--port)") from None
        raise UndeError(
            f"port {port} of {host} cannot be used ({e.strerror}): choose another with --port, or --port 0 for any "
            "that is free"
        ) from None
    return made


def address(made: socket.socket, host: str, token: str) -> str:
    """What to open in a browser."""
    name = socket.gethostname() if host in EVERYWHERE else f"[{host}]" if ":" in host else host
    return f"http://{name}:{made.getsockname()[1]}/?token={token}"


def serve(session: Session, listening: socket.socket, host: str, opening: bool = False) -> None:
    """Serve the page until Ctrl-C."""
    token = secrets.token_urlsafe(24)
    where = address(listening, host, token)
    config = uvicorn.Config(
        application(session, token, host),
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        limit_concurrency=64,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
    )
    if f"[{host}]" not in LOOPBACK and host not in LOOPBACK:
        console.note(
            f"{host} can be reached from other machines: whoever has the address below sees the training data"
        )
    console.echo(f"Open {where} in a browser. Ctrl-C ends it.")
    if opening and not webbrowser.open(where):
        console.note("no browser could be opened here: open the address yourself")
    uvicorn.Server(config).run(sockets=[listening])


def page(title: str, examples: int, calibration: str | None = None) -> str:
    """The whole page as text."""
    frame = Template(files("unde.ui.explorer").joinpath("page.html").read_text(encoding="utf-8"))
    sentence = el("p.subtitle", f"Calibrated: {calibration}.", id="calibration")
    signs = {"differs": DIFFERS, "right": RIGHT, "wrong": WRONG}  # for scripts to copy
    templates = [el("template", sign, id=f"sign-{name}") for name, sign in signs.items()]
    return frame.substitute(
        title=text(title),
        examples=f"{examples:,}",
        calibration=sentence if calibration else Html(""),
        token_key=key(),
        templates=join(templates),
    )
