"""Tables with gaps, words and dates: statistics of the rows that are trained on, and the same inputs everywhere."""

from __future__ import annotations

import datetime
import json
import math
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ray_app.data.dataset import Dataset, open_dataset
from ray_app.data.probes import probe
from ray_app.data.reader import Reader, RowSource, fetch_in_process, load_all
from ray_app.errors import BadRowError, ConfigError, DataError
from ray_app.models import loader
from ray_app.models.export import load_model, write_export
from ray_app.preflight.data_summary import describe_training_columns
from ray_app.task import table_statistics
from ray_app.task.base import Task
from ray_app.task.schema import prepare_task, stored_schema
from ray_app.task.table_encoding import encode_rows, value_codes
from ray_app.task.tabular import TabularClassification, TabularRegression

PEOPLE = {
    "age": [22.0, None, 26.0, 35.0, float("nan"), 54.0],
    "fare": [7.25, 71.28, 7.92, 53.1, 8.05, 51.86],
    "sex": ["male", "female", "female", "female", "male", "male"],
    "cabin": [None, "C85", None, "C85", "E46", "E46"],
    "class": [3, 1, 3, 1, 3, 1],
    "label": [0, 1, 1, 1, 0, 0],
}


def write_table(folder: Path, columns: dict[str, Any], row_group_size: int = 2) -> Dataset:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / "part-00000.parquet", row_group_size=row_group_size)
    return open_dataset(str(folder))


def decode_all_rows(task: Task, dataset: Dataset, skips: bool = False) -> dict[str, Any]:
    fields = probe(dataset, task.columns(), task.decode)
    reader = Reader(dataset.root, task.columns(), task.decode, fields, skips)
    return load_all(fetch_in_process, RowSource(reader, dataset.manifest, 100)).arrays


def prepare(dataset: Dataset, **arguments: Any) -> TabularClassification:
    """Prepares a task that takes numbers as they are and refuses gaps, unless an argument says otherwise."""
    missing = {"default": "refuse", **arguments.pop("missing", {})}
    arguments = {"standardize": False, "missing": missing, **arguments}
    task = prepare_task(TabularClassification(**arguments), dataset.facts)
    assert isinstance(task, TabularClassification)
    return task


def encode(task: TabularClassification | TabularRegression, rows: Any) -> dict[str, Any]:
    assert task.fitted is not None
    return encode_rows(task.fitted, rows)


def test_missing_numbers_and_words_become_what_the_configuration_says(tmp_path: Path) -> None:
    dataset = write_table(tmp_path, PEOPLE)
    task = prepare(dataset, missing={"age": "indicator", "cabin": "category"}, categories=["sex", "cabin"])
    arrays = decode_all_rows(task, dataset)
    mean = (22 + 26 + 35 + 54) / 4
    assert task.columns()[:5] == ["age", "cabin", "class", "fare", "sex"]
    expected = np.array([[22, mean, 26, 35, mean, 54], [0, 1, 0, 0, 1, 0], PEOPLE["class"], PEOPLE["fare"]])
    assert np.array_equal(arrays["features"], expected.T.astype(np.float32))
    # The values of cabin are C85 and E46, 2 is other, and 3 is missing; those of sex are female and male.
    assert arrays["categories"].tolist() == [[3, 1], [0, 0], [3, 0], [0, 0], [1, 1], [1, 1]]
    assert json.loads(json.dumps(task.fitted)) == task.fitted


