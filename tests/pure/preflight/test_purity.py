"""Random numbers that do not come from torch or the keys are detected before a run, with the line of the user."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ray_app.preflight.purity import find_impurities
from ray_app.task.base import Rows
from ray_app.task.configured_arguments import make_loss
from ray_app.task.module import ModuleTask
from ray_app.task.ragged import Arrays
from tests.support import impure_tasks
from tests.support.impure_tasks import Impure
from tests.support.local_world import make_job, write_images

CODE = Path(impure_tasks.__file__).read_text().splitlines()


def impurities_of(tmp_path: Path, impurity: str) -> list[str]:
    data = write_images(tmp_path / "data", [[8], [8]])
    return find_impurities(make_job(tmp_path / "run", data, logical_workers=2, batch=4, task=Impure(impurity)))


def line_of(code: str) -> str:
    [number] = [i for i, source_line in enumerate(CODE, 1) if code in source_line]
    return f"(impure_tasks.py, line {number}, in "


@pytest.mark.rest
@pytest.mark.parametrize(
    ("impurity", "expected"),
    [
        ("decode", f"decode draws from Python's generator (random) {line_of('random.random() <')}"),
        ("batch", "decode returns another 'image' for a row alone"),
        ("numpy", f"augment draws from NumPy's generator (numpy.random) {line_of('np.random.rand()')}"),
        ("unseeded", "augment draws from a generator without a seed (numpy.random.default_rng) "),
        ("transform", "augment returns another result if it is called again"),
        ("kept", "training_loss returns another result if it is called again"),
    ],
)
def test_preflight_names_impure_code(impurity: str, expected: str, tmp_path: Path) -> None:
    [message] = impurities_of(tmp_path, impurity)
    assert message.startswith(expected)


class DrawingTask(Impure):
    """Draws in `decode_training` from the global generator of NumPy."""

    def decode_training(self, rows: Rows, keys: npt.NDArray[np.int64]) -> Arrays:
        np.random.rand()
        return self.decode(rows)


def test_a_draw_in_training_alone_is_named(tmp_path: Path) -> None:
    job = make_job(
        tmp_path / "run", write_images(tmp_path / "data", [[8], [8]]), logical_workers=2, batch=4, task=DrawingTask()
    )
    [message] = find_impurities(job)
    assert message.startswith("decode_training draws from NumPy's generator (numpy.random) (test_purity.py, line")


def test_a_pure_task_has_no_impurities(tmp_path: Path) -> None:
    assert impurities_of(tmp_path, "") == []


@pytest.mark.rest
def test_a_model_that_cannot_be_copied_is_built_again(tmp_path: Path) -> None:
    assert impurities_of(tmp_path, "lock") == []


def test_a_loss_that_a_process_makes_once_is_no_impurity(tmp_path: Path) -> None:
    model = {"class_path": "torch.nn.Conv2d", "init_args": {"in_channels": 1, "out_channels": 1, "kernel_size": 1}}
    task = ModuleTask(model, ["image"], "image", {"class_path": "torch.nn.MSELoss"})
    data = write_images(tmp_path / "data", [[8], [8]])
    job = make_job(tmp_path / "run", data, logical_workers=2, batch=4, task=task)
    make_loss.cache_clear()
    assert find_impurities(job) == []
