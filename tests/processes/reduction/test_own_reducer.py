"""A gradient reducer of the user (`train.reducer`) takes the place of the application's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_app.errors import ConfigError
from ray_app.testing import WorkerPool, cache_windows
from ray_app.train.build import load_reducer
from ray_app.train.job import Job
from tests.support.bit_identity import train_and_resume
from tests.support.local_world import make_job, write_images

REDUCER = "tests.support.own_reducer.OneDevice"


@pytest.mark.rest
def test_the_reducer_of_the_documentation_is_bit_identical_on_any_workers(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    """The rows of the last step of an epoch are those of one logical worker."""
    data = write_images(tmp_path / "data", [[50, 1], [46]])
    fields: dict[str, Any] = {"train__epochs": 2, "checkpoint__every_steps": 4, "train__grad_clip_norm": 0.5}

    def job_of(name: str, reducer: str | None) -> Job:
        return make_job(tmp_path / name, data, train__reducer=reducer, **fields)

    job = job_of("own", REDUCER)
    alone = train_and_resume(worker_pool, job, (1, 4))
    other = worker_pool.train_new_run(job_of("application", None), 2, cache_windows)
    for name, value in other.snapshot.model.items():
        assert torch.allclose(value, alone.snapshot.model[name], rtol=1e-3, atol=1e-3), name
    assert other.digests != alone.digests, "the application's reducer adds in the same order, so the test shows nothing"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.Reducer", "which cannot be imported: No module named 'nowhere'. Name an importable class"),
        ("torch.nn.Linear", "which is not a subclass of ray_app.reduction.reducer.GradientReducer"),
        (
            "ray_app.reduction.reducer.GradientReducer",
            "which lacks backward, close, finish, gradients, launch, norms, skip",
        ),
    ],
)
def test_other_classes_are_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_reducer(path)
