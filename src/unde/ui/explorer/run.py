"""Starting the server: a socket of its own, a token, and one line that says where the page is."""

from __future__ import annotations

import importlib
import secrets
import socket
import webbrowser

from unde import console
from unde.errors import UndeError
from unde.ui.explorer.security import EVERYWHERE, LOOPBACK
from unde.ui.explorer.session import Session


def check_extra() -> None:
    """Before a model is loaded in vain."""
    for library in ("starlette", "uvicorn", "PIL"):
        try:
            importlib.import_module(library)
        except ImportError:
            raise UndeError(f"the live page needs {library}: pip install 'unde[serve]'") from None


def bound(host: str, port: int) -> socket.socket:
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
    import uvicorn

    from unde.ui.explorer.app import application

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