NO_DATE = pa.array([None, None], pa.timestamp("us"))
PRICES = [Decimal("1234567890123.45"), Decimal("0.10"), Decimal("-3.99"), Decimal("7.00")]
NUMBERS: dict[str, tuple[Any, dict[str, Any], list[float]]] = {
    "mean": (PEOPLE["age"], {"missing": {"x": "mean"}}, [22, 34.25, 26, 35, 34.25, 54]),
    "median": (PEOPLE["age"], {"missing": {"x": "median"}}, [22, 30.5, 26, 35, 30.5, 54]),
    "constant": (PEOPLE["age"], {"missing": {"x": {"constant": -1}}}, [22, -1, 26, 35, -1, 54]),
    "filled before it is rounded; float16 ends at 65,504": (
        pa.array(np.array([0.5, 0.25], np.float16), mask=np.array([False, True])),
        {"missing": {"x": {"constant": 1e5}}},
        [0.5, 1e5],
    ),
    # The mean of three numbers 0.1, with a rounding of the sum and one of the division, is not 0.1.
    "constant column": ([0.1, 0.1, 0.1], {"standardize": True}, [0, 0, 0]),
    "dates": (NO_DATE, {"dates": {"x": ["seconds"]}, "missing": {"x": {"constant": "2000-01-01"}}}, [0, 0]),
    "decimal64": (pa.array(PRICES, pa.decimal128(15, 2)), {}, np.array(PRICES, np.float32).tolist()),
    "decimal128": (pa.array(PRICES, pa.decimal128(30, 2)), {}, np.array(PRICES, np.float32).tolist()),
}


@pytest.mark.parametrize(("values", "arguments", "expected"), NUMBERS.values(), ids=NUMBERS)
def test_a_column_becomes_numbers(
    tmp_path: Path, values: Any, arguments: dict[str, Any], expected: list[float]
) -> None:
    dataset = write_table(tmp_path, {"x": values, "label": [i % 2 for i in range(len(values))]})
    assert decode_all_rows(prepare(dataset, **arguments), dataset)["features"][:, 0].tolist() == expected


def test_text_that_is_unlike_categories_is_left_out_and_named(tmp_path: Path) -> None:
    names = [f"name {i}" for i in range(6)]
    dataset = write_table(tmp_path, {**PEOPLE, "name": names, "row_id": names})
    task = prepare(dataset, missing={"default": "auto"})
    assert [column["name"] for column in task.category_columns] == ["cabin", "sex"]
    _, unused = describe_training_columns(task, dataset)
    assert "'name' (text with 6 different values in 6 rows; categories can name it)" in unused
    assert "row_id" not in unused, "it never is a column to train on"
    named = prepare(dataset, features=["name"])
    assert named.category_columns[0]["values"] == names


@pytest.mark.parametrize(
    ("kind", "label", "other"),
    [(TabularClassification, "label", "target"), (TabularRegression, "target", "label")],
    ids=["classification", "regression"],
)
def test_a_column_with_the_name_of_a_target_is_a_feature_only_if_a_setting_names_it(
    tmp_path: Path, kind: type[Task], label: str, other: str
) -> None:
    dataset = write_table(tmp_path, {"x": [1.0, 2.0, 3.0], label: [0, 1, 0], other: [0, 2, 0]})
    task = prepare_task(kind(), dataset.facts)
    assert task.columns() == ["x", label]
    _, unused = describe_training_columns(task, dataset)
    assert unused == (
        f"Columns not used: '{other}' (integer, a {other} by its name; task.init_args.features can name it)"
    )
    for arguments in ({"features": ["x", other]}, {"categories": [other]}, {"standardize": [other]}):
        assert sorted(prepare_task(kind(**arguments), dataset.facts).columns()) == sorted(["x", label, other])
    with pytest.raises(DataError, match=f"'{other}': integer, a {other} by its name"):
        prepare_task(kind(), write_table(tmp_path / "alone", {label: [0, 1], other: [0, 2]}).facts)


def test_statistics_are_those_of_the_rows_that_are_trained_on(tmp_path: Path) -> None:
    train = write_table(tmp_path / "train", PEOPLE)
    evaluated = write_table(tmp_path / "eval", {**PEOPLE, "age": [None] * 5 + [80.0], "sex": ["x", "y", "male"] * 2})
    task = prepare(train, missing={"age": "mean", "cabin": "category"}, standardize=["age"])
    again = task.prepare(evaluated.facts)
    assert again.fitted == task.fitted
    assert decode_all_rows(again, evaluated)["categories"][:, 1].tolist() == [2, 2, 1, 2, 2, 1]
    (note,) = task.describe_differences(evaluated.facts)
    assert "4 of 6 rows" in note
    assert "'sex' that the training data lacks ('x', 'y')" in note
    assert task.describe_differences(train.facts) == []


