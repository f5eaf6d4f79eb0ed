"""The texts of docs/text.md, written by the script of the page."""

import subprocess
import sys
from pathlib import Path

from tests.support.pages import write_texts_script


def write_texts(folder: Path) -> None:
    """Runs the script of the page, which writes `texts.jsonl` and `tokenizer.json`."""
    write_texts_script(folder)
    subprocess.run([sys.executable, "make_texts.py"], cwd=folder, check=True, timeout=240)
