"""The arrays and the model of a call of `fit`: types that a buffer lacks, divided rows, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_app.errors import ConfigError, DataError
from ray_app.keras.inputs import FitColumns, split_rows, store_program
from ray_app.task.keras.library import import_keras
from ray_app.task.keras.program import load_saved, load_stored

keras = import_keras()


def test_arrays_of_bfloat16_are_float32() -> None:
    columns = FitColumns("x").fill(torch.full((2, 3), 0.5, dtype=torch.bfloat16))
    assert columns["x"].dtype == np.float32
    assert columns["x"].tolist() == [[0.5] * 3] * 2


def test_a_run_keeps_its_first_weights_and_notices_another_model(tmp_path: Path) -> None:
    def get_spec(before: Any = None, step: float = 0.1) -> Any:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype="bfloat16")])
        model.compile("sgd", keras.losses.Huber(step))
        return store_program(model, str(tmp_path), 0, before)

    first, other = get_spec(), get_spec()
    assert first["init_args"]["path"] != other["init_args"]["path"], "the weights are other ones"
    assert get_spec(before=first) == first
    assert get_spec(before=first, step=0.2) != first
    weights = [load_stored(**spec["init_args"]).get_weights()[0] for spec in (first, other)]
    assert not np.array_equal(*weights)


def test_a_stored_model_that_was_changed_is_not_read(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    init_args = store_program(model, str(tmp_path), 0)["init_args"]
    file = Path(init_args["path"])
    file.write_bytes(file.read_bytes().replace(b"dense", b"tense"))
    with pytest.raises(ConfigError, match=r"has changed since the configuration .* was written"):
        load_stored(**init_args)


def test_divided_targets_have_the_types_of_undivided_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of channels-first models are images by their axes alone."""
    monkeypatch.setattr(keras.config, "image_data_format", lambda: "channels_first")
    x, y = np.zeros((4, 3, 8, 8), np.uint8), np.ones((4, 1, 8, 8), np.uint8)
    whole = FitColumns("x", "y").fill(x, y)
    for columns in split_rows(whole, 0.5):
        assert {name: (len(values), values.dtype) for name, values in columns.items()} == {
            "x": (2, np.float32),
            "y": (2, np.int32),
        }


NAN = np.array([[0.0], [1.0], [np.nan]])


@pytest.mark.parametrize(
    ("x", "y", "weights", "message"),
    [
        (np.float32(3), None, None, "x is a float32, but fit accepts arrays of rows"),
        (None, None, None, "x is a NoneType, but fit accepts arrays of rows"),
        (NAN, None, None, "x is NaN or infinite as float32 in row 2, counted from 0"),
        ({"a": NAN[:2], "b": NAN}, None, None, r"x\['b'\] is NaN .* row 2"),
        (NAN[:2], np.array([1e300, 0]), None, "y is NaN or infinite as float32 in row 0"),
        (NAN[:2], NAN[:1], None, "x has 2 rows, y has 1 rows"),
        ([NAN[:2], NAN[:1]], NAN[:2], None, "x has 2 and 1 rows, y has 2 rows"),
        (NAN[:2], NAN[:2], np.ones(3), "y has 2 rows, sample_weight has 3 rows"),
        (NAN[:2], NAN[:2], [1.0, 2.0], "sample_weight is a list, but fit accepts arrays"),
        (NAN[:0], NAN[:0], None, r"x has no rows, an array of shape \(0, 1\)"),
        (np.array(["a", None]), None, None, "x: an array of object"),
        (np.array([{}, {}]), None, None, "x: an array of object"),
    ],
)
def test_rows_that_cannot_be_used_are_named_by_argument_and_row(x: Any, y: Any, weights: Any, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        FitColumns.name(x, y, weights).fill(x, y, weights)


def test_inputs_without_an_array_are_refused() -> None:
    with pytest.raises(ConfigError, match="x is an empty list"):
        FitColumns.name([], None, None).fill([])


def test_a_model_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"The file .*missing\.keras"):
        load_saved(str(tmp_path / "missing.keras"))