def test_a_stored_run_keeps_its_statistics_although_the_data_has_changed(tmp_path: Path) -> None:
    train = write_table(tmp_path / "train", PEOPLE)
    stored = json.loads(json.dumps(stored_schema(prepare(train, missing={"age": "mean", "default": "auto"}))))
    changed = write_table(tmp_path / "changed", {**PEOPLE, "age": [1.0] * 6})
    resumed = prepare_task(TabularClassification(missing={"age": "mean"}), changed.facts, stored)
    assert resumed.fitted == stored["fitted"]
    assert "fitted" not in resumed.data_schema


def test_standardized_numbers_have_mean_0_and_deviation_1_and_logarithms_come_first(tmp_path: Path) -> None:
    dataset = write_table(tmp_path, PEOPLE)
    task = prepare(
        dataset, features=["age", "fare", "class"], missing={"age": "median"}, log=["fare"], standardize=True
    )
    inputs = decode_all_rows(task, dataset)["features"]
    assert np.allclose(inputs.mean(0), 0, atol=1e-6)
    assert np.allclose(inputs.std(0), 1, atol=1e-6)
    logarithms = np.log1p(np.array(PEOPLE["fare"]))
    assert np.allclose(inputs[:, 1], (logarithms - logarithms.mean()) / logarithms.std(), atol=1e-6)


def test_arrays_are_standardized_by_element_and_constant_ones_stay_finite(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float64).reshape(4, 3)
    values[:, 1] = 5
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 3)
    dataset = write_table(tmp_path, {"x": column, "target": [1.0, 2.0, 3.0, 4.0]})
    task = prepare_task(TabularRegression(standardize=True), dataset.facts)
    features = decode_all_rows(task, dataset)["features"]
    assert np.allclose(features[:, [0, 2]].std(0), 1)
    assert (features[:, 1] == 0).all()


def test_dates_become_their_parts(tmp_path: Path) -> None:
    when = [datetime.datetime(2026, 11, 27, 13, 30), None, datetime.datetime(1969, 2, 3, 4, 5)]
    texts = ["2026-11-27T14:30:00+01:00", "2026-11-28", "2026-11-26"]
    days = [datetime.date(2026, 11, 27), datetime.date(2000, 1, 1), datetime.date(1900, 3, 1)]
    columns = {"when": pa.array(when, pa.timestamp("ns")), "text": texts, "day": days, "label": [0, 1, 0]}
    dataset = write_table(tmp_path, columns)
    parts = ["year", "month", "day", "weekday", "hour", "minute"]
    dates = {"when": parts, "text": [*parts, "seconds"], "day": ["year", "weekday"]}
    task = prepare(dataset, features=["when", "text", "day"], dates=dates, missing={"when": {"constant": "2000-01-01"}})
    rows = decode_all_rows(task, dataset)["features"].tolist()
    assert rows[0] == [2026, 11, 27, 4, 13, 30, 2026, 11, 27, 4, 13, 30, 135000, 2026, 4]
    assert rows[1][:6] == [2000, 1, 1, 5, 0, 0]
    assert rows[2][:7] == [1969, 2, 3, 0, 4, 5, 2026]
    assert rows[2][-2:] == [1900, 3]


def test_booleans_integers_and_dictionaries_are_categories_by_wish(tmp_path: Path) -> None:
    columns = {
        "truth": [True, False, None, True],
        "whole": pa.array([3, None, 1, 3], pa.int64()),
        "words": pa.array(["b", "a", None, "b"]).dictionary_encode(),
        "label": [0, 1, 0, 1],
    }
    dataset = write_table(tmp_path, columns)
    task = prepare(dataset, categories=["truth", "whole", "words"], missing={"default": "category"})
    codes = decode_all_rows(task, dataset)["categories"]
    assert [column["values"] for column in task.category_columns] == [["false", "true"], ["1", "3"], ["a", "b"]]
    assert codes.tolist() == [[1, 1, 1], [0, 3, 0], [3, 0, 3], [1, 1, 1]]


