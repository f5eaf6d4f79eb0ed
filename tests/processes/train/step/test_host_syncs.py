"""Counts the device synchronization points of a step, on a CPU, where tensors of floating point stand for those on a
device.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ray_app.task import losses
from ray_app.task.base import Batch
from ray_app.task.losses import Losses
from ray_app.testing import WorkerPool, cache_windows
from ray_app.train.job import Hooks
from tests.support.device_group import BACKEND
from tests.support.local_world import LocalMembership, TinyImages, make_job, write_images

FIRST, STEPS = 3, 5
WAITS = {getattr(Tensor, name) for name in ("tolist", "cpu", "numpy")}
"""Synchronizing functions that are not operators on a CPU."""
OPERATORS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select")


class _Calls(TorchFunctionMode):
    """Counts calls of synchronizing functions that are not operators."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func in WAITS and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Counts synchronizing operators."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.overloadpacket.__name__ in OPERATORS and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


class CountWaits:
    """A hook that writes the mean number of synchronizations in `STEPS` steps of rank 0 to a file, as JSON."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._calls = _Calls()
        self._operators = _Operators()
        self._are_on_host = losses.are_on_host

    def __call__(self, rank: int, step: int) -> None:
        if rank == 0 and step == FIRST:
            losses.are_on_host = lambda tensors: False
            self._calls.__enter__()
            self._operators.__enter__()
        if rank == 0 and step == FIRST + STEPS:
            self._operators.__exit__(None, None, None)
            self._calls.__exit__(None, None, None)
            losses.are_on_host = self._are_on_host
            self._file.write_text(json.dumps((self._calls.number + self._operators.number) / STEPS))


class Weighed(TinyImages):
    """A task with weights and a metric."""

    def loss(self, outputs: Tensor, batch: Batch) -> Losses:
        values = super().loss(outputs, batch)
        return Losses(values, torch.ones_like(values), {"sure": outputs.detach().amax(-1)})


CLIPPED = {"train__grad_clip_norm": 0.01}
LOCAL_SGD = {
    "train__strategy": "local_sgd",
    "train__local_steps": 2 * (FIRST + STEPS),
    "checkpoint__every_steps": 2 * (FIRST + STEPS),
}


@pytest.mark.parametrize("task", [TinyImages, pytest.param(Weighed, marks=pytest.mark.rest)])
@pytest.mark.parametrize(
    ("logical_workers", "workers", "backend", "fields", "waits"),
    [
        pytest.param(1, 1, "gloo", {}, 1, id="one"),
        pytest.param(4, 1, "gloo", CLIPPED, 1, id="four on one worker"),
        pytest.param(4, 1, "gloo", CLIPPED | {"train__precision": "fp16"}, 1, id="in half precision"),
        pytest.param(4, 2, BACKEND, CLIPPED, 1, id="four on two workers"),
        pytest.param(4, 2, "gloo", CLIPPED, 2, id="through the host, where the table does not wait for the gradients"),
        pytest.param(4, 2, BACKEND, CLIPPED | LOCAL_SGD, 1, id="local steps"),
    ],
)
def test_a_step_synchronizes_with_the_device_once_for_all_logical_workers(
    worker_pool: WorkerPool,
    tmp_path: Path,
    task: Any,
    logical_workers: int,
    workers: int,
    backend: str,
    fields: dict[str, Any],
    waits: int,
) -> None:
    data, count_file = write_images(tmp_path / "data", [[8 * (FIRST + STEPS + 2)]]), tmp_path / "count.json"
    job = make_job(tmp_path / "run", data, logical_workers=logical_workers, batch=8, task=task(), **fields)
    for outcome in worker_pool.train(
        job,
        workers,
        Hooks(after_step=CountWaits(count_file)),
        cache_windows,
        membership=partial(LocalMembership, backend=backend),
    ):
        assert outcome.error is None, outcome.trace
    assert json.loads(count_file.read_text()) == waits
