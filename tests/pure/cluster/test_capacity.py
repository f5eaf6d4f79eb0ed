"""Shuffle windows that do not fit into memory are refused before the start."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ray_app.cluster.resources import check_window_memory
from ray_app.errors import ConfigError
from tests.support.local_world import make_job, write_images


def node(memory: int) -> dict[str, object]:
    return {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"memory": memory, "CPU": 4.0}}


def test_shuffle_windows_that_fit_on_no_node_are_refused_with_their_sizes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_images(tmp_path / "data", [[400, 400]])
    job = make_job(
        tmp_path / "run", data, logical_workers=4, batch=8, data__shuffle_window_rows=100, scaling__min_workers=1
    )
    row_bytes = sum(spec.row_bytes for spec in job.fields.values())
    worker_bytes = 100 * row_bytes
    with caplog.at_level(logging.WARNING):
        check_window_memory(job, 4, [node(9 * worker_bytes), node(10 * worker_bytes), node(1) | {"Alive": False}])
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        check_window_memory(job, 4, [node(3 * worker_bytes)])
    assert "A worker of 1 would hold" in caplog.text
    assert "scaling.min_workers" in caplog.text
    expected = (
        rf"A worker of 2 would hold .*100 rows \(data.shuffle_window_rows\) x {row_bytes:,} bytes x 2 logical workers"
        r" x 2"
    )
    with pytest.raises(ConfigError, match=expected) as caught:
        check_window_memory(job, 2, [node(3 * worker_bytes)])
    assert "Set data.shuffle_window_rows to 60 or fewer" in str(caught.value)
    check_window_memory(
        make_job(tmp_path / "other", data, logical_workers=4, batch=8, data__cache="memory"), 2, [node(1)]
    )
