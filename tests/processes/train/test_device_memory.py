"""That the benchmark of a device's memory runs, and what its figures must be."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.places import ROOT


def printed(*command: str) -> str:
    """What a benchmark prints, in a process of its own as by hand."""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.rest
def test_the_memory_of_a_device_is_measured() -> None:
    lines = [json.loads(line) for line in printed("benchmarks/device_memory.py").splitlines() if line.startswith("{")]
    used = {line["strategy"]: line["device_mb"] for line in lines}
    assert used.keys() >= {"ddp", "central_storage", "fsdp"}
    assert 0 < used["central_storage"] < 0.9 * used["ddp"], "the moments are elsewhere"
