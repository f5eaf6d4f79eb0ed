"""Arrays as NumPy, Keras, MedMNIST and pandas store them, and IDX files of MNIST, Kaggle and EMNIST."""

from __future__ import annotations

import gzip
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_app import ingest_arrays
from ray_app.errors import ConfigError, DataError
from ray_app.ingest.ingest import DatasetSummary, IngestOptions, ingest
from ray_app.ingest.readers import arrays, sources
from tests.support.ingest_inputs import RNG, ingest_and_read, ingest_error, read_columns, write_idx

Arrays = dict[str, Any]
X, ROWS = RNG.random((5, 3)), np.arange(40) % 3
ZEROS = np.zeros((3, 4, 4, 3), np.uint8)
PICTURES = {word: RNG.integers(0, 256, (40, 4, 4), dtype=np.uint8) for word in ("train", "val", "valid", "test")}
PETS = np.array(["dog", "cat", "eel", "cat"])
EXTRA = np.array([True, False, True, True, False])


def write(tmp_path: Path, values: Arrays, packed: bool = True) -> Path:
    if packed:
        np.savez(tmp_path / "in.npz", **values)
        return tmp_path / "in.npz"
    (tmp_path / "in").mkdir()
    for name, array in values.items():
        np.save(tmp_path / "in" / name, array)
    return tmp_path / "in"


def summary_of(tmp_path: Path, source: Any, path: Path, **options: Any) -> DatasetSummary:
    return ingest(IngestOptions(source, str(tmp_path / "out"), str(path), **options))


def pictures(name: str, *words: str) -> Arrays:
    """Returns images and labels of data sets with names of this form."""
    stored = {name.format(rest="images", side=word): PICTURES[word] for word in words}
    return stored | {name.format(rest="labels", side=word): ROWS[:, None] for word in words}


