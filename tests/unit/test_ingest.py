"""Ingest: what goes in comes out, whatever the format; bounded, repeatable, refused with a reason."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from ray_app.data import sources
from ray_app.data.columns import decode, spec_of
from ray_app.data.ingest import READERS, IngestOptions, ingest
from ray_app.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[2]
RNG = np.random.default_rng(0)


def read(folder: Path | str) -> dict[str, Any]:
    """All columns of a data set in the order of its files: arrays as NumPy, the rest as lists."""
    table = pa.concat_tables(pq.read_table(path) for path in sorted(Path(folder).glob("*.parquet")))
    specs = {field.name: spec_of(field) for field in table.schema}
    return {name: decode(table[name], spec) if spec else table[name].to_pylist() for name, spec in specs.items()}


def row_groups(folder: Path) -> list[list[int]]:
    footers = [pq.read_metadata(path) for path in sorted(folder.glob("*.parquet"))]
    return [[f.row_group(i).num_rows for i in range(f.num_row_groups)] for f in footers]


def write_images(root: Path) -> dict[str, bytes]:
    """Images of every readable format in two classes and a file that is none; returns the bytes by relative path."""
    for name in ("cat/b.png", "cat/a.jpg", "cat/c.gif", "dog/z.WEBP", "dog/y.jpeg"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(RNG.integers(0, 255, (9, 7, 3), dtype=np.uint8)).save(root / name)
    (root / "cat" / "notes.txt").write_text("not an image")
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*.*") if p.suffix != ".txt"}


def write_idx(folder: Path, prefix: str, rows: int, packed: bool, magic: int = 2051, labels: int | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    labels = rows if labels is None else labels
    images = struct.pack(">4I", magic, rows, 28, 28) + RNG.integers(0, 256, rows * 784, dtype=np.uint8).tobytes()
    marks = struct.pack(">2I", 2049, labels) + (np.arange(labels) % 10).astype(np.uint8).tobytes()
    for kind, data in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", marks)):
        name = f"{prefix}-{kind}{'.gz' if packed else ''}"
        (folder / name).write_bytes(gzip.compress(data) if packed else data)


def test_images_keep_their_bytes(tmp_path: Path) -> None:
    files = write_images(tmp_path / "in")
    summary = ingest(IngestOptions("images", str(tmp_path / "out"), str(tmp_path / "in")))
    got = read(tmp_path / "out")
    assert got["row_id"] == ["cat/a.jpg", "cat/b.png", "cat/c.gif", "dog/y.jpeg", "dog/z.WEBP"]
    assert dict(zip(got["row_id"], got["image"], strict=True)) == files
    assert got["label"] == [0, 0, 0, 1, 1]
    part = summary.parts[""]
    assert (part.classes, part.class_counts, part.skipped_files) == (["cat", "dog"], {"cat": 3, "dog": 2}, 1)


def test_csv_types_hold_every_row_and_classes_are_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 256)  # so that the first block alone would give the wrong types
    folder = tmp_path / "in"
    folder.mkdir()
    head = "width,kind,note,count\n"
    first = "".join(f"{i},wasp,{i},{i}\n" for i in range(100)) + '0.5,ant,"two\nlines",7\n'
    (folder / "a.csv").write_text(head + first)
    (folder / "b.csv.gz").write_bytes(gzip.compress((head + ",bee,NA, 3\n").encode()))
    summary = ingest(IngestOptions("csv", str(tmp_path / "out"), str(folder), label="kind", rename={"width": "w"}))
    got = read(tmp_path / "out")
    assert list(got) == ["row_id", "w", "label", "note", "count"]
    assert got["w"] == [float(i) for i in range(100)] + [0.5, None]
    assert got["label"] == [2] * 100 + [0, 1]
    assert got["note"][-2:] == ["two\nlines", "NA"]
    assert got["count"] == [*range(100), 7, 3]
    assert got["row_id"] == [f"a.csv:{i}" for i in range(2, 103)] + ["b.csv.gz:2"]
    part = summary.parts[""]
    assert (part.classes, part.class_counts) == (["ant", "bee", "wasp"], {"ant": 1, "bee": 1, "wasp": 100})
    assert part.columns["w"] == {"type": "double", "shape": [], "dtype": "float64", "nulls": 1}
    assert part.columns["count"]["dtype"] == "int64"


def test_csv_with_an_integer_label_keeps_its_numbers(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("a,y\n1,5\n2,-1\n")
    summary = ingest(IngestOptions("csv", str(tmp_path / "out"), str(tmp_path / "f.csv"), label="y"))
    assert read(tmp_path / "out")["label"] == [5, -1]
    assert (summary.parts[""].classes, summary.parts[""].class_counts) == (None, {"-1": 1, "5": 1})


@pytest.mark.parametrize("packed", ["npz", "compressed", "npy"])
def test_numpy_arrays_come_back_equal(tmp_path: Path, packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1000)
    x, y = RNG.random((50, 4, 6)).astype(">f4"), np.arange(50, dtype=np.uint8) % 3
    if packed == "npy":
        np.save(tmp_path / "x.npy", x)
        np.save(tmp_path / "y.npy", y)
    else:
        (np.savez if packed == "npz" else np.savez_compressed)(tmp_path / "d.npz", x=x, y=y)
    source = tmp_path if packed == "npy" else tmp_path / "d.npz"
    ingest(IngestOptions("numpy", str(tmp_path.parent / f"out-{packed}"), str(source)))
    got = read(tmp_path.parent / f"out-{packed}")
    assert got["image"].dtype == np.dtype("=f4")
    np.testing.assert_array_equal(got["image"], x)
    assert got["label"] == y.tolist()
    assert got["row_id"] == [str(i) for i in range(50)]


def test_numpy_names_follow_shape_and_type_and_can_be_changed(tmp_path: Path) -> None:
    values = {"x": RNG.random((5, 3)), "y": np.arange(5) / 2, "extra": np.array([True, False, True, True, False])}
    np.savez(tmp_path / "d.npz", **values)
    ingest(IngestOptions("numpy", str(tmp_path / "a"), str(tmp_path / "d.npz")))
    assert list(read(tmp_path / "a")) == ["row_id", "features", "target", "extra"]
    ingest(IngestOptions("numpy", str(tmp_path / "b"), str(tmp_path / "d.npz"), rename={"extra": "label"}))
    got = read(tmp_path / "b")
    assert got["label"] == [1, 0, 1, 1, 0]
    assert got["target"] == values["y"].tolist()
    np.testing.assert_array_equal(got["features"], values["x"])


@pytest.mark.parametrize("packed", [True, False])
def test_idx_pairs_become_train_and_eval(tmp_path: Path, packed: bool) -> None:
    write_idx(tmp_path / "in", "train", 25, packed)
    write_idx(tmp_path / "in", "t10k", 7, packed)
    summary = ingest(IngestOptions("idx", str(tmp_path / "out"), str(tmp_path / "in"), row_group_rows=4))
    assert {name: part.rows for name, part in summary.parts.items()} == {"train": 25, "eval": 7}
    raw = (tmp_path / "in" / f"train-images-idx3-ubyte{'.gz' if packed else ''}").read_bytes()
    got = read(tmp_path / "out" / "train")
    assert got["image"].tobytes() == (gzip.decompress(raw) if packed else raw)[16:]
    assert (got["image"].shape, got["image"].dtype) == ((25, 28, 28), np.uint8)
    assert got["label"] == [i % 10 for i in range(25)]
    assert read(tmp_path / "out" / "eval")["row_id"] == [f"t10k:{i}" for i in range(7)]


def test_digits_are_complete_stratified_and_fixed(tmp_path: Path) -> None:
    ingest(IngestOptions("digits", str(tmp_path / "out")))
    data, parts = load_digits(), {name: read(tmp_path / "out" / name) for name in ("train", "eval")}
    assert Counter(parts["train"]["row_id"] + parts["eval"]["row_id"]) == Counter(str(i) for i in range(1797))
    for part in parts.values():
        rows = [int(i) for i in part["row_id"]]
        np.testing.assert_array_equal(part["image"], data.images[rows])
        assert part["label"] == data.target[rows].tolist()
    per_class = Counter(parts["eval"]["label"])
    assert all(per_class[c] == round(0.2 * n) for c, n in Counter(data.target.tolist()).items())
    digest = hashlib.sha256("\n".join(parts["eval"]["row_id"]).encode()).hexdigest()
    assert digest == "23502ffd9cfeb453baeaaf1acbe2401fdc287491dc334d601db57c53d559a2d7"


def test_a_split_keeps_every_row_once_and_does_not_depend_on_order(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=RNG.random((2000, 2)), y=np.arange(2000) % 2)
    sides = []
    for out, shard_rows in (("a", 100), ("b", 1000)):
        options = IngestOptions("numpy", str(tmp_path / out), str(tmp_path / "d.npz"), eval_fraction=0.25, shard_rows=shard_rows)
        assert list(ingest(options).parts) == ["train", "eval"]
        sides.append({name: read(tmp_path / out / name)["row_id"] for name in ("train", "eval")})
    assert sides[0] == sides[1]
    assert Counter(sides[0]["train"] + sides[0]["eval"]) == Counter(str(i) for i in range(2000))
    assert 420 < len(sides[0]["eval"]) < 580


def test_shards_and_row_groups_are_bounded_in_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "d.npz", x=RNG.random((95, 2)))
    whole = None
    for block_bytes in (64, 1 << 20):
        monkeypatch.setattr(sources, "BLOCK_BYTES", block_bytes)
        out = tmp_path / str(block_bytes)
        ingest(IngestOptions("numpy", str(out), str(tmp_path / "d.npz"), shard_rows=40, row_group_rows=15))
        assert row_groups(out) == [[15, 15, 10], [15, 15, 10], [15]]
        data = {path.name: path.read_bytes() for path in out.glob("*.parquet")}
        whole = whole or data
        assert data == whole, "the files depend on the size of the blocks read"


def test_row_groups_are_bounded_in_bytes_also_with_rows_larger_than_that(tmp_path: Path) -> None:
    sizes = [300, 300, 300, 5000, 100, 100, 5000, 900]
    (tmp_path / "in" / "only").mkdir(parents=True)
    for i, size in enumerate(sizes):
        (tmp_path / "in" / "only" / f"{i}.png").write_bytes(bytes(size))
    options = IngestOptions("images", str(tmp_path / "out"), str(tmp_path / "in"), check=False, row_group_bytes=1000)
    ingest(options)
    assert row_groups(tmp_path / "out") == [[3, 1, 2, 1, 1]]
    assert [len(image) for image in read(tmp_path / "out")["image"]] == sizes


def test_only_plain_columns_have_statistics_and_no_array_has_a_dictionary(tmp_path: Path) -> None:
    ingest(IngestOptions("digits", str(tmp_path / "out")))
    group = pq.read_metadata(tmp_path / "out" / "train" / "part-00000.parquet").row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert (columns["label"].statistics.min, columns["label"].statistics.max) == (0, 9)
    assert columns["image"].statistics is None
    assert not columns["image"].has_dictionary_page
    assert columns["image"].compression == "ZSTD"


def test_dataset_json_describes_what_is_there(tmp_path: Path) -> None:
    write_idx(tmp_path / "in", "train", 12, True)
    ingest(IngestOptions("idx", str(tmp_path / "out"), str(tmp_path / "in"), shard_rows=5))
    folder = tmp_path / "out" / "train"
    found = json.loads((folder / "dataset.json").read_text())
    assert (found["format_version"], found["source"], found["rows"], found["classes"]) == (1, "idx", 12, None)
    assert found["class_counts"] == {str(i): 2 if i < 2 else 1 for i in range(10)}
    assert found["columns"]["image"] == {"type": "array", "shape": [28, 28], "dtype": "uint8", "nulls": 0}
    assert [(s["path"], s["rows"]) for s in found["shards"]] == [(f"part-0000{i}.parquet", n) for i, n in enumerate((5, 5, 2))]
    assert [s["bytes"] for s in found["shards"]] == [p.stat().st_size for p in sorted(folder.glob("*.parquet"))]


MEASURE = """
import sys
from ray_app.data.ingest import IngestOptions, ingest
ingest(IngestOptions(sys.argv[1], sys.argv[3], sys.argv[2], row_group_bytes=4 << 20))
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    peak_kib = []
    for times in (1, 8):
        source = tmp_path / f"in-{times}"
        source.mkdir()
        rows = times * 40_000  # 31 MB of pixels, then 251 MB
        with (source / "train-images-idx3-ubyte").open("wb") as file:
            file.write(struct.pack(">4I", 2051, rows, 28, 28))
            file.truncate(16 + rows * 784)
        (source / "train-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, rows) + bytes(rows))
        command = [sys.executable, "-c", MEASURE, "idx", str(source), str(tmp_path / f"out-{times}")]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        peak_kib.append(int(done.stdout))
    assert peak_kib[1] - peak_kib[0] < 60 << 10, f"peak memory {peak_kib} KiB for 1x and 8x the data"


def fingerprint(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_second_time_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("a,y\n" + "1,u\n2,v\n" * 20)
    options = IngestOptions("csv", str(tmp_path / "out"), str(tmp_path / "f.csv"), label="y", eval_fraction=0.5)
    first = ingest(options)
    before = fingerprint(tmp_path)
    second = ingest(options)
    assert (first.reused, second.reused) == (False, True)
    assert (first.parts, first.rows) == (second.parts, 40)
    assert fingerprint(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("options", "other options: shard_rows 100000, now 7"),
        ("source", "its source has changed since"),
        ("shard", "part-00000.parquet is missing or of another size"),
        ("json", "holds no data set"),
        ("file", "holds no data set"),
    ],
)
def test_a_target_with_something_else_is_refused_and_left_alone(tmp_path: Path, change: str, expected: str) -> None:
    source, out = tmp_path / "f.csv", tmp_path / "out"
    source.write_text("a\n1\n")
    ingest(IngestOptions("csv", str(out), str(source)))
    if change == "source":
        source.write_text("a\n12\n")
    elif change == "shard":
        (out / "part-00000.parquet").unlink()
    elif change == "json":
        (out / "dataset.json").unlink()
    elif change == "file":
        (out / "part-00000.parquet").unlink()
        (out / "dataset.json").rename(out / "mine.txt")
    before = fingerprint(tmp_path)
    options = IngestOptions("csv", str(out), str(source), shard_rows=7 if change == "options" else 100_000)
    with pytest.raises(ConfigError, match="give another folder or remove it") as caught:
        ingest(options)
    assert expected in str(caught.value)
    assert fingerprint(tmp_path) == before
    assert not list(tmp_path.glob("*.partial-*"))


def test_a_failure_midway_leaves_no_target_and_the_next_time_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 100)
    files = write_images(tmp_path / "in")
    good = files["dog/z.WEBP"]
    (tmp_path / "in" / "dog" / "z.WEBP").write_bytes(b"broken")
    options = IngestOptions("images", str(tmp_path / "deep" / "out"), str(tmp_path / "in"), row_group_rows=1)
    with pytest.raises(DataError, match=r"z\.WEBP"):
        ingest(options)
    assert list((tmp_path / "deep").iterdir()) == []
    (tmp_path / "in" / "dog" / "z.WEBP").write_bytes(good)
    assert ingest(options).rows == 5


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = [f"out.partial-{os.uname().nodename}-{pid}" for pid in (ended.pid, os.getppid())] + ["out.partial-other-1"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-00000.parquet").write_bytes(b"half")
    ingest(IngestOptions("digits", str(tmp_path / "out")))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["out", *names[1:]])


