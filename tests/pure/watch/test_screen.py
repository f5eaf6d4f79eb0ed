"""`ray-app watch` shows runs as they change, and serves its page only to clients with the token."""

from __future__ import annotations

import http.client
import io
import shutil
import socket
import threading
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from rich.console import Console

from ray_app.cli.watch import main
from ray_app.report.facts import Facts, FactsReader, read_facts
from ray_app.report.html import render
from ray_app.runlog import journal
from ray_app.runlog.paths import RunPaths
from ray_app.storage import files
from ray_app.storage.files import Location
from ray_app.watch.live_views import (
    PageHandler,
    PageServer,
    RunState,
    RunWatcher,
    format_line,
    remaining_seconds,
    render_screen,
    rows_per_second,
)
from tests.support.run_directory import RunDirectory, make_full_run
from tests.support.waiting import wait_until

EVERY_S = 0.05


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Returns a run with 100 of 400 steps, done in ten seconds."""
    live_run = RunDirectory(tmp_path, "live")
    live_run.write_live_lease()
    live_run.start()
    live_run.event("formed", 1.0, generation=1, workers=2, step=0)
    live_run.steps(1, 100, 1.0)
    return live_run


def render_text(*states: RunState, width: int = 120) -> str:
    console = Console(width=width, force_terminal=False, record=True, file=io.StringIO())
    console.print(render_screen(states))
    return console.export_text()


def read_states(*runs: RunDirectory) -> list[RunState]:
    return [RunState(run.paths, read_facts(run.paths)) for run in runs]


# --- reading


def test_files_that_were_read_are_not_read_again(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, files_read = FactsReader(run.paths), []
    read_all = files.read_all

    def read_and_note(paths: Iterable[Location], missing: bytes) -> list[bytes]:
        all_paths = list(paths)
        files_read.extend(all_paths)
        return read_all(all_paths, missing)

    for module in (files, journal):
        monkeypatch.setattr(module, "read_all", read_and_note)
    assert len(reader.read().records) == 100
    assert len(files_read) == 3
    assert len(reader.read().records) == 100
    assert len(files_read) == 3
    done_s = run.steps(101, 110, 11.0)
    run.steps(106, 110, done_s, generation="1.2")
    run.event("failed", done_s, number=1, errors={}, step=110, left=1, final=False)
    second_facts = reader.read()
    assert len(files_read) == 6
    fresh_facts = read_facts(run.paths)
    assert (list(second_facts.records), list(second_facts.course.repeated), list(second_facts.in_time)) == (
        list(fresh_facts.records),
        list(fresh_facts.course.repeated),
        list(fresh_facts.in_time),
    )
    assert len(second_facts.records) == 110
    assert len(second_facts.course.repeated) == 5
    assert (second_facts.events, second_facts.rows, second_facts.course.skipped) == (
        fresh_facts.events,
        fresh_facts.rows,
        fresh_facts.course.skipped,
    )


@pytest.mark.rest
def test_a_watcher_follows_a_run_and_keeps_its_facts_while_storage_is_unreachable(run: RunDirectory) -> None:
    with RunWatcher([run.paths], EVERY_S) as watcher:
        [first_state] = watcher.sights
        assert first_state.facts is not None
        assert first_state.facts.status == "running"
        run.steps(101, 150, 11.0)
        wait_until(lambda: (facts := watcher.sights[0].facts) is not None and len(facts.records) == 150)
        moved = run.paths.root.rename(run.paths.root.parent / "away")
        wait_until(lambda: watcher.sights[0].error is not None)
        last_facts = watcher.sights[0].facts
        assert last_facts is not None
        assert len(last_facts.records) == 150
        assert str(run.paths.root) in str(watcher.sights[0].error)
        moved.rename(run.paths.root)
        wait_until(lambda: watcher.sights[0].error is None)
        run.end(30.0)
        wait_until(lambda: (facts := watcher.sights[0].facts) is not None and facts.status == "finished")


# --- rendering


def test_the_terminal_shows_progress_evaluation_failures_and_generations(run: RunDirectory) -> None:
    run.checkpoint(50, 6.0)
    run.evaluate(50, 7.0, {"accuracy": 0.5, "loss": 1.0})
    run.checkpoint(100, 11.0)
    run.event("failed", 11.0, number=1, errors={"1": "KilledError: gone"}, step=100, left=1, final=False)
    run.event("formed", 11.2, generation=2, workers=1, step=100)
    [state] = read_states(run)
    facts = state.facts
    assert isinstance(facts, Facts)
    # A step has 32 rows and takes a tenth of a second.
    assert rows_per_second(facts) == pytest.approx(320)
    assert remaining_seconds(facts) == pytest.approx(30)
    text = render_text(state)
    for fragment in (
        "live  running",
        "about 30 s left",
        "step 100 of 400",
        "320 rows/s",
        "0.5000 at step 50",
        "50 steps behind",
        "1 of 5",
    ):
        assert fragment in text, fragment
    assert [line.split()[:3] for line in text.splitlines() if line.startswith(("1.1 ", "1.2 "))] == [
        ["1.1", "0", "2"],
        ["1.2", "100", "1"],
    ]
    assert "KilledError: gone" in text
    assert format_line(state).startswith("live: running, step 100 of 400, loss ")


def test_the_job_of_the_newest_start_is_linked_if_its_address_is_a_web_page(run: RunDirectory) -> None:
    for fence, page in enumerate(
        ("http://head:8265/#/jobs/01", "javascript:alert(1)", None, "https://head/#/jobs/<02>"), start=2
    ):
        run.start(20.0 + fence, fence, ray_job={"job_id": "01", "page": page})
        html, screen_text = render(read_facts(run.paths)), render_text(*read_states(run), width=200)
        if page is not None and page.startswith("http"):
            assert f'<a href="{escape(page)}">{escape(page)}</a>' in html
            assert page in screen_text
        else:
            assert "Ray job" not in html + screen_text
            assert "javascript:" not in html


def test_a_run_without_steps_and_a_run_with_all_kinds_of_events_are_rendered(tmp_path: Path) -> None:
    empty = RunDirectory(tmp_path, "empty")
    assert "vanished" in render_text(*read_states(empty))
    empty.write_live_lease()
    empty.start()
    assert "step 0 of 400" in render_text(*read_states(empty))
    assert "empty: running, step 0 of 400" in format_line(*read_states(empty))
    full = make_full_run(tmp_path, "full", text="a[bold]b")
    assert "a[bold]b" in render_text(*read_states(full), width=200), "text of the run is taken for markup"
    assert max(map(len, render_text(*read_states(full), width=60).splitlines())) <= 60


def test_stragglers_are_shown_until_they_recover_or_the_generation_ends(run: RunDirectory) -> None:
    worker = {"name": "host-7", "host": "10.0.0.7", "device": "cuda NVIDIA H200"}
    run.event("straggler_detected", 12.0, rank=2, cause="compute", times=1.5, step=60, **worker)
    run.event("straggler_detected", 12.5, rank=1, cause="data", times=1.4, step=61, **worker)
    run.event("straggler_recovered", 13.0, rank=1, cause="data", times=1.0, step=90, **worker)
    screen_text = render_text(*read_states(run), width=200)
    assert (
        "1: rank 2 (host-7, 10.0.0.7, cuda NVIDIA H200) computed 1.5 times as long as the others at step 60"
        in screen_text
    )
    run.event("formed", 14.0, generation=9, workers=2, step=95)
    assert "slow workers" not in render_text(*read_states(run), width=200), (
        "stragglers of an earlier generation are shown"
    )


def test_several_runs_are_rows_of_one_table(run: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory(tmp_path, "other")
    other.start()
    other.steps(1, 400, 1.0, workers=1)
    other.end(50.0)
    head, *rows = render_text(*read_states(run, other), width=160).splitlines()
    assert head.split()[:3] == ["run", "status", "step"]
    assert [row.split()[:2] for row in rows if row.strip()] == [["live", "running"], ["other", "finished"]]


def test_the_command_ends_with_the_run_and_refuses_another_path(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.end(30.0)
    assert main([str(run.paths.root)]) == 0
    assert capsys.readouterr().out.startswith("live: finished, step 100 of 400, loss ")
    assert main([str(tmp_path / "nowhere")]) == 2
    assert str(tmp_path / "nowhere") in capsys.readouterr().err


# --- access to the page


class PageClient:
    """A client of the page's server, which sends `cookie` if it is set."""

    def __init__(self, url: str) -> None:
        self.address, self.token = urlsplit(url).netloc, urlsplit(url).query.removeprefix("token=")
        self.cookie: str | None = None

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection(self.address, timeout=30)
        connection.request(method, path, headers=({"Cookie": self.cookie} if self.cookie else {}) | headers)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, body, dict(answer.getheaders())


