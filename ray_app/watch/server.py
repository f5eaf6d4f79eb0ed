"""The HTTP server of `ray-app watch`: the current reports of runs, for browsers that have the token."""

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

from ray_app.report.html import Live, render
from ray_app.watch.screen import RunState, RunWatcher

logger = logging.getLogger(__name__)

_COOKIE, _SCRIPT = "ray_app_watch", "/watch.js"


class PageServer:
    """Serves the pages in threads, within its context, by default at any free port with a random token."""

    def __init__(self, looking: RunWatcher, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
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
    """The pages of the runs, each rendered once for a version of its run, however many browsers show it."""

    def __init__(self, looking: RunWatcher) -> None:
        self._watcher, self._lock = looking, threading.Lock()
        self._cache: dict[int, tuple[RunState, bytes]] = {}

    def of(self, number: int) -> bytes | None:
        """Returns the page of a run; None if no run has this number."""
        sights = self._watcher.sights
        if not 0 <= number < len(sights):
            return None
        sight = sights[number]
        with self._lock:
            cached = self._cache.get(number)
            if cached is None or cached[0] is not sight:
                cached = self._cache[number] = (sight, _render_page(sights, number))
            return cached[1]


def _render_page(sights: Sequence[RunState], number: int) -> bytes:
    facts = sights[number].facts
    assert facts is not None
    others = [(sight.paths.name, sight.facts.status if sight.facts else "") for sight in sights]
    return render(facts, Live(_SCRIPT, number, others, sights[number].error)).encode()


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests of `/`, `/<number of a run>` and the script, with the token or its cookie."""

    pages: _Pages
    token: str
    server_version, sys_version = "ray-app", ""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        token = parse_qs(address.query).get("token", [""])[0]
        if self._is_valid(token):
            cookie = f"{_COOKIE}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            self._send(HTTPStatus.SEE_OTHER, b"", {"Location": address.path, "Set-Cookie": cookie})
        elif not self._is_valid(self._read_cookie()):
            self._send(HTTPStatus.FORBIDDEN, b"The address needs the token that ray-app watch has printed with it.\n")
        elif address.path == _SCRIPT:
            self._send(HTTPStatus.OK, files("ray_app.watch").joinpath("watch.js").read_bytes(), kind="text/javascript")
        else:
            name = address.path.strip("/") or "0"
            page = self.pages.of(int(name)) if name.isascii() and name.isdigit() and len(name) < 9 else None
            if page is None:
                self._send(HTTPStatus.NOT_FOUND, b"There is no such run.\n")
            else:
                self._send(HTTPStatus.OK, page, kind="text/html; charset=utf-8")

    def _is_valid(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.token.encode())

    def _read_cookie(self) -> str:
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(_COOKIE)
        except CookieError:
            return ""
        return cookie.value if cookie else ""

    def _send(
        self, status: HTTPStatus, body: bytes, headers: dict[str, str] | None = None, kind: str = "text/plain"
    ) -> None:
        self.send_response(status)
        common = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        for name, value in (common | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: the terminal shows the runs, and an address may contain the token."""
