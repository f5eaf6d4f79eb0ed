"""The cost of a step in Python calls and torch operators, which does not depend on the load of the machine.

The numbers hold for Python 3.11 and the pinned torch. A change that makes a step more expensive raises them here and
gives the reason in its commit message; a change that makes it cheaper lowers them. Eighteen calls of a step on several
workers, two on one, are for straggler detection (`train/stragglers.py`); two check whether parameters are to be
compared; six keep losses on the device until it has the work of all logical workers (`test_host_syncs.py`). The thread
that sends all buckets but the last during backward is not counted.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ray_app.task.base import Task
from ray_app.task.image import ImageClassification
from ray_app.testing import WorkerPool, cache_windows, stream_windows
from ray_app.train.job import Hooks, OpenWindows
from tests.support.local_world import TinyImages, make_job, write_images
from tests.support.step_cost import STEPS, StepCost

FIRST = 13


class Small(TinyImages):
    """Imports PyTorch's compiler in every process: a step without it has fewer calls, see `test_imports.py`.

    Tests in `test_windows.py` count the calls that gather rows.
    """

    def build_model(self) -> nn.Module:
        import_module("torch._dynamo")
        return super().build_model()


class Grey(ImageClassification):
    """A ResNet-18 with one input channel and PyTorch's compiler imported, as in `Small`."""

    def build_model(self) -> nn.Module:
        import_module("torch._dynamo")
        model = super().build_model()
        model.conv1 = nn.Conv2d(1, 64, 7, 2, 3, bias=False)
        return model


def resnet18() -> Task:
    return Grey(model="resnet18")


@pytest.mark.parametrize(
    ("task", "workers", "windows", "fields", "expected"),
    [
        pytest.param(Small, 1, cache_windows, {}, {"python_calls": 433, "torch_operators": 66}, id="small"),
        pytest.param(Small, 1, stream_windows, {}, {"python_calls": 433, "torch_operators": 66}, id="small, read"),
        pytest.param(Small, 2, cache_windows, {}, {"python_calls": 727, "torch_operators": 94}, id="small, 2 workers"),
        pytest.param(
            resnet18,
            2,
            cache_windows,
            {},
            {"python_calls": 3105, "torch_operators": 404},
            id="ResNet-18, 2 workers",
            marks=pytest.mark.rest,
        ),
        pytest.param(
            resnet18,
            2,
            cache_windows,
            {"train__reduction": "overlapped"},
            {"python_calls": 3089, "torch_operators": 401},
            id="ResNet-18, overlapped",
            marks=pytest.mark.rest,
        ),
    ],
)
@pytest.mark.exact_versions
def test_a_step_has_a_fixed_number_of_calls_and_operators(
    worker_pool: WorkerPool,
    tmp_path: Path,
    task: Any,
    workers: int,
    windows: OpenWindows,
    fields: dict[str, Any],
    expected: dict[str, int],
) -> None:
    data, count_file = write_images(tmp_path / "data", [[8 * (FIRST + 2 * STEPS + 2)]]), tmp_path / "count.json"
    job = make_job(
        tmp_path / "run",
        data,
        logical_workers=workers,
        batch=8,
        task=task(),
        data__shuffle_window_rows=10_000,
        **fields,
    )
    outcomes = worker_pool.train(job, workers, Hooks(after_step=StepCost(str(count_file), FIRST)), windows)
    assert [outcome.error for outcome in outcomes] == [None] * workers
    # On a busy machine, a step of several workers may look once more, by three calls, whether a transfer is done.
    calls = pytest.approx(expected["python_calls"], abs=2 if workers == 1 else 6)
    assert json.loads(count_file.read_text()) == expected | {"python_calls": calls}
