"""Checks that fields and files which a page names in code style exist, and makes fields links."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from docutils import nodes
from elsewhere import ROOT
from fields import ALL, PAGE, anchor
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

logger = logging.getLogger(__name__)

_FIELD = re.compile(rf"(?:--)?({'|'.join(ALL)})\.([a-z]\w*)(?![\w/])(?<!\.py)(?<!\.yaml)(?<!\.json)")
_FILE = re.compile(r"(?:[\w.-]+/)+[\w.-]+\.(?:py|yaml|ipynb|toml)$")
_FOLDERS = {path.name for path in (*ROOT.iterdir(), *(ROOT / "ray_app").iterdir()) if path.is_dir()}


class Names(SphinxPostTransform):
    """Looks at every piece of code inside a text."""

    default_priority = 5

    def run(self, **kwargs: Any) -> None:
        """See `Transform.run`."""
        for literal in list(self.document.findall(nodes.literal)):
            text = literal.astext()
            if not isinstance(literal.parent, nodes.reference | nodes.term):
                self._link(literal, text)
            if _FILE.fullmatch(text) and text.split("/")[0] in _FOLDERS and not _is_there(text):
                logger.warning("there is no file %s", text, location=literal, type="names", subtype="file")

    def _link(self, literal: nodes.literal, text: str) -> None:
        match = _FIELD.match(text)
        if not match:
            return
        section, field = match[1], match[2]
        if field not in {section_field.name for section_field in dataclasses.fields(ALL[section])}:
            logger.warning("there is no field %s.%s", section, field, location=literal, type="names", subtype="field")
        elif self.env.docname != PAGE or literal.parent:
            target = anchor(section, field)
            literal.replace_self(make_refnode(self.app.builder, self.env.docname, PAGE, target, literal.deepcopy()))


def _is_there(path: str) -> bool:
    return any((folder / path).exists() for folder in (ROOT, ROOT / "ray_app"))


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_post_transform(Names)
    return {"parallel_read_safe": True}
