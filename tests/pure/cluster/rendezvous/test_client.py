"""The heartbeats that a worker sends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ray_app.cluster.rendezvous.client import RendezvousClient


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("a message that nobody expects"), MemoryError()])
def test_heartbeats_continue_after_any_error(error: Exception) -> None:
    closed_states = iter([False, False, True])
    attempts = []

    def connect() -> None:
        attempts.append(error)
        raise error

    closed = SimpleNamespace(is_set=lambda: next(closed_states), wait=lambda seconds: None)
    worker = SimpleNamespace(_closed=closed, _connection=None, _connect=connect, _disconnect=lambda: None)
    RendezvousClient._run(worker)
    assert attempts == [error, error]
