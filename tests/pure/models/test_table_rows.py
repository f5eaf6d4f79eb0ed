"""An export of a table takes raw rows in each usual form, and says which row and column it cannot take, and why."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ray_app.data.dataset import open_dataset
from ray_app.models import loader
from ray_app.models.export import load_model, write_export
from ray_app.models.inputs import read_decoded
from ray_app.models.predictor import ModelPredictor
from ray_app.task.schema import prepare_task
from ray_app.task.tabular import TabularClassification

PEOPLE: dict[str, Any] = {
    "fare": [7.25, 71.28, 7.92, 53.1, 8.05, 51.86],
    "sex": ["male", "female", "female", "female", "male", "male"],
    "cabin": [None, "C85", None, "C85", "E46", "E46"],
    "day": ["2026-11-27", "2026-11-28"] * 3,
    "label": [0, 1, 1, 1, 0, 0],
}
RAW_ROWS: dict[str, Any] = {
    "sex": ["male", "female"],
    "fare": [7.25, 71.28],
    "cabin": [None, "C85"],
    "day": ["2026-11-27"] * 2,
}


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> ModelPredictor:
    """An export of a task that uses the columns `sex`, `fare`, `cabin` and `day`."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("table")
    pq.write_table(pa.table(PEOPLE), folder / "people.parquet")
    arguments: dict[str, Any] = {"features": [*RAW_ROWS], "dates": {"day": ["day"]}, "hidden": [4]}
    arguments |= {"missing": {"default": "refuse", "cabin": "category"}, "standardize": False}
    task = prepare_task(TabularClassification(**arguments), open_dataset(str(folder / "people.parquet")).facts)
    model = task.build_model().eval()
    source = {"run": "run", "step": 1, "params_digest": ""}
    arrays: Any = read_decoded(task, str(folder / "people.parquet"))
    write_export(task, model, arrays, folder / "export", source)
    return load_model(folder / "export")


def test_an_export_takes_rows_in_each_form(predictor: ModelPredictor) -> None:
    expected = predictor.predict(RAW_ROWS, scores=True)
    assert expected.shape == (2, 2)
    rows = [{name: values[i] for name, values in RAW_ROWS.items()} for i in range(2)]
    assert np.array_equal(predictor.predict(pd.DataFrame(RAW_ROWS), scores=True), expected)
    table = pa.table(RAW_ROWS)
    readers = [table, pl.DataFrame(RAW_ROWS), duckdb.from_arrow(table), table.to_reader()]
    assert all(np.array_equal(predictor.predict(rows, scores=True), expected) for rows in readers)
    assert np.array_equal(predictor.predict(rows, scores=True), expected)
    one = predictor.predict({name: values[:1] for name, values in RAW_ROWS.items()}, scores=True)
    assert np.array_equal(predictor.predict(rows[0], scores=True), one)
    assert np.array_equal(predictor.predict(pd.DataFrame(RAW_ROWS).iloc[0], scores=True), one)
    encoded: dict[str, Any] = {"features": np.zeros((1, 2), np.float32), "categories": np.zeros((1, 2), np.int64)}
    assert predictor.predict(encoded, scores=True).shape == (1, 2)
    assert predictor.predict([{name: values[0] for name, values in encoded.items()}], scores=True).shape == (1, 2)


