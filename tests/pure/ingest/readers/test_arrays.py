"""Arrays as Keras, MedMNIST and pandas store them, and IDX files of Kaggle and EMNIST."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_app import ingest_arrays
from ray_app.errors import ConfigError
from ray_app.ingest.ingest import DatasetSummary, IngestOptions, ingest
from ray_app.ingest.readers import arrays
from tests.support.ingest_inputs import ingest_and_read, ingest_error, read_columns

RNG = np.random.default_rng(0)


def summary_of(tmp_path: Path, source: Any, path: Path, **options: Any) -> DatasetSummary:
    return ingest(IngestOptions(source, str(tmp_path / "out"), str(path), **options))


@pytest.mark.parametrize("name", ["{rest}_{side}", "{side}_{rest}"])
@pytest.mark.parametrize("words", [("train", "val", "test"), ("train", "valid"), ("train", "test")])
def test_names_of_arrays_tell_data_sets(tmp_path: Path, name: str, words: tuple[str, ...]) -> None:
    images = {word: RNG.integers(0, 256, (40, 4, 4), dtype=np.uint8) for word in words}
    stored = {name.format(rest="images", side=word): images[word] for word in words}
    stored |= {name.format(rest="labels", side=word): np.arange(40)[:, None] % 3 for word in words}
    np.savez(tmp_path / "d.npz", **stored)
    parts = summary_of(tmp_path, "numpy", tmp_path / "d.npz").parts
    if words == ("train", "test"):
        assert parts["train"].rows + parts["eval"].rows == 40
    else:
        assert {side: part.rows for side, part in parts.items()} == dict.fromkeys(
            {"train": 0, "eval": 0, "test": 0} if len(words) > 2 else {"train": 0, "eval": 0}, 40
        )
        rows = read_columns(tmp_path / "out" / "eval")
        assert np.array_equal(rows["image"], images[words[1]])
        assert rows["label"] == [i % 3 for i in range(40)]


def test_a_data_set_with_other_arrays_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x_train=np.zeros(3), x_val=np.zeros(3), y_val=np.zeros(3))
    assert "those of 'eval' must be those to train on" in ingest_error(tmp_path, "numpy", tmp_path / "d.npz")


@pytest.mark.parametrize("shape", [(7, 3), (7, 2, 3, 4), (7,), (1, 5)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shard_rows", [3, 100])
def test_arrays_in_fortran_order_are_read(
    tmp_path: Path, shape: tuple[int, ...], packed: bool, shard_rows: int
) -> None:
    values = RNG.random(shape)
    np.savez(tmp_path / "in.npz", z=np.asfortranarray(values))
    if not packed:
        (tmp_path / "in").mkdir()
        np.save(tmp_path / "in" / "z.npy", np.asfortranarray(values))
    path = tmp_path / ("in.npz" if packed else "in")
    rows = ingest_and_read(tmp_path, "numpy", path, shard_rows=shard_rows)
    assert np.array_equal(rows["z"], values)


def test_large_and_damaged_arrays_in_fortran_order_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "x.npy"
    np.save(file, np.asfortranarray(np.zeros((8, 3))))
    whole = file.read_bytes()
    file.write_bytes(whole + b"x")
    assert "goes on after the last of 8 rows" in ingest_error(tmp_path, "numpy", tmp_path / "in")
    file.write_bytes(whole[:-1])
    assert "ends before row" in ingest_error(tmp_path, "numpy", tmp_path / "in")
    file.write_bytes(whole)
    monkeypatch.setattr(arrays, "_MAX_FORTRAN_BYTES", 100)
    assert "numpy.ascontiguousarray(x)" in ingest_error(tmp_path, "numpy", tmp_path / "in")


@pytest.mark.parametrize("kind", ["U", "S", ">U5"])
def test_texts_are_classes_as_labels_and_text_elsewhere(tmp_path: Path, kind: str) -> None:
    texts = np.array(["dog", "cat", "eel", "cat"]).astype(kind)
    np.savez(tmp_path / "d.npz", x=np.zeros((4, 2)), y=texts[:, None], name=texts)
    part = summary_of(tmp_path, "numpy", tmp_path / "d.npz").parts[""]
    assert part.classes == ["cat", "dog", "eel"]
    rows = read_columns(tmp_path / "out")
    assert (rows["label"], rows["name"]) == ([1, 0, 2, 0], ["dog", "cat", "eel", "cat"])


def test_classes_of_texts_are_the_same_in_all_data_sets(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "d.npz",
        x_train=np.zeros((2, 2)),
        y_train=np.array(["b", "c"]),
        x_val=np.zeros((2, 2)),
        y_val=np.array(["a", "longer"]),
    )
    parts = summary_of(tmp_path, "numpy", tmp_path / "d.npz").parts
    assert [part.classes for part in parts.values()] == [["a", "b", "c", "longer"]] * 2
    assert read_columns(tmp_path / "out" / "train")["label"] == [1, 2]


def write_idx_files(folder: Path, images: str, labels: str, first: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in (
        (images, struct.pack(">4I", 2051, 3, 2, 2) + bytes(range(first, first + 12))),
        (labels, struct.pack(">2I", 2049, 3) + bytes([1, 2, 3])),
    ):
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        ("t10k-images.idx3-ubyte", "t10k-labels.idx1-ubyte"),
        ("test-images-idx3-ubyte.gz", "test-labels-idx1-ubyte"),
        ("emnist-letters-test-images-idx3-ubyte.gz", "emnist-letters-test-labels-idx1-ubyte.gz"),
    ],
)
def test_names_of_kaggle_and_emnist_are_read(tmp_path: Path, images: str, labels: str) -> None:
    write_idx_files(tmp_path / "in", images, labels)
    ingest(IngestOptions("idx", str(tmp_path / "out"), str(tmp_path / "in")))
    rows = read_columns(tmp_path / "out" / "test")
    assert rows["image"].ravel().tolist() == list(range(12))
    assert rows["label"] == [1, 2, 3]


def test_one_of_several_data_sets_of_emnist_is_named(tmp_path: Path) -> None:
    for number, name in enumerate(("digits", "letters")):
        names = [f"emnist-{name}-train-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
        write_idx_files(tmp_path / "in", *names, first=number)
    assert "IDX files of several data sets" in ingest_error(tmp_path, "idx", tmp_path / "in")
    options = IngestOptions("idx", str(tmp_path / "out"), str(tmp_path / "in" / "emnist-letters"), eval_fraction=0)
    ingest(options)
    assert read_columns(tmp_path / "out" / "train")["image"].ravel().tolist() == list(range(1, 13))


@pytest.mark.parametrize("names", [("X", "y"), ("X", "Y"), ("X_train", "y_train", "X_test", "y_test")])
def test_names_of_arrays_may_be_capital_letters(tmp_path: Path, names: tuple[str, ...]) -> None:
    columns = {"X": np.ones((60, 3)), "Y": np.arange(60) % 3}
    np.savez(tmp_path / "d.npz", **{name: columns[name[0].upper()] for name in names})
    parts = summary_of(tmp_path, "numpy", tmp_path / "d.npz").parts
    assert parts.keys() == ({"": 0} if len(names) == 2 else {"train": 0, "eval": 0, "test": 0}).keys()
    rows = read_columns(tmp_path / "out" / ("" if len(names) == 2 else "test"))
    assert rows.keys() == {"row_id", "features", "label"}


def test_a_capital_letter_stays_where_the_small_one_is_there(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.ones((4, 3)), X=np.zeros((4, 3)), y=np.arange(4))
    summary_of(tmp_path, "numpy", tmp_path / "d.npz")
    assert read_columns(tmp_path / "out").keys() == {"row_id", "features", "X", "label"}


def test_an_empty_text_as_label_is_named_by_array_and_row(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.ones((3, 2)), y=np.array(["a", "b", ""]))
    message = ingest_error(tmp_path, "numpy", tmp_path / "d.npz")
    assert "d.npz:y: the row 2, counted from 0, has an empty text as label" in message


def test_idx_files_may_be_in_folders_of_their_names(tmp_path: Path) -> None:
    for name, axes in (("train-images-idx3-ubyte", (3, 2, 2)), ("train-labels-idx1-ubyte", (3,))):
        (tmp_path / "in" / name).mkdir(parents=True)
        header = struct.pack(f">{len(axes) + 1}I", 0x800 + len(axes), *axes)
        (tmp_path / "in" / name / name).write_bytes(header + bytes(int(np.prod(axes))))
    assert summary_of(tmp_path, "idx", tmp_path / "in", eval_fraction=0.0).parts["train"].rows == 3


def test_only_names_of_inputs_and_labels_become_lower_case(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", X_Y=np.arange(4), x_Y=np.arange(4) * 10, position_X=np.arange(4), Y=np.arange(4) % 2)
    rows = ingest_and_read(tmp_path, "numpy", tmp_path / "in.npz")
    assert sorted(rows) == ["X_Y", "label", "position_X", "row_id", "x_Y"]


def test_equal_arrays_reuse_the_data_set_and_changed_arrays_are_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    x, y = np.arange(240, dtype=np.uint8).reshape(40, 2, 3), np.arange(40) % 3
    assert ingest_arrays(out, x=x, y=y).rows == 40
    columns = read_columns(tmp_path / "out")
    np.testing.assert_array_equal(columns["image"], x)
    assert columns["label"] == y.tolist()
    assert ingest_arrays(out, x=np.asfortranarray(x), y=torch.from_numpy(y)).reused
    with pytest.raises(ConfigError, match="its source has changed"):
        ingest_arrays(out, x=x + 1, y=y)
