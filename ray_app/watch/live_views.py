"""Live views of runs that train, for `ray-app watch`: the screen on a terminal and the page in a browser.

`RunWatcher` reads the files of the runs again and again in a thread; it sends no requests to their processes.
`render_screen` and `format_line` show progress, speed, workers and newest events on a terminal. `PageServer` serves the
current reports by HTTP, for browsers that have the token.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from urllib.parse import parse_qs, urlsplit

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ray_app.errors import RayAppError
from ray_app.report.charts import seconds, sparkline
from ray_app.report.facts import Facts, FactsReader
from ray_app.report.html import TONES, Live, render
from ray_app.report.tables import budgets, happenings, health, sizes_text, time_parts
from ray_app.runlog.history import column
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.storage.files import poll_interval_s, poll_pause_s

logger = logging.getLogger(__name__)

_COOKIE, _SCRIPT = "ray_app_watch", "watch.js"
_MAX_CONNECTIONS = 64
"""Number of open connections, each with a thread; the oldest is closed for a further one."""


@dataclass(frozen=True)
class RunState:
    """The state of a run at the newest successful read.

    Args:
        facts: The facts of the run; None before the first read.
        error: The error of the newest read; None if it succeeded.
        looked_s: Time of the read that gave the facts, seconds since 1970 (UTC).
    """

    paths: RunPaths
    facts: Facts | None = None
    error: str | None = None
    looked_s: float = 0.0


class RunWatcher:
    """Reads some runs repeatedly in a thread, by default each second if the storage is fast, within its context."""

    def __init__(self, runs: Sequence[RunPaths], every_s: float | None = None) -> None:
        self._readers = [FactsReader(paths) for paths in runs]
        self._every_s = every_s or max(1.0, *(poll_interval_s(paths.root) for paths in runs))
        self._sights = [RunState(paths) for paths in runs]
        self._ended, self.changed = threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._run, name="looking", daemon=True)

    def __enter__(self) -> RunWatcher:
        """Reads the runs once, with the errors of `read_facts`, and starts the thread."""
        for number, reader in enumerate(self._readers):
            self._sights[number] = RunState(reader.paths, reader.read(), None, time.time())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def sights(self) -> list[RunState]:
        """The newest state of each run."""
        return list(self._sights)

    def _run(self) -> None:
        pause_s = self._every_s
        while not self._ended.wait(pause_s):
            began_s = time.monotonic()
            for number, reader in enumerate(self._readers):
                self._sights[number] = _read_run(reader, self._sights[number])
            pause_s = poll_pause_s(self._every_s, time.monotonic() - began_s)
            with self.changed:
                self.changed.notify_all()


def _read_run(reader: FactsReader, before: RunState) -> RunState:
    """Reads a run; returns the facts of before with the error if the storage does not answer or the run was removed."""
    try:
        return RunState(reader.paths, reader.read(), None, time.time())
    except (RayAppError, OSError) as error:
        logger.debug("%s could not be read: %s", reader.paths.root, error)
        return RunState(before.paths, before.facts, redact(f"{type(error).__name__}: {error}"), before.looked_s)


_COLORS = {
    "blue": "blue",
    "green": "green",
    "orange": "yellow",
    "red": "red",
    "purple": "magenta",
    "gray": "bright_black",
}
_LAST = 20
"""Number of steps from which the speed is computed."""
_EVENTS = 8
"""Number of lines of the table of events."""
_GENERATIONS = 6
"""Number of lines of the table of generations."""


def render_screen(sights: Sequence[RunState]) -> RenderableType:
    """Returns the display of one run with all details, or of several runs as a table with a line for each."""
    if len(sights) > 1:
        return _render_side_by_side(sights)
    [sight] = sights
    facts = sight.facts
    assert facts is not None, "the first look is made before anything is shown"
    parts: list[RenderableType] = [
        _render_head(facts),
        _render_progress(facts),
        Text(facts.story),
        *_error_text(sight),
        _render_values(facts),
    ]
    if generation_rows := list_generations(facts):
        parts.append(
            _make_table("generation", "since step", "workers", "running time", rows=generation_rows[-_GENERATIONS:])
        )
    if event_rows := happenings(facts):
        parts.append(_make_table("running time", "event", "what", rows=event_rows[-_EVENTS:]))
    return Group(*parts)


def format_line(sight: RunState) -> str:
    """Returns the state of a run in one line, for output that is not a terminal."""
    facts = sight.facts
    assert facts is not None
    step = facts.records[-1].step if facts.records else 0
    parts = [f"{facts.paths.name}: {facts.status}", f"step {step:,} of {facts.total_steps or 0:,}"]
    parts += [
        f"{name} {value}" for name, value in list_values(facts) if name in ("loss", "speed", "workers", facts.metric)
    ]
    return ", ".join(parts) + (f" ({sight.error})" if sight.error else "")


def is_over(facts: Facts) -> bool:
    """Returns whether a run has reached its end. A run that failed or was interrupted may be started again."""
    return facts.status in ("finished", "stopped early")


def rows_per_second(facts: Facts) -> float | None:
    """Returns the rows per second of the newest steps; None if there are too few."""
    newest = list(facts.in_time[-_LAST:])
    elapsed_s = newest[-1].time_s - newest[0].time_s if newest else 0.0
    return sum(sum(record.rows) for record in newest[1:]) / elapsed_s if elapsed_s > 0 else None


def remaining_seconds(facts: Facts) -> float | None:
    """Returns the seconds that the run still needs at the speed of its newest steps; None if that is unknown."""
    newest = list(facts.in_time[-_LAST:])
    if len(newest) < 2 or facts.total_steps is None:
        return None
    return (facts.total_steps - facts.records[-1].step) * (newest[-1].time_s - newest[0].time_s) / (len(newest) - 1)


def list_values(facts: Facts) -> list[tuple[str, str]]:
    """Returns names and values of the newest step, evaluation and checkpoint."""
    pairs: list[tuple[str, str]] = []
    if facts.records:
        last = facts.records[-1]
        rows_per_s = rows_per_second(facts)
        newest_records = list(facts.in_time[-_LAST:])
        pairs.append(("loss", f"{last.loss:.4f}"))
        pairs += [(name, f"{value:.4f}") for name, value in last.metrics.items()]
        pairs.append(("speed", f"{rows_per_s:,.0f} rows/s" if rows_per_s else "-"))
        pairs.append(("workers", f"{last.workers}"))
        wait_ms, step_ms = sum(r.data_wait_ms for r in newest_records), sum(r.step_ms for r in newest_records)
        pairs.append(("waits for data", f"{wait_ms / max(1e-9, step_ms):.0%} of a step"))
    pairs += [(name, f"{number}: {note}") for name, number, note in health(facts)]
    metric, best = facts.metric, facts.best
    if facts.evaluations:
        evaluation = facts.evaluations[-1]
        value = evaluation.metrics.get(metric, float("nan"))
        pairs.append((metric, f"{value:.4f} at step {evaluation.step:,}"))
        if best is not None:
            pairs.append((f"best {metric}", f"{best.metrics[metric]:.4f} at step {best.step:,}"))
    if facts.config.data.evaluation_path and facts.newest is not None:
        behind = facts.newest.step - (facts.evaluations[-1].step if facts.evaluations else 0)
        pairs.append(("evaluator", f"{behind:,} steps behind" if behind > 0 else "is not behind"))
    if facts.newest is not None:
        age_s = max(0.0, facts.made_s - facts.newest.time_s)
        pairs.append(("checkpoint", f"at step {facts.newest.step:,}, {seconds(age_s)} ago"))
    if parts := [f"{name}: {part:.1%}" for _, name, part in time_parts(facts) if part >= 0.001]:
        pairs.append(("time since the first step", "; ".join(parts)))
    pairs += [
        (b.name, f"{b.used} of {'any number' if b.allowed is None else b.allowed}") for b in budgets(facts) if b.used
    ]
    if facts.ray_job is not None:
        pairs.append(("Ray job", facts.ray_job))
    return pairs


def list_generations(facts: Facts) -> list[tuple[str, ...]]:
    """Returns a row for each generation: its number, its first step, its workers, and the run's time of its start."""
    rows = list[tuple[str, ...]]()
    for e in (event for event in facts.events if event.kind == "formed"):
        generation, step, workers = (e.details[name] for name in ("generation", "step", "workers"))
        rows.append((f"{e.fence}.{generation}", f"{step:,}", str(workers), seconds(facts.clock.at(e.time_s))))
    return rows