def test_an_export_returns_no_scores_for_no_rows(predictor: ModelPredictor) -> None:
    assert predictor.predict({name: [] for name in RAW_ROWS}, scores=True).shape == (0, 2)
    assert predictor.predict(pd.DataFrame(RAW_ROWS)[:0], scores=True).shape == (0, 2)
    encoded = {"features": np.zeros((0, 2), np.float32), "categories": np.zeros((0, 2), np.int64)}
    assert predictor.predict(encoded, scores=True).shape == (0, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fare": [1.0, None]}, "row 1, counted from 0: column 'fare' is NaN or infinite"),
        ({"fare": [1.0, math.inf]}, "row 1, counted from 0: column 'fare' is NaN or infinite"),
        ({"fare": [1.0, 1e300]}, "row 1, counted from 0: column 'fare', as float32 and divided by"),
        ({"fare": [1.0, "much"]}, "row 1, counted from 0: column 'fare': the column holds"),
        ({"sex": ["male", None]}, "row 1, counted from 0: column 'sex' has no value"),
        ({"day": ["2026-11-27", "soon"]}, "row 1, counted from 0: column 'day': 'soon' is not a date of ISO 8601"),
        ({"sex": ["male"]}, "different numbers of rows: 'sex' 1, 'fare' 2"),
        ({"sex": "male"}, "'sex' is one value, 'male', and 'fare' a sequence"),
    ],
)
def test_an_error_of_an_export_names_row_and_column(
    predictor: ModelPredictor, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        predictor.predict(RAW_ROWS | changes, scores=True)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (pa.table({"x": [0.5] * 1000}), "column 'sex' is missing; the columns are 'x'. Pass the columns 'sex', 'fare'"),
        ([{"x": 1}, {"x": 2}], "column 'sex' is missing; the columns are 'x'. Pass the columns 'sex', 'fare'"),
        ([RAW_ROWS, {"sex": "male"}], "Row 1, counted from 0, lacks 'fare', which other rows have; pass None"),
        (pl.LazyFrame(RAW_ROWS), r"A LazyFrame has no rows yet; call collect\(\) of Polars"),
        ([["male", 7.25, None, "2026-11-27"]], "several inputs, but list has no names. Pass the columns 'sex', 'fare'"),
    ],
    ids=["arrow", "rows", "lacking", "lazy", "lists"],
)
def test_an_export_refuses_rows_without_its_columns(predictor: ModelPredictor, rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        predictor.predict(rows, scores=True)
    assert len(str(caught.value)) < 400


def test_a_model_of_arrays_says_what_it_takes() -> None:
    predictor = loader.Predictor(torch.nn.Identity(), [{"name": "features", "dtype": "<f4", "shape": [2]}])
    allowed = r"Pass an array, or a dictionary with it: 'features' float32 \(rows, 2\)"
    for rows in ([{"x": 1.0, "y": 2.0}], {"x": 1.0, "y": 2.0}, [["a", "b"]], [[1.0, None]], [[1.0], [1.0, 2.0]]):
        with pytest.raises(ValueError, match=allowed):
            predictor.predict(rows)
    assert predictor.predict([{"features": [1.0, 2.0]}]).tolist() == [[1, 2]]
    assert predictor.predict(np.zeros((0, 2), np.float32)).shape == (0, 2)


def test_an_export_warns_once_of_values_that_the_training_data_lacks(predictor: ModelPredictor) -> None:
    words = ["robot", "male", "x", "y", "z", "robot"]
    rows = {name: [values[0]] * 6 for name, values in RAW_ROWS.items()}
    with pytest.warns(UserWarning, match="are treated as one category") as caught:
        predictor.predict(rows | {"sex": words, "cabin": ["Z9", None, "C85", "C85", "C85", "C85"]}, scores=True)
    (warning,) = caught
    assert str(warning.message) == (
        "5 of 6 rows have values of 'sex' that the training data lacks ('robot', 'x', 'y' and 1 more): they are"
        " treated as one category, other. 1 of 6 rows have values of 'cabin' that the training data lacks ('Z9'): they"
        " are treated as one category, other."
    )
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predictor.predict(RAW_ROWS, scores=True)


def test_columns_of_numbers_are_taken_by_name(tmp_path: Path) -> None:
    table = {"a": [0.0, 1.0, 2.0, 3.0], "b": [5.0, 3.0, 9.0, 1.0], "label": [0, 1, 0, 1]}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    path = str(tmp_path / "rows.parquet")
    torch.manual_seed(1)
    task = prepare_task(TabularClassification(features=["a", "b"], hidden=[4]), open_dataset(path).facts)
    arrays: Any = read_decoded(task, path)
    source = {"run": "run", "step": 1, "params_digest": ""}
    write_export(task, task.build_model().eval(), arrays, tmp_path / "export", source)
    predictor = load_model(tmp_path / "export")
    expected = predictor.predict(arrays["features"], scores=True)
    assert np.array_equal(predictor.predict(pd.DataFrame(table)[["b", "label", "a"]], scores=True), expected)
    with pytest.raises(ValueError, match="The column 'a' is missing"):
        predictor.predict(pd.DataFrame(table)[["b", "label"]], scores=True)


def test_one_column_of_numbers_is_taken_by_name_and_scaled(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [0.0, 1.0, 2.0, 3.0], "label": [0, 1, 0, 1]}), tmp_path / "rows.parquet")
    path = str(tmp_path / "rows.parquet")
    torch.manual_seed(1)
    task = prepare_task(TabularClassification(scale=2.0, hidden=[4]), open_dataset(path).facts)
    arrays: Any = read_decoded(task, path)
    source = {"run": "run", "step": 1, "params_digest": ""}
    write_export(task, task.build_model().eval(), arrays, tmp_path / "export", source)
    predictor = load_model(tmp_path / "export")
    expected = predictor.predict(arrays["features"], scores=True)
    assert np.array_equal(predictor.predict(pd.DataFrame({"a": [0.0, 1.0, 2.0, 3.0]}), scores=True), expected)
    assert np.array_equal(predictor.predict({"a": [0.0, 1.0, 2.0, 3.0]}, scores=True), expected)