@pytest.mark.parametrize("trained", [[True, False, None], ["True", "False", None], ["true", "false", None]])
@pytest.mark.parametrize("fill", ["category", {"constant": "unknown"}, {"constant": True}], ids=str)
def test_a_boolean_is_a_category_in_each_usual_form(tmp_path: Path, trained: list[Any], fill: Any) -> None:
    is_text = isinstance(trained[0], str)
    fill = {"constant": trained[0]} if fill == {"constant": True} and is_text else fill
    columns = {"alone": trained, "label": [0, 1, 0]}
    task = prepare(write_table(tmp_path / "train", columns), categories=["alone"], missing={"alone": fill})
    forms = {True: ["true", "True", "TRUE", "1", True, 1, 1.0], False: ["false", "False", "FALSE", "0", False, 0, 0.0]}
    codes = [encode(task, {"alone": [value]})["categories"][0, 0] for value in trained[:2]]
    for code, values in zip(codes, forms.values(), strict=True):
        for value in values:
            assert encode(task, {"alone": [value]})["categories"].tolist() == [[code]], repr(value)
    other = len(task.category_columns[0]["values"])
    assert encode(task, {"alone": ["yes", 2]})["categories"].tolist() == [[other], [other]]
    later = write_table(tmp_path / "later", {"alone": ["TRUE", "0", "maybe"], "label": [0, 1, 0]})
    (note,) = task.describe_differences(later.facts)
    assert note.startswith("1 of 3 rows")


