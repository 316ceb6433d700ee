"""``dtlib wall``: an HTTP server that receives messages of learners' notebooks and serves one live page.

    POST join   {code}                      -> {token}: a number and its signature, so the wall stores no tokens
    POST tell   a message, with the token   -> {}
    POST leave  the token                   -> {}
    GET  room   with the instructor's key   -> the content of the page; without the key the page is empty
    GET  /      as a JupyterHub service     -> the page with its key, for authorised users of the hub

The code, the key and the secret of the signatures are kept for a day, in a file that only its owner can read. So a
wall that was killed and restarted accepts the same learners, and shows their state again within seconds.
"""

import asyncio
import hmac
import json
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
import webbrowser
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from tornado import httpserver, netutil, web
from tornado.iostream import IOStream

from dtlib.errors import DtlibError
from dtlib.wall import secrets_file
from dtlib.wall.room import Room, checked

MOST_BYTES = 64 * 1024  # bytes of the largest accepted message
MOST_CONNECTIONS = 500
SILENT_SECONDS = 10  # after which an idle connection is closed
PER_SECOND = {"tell": 4, "join": 5}  # messages per learner and second; joins per second
BURST = {"tell": 20, "join": 100}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


class Rates:
    """Rate limits: ``PER_SECOND`` requests per second, and up to ``BURST`` after a pause."""

    def __init__(self):
        self._left = {}  # (what, who) -> (requests left, time of the last request)

    def allow(self, what: str, who: str = "") -> bool:
        """Return True if ``who`` may do ``what`` now, and count the request."""
        now = time.monotonic()
        if len(self._left) > 10_000:  # forget clients that may send BURST requests again
            self._left = {key: it for key, it in self._left.items() if now - it[1] < BURST[key[0]] / PER_SECOND[key[0]]}
        # A token bucket: the requests left grow with time, up to BURST.
        left, when = self._left.get((what, who), (BURST[what], now))
        left = min(BURST[what], left + (now - when) * PER_SECOND[what])
        self._left[what, who] = left - (left >= 1), now
        return left >= 1


class Wall:
    """A room with its code, tokens and rate limits."""

    def __init__(self, secret: dict, address: str):
        self.secret, self.address = secret, address
        self.room, self.rates = Room(), Rates()

    def token(self) -> str:
        """Return a new token: a random number and its signature."""
        number = secrets.token_hex(8)
        return f"{number}.{self._seal(number)}"

    def number(self, token: str) -> str | None:
        """Return the learner's number in a token; None if this wall did not issue the token."""
        number, _, seal = token.partition(".")
        return number if hmac.compare_digest(seal.encode(), self._seal(number).encode()) else None

    def _seal(self, number: str) -> str:
        return hmac.new(self.secret["secret"].encode(), number.encode(), "sha256").hexdigest()


class Secured(web.RequestHandler):
    """The security headers of all answers: none is cached by a browser or shown inside another page."""

    def set_default_headers(self) -> None:
        self.set_header("Content-Security-Policy", POLICY)
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("Cache-Control", "no-store")


class Answers(Secured):
    """The base class of the wall's own handlers."""

    def initialize(self, wall: Wall) -> None:
        self.wall = wall

    def write_error(self, status_code: int, **_: object) -> None:
        self.finish({"error": status_code})

    def refuse(self, status: int = 403) -> NoReturn:
        """End the request with an HTTP error."""
        raise web.HTTPError(status)

    def bearer(self) -> str:
        """Return the token or key of the request."""
        return self.request.headers.get("Authorization", "").removeprefix("Bearer ")

    def body(self) -> dict:
        """Return the JSON object of the request, or refuse the request."""
        try:
            found = json.loads(self.request.body)
        except (ValueError, RecursionError):
            found = None
        return found if isinstance(found, dict) else self.refuse(400)

    def learner(self) -> str:
        """Return the learner's number, or refuse an invalid token or too many requests."""
        number = self.wall.number(self.bearer()) or self.refuse()
        if not self.wall.rates.allow("tell", number):
            raise web.HTTPError(429)
        return number


class Join(Answers):
    """A learner joins: check the code, return a token."""

    def post(self) -> None:
        code = str(self.body().get("code")).upper().encode(errors="replace")
        if not hmac.compare_digest(code, self.wall.secret["code"].encode()):
            self.refuse()
        if not self.wall.rates.allow("join"):
            raise web.HTTPError(429)
        self.finish({"token": self.wall.token()})


class Tell(Answers):
    """A learner's notebook sends its state."""

    def post(self) -> None:
        number = self.learner()
        try:
            message = checked(self.body())
        except ValueError:
            self.refuse(400)
        if not self.wall.room.tell(number, message, time.time()):
            raise web.HTTPError(410 if number in self.wall.room.left else 429)
        self.finish({})


class Leave(Answers):
    """A learner leaves."""

    def post(self) -> None:
        self.wall.room.leave(self.learner())
        self.finish({})