@pytest.fixture
def client(run: RunDirectory) -> Iterator[PageClient]:
    with RunWatcher([run.paths], EVERY_S) as watcher, PageServer(watcher) as server:
        assert server.url.startswith("http://127.0.0.1:")
        yield PageClient(server.url)


@pytest.mark.parametrize("path", ["/", "/0", "/watch.js", "/7", "/?token=wrong", "/?token=%C3%A9", "/?token="])
def test_a_page_request_without_the_token_is_refused(client: PageClient, path: str) -> None:
    for cookie in (None, "ray_app_watch=wrong", "ray_app_watch=", "other=1", 'x="'):
        client.cookie = cookie
        status, body, headers = client.get(path)
        assert status == 403, cookie
        assert "live" not in body, cookie
        assert "Set-Cookie" not in headers, cookie


def test_the_token_of_the_address_is_replaced_by_a_cookie(client: PageClient, run: RunDirectory) -> None:
    status, _, headers = client.get(f"/?token={client.token}")
    folder = headers["Location"]
    assert (status, len(folder)) == (303, 34)
    client.cookie, *rest = headers["Set-Cookie"].split("; ")
    # A browser sends the cookie to no other server of this machine: none has this folder.
    assert {"HttpOnly", "SameSite=Strict", f"Path={folder}"} == set(rest)
    status, body, headers = client.get(folder)
    assert (status, headers["Cache-Control"], headers["X-Content-Type-Options"]) == (200, "no-store", "nosniff")
    assert (headers["X-Frame-Options"], headers["Content-Security-Policy"]) == ("DENY", "frame-ancestors 'none'")
    assert "live <span" in body
    assert client.token not in body
    paths = {"0": 200, "watch.js": 200, "1": 404, "-1": 404, "../../etc/passwd": 404, "9999999999": 404, "/": 404}
    assert {path: client.get(folder + path)[0] for path in paths} == paths
    assert (client.get("/")[0], client.get("/0")[0], client.get(folder, method="POST")[0]) == (404, 404, 501)
    run.steps(101, 150, 11.0)
    wait_until(lambda: ">150<" in client.get(folder)[1])
    shutil.rmtree(run.paths.events)
    wait_until(lambda: client.get(folder)[0] == 200)


