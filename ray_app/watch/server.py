"""The page of `ray-app watch`: the reports of runs, as they are now, for whoever has the token."""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from urllib.parse import parse_qs, urlsplit

from ray_app.report.page import Live, render
from ray_app.watch.screen import Looking, Sight

logger = logging.getLogger(__name__)

_COOKIE, _SCRIPT = "ray_app_watch", "/watch.js"


class PageServer:
    """Serves the page from threads, until it is left.

    Args:
        looking: What is known of the runs.
        host: Where to listen.
        port: 0: any that is free.
        token: What a browser has to show; not given: one is made.
    """

    def __init__(self, looking: Looking, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(24)
        self._pages = _Pages(looking)
        handler = type("Handler", (_Handler,), {"pages": self._pages, "token": self.token})
        self._server = ThreadingHTTPServer((host, port), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="page", daemon=True)

    @property
    def url(self) -> str:
        """The address, with the token."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/?token={self.token}"

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Pages:
    """The pages, each drawn once for a look, however many browsers show it."""

    def __init__(self, looking: Looking) -> None:
        self._looking, self._lock = looking, threading.Lock()
        self._drawn: dict[int, tuple[Sight, bytes]] = {}

    def of(self, number: int) -> bytes | None:
        """The page of a run; None: there is none."""
        sights = self._looking.sights
        if not 0 <= number < len(sights):
            return None
        sight = sights[number]
        with self._lock:
            known = self._drawn.get(number)
            if known is None or known[0] is not sight:
                known = self._drawn[number] = (sight, _drawn(sights, number))
            return known[1]


def _drawn(sights: Sequence[Sight], number: int) -> bytes:
    facts = sights[number].facts
    assert facts is not None
    others = [(sight.paths.name, sight.facts.status if sight.facts else "") for sight in sights]
    return render(facts, Live(_SCRIPT, number, others, sights[number].error)).encode()


class _Handler(BaseHTTPRequestHandler):
    """Answers GET of `/`, `/<number of a run>` and the script, with the token in the address or, afterwards, in a
    cookie.
    """

    pages: _Pages
    token: str
    server_version, sys_version = "ray-app", ""

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        given = parse_qs(asked.query).get("token", [""])[0]
        if self._is_right(given):
            cookie = f"{_COOKIE}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            self._answer(HTTPStatus.SEE_OTHER, b"", {"Location": asked.path, "Set-Cookie": cookie})
        elif not self._is_right(self._cookie()):
            self._answer(HTTPStatus.FORBIDDEN, b"The address needs the token that ray-app watch has printed with it.\n")
        elif asked.path == _SCRIPT:
            self._answer(
                HTTPStatus.OK, files("ray_app.watch").joinpath("watch.js").read_bytes(), kind="text/javascript"
            )
        else:
            name = asked.path.strip("/") or "0"
            page = self.pages.of(int(name)) if name.isascii() and name.isdigit() and len(name) < 9 else None
            if page is None:
                self._answer(HTTPStatus.NOT_FOUND, b"There is no such run.\n")
            else:
                self._answer(HTTPStatus.OK, page, kind="text/html; charset=utf-8")

    def _is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(_COOKIE)
        except CookieError:
            return ""
        return found.value if found else ""

    def _answer(
        self, status: HTTPStatus, body: bytes, headers: dict[str, str] | None = None, kind: str = "text/plain"
    ) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing goes to the terminal, where the runs are shown; addresses may hold the token."""
