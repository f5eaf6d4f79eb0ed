"""The documentation in a real headless Chromium: every page, wide and narrow, light and dark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.browser import Browser, browser
from tests.support.places import ROOT

__all__ = ["browser"]
pytestmark = pytest.mark.rest

BROKEN = "[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
ASKED_ELSEWHERE = (
    "performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith('file:') &&"
    " !n.startsWith('data:'))"
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("site")
    made = [sys.executable, "-m", "sphinx", "-q", "-b", "html", str(ROOT / "docs"), str(folder)]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True, timeout=300)
    return sorted(page for page in folder.rglob("*.html") if "_static" not in page.parts)


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (1480, "dark"), (390, "light"), (390, "dark")])
def test_no_page_sticks_out_lacks_a_picture_or_asks_elsewhere(
    browser: Browser, pages: list[Path], width: int, scheme: str
) -> None:
    found = {}
    for page in pages:
        browser.show(page.as_uri(), width=width, scheme=scheme)
        told = {"wide": browser.ask("document.documentElement.scrollWidth"), "broken": browser.ask(BROKEN)}
        told["elsewhere"] = browser.ask(ASKED_ELSEWHERE)
        if told != {"wide": width, "broken": [], "elsewhere": []}:
            found[page.name] = told
    assert len(pages) > 40
    assert found == {}
