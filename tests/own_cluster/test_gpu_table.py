"""The GPU benchmarks can write their table: a dry run on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.mark.rest
def test_the_dry_run_writes_a_table_with_the_lines_of_the_page(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--out", str(tmp_path / "table.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads((tmp_path / "table.json").read_text())["lines"]
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert [line["name"] for line in lines if f"| {line['name']} |" not in page] == [], (
        "docs/gpu.md lacks these lines of the table"
    )
    assert sum(line["status"] == "passed" for line in lines) >= 10
    assert sum(line["status"] == "measured" for line in lines) >= 8
    assert {line["status"] for line in lines} <= {"passed", "measured", "not yet", "left out"}
