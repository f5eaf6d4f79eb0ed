"""The processes of a trial."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ray_app.preflight.sandbox import Sandbox
from ray_app.preflight.sandbox_server import _MAX_OUTPUT_BYTES
from tests.support.waiting import until


def flood(out: str) -> int:
    """Prints until twice what may stay has been said and forgotten; returns how much was said."""
    said = 0

    def is_forgotten() -> bool:
        nonlocal said
        said += 50_000
        print("x" * 49_999, flush=True)
        return said > 2 * _MAX_OUTPUT_BYTES and Path(out).stat().st_size < _MAX_OUTPUT_BYTES

    until(is_forgotten, "what was printed stays")
    print("the end")
    return said


@pytest.mark.rest
def test_a_flood_of_prints_does_not_fill_the_disk(tmp_path: Path) -> None:
    processes = Sandbox(tmp_path / "trial")
    try:
        [ended] = processes.run([(flood, (str(tmp_path / "trial" / "0.out"),))], 60.0)
    finally:
        processes.close()
    assert ended.error is None, ended.error
    assert ended.value > 2 * _MAX_OUTPUT_BYTES
    assert ended.output.splitlines()[-1] == "the end"


@pytest.mark.rest
def test_calls_after_one_that_took_too_long_run_in_a_new_server(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path / "trial")
    try:
        [late] = sandbox.run([(time.sleep, (600,))], 0.5)
        [value] = sandbox.run([(abs, (-3,))], 60.0)
    finally:
        sandbox.close()
    assert "did not end within 0.5 s" in str(late.error)
    assert (value.value, value.error) == (3, None)
