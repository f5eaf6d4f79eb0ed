"""The node sampler: names of nodes, the interval of its samples, and the library for GPUs."""

from __future__ import annotations

import importlib.util
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from ray_app.config.config import Config
from ray_app.driver import services
from ray_app.watch.metrics import _free_name


def test_nodes_that_share_an_address_have_different_names() -> None:
    assert _free_name("10.0.0.1", set()) == "10.0.0.1"
    assert _free_name("10.0.0.1", {"10.0.0.1", "10.0.0.1-3"}) == "10.0.0.1-2"


@pytest.mark.parametrize(("gpus", "installed"), [(1, False), (0, False), (1, True)])
def test_metrics_without_the_gpus_name_the_extra(
    gpus: int, installed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job: Any = SimpleNamespace(config=Config().replace(scaling__gpus_per_worker=gpus), paths=None, fence=1)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(services, "newest_commit", lambda _: None)
    monkeypatch.setattr(services, "NodeSampler", lambda *arguments: arguments)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: installed or None)
    with caplog.at_level(logging.WARNING):
        assert services.make_sampler(job) is not None
    expected = 'The system metrics lack the GPUs, since pynvml is not installed: pip install "PATH_TO_RAY_APP[gpu]".'
    assert [record.message for record in caplog.records] == ([expected] if gpus and not installed else [])