def test_texts_are_not_booleans_unless_all_of_them_are(tmp_path: Path) -> None:
    for values in (["true", "false", "maybe"], ["true", "True", "false"]):
        task = prepare(write_table(tmp_path, {"x": values, "label": [0, 1, 0]}), features=["x"])
        assert encode(task, {"x": ["TRUE", "1"]})["categories"].tolist() == [[3], [3]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"missing": {"age": "guess"}}, "task.init_args.missing.age is 'guess'; allowed are auto, refuse, mean"),
        ({"missing": {"age": {"constant": 1, "b": 2}}}, "task.init_args.missing.age is"),
        ({"missing": {"aeg": "mean"}}, "task.init_args.missing names 'aeg', which is not a feature"),
        ({"dates": {"sex": ["century"]}}, "allowed are some of year, month"),
        ({"log": ["label"]}, "task.init_args.log names 'label', which is not a feature"),
        ({"categories": ["class"], "standardize": ["class"]}, "task.init_args.categories names 'class', but so does"),
        ({"log": ["sex"]}, "task.init_args.log names 'sex', which is used as category; allowed"),
        ({"standardize": ["age", "sex"]}, "task.init_args.standardize names 'sex', which is used as category"),
        ({"missing": {"age": "category"}}, "missing.age is 'category', but the column is used as number"),
        ({"missing": {"age": {"constant": "old"}}}, "for the number column 'age' is 'old': the column holds"),
        ({"missing": {"age": {"constant": math.nan}}}, "for the column 'age' is nan, not a number"),
        ({"features": ["sex"], "standardize": True}, "task.init_args.standardize names no column of numbers"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(write_table(tmp_path, {**PEOPLE, "age": [1.0] * 6}), **arguments)


INFINITE = {"both": [math.inf, -math.inf, 1.0, None], "one": [math.inf, 1.0, 2.0, None]}
CABIN = r"'cabin'.* has 2 missing values.*missing.cabin to auto, category"


@pytest.mark.parametrize(
    ("columns", "arguments", "message"),
    [
        (PEOPLE, {}, r"2 columns of .* have missing values: 'age' \(1 .*, 'cabin' \(2 .*missing.age to auto, mean, .*"),
        (PEOPLE, {"features": ["cabin"]}, CABIN),
        (PEOPLE, {"features": ["cabin"], "missing": {"default": "mean"}}, CABIN),
        ({"x": [datetime.date(2026, 11, 27), None]}, {"dates": {"x": ["year"]}}, "'x'.* has 1 missing values"),
        ({"x": [-1.0, 2.0]}, {"log": ["x"]}, r"holds -1; ln\(1 \+ value\) needs values above -1"),
        (INFINITE, {"features": ["both"], "missing": {"both": "mean"}}, "'both' of .* has infinite values"),
        (INFINITE, {"features": ["both"], "missing": {"both": "median"}}, "'both' of .* has infinite values"),
        (INFINITE, {"features": ["one"], "missing": {"one": "mean"}}, "'one' of .* has infinite values"),
        (INFINITE, {"features": ["one"], "missing": {"one": "indicator"}}, "'one' of .* has infinite values"),
        ({"x": [1e308, 1e308, 1.0, None]}, {"missing": {"x": "mean"}}, "'x' of .* with a sum that is too large"),
        ({"x": [1e200, 1.0, 2.0, 3.0]}, {"standardize": True}, "too large for a standard deviation"),
        ({"x": [1.0, 2.0], "label": ["yes", None]}, {}, "1 missing values"),
    ],
)
def test_values_that_have_no_statistics_are_refused(
    tmp_path: Path, columns: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    labels = {"label": [i % 2 for i in range(len(next(iter(columns.values()))))]}
    with pytest.raises(DataError, match=message):
        prepare(write_table(tmp_path, labels | columns), **arguments)


def test_bad_rows_of_required_columns_are_still_bad(tmp_path: Path) -> None:
    train = write_table(tmp_path / "train", {"a": [1.0, 2.0, 3.0], "b": [1.0, 2.0, 3.0], "label": [0, 1, 0]})
    task = prepare(train, missing={"a": "mean"})
    other = write_table(tmp_path / "other", {"a": [None, 2.0, 3.0], "b": [1.0, None, 3.0], "label": [0, 1, 0]})
    with pytest.raises(BadRowError, match=r"row 1.*column 'b' has no value"):
        decode_all_rows(task, other)
    with_nan = write_table(tmp_path / "nan", {"age": [1.0, float("nan")], "label": [0, 1]})
    with pytest.raises(BadRowError, match="column 'age' is NaN or infinite"):
        decode_all_rows(prepare(with_nan), with_nan)


def test_a_median_needs_no_sum(tmp_path: Path) -> None:
    dataset = write_table(tmp_path, {"x": [1e308, 1e308, 1.0, None], "label": [0, 1, 0, 1]})
    fitted = prepare(dataset, missing={"x": "median"}).fitted
    assert fitted is not None
    assert fitted["columns"][0]["fill"] == 1e308


def test_a_large_integer_is_one_category_whatever_rows_are_read_with_it(tmp_path: Path) -> None:
    identifiers = pa.array([2**53 + 1, None, 2**53 + 1, 2**53 + 1], pa.int64())
    dataset = write_table(tmp_path, {"id": identifiers, "label": [0, 1, 0, 1]})
    task = prepare(dataset, categories=["id"], missing={"id": "category"})
    assert task.category_columns[0]["values"] == [str(2**53 + 1)]
    assert decode_all_rows(task, dataset)["categories"][:, 0].tolist() == [0, 2, 0, 0]


def test_much_free_text_is_left_out_after_a_part_of_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_statistics, "MAX_CATEGORIES", 3)
    names = [f"name {i}" for i in range(20)]
    dataset = write_table(tmp_path, {"x": [1.0] * 20, "name": names, "label": [0, 1] * 10})
    blocks = []
    read = dataset.facts.read
    assert read is not None

    def read_names(columns: list[str]) -> Any:
        for rows in read(columns):
            blocks.extend(["name"] if columns == ["name"] else [])
            yield rows

    task = prepare_task(TabularClassification(), replace(dataset.facts, read=read_names))
    assert task.left_out == {"name": "text with more than 3 different values; categories can name it"}
    assert len(blocks) == 2


def test_of_many_words_the_frequent_ones_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_statistics, "MAX_AUTO_CATEGORIES", 2)
    words = ["b"] * 4 + ["a"] * 3 + ["c"] * 2 + ["d", None, None]
    dataset = write_table(tmp_path, {"word": words, "label": [0, 1] * 6})
    task = prepare_task(TabularClassification(), dataset.facts)
    assert isinstance(task, TabularClassification)
    assert task.category_columns[0]["values"] == ["a", "b"]
    # 2 is other, and 3 is missing.
    assert decode_all_rows(task, dataset)["categories"][:, 0].tolist() == [1] * 4 + [0] * 3 + [2] * 3 + [3] * 2