class Shown(Answers):
    """The instructor's page polls its content."""

    def get(self) -> None:
        if not hmac.compare_digest(self.bearer().encode(), self.wall.secret["key"].encode()):
            self.refuse()
        code, address = self.wall.secret["code"], self.wall.address
        self.finish({**self.wall.room.shown(time.time()), "code": code, "address": address})


class Site(Secured, web.StaticFileHandler):
    """The files of the page."""

    def get_cache_time(self, *_: object) -> int:
        return 0  # tornado would have files with ?v= cached for ten years


class Connections:
    """Open connections, at most ``MOST_CONNECTIONS``.

    A new connection is always accepted. If all places are taken, the oldest connection of the address with most
    connections is closed. So clients that open idle connections lose their own connections first.
    """

    def __init__(self):
        self._open: dict[IOStream, str] = {}  # connection -> address, oldest first

    def register(self, stream: IOStream, address: str) -> None:
        """Register a connection, and close another one if all places are taken."""
        self._open = {each: whose for each, whose in self._open.items() if not each.closed()}
        if len(self._open) >= MOST_CONNECTIONS:
            ((most, _),) = Counter(self._open.values()).most_common(1)
            next(each for each, whose in self._open.items() if whose == most).close()
        self._open[stream] = address


class Server(httpserver.HTTPServer):
    """An HTTP server that idle connections cannot fill."""

    connections: Connections

    def handle_stream(self, stream: IOStream, address: tuple) -> None:
        self.connections.register(stream, address[0])
        super().handle_stream(stream, address)


def application(wall: Wall, prefix: str = "/", of_hub: bool = False) -> web.Application:
    """Return the web application; with ``of_hub`` it also has the login of a JupyterHub service."""
    routes = {"join": Join, "tell": Tell, "leave": Leave, "room": Shown}
    site = {"path": str(Path(__file__).with_name("site")), "default_filename": "page.html"}
    return web.Application(
        [(re.escape(prefix) + name, handler, {"wall": wall}) for name, handler in routes.items()]
        + (entrance(wall, prefix) if of_hub else [])
        + [(re.escape(prefix) + r"((?:page\.\w+)?)", Site, site)],
        cookie_secret=secrets.token_bytes(32),
        log_function=lambda handler: None,  # learners' addresses are not logged
    )


def entrance(wall: Wall, prefix: str) -> list:
    """Return the handlers for a hub's service: they redirect authorised users to the page with its key."""
    from jupyterhub.services.auth import HubOAuthCallbackHandler, HubOAuthenticated

    class Entrance(HubOAuthenticated, web.RequestHandler):
        @web.authenticated
        def get(self) -> None:
            self.redirect(f"{prefix}page.html#{wall.secret['key']}")

    return [(re.escape(prefix), Entrance), (re.escape(prefix) + "oauth_callback", HubOAuthCallbackHandler)]


def serve(host: str, port: int, browser: bool) -> int:
    """Serve the wall until Ctrl-C or SIGTERM."""
    prefix = os.environ.get("JUPYTERHUB_SERVICE_PREFIX", "/")
    if url := os.environ.get("JUPYTERHUB_SERVICE_URL"):
        host, port = urlsplit(url).hostname or host, urlsplit(url).port or port
    try:
        sockets = netutil.bind_sockets(port, host)
    except (OSError, UnicodeError) as problem:  # UnicodeError: not a valid host name
        why = getattr(problem, "strerror", None) or problem
        raise DtlibError(f"{host}:{port} cannot be listened on ({why}): name others with --host and --port.") from None
    port = sockets[0].getsockname()[1]
    here = address_of(host)
    wall = Wall(secrets_file.secret_of(port), "" if url else f"{here}:{port}")
    page = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::', '') else here}:{port}{prefix}#{wall.secret['key']}"
    where = wall.address or f"THE HUB'S ADDRESS{prefix}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the event loop has its own handler
    print(f'Learners join with: lab.join("{wall.secret["code"]}@{where}", "an alias of their own")', flush=True)
    print(f"The page, for you and your projector: {page}", flush=True)
    print("What learners send is never stored on disk. Ctrl-C ends the wall.", flush=True)
    with secrets_file.page_file(port, page) if browser else nullcontext() as file:
        asyncio.run(_serve(application(wall, prefix, bool(url)), sockets, file))
    return 0


async def _serve(served, sockets, page: str | None) -> None:
    server = Server(
        served, max_body_size=MOST_BYTES, max_buffer_size=2 * MOST_BYTES, max_header_size=8192,
        body_timeout=SILENT_SECONDS, idle_connection_timeout=SILENT_SECONDS,
    )  # fmt: skip
    server.connections = Connections()
    server.add_sockets(sockets)
    over = asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, over.set)
    # In a thread, because a browser that runs in the terminal does not return.
    if page:
        threading.Thread(target=webbrowser.open, args=(page,), daemon=True).start()
    await over.wait()
    server.stop()


def address_of(host: str) -> str:
    """Return the address at which this network's machines reach a server on ``host``. Nothing is sent."""
    if host not in ("0.0.0.0", "::", ""):
        return f"[{host}]" if ":" in host else host
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(("10.255.255.255", 1))
        return asked.getsockname()[0]
    return "127.0.0.1"