def test_of_two_at_once_the_slower_one_returns_what_the_quicker_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, rename = IngestOptions("digits", str(tmp_path / "out")), os.rename

    def overtaken(partial: Path, out: Path) -> None:
        shutil.copytree(partial, out)
        rename(partial, out)

    monkeypatch.setattr(os, "rename", overtaken)
    summary = ingest(options)
    assert (summary.reused, summary.rows) == (True, 1797)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_rows_that_vanish_while_reading_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((5, 2)))

    class Shrinking(sources.Numpy):
        def parts(self) -> list[sources.Part]:
            return [replace(part, rows=part.rows + 1) for part in super().parts()]

    monkeypatch.setitem(READERS, "numpy", lambda path, options: Shrinking(path))
    with pytest.raises(DataError, match="6 rows expected, 5 read"):
        ingest(IngestOptions("numpy", str(tmp_path / "out"), str(tmp_path / "d.npz")))
    assert not (tmp_path / "out").exists()


def assert_refused(tmp_path: Path, expected: list[str], **options: Any) -> None:
    """The error's message has all texts `expected`, and beside the input `in` nothing was made."""
    with pytest.raises((DataError, ConfigError)) as caught:
        ingest(IngestOptions(out=str(tmp_path / "out"), **options))
    assert [text for text in expected if text not in str(caught.value)] == [], str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("files", "options", "expected"),
    [
        ([b"a,b\n1,2\n3\n"], {}, ["0.csv", "Row #3: Expected 2 columns, got 1", "Correct the file"]),
        ([b""], {}, ["0.csv", "Empty CSV file"]),
        ([b"a\n"], {}, ["no rows"]),
        ([b"a,a\n1,2\n"], {}, ["['a', 'a']", "its own name"]),
        ([b"row_id\n1\n"], {}, ["`row_id` is ours", "rename"]),
        ([b"a\n\xe9\n"], {}, ["0.csv", "UTF-8", "Row #2"]),
        ([b"a,y\n1,2\n", b"b\n1\n"], {}, ["1.csv", "['b']", "['a', 'y']", "one header"]),
        ([b"a,y\n1,2\n"], {"label": "species"}, ["no label column 'species'", "['a', 'y']"]),
        ([b"a,y\n1,0.5\n"], {"label": "y"}, ["'y'", "not integers", "'target'"]),
        ([b"a,y\n1,0\n2,\n"], {"label": "y"}, ["0.csv:3", "no label"]),
        ([b"a,y\n1,u\n2,\n"], {"label": "y"}, ["'y' has rows without a value"]),
        ([b"a,label\n1,u\n"], {}, ["`label` is of type string", "option label"]),
        ([b"a,y\n1,2\n"], {"rename": {"b": "c"}}, ["['b']", "['a', 'y']"]),
        ([], {}, ["no CSV file", ".csv.gz"]),
    ],
)
def test_bad_csv_is_refused(tmp_path: Path, files: list[bytes], options: dict[str, Any], expected: list[str]) -> None:
    (tmp_path / "in").mkdir()
    for i, data in enumerate(files):
        (tmp_path / "in" / f"{i}.csv").write_bytes(data)
    assert_refused(tmp_path, expected, source="csv", input=str(tmp_path / "in"), **options)


