"""A console of rich that shows texts as they are: names of classes and files, errors, and output of user code."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ray_app.errors import escape_controls

_COLORS = re.compile(r"\x1b\[[\d;]*m")


class TextConsole(Console):
    """A console that writes control characters of texts as escapes; only rich itself colors and moves the cursor."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """See `Console.render`, which all output passes, that of nested and live displays included."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_controls(segment.text))


def without_colors(text: str) -> str:
    """Returns the output of a program without its colors, and with a line for each state of a progress bar."""
    return _COLORS.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
