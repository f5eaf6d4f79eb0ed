"""Which of the two ways to recover a run has."""

from __future__ import annotations

import sys

import pytest

from ray_app.cluster.trainer import _recovers_in_place
from ray_app.config.config import Config


def test_with_a_ray_of_other_internals_all_workers_restart_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert _recovers_in_place(Config())
    assert not _recovers_in_place(Config().replace(failure__recovery="restart"))
    assert not caplog.records
    monkeypatch.setitem(sys.modules, "ray_app.cluster.elastic", None)  # as if something that it imports were not there
    assert not _recovers_in_place(Config())
    [warning] = caplog.records
    assert "lacks what recovery in place needs" in warning.getMessage()
    assert "all workers restart after a failure" in warning.getMessage()