READ: dict[str, tuple[Arrays, dict[str, Any], dict[str, Arrays]]] = {
    **{
        f"{dtype} {name} of shape (n, 1)": (
            {"x": ZEROS, name: np.array([[1], [0], [1]], dtype)},
            {},
            {"": {"label": [1, 0, 1]}},
        )
        for dtype in ("uint8", "int64", "bool")
        for name in ("y", "label")
    },
    "targets of shape (n, 1)": (
        {"x": X[:3], "y": np.array([[0.5], [1.5], [2.25]])},
        {},
        {"": {"target": [0.5, 1.5, 2.25]}},
    ),
    **{
        f"texts {kind}": (
            {"x": np.zeros((4, 2)), "y": PETS.astype(kind)[:, None], "name": PETS.astype(kind)},
            {},
            {"": {"features": np.zeros((4, 2)), "label": [1, 0, 2, 0], "name": PETS}},
        )
        for kind in ("U", "S", ">U5")
    },
    "texts of all data sets": (
        {"x_train": X[:2], "y_train": np.array(["b", "c"]), "x_val": X[:2], "y_val": np.array(["a", "longer"])},
        {},
        {"train": {"features": X[:2], "label": [1, 2]}, "eval": {"features": X[:2], "label": [0, 3]}},
    ),
    **{
        f"{words} {name}": (
            pictures(name, *words),
            {"eval_fraction": 0},
            {sources.SPLITS[word]: {"image": PICTURES[word], "label": ROWS} for word in words},
        )
        for name in ("{rest}_{side}", "{side}_{rest}")
        for words in (("train", "val", "test"), ("train", "valid"), ("train", "test"))
    },
    "capital X": ({"X": X, "y": np.arange(5)}, {}, {"": {"features": X, "label": np.arange(5)}}),
    "capital X and Y": ({"X": X, "Y": np.arange(5)}, {}, {"": {"features": X, "label": np.arange(5)}}),
    "capital X of data sets": (
        {"X_train": X, "y_train": np.arange(5), "X_test": X, "y_test": np.arange(5)},
        {"eval_fraction": 0},
        {side: {"features": X, "label": np.arange(5)} for side in ("train", "test")},
    ),
    "X beside x": (
        {"x": X, "X": X[:, 0], "y": np.arange(5)},
        {},
        {"": {"features": X, "X": X[:, 0], "label": np.arange(5)}},
    ),
    "other capital letters": (
        {"X_Y": ROWS, "x_Y": ROWS, "position_X": ROWS, "Y": ROWS},
        {},
        {"": {"X_Y": ROWS, "x_Y": ROWS, "position_X": ROWS, "label": ROWS}},
    ),
    "names by shape and type": (
        {"x": X, "y": np.arange(5) / 2, "extra": EXTRA},
        {},
        {"": {"features": X, "target": np.arange(5) / 2, "extra": EXTRA}},
    ),
    "another name": (
        {"x": X, "y": np.arange(5) / 2, "extra": EXTRA},
        {"rename": {"extra": "label"}},
        {"": {"features": X, "target": np.arange(5) / 2, "label": EXTRA}},
    ),
    "one-hot targets": ({"x": X[:3], "target": np.eye(3)}, {}, {"": {"features": X[:3], "target": np.eye(3)}}),
}
ONE_HOT = "y has the shape (4, 3) and one 1 in each row"
REFUSED: list[tuple[Arrays, str, str]] = [
    ({"x": X[:3], "y": np.array([["a", "b"], ["a", "c"], ["b", "c"]])}, "y", "allowed is one text for each row"),
    ({"x": X[:3], "y": np.array([b"a", b"\xff", b"a"])}, "y", "can't decode byte 0xff"),
    ({"x": X[:3], "y": np.array(["a", "b", ""])}, "y", "the row 2, counted from 0, has an empty text as label"),
    ({"x": X[:3], "y": np.array(["2020-01-01"] * 3, "datetime64[D]")}, "y", "convert times to numbers"),
    (
        {"x": X[:3], "y": np.array([(1, 2.0)] * 3, [("a", int), ("b", float)])},
        "y",
        "save each field as a separate",
    ),
    (
        {"x": X[:3], "y": np.array([(0, [1, 2])] * 3, [("a", int), ("b", int, 2)])},
        "y",
        "save each field as a separate",
    ),
    ({"x": X[:3], "y": np.array([1j, 2, 3])}, "y", "allowed are bool, integers and floats"),
    ({"x": X[:3], "y": np.zeros(3, np.longdouble)}, "y", "allowed are bool, integers and floats"),
    ({"x": X[:3], "y": np.array([1, None, "x"], object)}, "y", "nothing is unpickled"),
    ({"x": X[:3], "y": np.zeros((3, 0))}, "y", "rows of shape (0,) are empty"),
    ({"x": X[:3], "y": np.zeros(())}, "y", "one single value"),
    ({"x": X[:3], "y": np.zeros(2)}, "y", "arrays with different numbers of rows"),
    ({"x": X[:4], "y": np.eye(3)[[0, 2, 1, 0]]}, "y", ONE_HOT),
    ({"x": np.zeros((0, 2))}, "", "no rows"),
    ({"label": np.arange(3) / 2}, "", "`label` is of type double"),
    ({"y": np.arange(3), "label": np.arange(3)}, "", "two of ['label', 'y'] would become one of the columns ['label']"),
    ({"x_train": X, "x_test": X, "y_test": X}, "", "the arrays of 'test' need counterparts"),
    ({"x_train": X, "x_val": X, "y_val": X}, "", "the arrays of 'eval' need counterparts"),
    ({"x_train": X, "y_train": ROWS[:5], "x_test": X, "y_test": ROWS[:5] / 2}, "", "differ in type or axes"),
    ({}, "", "no array"),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", READ)
def test_arrays_become_columns_by_their_names(tmp_path: Path, case: str, packed: bool) -> None:
    values, options, expected = READ[case]
    parts = summary_of(tmp_path, "numpy", write(tmp_path, values, packed), **options).parts
    assert parts.keys() == expected.keys()
    for side, columns in expected.items():
        stored = read_columns(tmp_path / "out" / side)
        assert len(columns) == 1 or stored.keys() == {"row_id", *columns}
        for name, array in columns.items():
            assert np.array_equal(stored[name], array), name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_arrays_that_cannot_be_used_are_refused_by_name(tmp_path: Path, case: int, packed: bool) -> None:
    values, name, expected = REFUSED[case]
    message = ingest_error(tmp_path, "numpy", write(tmp_path, values, packed))
    assert expected in message
    assert (f"in.npz:{name}" if packed else f"{name}.npy") in message if name else "in" in message


@pytest.mark.parametrize("packed", ["npz", "compressed", "npy"])
def test_arrays_are_stored_unchanged(tmp_path: Path, packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1000)
    x, y = RNG.random((50, 6, 6)).astype(">f4"), np.arange(50, dtype=np.uint8) % 3
    path = write(tmp_path, {"x": x, "y": y}, packed != "npy")
    if packed == "compressed":
        np.savez_compressed(path, x=x, y=y)
    columns = ingest_and_read(tmp_path, "numpy", path)
    assert columns["image"].dtype == np.dtype("=f4")
    np.testing.assert_array_equal(columns["image"], x)
    assert (columns["label"], columns["row_id"]) == (y.tolist(), [str(i) for i in range(50)])


@pytest.mark.parametrize("shape", [(7, 3), (7, 2, 3, 4), (7,), (1, 5)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shard_rows", [3, 100])
def test_arrays_in_fortran_order_are_read(
    tmp_path: Path, shape: tuple[int, ...], packed: bool, shard_rows: int
) -> None:
    values = RNG.random(shape)
    path = write(tmp_path, {"z": np.asfortranarray(values)}, packed)
    assert np.array_equal(ingest_and_read(tmp_path, "numpy", path, shard_rows=shard_rows)["z"], values)


def npy_header(shape: str) -> bytes:
    """Returns the header of a .npy file that declares float64 values of a shape."""
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (f"({2**60},)", "ends before row"),
        (f"(3, {2**60})", "ends before row 1 of 3"),
        (f"(3, {2**63})", "ends before row 1 of 3"),
        (f"({2**60}, 0)", "are empty"),
        ("(" + "[" * 50, "cannot be read"),
    ],
)
def test_a_header_that_declares_more_than_its_data_is_refused(
    tmp_path: Path, packed: bool, shape: str, expected: str
) -> None:
    source = tmp_path / ("x.npz" if packed else "x.npy")
    if packed:
        with zipfile.ZipFile(source, "w") as archive:
            archive.writestr("x.npy", npy_header(shape) + bytes(64))
    else:
        source.write_bytes(npy_header(shape) + bytes(64))
    message = ingest_error(tmp_path, "numpy", source)
    assert all(text in message for text in (["x.npz:x", "damaged"] if packed else ["x.npy", expected]))


def test_large_and_damaged_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.npz").write_bytes(b"hello")
    assert "in.npz: File is not a zip file" in ingest_error(tmp_path, "numpy", tmp_path / "in.npz")
    file = write(tmp_path, {"x": np.asfortranarray(np.zeros((8, 3)))}, False) / "x.npy"
    whole = file.read_bytes()
    file.write_bytes(whole + b"x")
    assert "continues after the last of 8 rows" in ingest_error(tmp_path, "numpy", tmp_path / "in")
    file.write_bytes(whole[:-1])
    assert "ends before row" in ingest_error(tmp_path, "numpy", tmp_path / "in")
    file.write_bytes(whole)
    monkeypatch.setattr(arrays, "_MAX_FORTRAN_BYTES", 100)
    assert "numpy.ascontiguousarray(x)" in ingest_error(tmp_path, "numpy", tmp_path / "in")


@pytest.mark.parametrize("kind", ["mnist.npz", "folder of .npy", "idx"])
def test_a_tenth_of_the_train_rows_becomes_eval_and_test_rows_stay_test(tmp_path: Path, kind: str) -> None:
    values = {
        "x_train": RNG.integers(0, 256, (300, 28, 28), dtype=np.uint8),
        "y_train": np.arange(300, dtype=np.uint8) % 10,
    }
    values |= {"x_test": values["x_train"][:40] ^ 1, "y_test": values["y_train"][:40]}
    source, path = ("idx" if kind == "idx" else "numpy"), tmp_path / "in"
    if kind == "idx":
        write_idx(path, "train", 300, packed=True)
        write_idx(path, "t10k", 40, packed=True)
    else:
        path = write(tmp_path, values, kind == "mnist.npz")
    assert list(summary_of(tmp_path, source, path).parts) == ["train", "test", "eval"]
    train, test, evaluation = (read_columns(tmp_path / "out" / part) for part in ("train", "test", "eval"))
    assert 15 < len(evaluation["label"]) < 45, "the evaluation part should have about 30 of 300 rows"
    assert len({*train["row_id"], *evaluation["row_id"]}) == 300 == len(train["row_id"]) + len(evaluation["row_id"])
    assert len(test["label"]) == 40
    for part, columns in (("train", train), ("train", evaluation), ("test", test)) if kind != "idx" else ():
        rows = [int(row_id.removeprefix(f"{part}:")) for row_id in columns["row_id"]]
        np.testing.assert_array_equal(columns["image"], values[f"x_{part}"][rows])
        assert columns["label"] == values[f"y_{part}"][rows].tolist()
    assert summary_of(tmp_path, source, path).reused


def test_targets_that_are_integral_floats_are_noted(tmp_path: Path) -> None:
    path = write(tmp_path, {"x": np.zeros((6, 4)), "y": np.array([0.0, 1, 2, 0, 1, 2])})
    [note] = summary_of(tmp_path, "numpy", path).parts[""].notes
    assert "in.npz:y holds float64 and becomes `target`, although all its values are whole numbers" in note


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.ma.masked_array([1, 2, 3], [False, True, False]), "1 values are masked"),
        (np.array([1, None], object), "an array of object"),
        ([1, None], "an array of object"),
        (["a", "b"], "an array of <U1"),
        ([[1, 2], [3]], "all of one shape"),
        (np.array(["2020-01-01", "NaT"], "datetime64[D]"), "an array of datetime64[D]"),
    ],
)
def test_ingest_arrays_refuses_values_that_would_be_lost(tmp_path: Path, values: Any, expected: str) -> None:
    with pytest.raises(DataError, match=r"^x: ") as caught:
        ingest_arrays(str(tmp_path / "out"), x=values)
    assert expected in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_equal_arrays_reuse_the_data_set_and_changed_arrays_are_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    x, y = np.arange(240, dtype=np.uint8).reshape(40, 2, 3), np.arange(40) % 3
    assert ingest_arrays(out, x=np.ma.masked_array(x, False), y=y).rows == 40
    columns = read_columns(tmp_path / "out")
    np.testing.assert_array_equal(columns["image"], x)
    assert columns["label"] == y.tolist()
    assert ingest_arrays(out, x=np.asfortranarray(x), y=torch.from_numpy(y)).reused
    with pytest.raises(ConfigError, match="its source has changed"):
        ingest_arrays(out, x=x + 1, y=y)


