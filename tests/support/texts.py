"""The texts of docs/text.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT


def write_texts(folder: Path) -> None:
    """Writes `texts.jsonl` and `tokenizer.json`."""
    subprocess.run([sys.executable, str(ROOT / "conf" / "make_texts.py")], cwd=folder, check=True, timeout=240)
