"""``dtlib wall``: what learners' notebooks tell comes in by HTTP, and one page shows it, live.

    POST join   {code}                      -> {token}: a number and its seal, so the wall need not keep it
    POST tell   a message, with the token   -> {}
    POST leave  the token                   -> {}
    GET  room   with the instructor's key   -> what the page shows; the page itself shows nothing without
    GET         of a hub's service          -> the page with its key, to those of the hub who may see it

Code, key and the seal's secret lie in a file that only their owner can read, for a day: a wall that was killed and
started again lets the same learners in, and they have told it all within seconds.
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
from dtlib.wall import kept
from dtlib.wall.room import Room, checked

MOST_BYTES = 64 * 1024  # of a message
MOST_CONNECTIONS = 500
SILENT_SECONDS = 10  # that a connection may take to say something
A_SECOND = {"tell": 4, "join": 5}  # messages of a learner; learners
AT_ONCE = {"tell": 20, "join": 100}
POLICY = "; ".join(
    ("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "base-uri 'none'",
     "form-action 'none'", "frame-ancestors 'none'")
)  # fmt: skip


class Rates:
    """How often something may be done: ``A_SECOND``, and ``AT_ONCE`` after a pause."""

    def __init__(self):
        self._left = {}  # (what, who) -> (how many more, when)

    def allow(self, what: str, who: str = "") -> bool:
        now = time.monotonic()
        if len(self._left) > 10_000:  # of those who asked long ago nothing need be known
            self._left = {key: it for key, it in self._left.items() if now - it[1] < AT_ONCE[key[0]] / A_SECOND[key[0]]}
        left, when = self._left.get((what, who), (AT_ONCE[what], now))
        left = min(AT_ONCE[what], left + (now - when) * A_SECOND[what])
        self._left[what, who] = left - (left >= 1), now
        return left >= 1


class Wall:
    """A room, and who may speak in it."""

    def __init__(self, secret: dict, address: str):
        self.secret, self.address = secret, address
        self.room, self.rates = Room(), Rates()

    def token(self) -> str:
        number = secrets.token_hex(8)
        return f"{number}.{self._seal(number)}"

    def number(self, token: str) -> str | None:
        """Whose token that is; None where this wall has not given it."""
        number, _, seal = token.partition(".")
        return number if hmac.compare_digest(seal.encode(), self._seal(number).encode()) else None

    def _seal(self, number: str) -> str:
        return hmac.new(self.secret["secret"].encode(), number.encode(), "sha256").hexdigest()


class Answers(web.RequestHandler):
    """What all of them share: no answer is kept by a browser or shown inside another page."""

    def initialize(self, wall: Wall) -> None:
        self.wall = wall

    def set_default_headers(self) -> None:
        set_headers(self)

    def write_error(self, status_code: int, **_: object) -> None:
        self.finish({"error": status_code})

    def refuse(self, status: int = 403) -> NoReturn:
        raise web.HTTPError(status)

    def bearer(self) -> str:
        return self.request.headers.get("Authorization", "").removeprefix("Bearer ")

    def body(self) -> dict:
        try:
            found = json.loads(self.request.body)
        except (ValueError, RecursionError):
            found = None
        return found if isinstance(found, dict) else self.refuse(400)

    def learner(self) -> str:
        number = self.wall.number(self.bearer()) or self.refuse()
        if not self.wall.rates.allow("tell", number):
            raise web.HTTPError(429)
        return number


def set_headers(handler: web.RequestHandler) -> None:
    handler.set_header("Content-Security-Policy", POLICY)
    handler.set_header("X-Content-Type-Options", "nosniff")
    handler.set_header("Referrer-Policy", "no-referrer")
    handler.set_header("Cache-Control", "no-store")


def _bytes(code) -> bytes:
    return str(code).upper().encode(errors="replace")


class Join(Answers):
    def post(self) -> None:
        if not hmac.compare_digest(_bytes(self.body().get("code")), self.wall.secret["code"].encode()):
            self.refuse()
        if not self.wall.rates.allow("join"):
            raise web.HTTPError(429)
        self.finish({"token": self.wall.token()})


class Tell(Answers):
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
    def post(self) -> None:
        self.wall.room.leave(self.learner())
        self.finish({})


class Shown(Answers):
    def get(self) -> None:
        if not hmac.compare_digest(self.bearer().encode(), self.wall.secret["key"].encode()):
            self.refuse()
        code, address = self.wall.secret["code"], self.wall.address
        self.finish({**self.wall.room.shown(time.time()), "code": code, "address": address})


class Site(web.StaticFileHandler):
    def set_extra_headers(self, path: str) -> None:
        set_headers(self)


class Places:
    """Connections that are open. A new one always has a place: where all are taken, it is that of the oldest one of the
    address that has most. So those who connect and say nothing close their own connections."""

    def __init__(self):
        self._taken: dict[IOStream, str] = {}  # connection -> address, the oldest first

    def give(self, stream: IOStream, address: str) -> None:
        self._taken = {each: whose for each, whose in self._taken.items() if not each.closed()}
        if len(self._taken) >= MOST_CONNECTIONS:
            ((most, _),) = Counter(self._taken.values()).most_common(1)
            next(each for each, whose in self._taken.items() if whose == most).close()
        self._taken[stream] = address


class Server(httpserver.HTTPServer):
    """One that is not filled by those who connect and say nothing."""

    places: Places

    def handle_stream(self, stream: IOStream, address: tuple) -> None:
        self.places.give(stream, address[0])
        super().handle_stream(stream, address)


def application(wall: Wall, prefix: str = "/", of_hub: bool = False) -> web.Application:
    routes = {"join": Join, "tell": Tell, "leave": Leave, "room": Shown}
    site = {"path": str(Path(__file__).with_name("site")), "default_filename": "page.html"}
    return web.Application(
        [(re.escape(prefix) + name, handler, {"wall": wall}) for name, handler in routes.items()]
        + (entrance(wall, prefix) if of_hub else [])
        + [(re.escape(prefix) + r"((?:page\.\w+)?)", Site, site)],
        cookie_secret=secrets.token_bytes(32),
        log_function=lambda handler: None,  # no address of a learner
    )


def entrance(wall: Wall, prefix: str) -> list:
    """The front door of a hub's service: it gives the page's key to who has logged in and may, as teachers may."""
    from jupyterhub.services.auth import HubOAuthCallbackHandler, HubOAuthenticated

    class Entrance(HubOAuthenticated, web.RequestHandler):
        @web.authenticated
        def get(self) -> None:
            self.redirect(f"{prefix}page.html#{wall.secret['key']}")

    return [(re.escape(prefix), Entrance), (re.escape(prefix) + "oauth_callback", HubOAuthCallbackHandler)]


def serve(host: str, port: int, browser: bool) -> int:
    """Show the wall until Ctrl-C, or SIGTERM."""
    prefix = os.environ.get("JUPYTERHUB_SERVICE_PREFIX", "/")
    if url := os.environ.get("JUPYTERHUB_SERVICE_URL"):
        host, port = urlsplit(url).hostname or host, urlsplit(url).port or port
    try:
        sockets = netutil.bind_sockets(port, host)
    except (OSError, UnicodeError) as problem:  # the second: a name that is none
        why = getattr(problem, "strerror", None) or problem
        raise DtlibError(f"{host}:{port} cannot be listened on ({why}): name others with --host and --port.") from None
    port = sockets[0].getsockname()[1]
    here = address_of(host)
    wall = Wall(kept.secret_of(port), "" if url else f"{here}:{port}")
    page = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::', '') else here}:{port}{prefix}#{wall.secret['key']}"
    where = wall.address or f"THE HUB'S ADDRESS{prefix}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the loop has its own: ended as soon as it is heard of
    print(f'Learners join with: lab.join("{wall.secret["code"]}@{where}", "an alias of their own")', flush=True)
    print(f"The page, for you and your projector: {page}", flush=True)
    print("Nothing is stored. Ctrl-C ends the wall.", flush=True)
    with kept.page_file(port, page) if browser else nullcontext() as file:
        asyncio.run(_serve(application(wall, prefix, bool(url)), sockets, file))
    return 0


async def _serve(served, sockets, page: str | None) -> None:
    server = Server(
        served, max_body_size=MOST_BYTES, max_buffer_size=2 * MOST_BYTES, max_header_size=8192,
        body_timeout=SILENT_SECONDS, idle_connection_timeout=SILENT_SECONDS,
    )  # fmt: skip
    server.places = Places()
    server.add_sockets(sockets)
    over = asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, over.set)
    if page:  # in a thread: a browser in a terminal would not return
        threading.Thread(target=webbrowser.open, args=(page,), daemon=True).start()
    await over.wait()
    server.stop()


def address_of(host: str) -> str:
    """At which address the machines of this network reach a server that listens on ``host``; nothing is sent."""
    if host not in ("0.0.0.0", "::", ""):
        return f"[{host}]" if ":" in host else host
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(("10.255.255.255", 1))
        return asked.getsockname()[0]
    return "127.0.0.1"