@pytest.mark.parametrize(
    ("made", "change", "expected"),
    [
        ({"magic": 2052}, None, ["train-images", "00000804", "expected 00000803"]),
        ({"labels": 4}, None, ["train-images-idx3-ubyte': 5", "train-labels-idx1-ubyte': 4"]),
        ({}, lambda images, labels: labels.unlink(), ["train-labels-idx1-ubyte[.gz] is missing"]),
        ({}, lambda images, labels: images.write_bytes(images.read_bytes()[:-1]), ["ends before row 5 of 5"]),
        ({}, lambda images, labels: images.write_bytes(images.read_bytes() + b"x"), ["more data after the last of 5"]),
        ({}, lambda images, labels: images.write_bytes(b"\0"), ["train-images", "expected 00000803"]),
        ({}, lambda images, labels: [images.unlink(), labels.unlink()], ["no IDX files", "train-images-idx3-ubyte[.gz]", "t10k"]),
    ],
)
def test_bad_idx_is_refused(tmp_path: Path, made: dict[str, int], change: Any, expected: list[str]) -> None:
    write_idx(tmp_path / "in", "train", 5, False, **made)
    if change:
        change(tmp_path / "in" / "train-images-idx3-ubyte", tmp_path / "in" / "train-labels-idx1-ubyte")
    assert_refused(tmp_path, expected, source="idx", input=str(tmp_path / "in"))


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    write_idx(tmp_path / "in", "train", 5, True)
    images = tmp_path / "in" / "train-images-idx3-ubyte.gz"
    images.write_bytes(images.read_bytes()[:-20])
    assert_refused(tmp_path, [str(images), "damaged"], source="idx", input=str(tmp_path / "in"))


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"x": np.zeros((3, 2)), "y": np.arange(2)}, ["d.npz:x': 3", "d.npz:y': 2"]),
        ({"x": np.array([{}, []], dtype=object)}, ["d.npz:x", "object", "nothing is unpickled"]),
        ({"x": np.zeros((3, 2)), "y": np.array(["a", "b", "c"])}, ["d.npz:y", "<U1", "bool, integers and floats"]),
        ({"x": np.asfortranarray(np.zeros((3, 2)))}, ["Fortran order", "ascontiguousarray"]),
        ({"x": np.float64(3)}, ["one single value"]),
        ({"x": np.zeros((0, 2))}, ["no rows"]),
        ({"label": np.arange(3) / 2}, ["`label` is of type double", "'target'"]),
        ({}, ["no array in it", "numpy.savez"]),
        (None, ["d.npz", "not a zip file"]),
    ],
)
def test_bad_arrays_are_refused(tmp_path: Path, arrays: dict[str, Any] | None, expected: list[str]) -> None:
    path = tmp_path / "in" / "d.npz"
    path.parent.mkdir()
    if arrays is None:
        path.write_bytes(b"hello")
    else:
        np.savez(path, **arrays)
    assert_refused(tmp_path, expected, source="numpy", input=str(path))


