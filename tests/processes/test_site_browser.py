"""The pages of the documentation in a real headless Chromium, wide and narrow, light and dark."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.browser import Browser, browser
from tests.support.paths import ROOT

__all__ = ["browser"]
pytestmark = pytest.mark.rest

BROKEN = "[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
EXTERNAL_REQUESTS = (
    "performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith('file:') &&"
    " !n.startsWith('data:'))"
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", str(ROOT / "docs"), str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    return sorted(page for page in folder.rglob("*.html") if "_static" not in page.parts)


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (1480, "dark"), (390, "light"), (390, "dark")])
def test_every_page_fits_loads_its_images_and_requests_no_other_site(
    browser: Browser, pages: list[Path], width: int, scheme: str
) -> None:
    problems = {}
    for page in pages:
        browser.load(page.as_uri(), width=width, scheme=scheme)
        layout = {"wide": browser.evaluate("document.documentElement.scrollWidth"), "broken": browser.evaluate(BROKEN)}
        layout["elsewhere"] = browser.evaluate(EXTERNAL_REQUESTS)
        if layout != {"wide": width, "broken": [], "elsewhere": []}:
            problems[page.name] = layout
    assert len(pages) > 40
    assert problems == {}