def _render_head(facts: Facts) -> Text:
    timing = f"  {seconds(facts.wall_s)}"
    if facts.status == "running" and (remaining_s := remaining_seconds(facts)) is not None:
        timing += f", about {seconds(remaining_s)} left"
    return Text.assemble(
        (facts.paths.name, "bold"), "  ", (facts.status, f"bold {_COLORS[TONES[facts.status]]}"), timing
    )


def _render_progress(facts: Facts) -> RenderableType:
    step, total = facts.records[-1].step if facts.records else 0, facts.total_steps
    table = Table.grid(padding=(0, 1))
    curve = sparkline(column(facts.records, "loss"), "▁▂▃▄▅▆▇█")
    table.add_row(
        ProgressBar(total=total or 1, completed=step, width=30), f"step {step:,} of {total or 0:,}", f"loss {curve}"
    )
    return table


def _render_values(facts: Facts) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in list_values(facts):
        table.add_row(Text(name, "bright_black"), Text(value))
    return table


def _error_text(sight: RunState) -> list[RenderableType]:
    if sight.error is None:
        return []
    return [Text(f"As seen {seconds(time.time() - sight.looked_s)} ago; since then: {sight.error}", "red")]


def _make_table(*columns: str, rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for row in rows:
        table.add_row(*(Text(cell, overflow="ellipsis", no_wrap=True) for cell in row))
    return table


def _render_side_by_side(sights: Sequence[RunState]) -> Table:
    rows = []
    for sight in sights:
        facts = sight.facts
        assert facts is not None
        value_of = dict(list_values(facts))
        step = f"{facts.records[-1].step if facts.records else 0:,} of {facts.total_steps or 0:,}"
        columns = (value_of.get(name, "-") for name in ("loss", facts.metric, "speed"))
        workers, happened = sizes_text(facts.sizes), sight.error or facts.story
        rows.append((facts.paths.name, facts.status, step, *columns, workers, happened))
    return _make_table("run", "status", "step", "loss", "evaluation", "speed", "workers", "what happened", rows=rows)


def can_redraw(console: Console) -> bool:
    """Returns whether the console can redraw a display in place."""
    return console.is_terminal and not console.is_jupyter


class PageServer:
    """Serves the pages in threads, within its context, by default at any free port with a random token.

    A browser sends its cookies to all servers of a host, whatever their port. So the pages are in a folder with a
    secret name, and the cookie belongs to this folder: no other server on the machine gets it.
    """

    def __init__(self, looking: RunWatcher, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(24)
        self.folder = f"/{hashlib.sha256(self.token.encode()).hexdigest()[:32]}/"
        attributes = {"pages": _Pages(looking), "token": self.token, "folder": self.folder}
        self._server = _Server((host, port), type("Handler", (PageHandler,), attributes))
        self._thread = threading.Thread(target=self._server.serve_forever, name="page", daemon=True)

    @property
    def url(self) -> str:
        """The address, with the token."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/?token={self.token}"

    @property
    def is_private(self) -> bool:
        """Whether only this machine reaches the server."""
        return ipaddress.ip_address(str(self._server.server_address[0])).is_loopback

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """A server with a limited number of connections, so that silent or slow clients keep out no other client."""

    daemon_threads = True
    # With the default of 5, a client waits for seconds beside a burst of others.
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._connections, self._lock = list[socket.socket](), threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        with self._lock:
            if len(self._connections) >= _MAX_CONNECTIONS:
                with suppress(OSError):
                    self._connections.pop(0).shutdown(socket.SHUT_RDWR)
            self._connections.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        with self._lock, suppress(ValueError):
            self._connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Logs an error of a connection, for example one that was closed, without a traceback on the terminal."""
        logger.debug("A request of the page failed", exc_info=True)


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


_BROWSER_HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",  # what else the page may do is in its own meta element
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class PageHandler(BaseHTTPRequestHandler):
    """Answers GET requests of the number of a run and of the script in its folder, with the token or its cookie."""

    pages: _Pages
    token: str
    folder: str
    timeout = 10
    server_version, sys_version = "ray-app", ""

    def do_GET(self) -> None:
        """Answers a request, with an error if it lacks the token."""
        address = urlsplit(self.path)
        token = parse_qs(address.query).get("token", [""])[0]
        if self._is_valid(token):
            cookie = f"{_COOKIE}={self.token}; HttpOnly; SameSite=Strict; Path={self.folder}"
            self._send(HTTPStatus.SEE_OTHER, b"", {"Location": self.folder, "Set-Cookie": cookie})
        elif not self._is_valid(self._read_cookie()):
            self._send(HTTPStatus.FORBIDDEN, b"The address needs the token that ray-app watch has printed with it.\n")
        elif (name := address.path.removeprefix(self.folder)) == _SCRIPT:
            self._send(HTTPStatus.OK, files("ray_app.watch").joinpath("watch.js").read_bytes(), kind="text/javascript")
        else:
            name = name or "0"
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
        for name, value in (common | _BROWSER_HEADERS | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: the terminal shows the runs, and an address may contain the token."""
