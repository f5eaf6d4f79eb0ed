"""The processes of a dry run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ray_app.preflight.sandbox import Sandbox


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
