"""`ray-app watch`: what it shows of runs as they change, and who gets the page."""

from __future__ import annotations

import http.client
import io
import shutil
from collections.abc import Iterator
from html import escape
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from rich.console import Console

from ray_app.cli.watch import main
from ray_app.report.facts import Facts, FactsReader, read_facts
from ray_app.report.page import render
from ray_app.runlog import journal
from ray_app.runlog import journal as segments
from ray_app.runlog.paths import RunPaths
from ray_app.watch.screen import RunState, RunWatcher, format_line, remaining_seconds, render_screen, rows_per_second
from ray_app.watch.server import PageServer
from tests.support.made_run import MadeRun, full_run
from tests.support.waiting import until

EVERY_S = 0.05


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    """A run that has done 100 of 400 steps in ten seconds."""
    made = MadeRun(tmp_path, "live")
    made.hold()
    made.start()
    made.event("formed", 1.0, generation=1, workers=2, step=0)
    made.steps(1, 100, 1.0)
    return made


def drawn(*sights: RunState, width: int = 120) -> str:
    console = Console(width=width, force_terminal=False, record=True, file=io.StringIO())
    console.print(render_screen(sights))
    return console.export_text()


def seen(*runs: MadeRun) -> list[RunState]:
    return [RunState(made.paths, read_facts(made.paths, with_earlier=False)) for made in runs]


# --- what is read