@pytest.mark.parametrize(
    ("name", "values", "is_used"),
    [
        ("PassengerId", list(range(1, 31)), False),
        ("t", list(range(30)), False),
        ("order_id", [10_000 + 7 * i for i in range(30)], False),
        ("humid", [10_000 + 7 * i for i in range(30)], True),
        ("order_id", [10_000 + 7 * (i % 15) for i in range(30)], True),
        ("id", [float(i) for i in range(30)], True),
    ],
)
def test_an_integer_that_identifies_its_row_is_no_feature(
    tmp_path: Path, name: str, values: list[Any], is_used: bool
) -> None:
    dataset = write_table(tmp_path, {name: values, "x": [0.5, 1.5] * 15, "label": [0, 1] * 15})
    task = prepare_task(TabularClassification(), dataset.facts)
    assert (name in task.columns()) == is_used
    assert (name in task.left_out) == (not is_used)
    assert name in prepare_task(TabularClassification(features=[name, "x"]), dataset.facts).columns()


def test_defaults_take_gaps_dates_and_tails(tmp_path: Path) -> None:
    count = 40
    columns = {
        "tail": [*np.linspace(-1, 1, count - 1), 1e200],
        "gap": [None, *np.linspace(5, 6, count - 1)],
        "day": [f"2026-01-{1 + i % 28:02}" for i in range(count)],
        "word": ["a", None] * (count // 2),
        "Price ($)": list(np.linspace(0, 1000, count)),
        "target": list(np.linspace(100_000, 500_000, count)),
    }
    dataset = write_table(tmp_path, columns)
    task = prepare_task(TabularRegression(), dataset.facts)
    assert isinstance(task, TabularRegression)
    arrays = decode_all_rows(task, dataset)
    assert np.abs(arrays["features"]).max() <= 3
    assert arrays["categories"][:, 0].tolist() == [0, 2] * (count // 2)
    assert task.fitted is not None
    kinds = {column["name"]: column["kind"] for column in task.fitted["columns"]}
    assert kinds == {"Price ($)": "number", "day": "date", "gap": "number", "tail": "number", "word": "category"}
    raw = {name: values[:1] for name, values in columns.items() if name != "target"}
    with_gaps = {name: [None] for name in raw}
    assert np.isfinite(encode(task, with_gaps)["features"]).all()
    assert encode(task, raw)["features"].tolist() == arrays["features"][:1].tolist()


@pytest.mark.parametrize("hidden", [None, [8]])
def test_losses_and_predictions_are_in_the_unit_of_the_target(tmp_path: Path, hidden: list[int] | None) -> None:
    target = np.linspace(100_000, 500_000, 64)
    losses, gradients = list[torch.Tensor](), list[torch.Tensor]()
    for unit in (1.0, 1000.0):
        columns = {"x": list(np.linspace(0, 1, 64)), "target": list(target / unit)}
        dataset = write_table(tmp_path / str(unit), columns)
        task = prepare_task(TabularRegression(hidden=hidden, dropout=0.0), dataset.facts)
        torch.manual_seed(0)
        model = task.build_model()
        batch = {name: torch.from_numpy(values.copy()) for name, values in decode_all_rows(task, dataset).items()}
        loss = task.training_loss(model, batch)
        assert isinstance(loss, torch.Tensor)
        loss.mean().backward()
        losses.append(loss.detach() * unit**2)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        with torch.no_grad():
            outputs = task.forward(model.eval(), batch)
        predicted = task.predictions(outputs, batch)["predicted"] * unit
        assert np.abs(predicted - target.mean()).max() < 4 * target.std()
    assert torch.allclose(losses[0], losses[1], rtol=1e-3)
    assert torch.allclose(gradients[0], gradients[1], atol=1e-4), "the unit decides how a network learns"


def test_decimals_times_and_durations_of_a_caller_are_the_numbers_of_a_file(tmp_path: Path) -> None:
    columns = {
        "clock": [datetime.time(1, 2, 3, 500_000), None, datetime.time(23)],
        "price": [Decimal("0.1"), None, Decimal("7")],
        "wait": [datetime.timedelta(days=1, milliseconds=5), None, datetime.timedelta(0)],
    }
    dataset = write_table(tmp_path, columns | {"label": [0, 1, 0]})
    task = prepare(dataset, missing={"default": "median"})
    expected = decode_all_rows(task, dataset)["features"]
    assert expected[0].tolist() == np.float32([3723.5, 0.1, 86400.005]).tolist()
    for rows in (columns, pd.DataFrame(columns), pa.table(columns).to_pandas(types_mapper=pd.ArrowDtype)):
        assert np.array_equal(encode(task, rows)["features"], expected)


def test_an_array_is_no_rows_and_a_gap_beside_dates_is_no_text(tmp_path: Path) -> None:
    columns = {"day": ["2026-01-01", None, "2026-01-03"], "x": [[1.0, 2.0], [3.0, 5.0], [4.0, 4.0]]}
    arrays = columns | {"x": pa.array(columns["x"], pa.list_(pa.float64(), 2)), "label": [0, 1, 0]}
    dataset = write_table(tmp_path, arrays)
    task = prepare(dataset, missing={"default": "auto"}, standardize=True)
    expected = decode_all_rows(task, dataset)["features"]
    rows = {"day": ["2026-01-01", math.nan, "2026-01-03"], "x": columns["x"]}
    assert np.array_equal(encode(task, rows)["features"], expected)
    alone = prepare(dataset, features=["x"], standardize=True)
    with pytest.raises(ValueError, match="as a list of one dictionary"):
        encode(alone, {"x": [1.0, 2.0]})


@pytest.mark.parametrize("word", ["NA", " nan ", "N/A", "NaT", "null"])
def test_a_word_for_a_missing_date_is_a_gap(tmp_path: Path, word: str) -> None:
    fitted = []
    for gap in (None, word):
        days = [f"2026-01-{i + 1:02} 10:00:00.25+00" if i % 4 else gap for i in range(28)]
        dataset = write_table(tmp_path / str(gap), {"day": days, "label": [0, 1] * 14})
        task = prepare_task(TabularClassification(), dataset.facts)
        assert isinstance(task, TabularClassification)
        assert task.fitted is not None
        fitted.append((task.fitted["columns"], decode_all_rows(task, dataset)["features"].tolist()))
    assert fitted[1] == fitted[0]
    assert fitted[0][0][0]["indicator"]


def test_pandas_na_is_a_missing_value(tmp_path: Path) -> None:
    task = prepare(
        write_table(tmp_path, PEOPLE), features=["age", "cabin"], missing={"age": "median", "cabin": "category"}
    )
    table = {"age": pd.array([22, None], "Int64"), "cabin": pd.array([None, "C85"], "string")}
    fields = encode(task, table)
    assert (fields["features"].tolist(), fields["categories"].tolist()) == ([[22], [30.5]], [[3], [0]])


def test_a_table_that_lacks_a_column_is_not_taken_for_encoded_rows() -> None:
    encoding = {"columns": [{"name": "age"}, {"name": "fare"}]}
    inputs = [{"name": "features", "dtype": "float32", "shape": [2]}]

    predictor = loader.Predictor(torch.nn.Identity(), inputs, encoding, encode_rows)
    with pytest.raises(ValueError, match="column 'fare' is missing; the columns are 'age', 'id'"):
        predictor.predict(pd.DataFrame({"age": [1.0], "id": [7.0]}))
    encoded = np.ones((1, 2), np.float32)
    assert predictor.predict({"features": encoded}).tolist() == [[1, 1]]


def test_a_run_keeps_the_order_of_its_classes_of_text(tmp_path: Path) -> None:
    train = write_table(tmp_path / "train", {"x": [1.0, 2.0], "answer": ["no", "yes"]})
    stored = json.loads(json.dumps(stored_schema(prepare(train, label="answer"))))
    changed = write_table(tmp_path / "changed", {"x": [1.0, 2.0], "answer": ["maybe", "yes"]})
    assert prepare_task(TabularClassification("answer"), changed.facts, stored).classes == ["no", "yes"]
    with pytest.raises(ConfigError, match=r"num_classes is 5, but .* 2 different values"):
        prepare(train, label="answer", num_classes=5)


@pytest.mark.parametrize("embedding", [None, 3])
def test_raw_rows_give_the_same_scores_through_task_and_export(tmp_path: Path, embedding: int | None) -> None:
    torch.manual_seed(1)
    dataset = write_table(tmp_path / "train", PEOPLE)
    missing = {"age": "indicator", "cabin": "category"}
    task = prepare(dataset, missing=missing, standardize=["age", "fare"], embedding=embedding, hidden=[8])
    model = task.build_model().eval()
    arrays = decode_all_rows(task, dataset)
    with torch.no_grad():
        expected = task.forward(model, {name: torch.from_numpy(values.copy()) for name, values in arrays.items()})
    write_export(task, model, arrays, tmp_path / "export", {"run": "run", "step": 1, "params_digest": ""})
    predictor = load_model(tmp_path / "export")
    raw = {name: values for name, values in PEOPLE.items() if name != "label"}
    assert np.array_equal(predictor.predict(raw, scores=True), expected.numpy())
    with pytest.raises(ValueError, match="column 'fare' is NaN or infinite"):
        predictor.predict(raw | {"fare": [None] * 6})
    described = loader.describe(tmp_path / "export" / "data" / "model")
    assert described["encoding"]["settings"] == task.fitted
    assert (tmp_path / "export" / "code" / f"{described['encoding']['module']}.py").is_file()


def test_an_unknown_word_and_a_missing_column_are_told_apart(tmp_path: Path) -> None:
    task = prepare(write_table(tmp_path, PEOPLE), features=["sex"])
    assert encode(task, {"sex": ["male", "robot"]})["categories"].tolist() == [[1], [2]]
    with pytest.raises(ValueError, match="the column 'sex' is missing; the columns are 'gender'"):
        encode(task, {"gender": ["male"]})


@pytest.mark.parametrize("weights", [None, "balanced"])
def test_a_label_of_text_in_parquet_is_a_class(tmp_path: Path, weights: Any) -> None:
    columns = {"x": [1.0, 2.0, 3.0, 4.0], "label": pa.array(["no", "yes", "no", "no"]).dictionary_encode()}
    train = write_table(tmp_path / "train", columns)
    task = prepare(train, class_weights=weights)
    assert (task.classes, task.num_classes) == (["no", "yes"], 2)
    assert task.weights == (None if weights is None else [4 / (2 * 3), 4 / (2 * 1)])
    assert decode_all_rows(task, train)["label"].tolist() == [0, 1, 0, 0]
    evaluated = write_table(tmp_path / "eval", {"x": [1.0, 2.0], "label": ["yes", "yes"]})
    assert decode_all_rows(task.prepare(evaluated.facts), evaluated)["label"].tolist() == [1, 1]
    other = write_table(tmp_path / "other", {"x": [1.0, 2.0], "label": ["yes", "maybe"]})
    with pytest.raises(BadRowError, match=r"row 1.*label 'maybe' is not one of the 2 classes"):
        decode_all_rows(task.prepare(other.facts), other)


@pytest.mark.parametrize(
    ("values", "texts", "codes"),
    [
        (["1", "2", "-3"], ["1", "2.0", "-3.0", "2.5"], [0, 1, 2, None]),
        # The constant that replaces a missing value is a category, too.
        (["1", "none"], ["1.0", "none", "none.0"], [0, 1, None]),
        (["1", "1.0"], ["1", "1.0"], [0, 1]),
        (["a", "1"], ["1.0"], [None]),
    ],
)
def test_the_text_of_a_whole_float_is_the_category_of_the_integer(
    values: list[str], texts: list[str], codes: list[int | None]
) -> None:
    code_of = value_codes({"values": values, "fill": "none"})
    assert [code_of.get(text) for text in texts] == codes
