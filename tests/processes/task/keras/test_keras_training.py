"""Keras programs: the steps of `Model.fit`, and the same weights on any workers, also after a kill and a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_app.config.config import Config
from ray_app.data.arrays import to_column
from ray_app.task.keras import KerasTask
from ray_app.task.keras.library import import_keras, program_session
from ray_app.testing import WorkerPool, cache_windows, make_job, read_trained_run
from ray_app.train.job import Job
from ray_app.train.state.state import seed_init
from tests.support import keras_programs
from tests.support.bit_identity import train_and_resume
from tests.support.local_world import CPU, write_images
from tests.support.server_world import ServerWorld

PROGRAMS = "tests.support.keras_programs."
keras = import_keras()
RTOL, ATOL = 1e-5, 1e-6
"""Tolerance of float32: the mean of a loss is the same sum, divided in another place."""


@pytest.fixture(scope="module")
def worker_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """Worker processes that have imported Keras."""
    preloaded = ("ray_app.testing", "torchmetrics", "ray_app.task.keras", "tests.support.keras_programs")
    with WorkerPool(4, tmp_path_factory.mktemp("stores"), preloaded) as pool:
        yield pool


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("keras") / "images", [[50, 1], [46]])


def write_arrays(folder: Path, **arrays: np.ndarray) -> Path:
    """Writes arrays as columns of a data set."""
    folder.mkdir(parents=True)
    columns = [to_column(name, values) for name, values in arrays.items()]
    table = pa.Table.from_arrays([data for _, data in columns], schema=pa.schema([field for field, _ in columns]))
    pq.write_table(table, folder / "part-0.parquet")
    return folder


def job_of(folder: Path, data: Path, function: str, **fields: Any) -> Job:
    init_args = {"model": PROGRAMS + function, "inputs": "image", "target": "label", **fields.pop("init_args", {})}
    config = Config().replace(
        task={"class_path": "ray_app.task.keras.KerasTask", "init_args": init_args},
        **{
            "data__path": str(data),
            "data__global_batch_size": 12,
            "scaling__max_workers": 4,
            "train__epochs": 2,
            **fields,
        },
    )
    return make_job(config, folder)


class Steps(keras.callbacks.Callback):  # type: ignore[name-defined]
    """The loss and the metrics of every step of `fit` by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, float]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.reset_metrics()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append({name: float(value) for name, value in logs.items()})


def fit_with_keras(
    job: Job, function: Callable[[], Any], x: np.ndarray, y: np.ndarray
) -> tuple[Any, list[dict[str, float]]]:
    """Trains a program by `Model.fit` on the rows of a job in their order; returns the model and the logs of steps."""
    task = job.task
    assert isinstance(task, KerasTask)
    seed_init(job.config.seed, CPU)
    initial = task.build_model().program.get_weights()
    # Its layers get the names that they have in a new process.
    with program_session(None):
        model, steps = function(), Steps()
    model.set_weights(initial)
    for epoch in range(job.config.train.epochs or 1):
        order = job.plan.epoch(epoch)
        rows = np.concatenate([order.rows_at(0, step) for step in range(job.plan.steps_per_epoch)])
        batch = job.plan.global_batch_size
        model.fit(x[rows], y[rows], batch_size=batch, epochs=1, shuffle=False, verbose=0, callbacks=[steps])
    return model, steps.logs


def check_equal(pool: WorkerPool, job: Job, function: Callable[[], Any], x: np.ndarray, y: np.ndarray) -> None:
    trained = pool.train_new_run(job, 1)
    model, logs = fit_with_keras(job, function, x, y)
    np.testing.assert_allclose([step[1] for step in trained.steps], [one.pop("loss") for one in logs], RTOL, ATOL)
    if any(logs):
        for step, log in zip(trained.steps, logs, strict=True):
            assert dict(step[-1]) == pytest.approx(log, rel=RTOL)
    weights = {v.path: v.value.detach() for v in model.weights}
    assert trained.snapshot.model.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_allclose(trained.snapshot.model[name], value, RTOL, ATOL, err_msg=name)


def mnist(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (rows, 28, 28), dtype=np.uint8), (np.arange(rows) % 10).astype(np.int64)


