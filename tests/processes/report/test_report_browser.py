"""The report in a real headless Chromium: it fetches and executes nothing, fits the screen, and has a light and a dark
scheme.
"""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ray_app.report.html import write_report
from tests.support.browser import FIND_LOW_CONTRAST_ELEMENTS, FIND_OVERFLOWING_ELEMENTS, Browser, browser
from tests.support.run_directory import RunDirectory, make_full_run

__all__ = ["browser"]

SECTIONS = ["top", "figures", "learning", "cluster", "classes", "ledger", "configuration"]
WIDE_WORD = "a_long_name_without_a_single_space_that_has_nowhere_to_break_" * 3

BACKGROUND = "getComputedStyle(document.body).backgroundColor"
OVERLAPPING = """(() => {
  const found = [];
  for (const drawing of document.querySelectorAll("svg")) {
    const boxes = [...drawing.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]).filter(([, b]) => b.width);
    boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
      if (a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom) found.push([one, other]);
    }));
  }
  return found;
})()"""  # noqa: E501


class Site:
    """Serves a folder on a loopback port and notes the requested paths."""

    def __init__(self, folder: Path) -> None:
        self.requests: list[str] = []
        requests = self.requests

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                requests.append(self.path)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


@pytest.fixture
def full(tmp_path: Path) -> RunDirectory:
    run = make_full_run(tmp_path, classes=16, text=f"<b>class</b> {WIDE_WORD}")
    write_report(run.paths)
    return run


@pytest.mark.rest
@pytest.mark.parametrize(
    ("width", "scheme"), [(1200, "light"), (1200, "dark"), (800, "light"), (390, "light"), (390, "dark")]
)
def test_the_report_fits_every_screen_and_is_readable(
    browser: Browser, site: Site, full: RunDirectory, width: int, scheme: str
) -> None:
    page = f"{site.address}/run/report.html"
    browser.load(page, width=width, scheme=scheme)
    assert browser.requested_urls() == [page]
    assert site.requests == ["/run/report.html"], "the page requested other files"
    assert [event for event in browser.events if event.get("method") == "Log.entryAdded"] == [], (
        "the browser blocked a request of the page"
    )
    for name in SECTIONS:
        assert browser.evaluate(f"document.getElementById({name!r}).getBoundingClientRect().height") > 40, name
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate(FIND_OVERFLOWING_ELEMENTS) == []
    assert browser.evaluate("[...document.images].every(image => image.complete && image.naturalWidth === 1)")
    assert browser.evaluate(FIND_LOW_CONTRAST_ELEMENTS) == [], "a text has a contrast below 4.5 (WCAG AA)"
    assert browser.evaluate(OVERLAPPING) == []


@pytest.mark.rest
def test_light_and_dark_differ_and_print_is_light(
    browser: Browser, site: Site, full: RunDirectory, tmp_path: Path
) -> None:
    colors = {}
    for scheme in ("light", "dark"):
        browser.load(f"{site.address}/run/report.html", scheme=scheme)
        colors[scheme] = browser.evaluate(BACKGROUND), browser.evaluate("getComputedStyle(document.body).color")
    assert colors["light"][0] != colors["dark"][0]
    assert colors["light"][1] != colors["dark"][1]
    browser.call(
        "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    assert browser.evaluate("getComputedStyle(document.body).color") == colors["light"][1]
    assert browser.evaluate("document.querySelector('details .scroll').getBoundingClientRect().height") > 20, (
        "folded sections are not printed"
    )
    browser.print(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_texts_of_a_hostile_run_are_neither_fetched_nor_executed(browser: Browser, site: Site, tmp_path: Path) -> None:
    text = (
        f"<script>document.title='run'</script><img src='{site.address}/stolen.png' onerror=\"document.title='run'\">"
    )
    run = make_full_run(tmp_path, text=text)
    run.evaluate(
        390,
        5000,
        {"accuracy": 2.0},
        examples=[{"row": 1, "truth": text, "predicted": text, "image": f"{site.address}/stolen.png"}],
    )
    write_report(run.paths)
    browser.load(f"{site.address}/run/report.html")
    assert site.requests == ["/run/report.html"]
    assert browser.evaluate("document.title") == "run · finished"
    assert browser.evaluate("document.images.length") == 0
    assert browser.evaluate("document.scripts.length") == 0


def test_the_content_policy_blocks_injected_markup(browser: Browser, site: Site, full: RunDirectory) -> None:
    """If escaping missed markup, the page's content security policy still blocks fetching and execution."""
    text = full.paths.report.read_text()
    slipped = (
        f"<script>document.title='run'</script><img src='{site.address}/stolen.png'><link rel=stylesheet"
        f" href='{site.address}/stolen.css'>"
    )
    full.paths.report.write_text(text.replace("<main>", f"<main>{slipped}"))
    browser.load(f"{site.address}/run/report.html")
    assert site.requests == ["/run/report.html"]
    assert browser.evaluate("document.title") == "run · finished"


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["empty", "running", "failed"])
def test_the_report_of_an_unfinished_run_fits_a_phone(browser: Browser, site: Site, tmp_path: Path, kind: str) -> None:
    run = RunDirectory(tmp_path, data__eval_path=None)
    if kind != "empty":
        run.start()
        run.steps(1, 30, 2.0)
    if kind == "running":
        run.write_live_lease()
    elif kind == "failed":
        run.end(9.0, "failed", reason=f"it was {WIDE_WORD}")
    write_report(run.paths)
    browser.load(f"{site.address}/run/report.html", width=390)
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    assert browser.evaluate(FIND_OVERFLOWING_ELEMENTS) == []
    assert browser.evaluate("document.querySelector('.status').textContent") == {"empty": "vanished"}.get(kind, kind)
