"""The page of `ray-app watch` in a real headless Chromium: it follows its run, says when it cannot, and asks its own
server alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_app.watch.screen import RunWatcher
from ray_app.watch.server import PageServer
from tests.support.browser import STICKING_OUT, UNREADABLE, Browser, browser
from tests.support.made_run import MadeRun, full_run
from tests.support.waiting import until

__all__ = ["browser"]

OPEN = 'document.querySelector("#configuration details, details")'


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    made = full_run(tmp_path, "live")
    made.hold()
    made.start(6000, fence=3)
    return made


@pytest.fixture
def watched(run: MadeRun) -> Iterator[tuple[PageServer, str]]:
    other = MadeRun(run.paths.root.parent, "other")
    other.start()
    with RunWatcher([run.paths, other.paths], 0.05) as looking, PageServer(looking) as server:
        yield server, server.url.split("/?")[0]


@pytest.mark.rest
def test_it_follows_its_run(browser: Browser, watched: tuple[PageServer, str], run: MadeRun) -> None:
    server, site = watched
    browser.show(server.url)
    assert browser.ask("location.href") == f"{site}/", "the token is not left in the address"
    assert browser.ask('[...document.querySelectorAll("nav a")].map(a => a.textContent.trim().split(/\\s+/)[0])') == [
        "live",
        "other",
    ]
    assert ">400<" in browser.ask("document.querySelector('#figures').innerHTML")
    browser.ask(f"{OPEN}.open = true")
    run.steps(401, 450, 6100, generation="3.1")
    until(lambda: ">450<" in browser.ask("document.querySelector('#figures').innerHTML"))
    assert browser.ask(f"{OPEN}.open"), "what was folded out stays so"
    assert all(url.startswith(f"{site}/") for url in browser.requested())
    refused = [
        e for e in browser.events if e.get("method") == "Log.entryAdded" and "Content Security" in str(e["params"])
    ]
    assert not refused


@pytest.mark.rest
def test_it_says_when_it_is_not_up_to_date(browser: Browser, run: MadeRun) -> None:
    with RunWatcher([run.paths], 0.05) as looking:
        with PageServer(looking) as server:
            browser.show(server.url)
            assert browser.ask('document.querySelector("#lost").hidden')
            port, token = int(server.url.split(":")[2].split("/")[0]), server.token
        until(lambda: browser.ask('document.querySelector("#lost").textContent').startswith("Not up to date"))
        with PageServer(looking, port=port, token=token):
            until(lambda: browser.ask('document.querySelector("#lost").hidden'))


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "light"), (1200, "dark")])
def test_it_can_be_read(browser: Browser, watched: tuple[PageServer, str], width: int, scheme: str) -> None:
    browser.show(watched[0].url, width=width, scheme=scheme)
    assert browser.ask(STICKING_OUT) == []
    assert browser.ask(UNREADABLE) == []
