"""The processes of a dry run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ray_app.preflight.sandbox import MAX_OUTPUT_BYTES, Sandbox
from tests.support.waiting import wait_until


def flood(out: str) -> int:
    """Prints until twice the limit was printed and the file was truncated; returns the number of bytes."""
    printed_bytes = 0

    def is_truncated() -> bool:
        nonlocal printed_bytes
        printed_bytes += 50_000
        print("x" * 49_999, flush=True)
        return printed_bytes > 2 * MAX_OUTPUT_BYTES and Path(out).stat().st_size < MAX_OUTPUT_BYTES

    wait_until(is_truncated, "the output file was not truncated")
    print("the end")
    return printed_bytes


@pytest.mark.rest
def test_the_output_of_a_process_is_bounded_on_disk(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path / "trial")
    try:
        [ended] = sandbox.run([(flood, (str(tmp_path / "trial" / "0.out"),))], 60.0)
    finally:
        sandbox.close()
    assert ended.error is None, ended.error
    assert ended.value > 2 * MAX_OUTPUT_BYTES
    assert ended.output.splitlines()[-1] == "the end"


@pytest.mark.rest
def test_calls_after_a_timeout_run_in_a_new_server(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path / "trial")
    try:
        [late] = sandbox.run([(time.sleep, (600,))], 0.5)
        [value] = sandbox.run([(abs, (-3,))], 60.0)
    finally:
        sandbox.close()
    assert "did not end within 0.5 s" in str(late.error)
    assert (value.value, value.error) == (3, None)
