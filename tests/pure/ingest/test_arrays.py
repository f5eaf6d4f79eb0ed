"""`ingest_arrays` stores the arrays of a program as data sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ray_app import ingest_arrays
from ray_app.errors import ConfigError, DataError
from tests.support.ingest_inputs import read_columns

X = np.arange(40 * 6, dtype=np.uint8).reshape(40, 2, 3)
Y = np.arange(40) % 3


def test_equal_arrays_reuse_the_data_set_and_changed_arrays_are_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert ingest_arrays(out, x=X, y=Y).rows == 40
    columns = read_columns(tmp_path / "out")
    np.testing.assert_array_equal(columns["image"], X)
    assert columns["label"] == Y.tolist()
    assert ingest_arrays(out, x=np.asfortranarray(X), y=torch.from_numpy(Y)).reused
    with pytest.raises(ConfigError, match="its source has changed"):
        ingest_arrays(out, x=X + 1, y=Y)


def test_train_and_test_arrays_become_separate_parts(tmp_path: Path) -> None:
    summary = ingest_arrays(str(tmp_path / "out"), eval_fraction=0.25, x_train=X, y_train=Y, x_test=X[:5], y_test=Y[:5])
    assert {name: part.rows for name, part in summary.parts.items()}["test"] == 5
    assert summary.parts["train"].rows + summary.parts["eval"].rows == 40
    assert summary.parts["eval"].rows


def test_arrays_of_unequal_length_or_of_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="different numbers of rows"):
        ingest_arrays(str(tmp_path / "out"), x=X, y=Y[:3])
    with pytest.raises(DataError, match="no array"):
        ingest_arrays(str(tmp_path / "out"))
    with pytest.raises(DataError, match="an array of object"):
        ingest_arrays(str(tmp_path / "out"), x=[object()])