def test_what_was_read_once_is_not_read_again(run: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, read = FactsReader(run.paths), []
    events, records = journal._event, segments.read_segment
    monkeypatch.setattr(journal, "_event", lambda file, value: (read.append(file.name), events(file, value))[1])
    monkeypatch.setattr(
        segments, "read_segment", lambda place, data: (read.append(place.name), records(place, data))[1]
    )
    assert len(reader.read().records) == 100
    assert len(read) == 3
    assert len(reader.read().records) == 100
    assert len(read) == 3
    done_s = run.steps(101, 110, 11.0)
    run.steps(106, 110, done_s, generation="1.2")
    run.event("failed", done_s, number=1, errors={}, step=110, left=1, final=False)
    again = reader.read()
    assert len(read) == 6
    fresh = read_facts(run.paths, with_earlier=False)
    assert (list(again.records), list(again.repeated), list(again.in_time)) == (
        list(fresh.records),
        list(fresh.repeated),
        list(fresh.in_time),
    )
    assert len(again.records) == 110
    assert len(again.repeated) == 5
    assert (again.events, again.rows, again.skipped) == (fresh.events, fresh.rows, fresh.skipped)


def test_looks_follow_a_run_and_outlive_a_storage_that_is_away(run: MadeRun) -> None:
    with RunWatcher([run.paths], EVERY_S) as looking:
        [first] = looking.sights
        assert first.facts is not None
        assert first.facts.status == "running"
        run.steps(101, 150, 11.0)
        until(lambda: (facts := looking.sights[0].facts) is not None and len(facts.records) == 150)
        away = run.paths.root.rename(run.paths.root.parent / "away")
        until(lambda: looking.sights[0].error is not None)
        kept = looking.sights[0].facts
        assert kept is not None
        assert len(kept.records) == 150
        assert str(run.paths.root) in str(looking.sights[0].error)
        away.rename(run.paths.root)
        until(lambda: looking.sights[0].error is None)
        run.end(30.0)
        until(lambda: (facts := looking.sights[0].facts) is not None and facts.status == "finished")


# --- what is shown


def test_a_run_on_the_terminal(run: MadeRun) -> None:
    run.checkpoint(50, 6.0)
    run.evaluate(50, 7.0, {"accuracy": 0.5, "loss": 1.0})
    run.checkpoint(100, 11.0)
    run.event("failed", 11.0, number=1, errors={"1": "KilledError: gone"}, step=100, left=1, final=False)
    run.event("formed", 11.2, generation=2, workers=1, step=100)
    [sight] = seen(run)
    facts = sight.facts
    assert isinstance(facts, Facts)
    assert rows_per_second(facts) == pytest.approx(320)  # 32 rows in a tenth of a second
    assert remaining_seconds(facts) == pytest.approx(30)
    text = drawn(sight)
    for said in (
        "live  running",
        "about 30 s left",
        "step 100 of 400",
        "320 rows/s",
        "0.5000 at step 50",
        "50 steps behind",
        "1 of 5",
    ):
        assert said in text, said
    assert [each.split()[:3] for each in text.splitlines() if each.startswith(("1.1 ", "1.2 "))] == [
        ["1.1", "0", "2"],
        ["1.2", "100", "1"],
    ]
    assert "KilledError: gone" in text
    assert format_line(sight).startswith("live: running, step 100 of 400, loss ")


def test_the_job_of_the_newest_start_is_linked_if_it_is_a_page(run: MadeRun) -> None:
    for fence, page in enumerate(
        ("http://head:8265/#/jobs/01", "javascript:alert(1)", None, "https://head/#/jobs/<02>"), start=2
    ):
        run.start(20.0 + fence, fence, ray_job={"job_id": "01", "page": page})
        html, shown = render(read_facts(run.paths)), drawn(*seen(run), width=200)
        if page is not None and page.startswith("http"):
            assert f'<a href="{escape(page)}">{escape(page)}</a>' in html
            assert page in shown
        else:
            assert "Ray job" not in html + shown
            assert "javascript:" not in html


def test_of_a_run_without_steps_and_of_one_with_all_kinds_of_things(tmp_path: Path) -> None:
    empty = MadeRun(tmp_path, "empty")
    assert "vanished" in drawn(*seen(empty))
    empty.hold()
    empty.start()
    assert "step 0 of 400" in drawn(*seen(empty))
    assert "empty: running, step 0 of 400" in format_line(*seen(empty))
    full = full_run(tmp_path, "full", text="a[bold]b")
    assert "a[bold]b" in drawn(*seen(full), width=200), "what comes from a run is no markup"
    assert max(map(len, drawn(*seen(full), width=60).splitlines())) <= 60


def test_slow_workers_are_told_while_they_are_slow(run: MadeRun) -> None:
    where = {"name": "host-7", "host": "10.0.0.7", "device": "cuda NVIDIA H200"}
    run.event("straggler_detected", 12.0, rank=2, cause="compute", times=1.5, step=60, **where)
    run.event("straggler_detected", 12.5, rank=1, cause="data", times=1.4, step=61, **where)
    run.event("straggler_recovered", 13.0, rank=1, cause="data", times=1.0, step=90, **where)
    shown = drawn(*seen(run), width=200)
    assert "1: rank 2 (host-7, 10.0.0.7, cuda NVIDIA H200) computed 1.5 times as long as the others at step 60" in shown
    run.event("formed", 14.0, generation=9, workers=2, step=95)
    assert "slow workers" not in drawn(*seen(run), width=200), "they are others now"


def test_several_runs_are_side_by_side(run: MadeRun, tmp_path: Path) -> None:
    other = MadeRun(tmp_path, "other")
    other.start()
    other.steps(1, 400, 1.0, workers=1)
    other.end(50.0)
    head, *rows = drawn(*seen(run, other), width=160).splitlines()
    assert head.split()[:3] == ["run", "status", "step"]
    assert [row.split()[:2] for row in rows if row.strip()] == [["live", "running"], ["other", "finished"]]


def test_the_command_ends_with_the_run_and_refuses_what_is_none(
    run: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.end(30.0)
    assert main([str(run.paths.root)]) == 0
    assert capsys.readouterr().out.startswith("live: finished, step 100 of 400, loss ")
    assert main([str(tmp_path / "nowhere")]) == 2
    assert str(tmp_path / "nowhere") in capsys.readouterr().err


# --- who gets the page


class Asked:
    """What the page's server answers to a client that keeps its cookie if it is given one."""

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
def asked(run: MadeRun) -> Iterator[Asked]:
    with RunWatcher([run.paths], EVERY_S) as looking, PageServer(looking) as server:
        assert server.url.startswith("http://127.0.0.1:")
        yield Asked(server.url)


@pytest.mark.parametrize("path", ["/", "/0", "/watch.js", "/7", "/?token=wrong", "/?token=%C3%A9", "/?token="])
def test_nobody_without_the_token_sees_anything(asked: Asked, path: str) -> None:
    for cookie in (None, "ray_app_watch=wrong", "ray_app_watch=", "other=1", 'x="'):
        asked.cookie = cookie
        status, body, headers = asked.get(path)
        assert status == 403, cookie
        assert "live" not in body, cookie
        assert "Set-Cookie" not in headers, cookie


def test_the_token_becomes_a_cookie_and_leaves_the_address(asked: Asked, run: MadeRun) -> None:
    status, _, headers = asked.get(f"/?token={asked.token}")
    assert (status, headers["Location"]) == (303, "/")
    asked.cookie, *rest = headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict"} <= set(rest)
    status, body, headers = asked.get("/")
    assert (status, headers["Cache-Control"]) == (200, "no-store")
    assert "live <span" in body
    assert asked.token not in body
    paths = {"/0": 200, "/watch.js": 200, "/1": 404, "/-1": 404, "/../../etc/passwd": 404, "/9999999999": 404}
    assert {path: asked.get(path)[0] for path in paths} == paths
    assert asked.get("/", method="POST")[0] == 501
    run.steps(101, 150, 11.0)
    until(lambda: ">150<" in asked.get("/")[1])
    shutil.rmtree(run.paths.events)
    until(lambda: asked.get("/")[0] == 200)


def test_the_report_of_a_file_has_no_script(run: MadeRun) -> None:
    from ray_app.report.page import Live, render

    facts = read_facts(RunPaths(run.paths.root))
    assert "<script" not in render(facts)
    assert "script-src" not in render(facts)
    assert render(facts, Live("/watch.js", 0, [("live", "running")])).count("<script") == 1
