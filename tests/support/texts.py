"""The texts of docs/text.md, as the page makes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.pages import blocks
from tests.support.places import ROOT


def write_texts(folder: Path) -> None:
    """Runs the page's script: `texts.jsonl` and `tokenizer.json`."""
    [script] = [block for block in blocks(ROOT / "docs" / "text.md") if block.told == "make_texts.py"]
    (folder / script.told).write_text(script.text)
    subprocess.run([sys.executable, script.told], cwd=folder, check=True, timeout=240)