@pytest.mark.rest
def test_the_dense_network_of_the_guide_takes_the_steps_of_fit(worker_pool: WorkerPool, tmp_path: Path) -> None:
    image, label = mnist(640)
    data = write_arrays(tmp_path / "data", image=image, label=label)
    fields = {"scaling__max_workers": 1, "data__global_batch_size": 32, "init_args": {"scale": 255}}
    job = job_of(tmp_path / "run", data, "get_dense", **fields)
    x = image.reshape(-1, 784).astype("float32") / 255
    check_equal(worker_pool, job, keras_programs.get_dense, x, label)


@pytest.mark.rest
def test_the_network_of_the_tutorial_takes_the_steps_of_fit(worker_pool: WorkerPool, tmp_path: Path) -> None:
    image, label = mnist(160)
    data = write_arrays(tmp_path / "data", image=image, label=label)
    fields = {"scaling__max_workers": 1, "data__global_batch_size": 16, "init_args": {"scale": 255}}
    job = job_of(tmp_path / "run", data, "get_tutorial", **fields)
    check_equal(worker_pool, job, keras_programs.get_tutorial, (image / 255).astype("float32"), label)


def test_a_line_through_ones_takes_the_steps_of_fit(worker_pool: WorkerPool, tmp_path: Path) -> None:
    x = y = np.ones((100, 1), np.float32)
    data = write_arrays(tmp_path / "data", x=x, y=y)
    fields = {"scaling__max_workers": 1, "data__global_batch_size": 10}
    init_args = {"inputs": "x", "target": "y"}
    job = job_of(tmp_path / "run", data, "get_linear", init_args=init_args, **fields)
    check_equal(worker_pool, job, keras_programs.get_linear, x, y)


def test_batch_normalization_moves_its_statistics_as_in_fit(
    worker_pool: WorkerPool, images: Path, tmp_path: Path
) -> None:
    table = pq.read_table(images)
    label = table["label"].to_numpy()
    pixels = [np.frombuffer(row, np.uint8).reshape(8, 8, 1) for row in table["image"].to_pylist()]
    image = np.stack(pixels).astype("float32")
    job = job_of(tmp_path / "run", images, "get_without_dropout", scaling__max_workers=1)
    check_equal(worker_pool, job, keras_programs.get_without_dropout, image, label)


@pytest.mark.parametrize(
    "function",
    [
        "get_convolutional",
        *(
            pytest.param(name, marks=pytest.mark.rest)
            for name in ("get_measured", "get_mixed", "get_clipped", "get_subclassed", "get_frozen")
        ),
    ],
)
def test_a_program_trains_bit_identically_on_any_workers_after_a_kill_and_a_resume(
    worker_pool: WorkerPool, images: Path, tmp_path: Path, function: str
) -> None:
    job = job_of(tmp_path / "one", images, function, checkpoint__every_epochs=None, checkpoint__every_steps=3)
    one = train_and_resume(worker_pool, job, (1, 2, 4), ends=(2, 5), resumed=3, killed=1)
    # The state of metrics over the rows of an epoch continues in its middle.
    assert ("mean_io_u" in dict(one.steps[-1][-1])) == (function == "get_measured")


STRATEGIES: dict[str, dict[str, Any]] = {
    "local_sgd": {"train__strategy": "local_sgd", "train__local_steps": 2, "checkpoint__every_epochs": None},
    "central_storage": {"train__strategy": "central_storage"},
    "fsdp": {"train__strategy": "fsdp"},
    "parameter_server": {"train__strategy": "parameter_server", "train__servers": 2},
}


@pytest.mark.rest
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_program_is_bit_identical_on_any_workers_with_each_strategy(
    worker_pool: WorkerPool, images: Path, tmp_path: Path, strategy: str
) -> None:
    runs = []
    for workers in (1, 2):
        job = job_of(tmp_path / f"{workers}", images, "get_convolutional", train__max_steps=6, **STRATEGIES[strategy])
        if strategy == "parameter_server":
            ServerWorld(job, workers).run()
            runs.append(read_trained_run(job))
        else:
            runs.append(worker_pool.train_new_run(job, workers, cache_windows))
    assert (runs[1].digests, runs[1].steps) == (runs[0].digests, runs[0].steps)
    assert all({"step", "momentum", "velocity"} == set(state) for state in runs[0].snapshot.optimizer["state"].values())
    ddp = worker_pool.train_new_run(job_of(tmp_path / "ddp", images, "get_convolutional", train__max_steps=6), 2)
    if strategy != "local_sgd":
        assert runs[0].digests == ddp.digests, "the result is that of ddp"
