"""Pages that are made of one file of the repository outside docs/, and links to files that are pages of the site."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "deploy": "project/deploy.md",
    "deploy/README.md": "project/deploy.md",
    "conf": "reference/shipped.md",
    "notebooks": "notebooks.md",
}
_WHOLE = re.compile(r"^<!-- page: (\S+) -->$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")


def rebased(text: str, written_in: Path, shown_in: Path) -> str:
    """Returns Markdown with relative links rewritten for another folder, and for pages of the site if there are any."""

    def moved(link: re.Match[str]) -> str:
        target = (written_in / link[1]).resolve()
        if target.is_relative_to(ROOT) and (page := PAGES.get(str(target.relative_to(ROOT)))):
            target = DOCS / page
        return os.path.relpath(target, shown_in) + (link[2] or "")

    return _LINK.sub(moved, text)


def on_source_read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Puts the file of the repository where a page names one, and sets all links right."""
    folder = (DOCS / docname).parent
    source[0] = rebased(source[0], folder, folder)

    def whole(named: re.Match[str]) -> str:
        file = ROOT / named[1]
        app.env.note_dependency(str(file))
        return rebased(file.read_text(), file.parent, folder)

    source[0] = _WHOLE.sub(whole, source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", on_source_read)
    return {"parallel_read_safe": True}