def test_silent_clients_hold_few_threads_and_keep_out_no_other(client: PageClient) -> None:
    host, port = client.address.split(":")
    before = threading.active_count()
    silent = [socket.create_connection((host, int(port)), 10) for _ in range(200)]
    for connection in silent:
        connection.send(b"GET / HTTP/1.1\r\nX: ")
    assert client.get(f"/?token={client.token}")[0] == 303
    wait_until(lambda: threading.active_count() - before <= 64)
    # The oldest were closed; the newest have a time limit.
    assert silent[0].recv(1) == b""
    for connection in silent:
        connection.close()
    wait_until(lambda: threading.active_count() <= before)


def test_a_page_that_others_reach_is_said_to_be_readable(run: RunDirectory) -> None:
    with RunWatcher([run.paths], EVERY_S) as watcher:
        for host, private in (("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)):
            with PageServer(watcher, host) as server:
                assert server.is_private is private, host


def test_a_silent_client_is_disconnected(client: PageClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PageHandler.timeout is not None
    monkeypatch.setattr(PageHandler, "timeout", 0.2)
    host, port = client.address.split(":")
    with socket.create_connection((host, int(port)), 10) as silent:
        assert silent.recv(1) == b""


def test_a_report_file_has_no_script_and_a_live_page_has_one(run: RunDirectory) -> None:
    from ray_app.report.html import Live, render

    facts = read_facts(RunPaths(run.paths.root))
    assert "<script" not in render(facts)
    assert "script-src" not in render(facts)
    assert render(facts, Live("watch.js", 0, [("live", "running")])).count("<script") == 1
