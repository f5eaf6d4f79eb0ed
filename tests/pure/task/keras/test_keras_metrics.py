"""Metrics of Keras in chunks: the values of `Model.evaluate`, whatever the number of chunks and processes."""

from pathlib import Path

import numpy as np
import pytest

from ray_app.task.metrics import combine, mode_of, resample, score
from tests.support.keras_tasks import build, task_of
from tests.support.local_world import CPU, write_images

ROWS = 53


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("keras") / "images", [[ROWS]])


def arrays_of(classes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "image": rng.integers(0, 255, (ROWS, 1, 8, 8)).astype(np.uint8),
        "label": rng.integers(0, classes, ROWS).astype(np.int64),
    }


@pytest.mark.rest
@pytest.mark.parametrize(("function", "classes"), [("get_measured", 5), ("get_binary", 2)])
def test_metrics_are_those_of_evaluate_for_any_number_of_chunks(data: Path, function: str, classes: int) -> None:
    task = task_of(data, function)
    model, arrays = build(task), arrays_of(classes)
    images = np.moveaxis(arrays["image"], 1, -1).astype("float32")
    target = arrays["label"][:, None] if classes == 2 else arrays["label"]
    expected = model.program.evaluate(images, target, batch_size=ROWS, verbose=0, return_dict=True)
    once = combine(task, score(task, model, arrays, ROWS, CPU)).values
    assert once.keys() == {name for name, value in expected.items() if np.size(value) == 1}
    for name, value in once.items():
        np.testing.assert_allclose(value, np.ravel(expected[name])[0], 1e-6, err_msg=name)
    for size in (10, 7, 1):
        chunks = combine(task, score(task, model, arrays, size, CPU, chunk_rows=size))
        shared = [c for part in (2, 0, 1) for c in score(task, model, arrays, size, CPU, part, 3, chunk_rows=size)]
        assert combine(task, shared) == chunks, "bit-identical for any number of processes"
        assert chunks.values == pytest.approx(once, rel=1e-6)


def test_a_metric_of_counts_is_resampled(data: Path) -> None:
    task = task_of(data, "get_measured")
    arrays = arrays_of(5)
    chunks = list(score(task, build(task), arrays, 10, CPU, chunk_rows=10))
    counts = np.ones((1, len(chunks)), np.int64)
    assert resample(task, chunks, "accuracy", counts)[0] == pytest.approx(combine(task, chunks).values["accuracy"])


def test_more_is_better_of_an_accuracy(data: Path) -> None:
    metrics = task_of(data, "get_measured").metrics()
    assert mode_of("accuracy", metrics["accuracy"]) == "max"
