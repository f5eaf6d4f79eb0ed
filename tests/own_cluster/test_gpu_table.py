"""The GPU benchmarks can write their table: a dry run on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.mark.rest
def test_the_dry_run_writes_a_table(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--out", str(tmp_path / "table.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads((tmp_path / "table.json").read_text())["lines"]
    assert sum(line["status"] == "passed" for line in lines) >= 10
    assert sum(line["status"] == "measured" for line in lines) >= 8
    assert {line["status"] for line in lines} <= {"passed", "measured", "not yet", "left out"}
