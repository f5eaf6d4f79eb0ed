"""Two files of ratios are compared with the noise of their nulls as limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import RATIOS_FILE, Sample, report, store_ratios
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("null", "other", "direction"),
    [(1.02, 1.3, "higher"), (1.02, 0.8, "lower"), (1.02, 1.01, "same"), (1.5, 1.3, "same"), (0.6, 1.3, "same")],
)
def test_a_change_within_the_noise_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, null: float, other: float, direction: str
) -> None:
    for name, ratio in (("before", 1.0), ("after", other)):
        monkeypatch.setenv(RATIOS_FILE, str(tmp_path / name))
        walls = {"bare": 1.0, "ours": ratio, "bare again": null if name == "after" else 1.0}
        report("a step", {side: [Sample(wall, wall)] * 3 for side, wall in walls.items()}, {})
        store_ratios("a table without a null", "theirs", {"ours": [ratio]})
    command = [sys.executable, "benchmarks/compare.py", str(tmp_path / "before"), str(tmp_path / "after")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert [line.split()[0] for line in done.stdout.splitlines()] == [direction] * 2, done.stdout + done.stderr
    assert done.returncode == (direction == "higher")
