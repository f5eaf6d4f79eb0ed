"""The heartbeats of a worker."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ray_app.cluster.rendezvous.client import RendezvousClient


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("a message that nobody expects"), MemoryError()])
def test_signs_of_life_go_on_after_any_error(error: Exception) -> None:
    over = iter([False, False, True])
    tried = []

    def connect() -> None:
        tried.append(error)
        raise error

    closed = SimpleNamespace(is_set=lambda: next(over), wait=lambda seconds: None)
    worker = SimpleNamespace(_closed=closed, _connection=None, _connect=connect, _disconnect=lambda: None)
    RendezvousClient._run(worker)  # type: ignore[arg-type]
    assert tried == [error, error]
