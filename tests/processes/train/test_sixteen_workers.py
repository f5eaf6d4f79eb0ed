"""The claim of README holds literally: one worker and sixteen workers train the same parameters."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from ray_app.testing import WorkerPool, cache_windows
from tests.support.bit_identity import assert_bit_identical
from tests.support.local_world import TinyImages, make_job, write_images


@pytest.mark.rest
def test_one_worker_and_sixteen_are_bit_identical(tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", [[50, 1], [46]])
    job = make_job(tmp_path / "run", data, logical_workers=16, batch=32, task=TinyImages(), train__epochs=2)
    (tmp_path / "groups").mkdir()
    with closing(WorkerPool(16, tmp_path / "groups")) as pool:
        alone, sixteen = (pool.train_new_run(job, size, cache_windows) for size in (1, 16))
    assert_bit_identical(sixteen, alone)