def animate(path: Path) -> None:
    frames = [Image.fromarray(np.full((4, 4), value, np.uint8)) for value in (0, 200)]
    frames[0].save(path / "dog" / "2.gif", save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda path: shutil.rmtree(path / "cat") or shutil.rmtree(path / "dog"), ["no class folders", "DIR/cat/1.png"]),
        (lambda path: (path / "dog" / "1.png").unlink(), ["dog: no image", ".webp", "remove the folder"]),
        (lambda path: (path / "dog" / "puppy").mkdir(), ["dog: a class folder with a folder inside ('puppy')"]),
        (
            lambda path: (path / "dog" / "1.png").write_bytes((path / "dog" / "1.png").read_bytes()[:-20]),
            ["dog/1.png", "not an image that can be decoded", "check=False"],
        ),
        (lambda path: (path / "dog" / "1.png").write_bytes(b""), ["dog/1.png", "the file is empty"]),
        (lambda path: Image.new("RGB", (4, 4)).save(path / "dog" / "2.bmp"), ["dog/2.bmp", "decodes no bmp", "Convert"]),
        (animate, ["dog/2.gif", "it has 2 frames"]),
    ],
)
def test_bad_images_are_refused(tmp_path: Path, change: Any, expected: list[str]) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "in" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "in" / name / "1.png")
    change(tmp_path / "in")
    assert_refused(tmp_path, expected, source="images", input=str(tmp_path / "in"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"source": "tar", "input": "a"}, "allowed are images, csv, numpy, idx, digits"),
        ({"source": "csv"}, "needs an input"),
        ({"source": "digits", "input": "a"}, "reads no input"),
        ({"source": "csv", "input": "a", "out": "s3://b/c"}, "local or mounted"),
        ({"source": "csv", "input": "a", "out": "a/b"}, "lies in the input"),
        ({"source": "numpy", "input": "a", "label": "y"}, "only csv has it"),
        ({"source": "csv", "input": "a", "check": False}, "only images has it"),
        ({"source": "csv", "input": "a", "eval_fraction": 1.0}, "above 0 and below 1"),
        ({"source": "csv", "input": "a", "row_group_rows": 0}, "row_group_rows is 0; allowed is 1 or more"),
        ({"source": "csv", "input": "a", "row_group_bytes": 1 << 31}, "up to 1073741824"),
    ],
)
def test_bad_options_are_refused_before_anything_is_read(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ingest(IngestOptions(**{"out": "never-made", **options}))
    assert expected in str(caught.value)


@pytest.mark.parametrize("source", ["images", "csv", "numpy", "idx"])
def test_a_missing_input_is_refused(tmp_path: Path, source: Any) -> None:
    with pytest.raises(DataError) as caught:
        ingest(IngestOptions(source, str(tmp_path / "out"), str(tmp_path / "absent")))
    assert str(tmp_path / "absent") in str(caught.value)
    assert "expected" in str(caught.value)


def test_idx_with_both_pairs_is_not_split_again(tmp_path: Path) -> None:
    for prefix in ("train", "t10k"):
        write_idx(tmp_path / "in", prefix, 3, False)
    with pytest.raises(ConfigError, match=r"the source itself has \['train', 'eval'\]"):
        ingest(IngestOptions("idx", str(tmp_path / "out"), str(tmp_path / "in"), eval_fraction=0.5))


def job(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "jobs/ingest.py", *args], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_job_runs_and_refuses_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("a,y\n1,u\n2,v\n")
    args = ["--source", "csv", "--input", str(tmp_path / "f.csv"), "--out", str(tmp_path / "out"), "--label"]
    done = job(*args, "y")
    assert (done.returncode, read(tmp_path / "out")["label"]) == (0, [0, 1])
    assert f"{tmp_path / 'out'}: 2 rows in 1 shards" in done.stdout
    refused = job(*args, "z")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "label 'y', now 'z'" in refused.stderr
    assert "Traceback" not in refused.stderr
