"""A line of a notebook cell's output that changes in place, by Jupyter's display protocol alone: JupyterLab, VS Code and others know it."""

from __future__ import annotations

from html import escape
from typing import Any


class LiveLine:
    """One line; what it showed last stays in the stored notebook. Only to be used inside a kernel, where IPython is."""

    def __init__(self) -> None:
        self._display: Any = None
        self._shown: tuple[str, float | None] | None = None

    def show(self, text: str, part: float | None = None) -> None:
        """Shows another text.

        Args:
            text: The line.
            part: How much is done, from 0 to 1, for a bar; None: nobody knows.
        """
        from IPython.display import display

        if (text, part) == self._shown:
            return
        self._shown = text, part
        bar = f'<progress value="{part:.4f}" style="width: 14em; vertical-align: middle"></progress> ' if part is not None else ""
        style = "white-space: pre-wrap; font-family: monospace; font-variant-numeric: tabular-nums"
        data = {"text/plain": text, "text/html": f'<div style="{style}">{bar}{escape(text)}</div>'}
        if self._display is None:
            self._display = display(data, raw=True, display_id=True)
        else:
            self._display.update(data, raw=True)
