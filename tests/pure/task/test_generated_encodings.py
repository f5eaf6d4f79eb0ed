"""Generated tables are encoded as pipelines of scikit-learn encode them, and alike from a row, a frame and a file."""

from __future__ import annotations

import datetime
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OrdinalEncoder, RobustScaler, StandardScaler

from ray_app.data.dataset import open_dataset
from ray_app.errors import RayAppError
from ray_app.models.inputs import decode_inputs
from ray_app.task.schema import prepare_task
from ray_app.task.table_encoding import category_text
from ray_app.task.table_statistics import LIMIT
from ray_app.task.tabular import TabularClassification, TabularRegression
from tests.support.generated_programs import assert_none_differs
from tests.support.generated_tables import GRAMMAR, Program, draw, ingest_program, read_back, write

SEARCHED = 1000
ALLOWED = {
    "has only missing values": "A column of gaps has no median; scikit-learn drops it with a warning.",
    "more than the 1 rows": "One row of class 1 cannot be trained on.",
    "is NaN or infinite": "Numbers beyond float32 are refused with the column.",
    "has no column of numbers": "The same, with numbers as text or in lists of several lengths.",
    "names no column of numbers": "A table of words has nothing to standardize, and words seen once are no categories.",
    "pass a row with an array as a list": "As for a row with an array and a number.",
    "too large for a standard deviation": "The spread of numbers up to 1.8e308 overflows; refused with the remedy.",
    "has infinite values": "Infinite numbers have no statistics; scikit-learn refuses them, too.",
    "is one value": "A row with an array may also be three rows; refused, a list of one row says it.",
}
"""Differences that are right, by a part of their text, with the reason."""


def difference(program: Program) -> str:
    """Returns how the inputs of a table differ from those of scikit-learn, or from each other; empty if they do not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written, _ = write(program, folder)
        is_number = program["target"] == "number"
        try:
            ingest_program(program, written, folder / "out", None if is_number else "y")
        except RayAppError:
            return ""
        try:
            kind: Any = TabularRegression if is_number else TabularClassification
            scaling = True if program["seed"] % 2 else None
            dataset = open_dataset(str(folder / "out"))
            task = prepare_task(kind(label="y" if is_number else "label", standardize=scaling), dataset.facts)
            text = compare(task, folder / "out")
        except (RayAppError, ValueError) as error:
            text = f"refused: {error}".replace(name, "")
        return "" if any(reason in text for reason in ALLOWED) else text


def compare(task: Any, folder: Path) -> str:
    """Returns the first difference of the inputs."""
    ids = pd.read_parquet(folder, columns=["row_id"])["row_id"]
    frame = pd.DataFrame(read_back(folder)).set_index("row_id").loc[ids].reset_index()
    fields = decode_inputs(task, str(folder)).fields
    for name, rows in {"frame": frame, "records": frame.to_dict("records"), "row": frame.iloc[0].to_dict()}.items():
        others = decode_inputs(task, rows).fields
        for field, values in others.items():
            if not np.array_equal(values, fields[field][: len(values)]):
                return f"{field} of the {name} are {values[0]}, of the file {fields[field][0]}"
    first = category = 0
    for column in task.fitted["columns"]:
        values = frame[column["name"]]
        if column["kind"] == "category":
            codes, category = fields["categories"][:, category], category + 1
            expected: npt.NDArray[Any] = codes_by_sklearn(column, values)
            if not np.array_equal(codes, expected):
                return f"codes of {values.tolist()[:5]} are {codes[:5]}, by scikit-learn {expected[:5]}"
            continue
        expected = inputs_by_sklearn(column, values, "limit" in task.fitted)
        inputs, first = fields["features"][:, first : first + expected.shape[1]], first + expected.shape[1]
        if not np.allclose(np.where(np.isnan(expected), np.nan, inputs), expected, 1e-4, 1e-4, equal_nan=True):
            return f"inputs of {values.tolist()[:5]} are {inputs[:5]}, by scikit-learn {expected[:5]}"
    return ""


def codes_by_sklearn(column: dict[str, Any], values: pd.Series) -> npt.NDArray[Any]:
    """Returns the codes of a column of categories."""
    texts = np.array([category_text(value) for value in values.tolist()], object)
    is_present = texts != None  # noqa: E711 - of each element
    codes = np.full(len(texts), len(column["values"]) + 1.0)
    encoder = OrdinalEncoder(min_frequency=2 if column.get("has_rare") else None)
    codes[is_present] = encoder.fit_transform(texts[is_present, None])[:, 0]
    return codes


def inputs_by_sklearn(column: dict[str, Any], values: pd.Series, has_limit: bool) -> npt.NDArray[Any]:
    """Returns the inputs of a column of numbers, arrays or dates."""
    scaler: Any = RobustScaler(quantile_range=(25, 75), unit_variance=True) if has_limit else StandardScaler()
    if column["kind"] == "date":
        times = pd.Series(pd.to_datetime(values, utc=True, format="ISO8601")).dt.as_unit("us")
        missing = times.isna().to_numpy()
        seconds = SimpleImputer(strategy="median").fit_transform(
            np.where(missing, np.nan, times.astype("int64") / 1e6)[:, None]
        )[:, 0]
        parts = pd.Series(pd.to_datetime(seconds * 1e6, unit="us")).dt
        columns = [seconds - seconds.min(), parts.month, parts.day, parts.day_of_week, parts.hour]
        inputs = np.stack([*columns, *([missing] if missing.any() else [])], axis=1)
    elif isinstance(values.iloc[0], list):
        inputs = np.array(values.tolist(), np.float64).reshape(len(values), -1)
        # Arrays have mean 0 and deviation 1 in any case.
        scaler = StandardScaler()
    else:
        if isinstance(values.dropna().iloc[0], datetime.time):
            values = pd.to_timedelta(values.map(str, na_action="ignore"))
        seconds = values.dt.total_seconds() if values.dtype.kind == "m" else values
        numbers = pd.to_numeric(seconds).to_numpy(np.float64, na_value=np.nan)[:, None]
        inputs = SimpleImputer(strategy="median", add_indicator=True).fit_transform(numbers)
    scaled = scaler.fit_transform(inputs)
    # Where the quartiles are equal scikit-learn does not scale.
    low, high = np.quantile(inputs, [0.25, 0.75], axis=0)
    is_unscaled = (low == high) & isinstance(scaler, RobustScaler)
    return np.where(is_unscaled, np.nan, scaled / np.hypot(1.0, scaled / LIMIT)) if has_limit else scaled


@pytest.mark.parametrize("seed", range(3))
def test_a_generated_table_is_encoded_as_by_scikit_learn(seed: int) -> None:
    assert_none_differs(GRAMMAR, [draw(seed)], difference)


@pytest.mark.search
@pytest.mark.timeout(3600)
def test_generated_tables_are_encoded_as_by_scikit_learn() -> None:
    assert_none_differs(GRAMMAR, map(draw, range(SEARCHED)), difference)