@pytest.mark.parametrize("packed", [True, False])
def test_idx_pairs_become_train_and_test(tmp_path: Path, packed: bool) -> None:
    write_idx(tmp_path / "in", "train", 25, packed)
    write_idx(tmp_path / "in", "t10k", 7, packed)
    parts = summary_of(tmp_path, "idx", tmp_path / "in", eval_fraction=0).parts
    assert {name: part.rows for name, part in parts.items()} == {"train": 25, "test": 7}
    data = (tmp_path / "in" / f"train-images-idx3-ubyte{'.gz' if packed else ''}").read_bytes()
    columns = read_columns(tmp_path / "out" / "train")
    assert columns["image"].tobytes() == (gzip.decompress(data) if packed else data)[16:]
    assert (columns["image"].shape, columns["image"].dtype) == ((25, 28, 28), np.uint8)
    assert columns["label"] == [i % 10 for i in range(25)]
    assert read_columns(tmp_path / "out" / "test")["row_id"] == [f"t10k:{i}" for i in range(7)]


def write_idx_files(folder: Path, images: str, labels: str, first: int = 0) -> None:
    for name, content in (
        (images, struct.pack(">4I", 2051, 3, 2, 2) + bytes(range(first, first + 12))),
        (labels, struct.pack(">2I", 2049, 3) + bytes([1, 2, 3])),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        ("t10k-images.idx3-ubyte", "t10k-labels.idx1-ubyte"),
        ("test-images-idx3-ubyte.gz", "test-labels-idx1-ubyte"),
        ("emnist-letters-test-images-idx3-ubyte.gz", "emnist-letters-test-labels-idx1-ubyte.gz"),
        ("t10k-images-idx3-ubyte/t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte/t10k-labels-idx1-ubyte"),
    ],
)
def test_names_of_kaggle_and_emnist_are_read(tmp_path: Path, images: str, labels: str) -> None:
    write_idx_files(tmp_path / "in", images, labels)
    summary_of(tmp_path, "idx", tmp_path / "in")
    rows = read_columns(tmp_path / "out" / "test")
    assert (rows["image"].ravel().tolist(), rows["label"]) == (list(range(12)), [1, 2, 3])


