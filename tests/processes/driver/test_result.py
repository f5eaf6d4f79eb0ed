"""The result of a run evaluates on other rows, and predicts."""

from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ray_app import ingest_arrays, run_training
from ray_app.driver.result import Result
from ray_app.errors import ConfigError, DataError
from tests.support.ingest_inputs import read_columns
from tests.support.jobs import digits_config


@pytest.fixture(scope="module")
def result(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    fields = {"train__strategy": "single", "evaluate__where": "workers", "schedule": None, "train__epochs": 2}
    config = digits_config(digits, tmp_path_factory.mktemp("runs"), **fields, checkpoint__every_epochs=1)
    return run_training(config, Console(file=StringIO()))


def test_a_result_evaluates_to_the_metrics_of_the_run(digits: Path, result: Result) -> None:
    before = set(Path(str(result.path)).rglob("*"))
    for evaluation in result.evaluations():
        assert result.evaluate(str(digits / "eval"), f"step-{evaluation.step}") == pytest.approx(
            evaluation.metrics, rel=1e-5
        )
    best = result.summary["best"]
    assert result.evaluate(str(digits / "eval"))[best["metric"]] == pytest.approx(best["value"])
    assert set(Path(str(result.path)).rglob("*")) == before, "the evaluation wrote files"
    with pytest.raises(ConfigError, match="has no checkpoint 'step-1'"):
        result.evaluate(str(digits / "eval"), "step-1")


def test_rows_without_labels_are_predicted_from_a_path_and_from_arrays(
    digits: Path, result: Result, tmp_path: Path
) -> None:
    images = read_columns(digits / "eval", as_stored=True)["image"]
    predictions = result.predict(images)
    with torch.inference_mode():
        scores = result.task.forward(result.load_model(), {"image": torch.from_numpy(images[:, None])})
    assert predictions["predicted_index"].tolist() == scores.argmax(1).tolist()
    assert predictions["predicted"].tolist() == [str(i) for i in predictions["predicted_index"]]
    ingest_arrays(str(tmp_path / "out"), x=images[:20])
    stored = read_columns(tmp_path / "out", as_stored=True)
    order = [int(row_id) for row_id in stored["row_id"]]
    assert (
        result.predict(str(tmp_path / "out"))["predicted_index"].tolist()
        == predictions["predicted_index"][order].tolist()
    )
    assert result.predict({"image": images[:3]})["confidence"].tolist() == pytest.approx(
        predictions["confidence"][:3].tolist()
    )
    with pytest.raises(DataError, match=r"No column 'image' is given; the task reads \['image'\]"):
        result.predict({"x": images})
    for lacking in ([], images[:0]):
        with pytest.raises(DataError, match="at least 1"):
            result.predict({"image": lacking})
    with pytest.raises(DataError, match="all must have the same number"):
        result.evaluate({"image": images[:3], "label": [0, 1]})
    with pytest.raises(ConfigError, match="batch_size is -1; it must be at least 1"):
        result.predict(images, batch_size=-1)
