"""Lightning modules, loops in user code, Keras programs and exported models compute on simulated devices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ray_app.config.import_paths import TASK_OPTIMIZER
from ray_app.predict.actor import Model
from ray_app.task.base import Task
from ray_app.task.lightning import LightningTask
from ray_app.task.user_loop import LoopTask
from ray_app.testing import WorkerPool, stream_windows
from tests.device.training import device_run
from tests.support.local_world import make_job

LIGHTNING, LOOP = "tests.support.lightning_modules.", "tests.support.loop_scripts."


def lightning_task() -> Task:
    return LightningTask({"class_path": LIGHTNING + "Good", "init_args": {}}, ["image", "label"], "label")


def loop_task() -> Task:
    return LoopTask(
        train=LOOP + "train",
        evaluate=LOOP + "loss_and_accuracy",
        module={"class_path": LOOP + "net"},
        rows=["image", "label"],
        target="label",
        settings={"variant": "", "log_file": None},
    )


def keras_task() -> Task:
    from ray_app.task.keras import KerasTask

    return KerasTask(model="tests.support.keras_programs.get_convolutional", inputs="image", target="label")


@pytest.mark.rest
@pytest.mark.parametrize("make_task", [lightning_task, *(task for task in (loop_task, keras_task))])
def test_a_task_is_bit_identical_on_one_and_two_devices(
    device_pool: WorkerPool, data: Path, tmp_path: Path, make_task: Callable[[], Task]
) -> None:
    optimizer: dict[str, Any] = {} if make_task is keras_task else {"optimizer": {"class_path": TASK_OPTIMIZER}}
    job = make_job(tmp_path / "run", data, task=make_task(), train__epochs=2, **optimizer)
    one, two = (device_run(device_pool, job, workers, stream_windows) for workers in (1, 2))
    assert (two.digests, two.steps) == (one.digests, one.steps)


@pytest.mark.rest
@pytest.mark.parametrize("is_exported", [True, False])
def test_a_stored_model_predicts_on_a_device(
    device_pool: WorkerPool, data: Path, tmp_path: Path, is_exported: bool
) -> None:
    device_pool.run(1, predict, data, tmp_path, is_exported)


def predict(rank: int, store: Path, data: Path, folder: Path, is_exported: bool) -> None:
    """Compares the outputs of a model on the host and on a device."""
    from ray_app.checkpoint.format import params_digest
    from ray_app.data.reader import fetch_in_process, load_all
    from ray_app.models.loader import EXPORTED
    from ray_app.models.package import write_files
    from ray_app.task.ragged import to_batch
    from tests.device.sim import DEVICE, SIM

    job = make_job(folder / "run", data)
    model = job.task.build_model().eval()
    arrays = load_all(fetch_in_process, job.source).arrays
    state = dict(model.state_dict())
    weights, inputs = safetensors.torch.save(state), None
    if is_exported:
        files = write_files(job.task, model, {name: values[:2] for name, values in arrays.items()}, folder)
        weights, inputs = (files.data / EXPORTED).read_bytes(), list(files.example)
    stored = Model(job.task, weights, inputs, params_digest(state))
    batch = to_batch(arrays, slice(0, 20))
    with torch.inference_mode():
        expected = stored.load(torch.device("cpu"))(batch)
        outputs = stored.load(DEVICE)({name: values.to(DEVICE) for name, values in batch.items()})
    assert outputs.device == DEVICE
    torch.testing.assert_close(outputs.cpu(), expected)
    assert SIM.races() == []
