"""The page of `ray-app watch` in a real headless Chromium: it follows its run, reports a lost server, and requests only
its own server.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_app.watch.live_views import PageServer, RunWatcher
from tests.support.browser import FIND_LOW_CONTRAST_ELEMENTS, FIND_OVERFLOWING_ELEMENTS, Browser, browser
from tests.support.run_directory import RunDirectory, make_full_run
from tests.support.waiting import wait_until

__all__ = ["browser"]

OPEN = 'document.querySelector("#configuration details, details")'


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = make_full_run(tmp_path, "live")
    run.write_live_lease()
    run.start(6000, fence=3)
    return run


@pytest.fixture
def page_server(run: RunDirectory) -> Iterator[tuple[PageServer, str]]:
    other = RunDirectory(run.paths.root.parent, "other")
    other.start()
    with RunWatcher([run.paths, other.paths], 0.05) as watcher, PageServer(watcher) as server:
        yield server, server.url.split("/?")[0]


@pytest.mark.rest
def test_the_page_follows_its_run(browser: Browser, page_server: tuple[PageServer, str], run: RunDirectory) -> None:
    server, site = page_server
    browser.load(server.url)
    assert browser.evaluate("location.href") == f"{site}{server.folder}", "the token stays in the address"
    assert browser.evaluate(
        '[...document.querySelectorAll("nav a")].map(a => a.textContent.trim().split(/\\s+/)[0])'
    ) == ["live", "other"]
    assert ">400<" in browser.evaluate("document.querySelector('#figures').innerHTML")
    browser.evaluate(f"{OPEN}.open = true")
    run.steps(401, 450, 6100, generation="3.1")
    wait_until(lambda: ">450<" in browser.evaluate("document.querySelector('#figures').innerHTML"))
    assert browser.evaluate(f"{OPEN}.open"), "an expanded section was collapsed"
    assert all(url.startswith(f"{site}/") for url in browser.requested_urls())
    refused = [
        e for e in browser.events if e.get("method") == "Log.entryAdded" and "Content Security" in str(e["params"])
    ]
    assert not refused


@pytest.mark.rest
def test_the_page_reports_a_lost_server(browser: Browser, run: RunDirectory) -> None:
    with RunWatcher([run.paths], 0.05) as watcher:
        with PageServer(watcher) as server:
            browser.load(server.url)
            assert browser.evaluate('document.querySelector("#lost").hidden')
            port, token = int(server.url.split(":")[2].split("/")[0]), server.token
        wait_until(lambda: browser.evaluate('document.querySelector("#lost").textContent').startswith("Not up to date"))
        with PageServer(watcher, port=port, token=token):
            wait_until(lambda: browser.evaluate('document.querySelector("#lost").hidden'))


@pytest.mark.rest
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "light"), (1200, "dark")])
def test_the_page_fits_the_screen_and_is_readable(
    browser: Browser, page_server: tuple[PageServer, str], width: int, scheme: str
) -> None:
    browser.load(page_server[0].url, width=width, scheme=scheme)
    assert browser.evaluate(FIND_OVERFLOWING_ELEMENTS) == []
    assert browser.evaluate(FIND_LOW_CONTRAST_ELEMENTS) == []
