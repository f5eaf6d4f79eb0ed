"""The heartbeats of a worker."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ray_app.cluster.membership import RayMembership


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("a message that nobody expects"), MemoryError()])
def test_signs_of_life_go_on_after_any_error(error: Exception) -> None:
    waits = iter([False, False, True])
    tried = []

    def keep_line() -> None:
        tried.append(error)
        raise error

    worker = SimpleNamespace(_closed=SimpleNamespace(wait=lambda seconds: next(waits)), _keep_line=keep_line)
    RayMembership._run(worker)  # type: ignore[arg-type]
    assert tried == [error, error]