def test_one_of_several_data_sets_of_emnist_is_named(tmp_path: Path) -> None:
    for number, name in enumerate(("digits", "letters")):
        names = [f"emnist-{name}-train-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
        write_idx_files(tmp_path / "in", *names, first=number)
    assert "IDX files of several data sets" in ingest_error(tmp_path, "idx", tmp_path / "in")
    summary_of(tmp_path, "idx", tmp_path / "in" / "emnist-letters", eval_fraction=0)
    assert read_columns(tmp_path / "out" / "train")["image"].ravel().tolist() == list(range(1, 13))


ENORMOUS = struct.pack(">4I", 2051, 5, 2**32 - 1, 2**32 - 1) + bytes(64)
Change = Callable[[Path, Path], object]


@pytest.mark.parametrize(
    ("packed", "options", "change", "expected"),
    [
        (False, {"magic": 2052}, None, "the magic number is 00000804; expected 00000803"),
        (False, {"labels": 4}, None, "train-labels-idx1-ubyte': 4"),
        (False, {}, lambda images, labels: labels.unlink(), "train-labels-idx1-ubyte[.gz] is missing"),
        (False, {}, lambda images, labels: images.write_bytes(images.read_bytes()[:-1]), "ends before row 5 of 5"),
        (
            False,
            {},
            lambda images, labels: images.write_bytes(images.read_bytes() + b"x"),
            "continues after the last of 5",
        ),
        (False, {}, lambda images, labels: images.write_bytes(b"\0"), "expected 00000803"),
        (False, {}, lambda images, labels: [images.unlink(), labels.unlink()], "no IDX files; expected a folder with"),
        (False, {}, lambda images, labels: images.write_bytes(ENORMOUS), "damaged"),
        (True, {}, lambda images, labels: images.write_bytes(gzip.compress(ENORMOUS)), "damaged"),
        (True, {}, lambda images, labels: images.write_bytes(images.read_bytes()[:-20]), "damaged"),
    ],
)
def test_bad_idx_is_refused(
    tmp_path: Path, packed: bool, options: dict[str, int], change: Change | None, expected: str
) -> None:
    write_idx(tmp_path / "in", "train", 5, packed, **options)
    suffix = ".gz" if packed else ""
    if change:
        names = ("images-idx3", "labels-idx1")
        change(*(tmp_path / "in" / f"train-{name}-ubyte{suffix}" for name in names))
    assert expected in ingest_error(tmp_path, "idx", tmp_path / "in")
