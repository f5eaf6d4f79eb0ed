"""The data set of docs/detection.md: images of different sizes with the boxes of their objects."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT


def write_shapes(folder: Path, rows: int = 64) -> dict[str, Any]:
    """Writes the data set; returns the fields of the section `data` for training and evaluation on it."""
    runpy.run_path(str(ROOT / "conf" / "make_shapes.py"))["write_shapes"](folder, rows, rows)
    return {"path": str(folder / "train"), "eval_path": str(folder / "eval")}
