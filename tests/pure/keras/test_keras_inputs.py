"""The arrays and the model of a call of `fit`: types that a buffer lacks, divided rows, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_app.errors import ConfigError
from ray_app.keras.inputs import FitColumns, split_arrays, store_program
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
    for rows in split_arrays((x, y, None), 0.5):
        columns = FitColumns("x", "y").fill(*rows)
        assert {name: values.dtype for name, values in columns.items()} == {
            name: values.dtype for name, values in whole.items()
        }


@pytest.mark.parametrize("x", [(row for row in ()), np.float32(3), None])
def test_rows_that_are_no_arrays_cannot_be_divided(x: Any) -> None:
    with pytest.raises(ConfigError, match="fit takes arrays of rows"):
        split_arrays((x, None, None), 0.5)


def test_inputs_without_an_array_are_refused() -> None:
    with pytest.raises(ConfigError, match="x is an empty list"):
        FitColumns.name([], None, None).fill([])


def test_a_model_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no file .*missing\.keras"):
        load_saved(str(tmp_path / "missing.keras"))
