"""Ingest of any format: shards are bounded, targets are complete or absent, output is reproducible, refusals have a
reason.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_app.errors import ConfigError, DataError
from ray_app.ingest.ingest import READERS, IngestOptions, ingest
from ray_app.ingest.readers import sources
from ray_app.ingest.readers.arrays import Numpy
from tests.support.ingest_inputs import RNG, read_columns, write_idx, write_images
from tests.support.paths import ROOT


def row_groups(folder: Path) -> list[list[int]]:
    footers = [pq.read_metadata(path) for path in sorted(folder.glob("*.parquet"))]
    return [[f.row_group(i).num_rows for i in range(f.num_row_groups)] for f in footers]


def test_a_split_keeps_every_row_once_for_any_shard_size(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=RNG.random((2000, 2)), y=np.arange(2000) % 2)
    sides = []
    for out, shard_rows in (("a", 100), ("b", 1000)):
        options = IngestOptions(
            "numpy", str(tmp_path / out), str(tmp_path / "d.npz"), eval_fraction=0.25, shard_rows=shard_rows
        )
        assert list(ingest(options).parts) == ["train", "eval"]
        sides.append({name: read_columns(tmp_path / out / name)["row_id"] for name in ("train", "eval")})
    assert sides[0] == sides[1]
    assert Counter(sides[0]["train"] + sides[0]["eval"]) == Counter(str(i) for i in range(2000))
    assert 420 < len(sides[0]["eval"]) < 580


def test_shards_and_row_groups_are_bounded_in_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_app.ingest.options.ROW_GROUP_ROWS", 15)
    np.savez(tmp_path / "d.npz", x=RNG.random((95, 2)))
    whole = None
    for block_bytes in (64, 1 << 20):
        monkeypatch.setattr(sources, "BLOCK_BYTES", block_bytes)
        out = tmp_path / str(block_bytes)
        ingest(IngestOptions("numpy", str(out), str(tmp_path / "d.npz"), shard_rows=40))
        assert row_groups(out) == [[15, 15, 10], [15, 15, 10], [15]]
        data = {path.name: path.read_bytes() for path in out.glob("*.parquet")}
        whole = whole or data
        assert data == whole, "the files depend on the size of the blocks read"


def test_row_groups_are_bounded_in_bytes_also_with_larger_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_app.ingest.options.ROW_GROUP_BYTES", 1000)
    sizes = [300, 300, 300, 5000, 100, 100, 5000, 900]
    (tmp_path / "in" / "only").mkdir(parents=True)
    for i, size in enumerate(sizes):
        (tmp_path / "in" / "only" / f"{i}.png").write_bytes(bytes(size))
    ingest(IngestOptions("images", str(tmp_path / "out"), str(tmp_path / "in"), check=False))
    stored_sizes = [len(image) for image in read_columns(tmp_path / "out", as_stored=True)["image"]]
    assert sorted(stored_sizes) == sorted(sizes)
    expected: list[list[int]] = []
    for size in stored_sizes:
        if expected and sum(expected[-1]) + size < 1000:
            expected[-1].append(size)
        else:
            expected.append([size])
    assert row_groups(tmp_path / "out") == [[len(group) for group in expected]]
    assert max(map(len, expected)) > 1


def test_only_plain_columns_have_statistics_and_no_array_has_a_dictionary(tmp_path: Path) -> None:
    ingest(IngestOptions("digits", str(tmp_path / "out")))
    group = pq.read_metadata(tmp_path / "out" / "train" / "part-00000.parquet").row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert (columns["label"].statistics.min, columns["label"].statistics.max) == (0, 9)
    assert columns["image"].statistics is None
    assert not columns["image"].has_dictionary_page
    assert columns["image"].compression == "ZSTD"


def test_dataset_json_describes_the_shards_and_columns(tmp_path: Path) -> None:
    write_idx(tmp_path / "in", "train", 12, False)
    ingest(IngestOptions("idx", str(tmp_path / "out"), str(tmp_path / "in"), shard_rows=5, eval_fraction=0))
    folder = tmp_path / "out" / "train"
    facts = json.loads((folder / "_dataset.json").read_text())
    assert (facts["format_version"], facts["source"], facts["rows"], facts["classes"]) == (1, "idx", 12, None)
    assert facts["class_counts"] == {str(i): 2 if i < 2 else 1 for i in range(10)}
    assert facts["columns"]["image"] == {"type": "array", "shape": [28, 28], "dtype": "uint8", "nulls": 0}
    assert [(s["path"], s["rows"]) for s in facts["shards"]] == [
        (f"part-00000{end}.parquet", n) for end, n in (("", 5), ("_001", 5), ("_002", 2))
    ]
    assert [s["bytes"] for s in facts["shards"]] == [p.stat().st_size for p in sorted(folder.glob("*.parquet"))]


MEASURE = """
import sys
from ray_app.ingest import options, shuffle
from ray_app.ingest.ingest import IngestOptions, ingest
options.ROW_GROUP_BYTES, shuffle.BUCKET_BYTES = 4 << 20, 16 << 20
ingest(IngestOptions(sys.argv[1], sys.argv[3], sys.argv[2], shard_rows=10_000))
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.rest
def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    peak_kib = []
    for times in (1, 8):
        source = tmp_path / f"in-{times}"
        source.mkdir()
        # The images have 31 MB of pixels, then 251 MB.
        rows = times * 40_000
        with (source / "train-images-idx3-ubyte").open("wb") as file:
            file.write(struct.pack(">4I", 2051, rows, 28, 28))
            file.truncate(16 + rows * 784)
        (source / "train-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, rows) + bytes(rows))
        command = [sys.executable, "-c", MEASURE, "idx", str(source), str(tmp_path / f"out-{times}")]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        peak_kib.append(int(done.stdout))
    assert peak_kib[1] - peak_kib[0] < 110 << 10, f"peak memory {peak_kib} KiB for 1x and 8x the data, 220 MB more"


def fingerprint(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_repeated_ingest_reuses_the_data_set(tmp_path: Path) -> None:
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
def test_a_target_with_other_content_is_refused_and_unchanged(tmp_path: Path, change: str, expected: str) -> None:
    source, out = tmp_path / "f.csv", tmp_path / "out"
    source.write_text("a\n1\n")
    ingest(IngestOptions("csv", str(out), str(source)))
    if change == "source":
        source.write_text("a\n12\n")
    elif change == "shard":
        (out / "part-00000.parquet").unlink()
    elif change == "json":
        (out / "_dataset.json").unlink()
    elif change == "file":
        (out / "part-00000.parquet").unlink()
        (out / "_dataset.json").rename(out / "mine.txt")
    before = fingerprint(tmp_path)
    options = IngestOptions("csv", str(out), str(source), shard_rows=7 if change == "options" else 100_000)
    with pytest.raises(ConfigError, match="name another folder or remove") as caught:
        ingest(options)
    assert expected in str(caught.value)
    assert fingerprint(tmp_path) == before
    assert not list(tmp_path.glob("*.partial-*"))


def test_a_failure_midway_leaves_no_target_and_a_retry_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 100)
    monkeypatch.setattr("ray_app.ingest.options.ROW_GROUP_ROWS", 1)
    files = write_images(tmp_path / "in")
    good = files["dog/z.WEBP"]
    (tmp_path / "in" / "dog" / "z.WEBP").write_bytes(b"broken")
    options = IngestOptions("images", str(tmp_path / "deep" / "out"), str(tmp_path / "in"))
    with pytest.raises(DataError, match=r"z\.WEBP"):
        ingest(options)
    assert list((tmp_path / "deep").iterdir()) == []
    (tmp_path / "in" / "dog" / "z.WEBP").write_bytes(good)
    assert ingest(options).rows == 5


def test_leftovers_of_another_ingest_are_removed_unless_it_is_running(tmp_path: Path) -> None:
    for name in ("out.partial-left", "out.partial-used", "other.partial-left"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-00000.parquet").write_bytes(b"half")
    used = os.open(tmp_path / "out.partial-used", os.O_RDONLY)
    fcntl.flock(used, fcntl.LOCK_EX)
    ingest(IngestOptions("digits", str(tmp_path / "out")))
    os.close(used)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.partial-left", "out", "out.partial-used"]


def test_the_slower_of_two_concurrent_ingests_reuses_the_data_set(tmp_path: Path) -> None:
    options = IngestOptions("digits", str(tmp_path / "out"))
    with ThreadPoolExecutor(2) as pool:
        summaries = list(pool.map(ingest, [options, options]))
    assert sorted(summary.reused for summary in summaries) == [False, True]
    assert [summary.rows for summary in summaries] == [1797, 1797]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_rows_that_vanish_while_reading_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((5, 2)))

    class Shrinking(Numpy):
        def parts(self, run: sources.Run) -> list[sources.Part]:
            [part] = super().parts(run)
            return [replace(part, input_splits=[replace(split, rows=6) for split in part.input_splits])]

    monkeypatch.setitem(READERS, "numpy", Shrinking)
    with pytest.raises(DataError, match="6 rows expected, but 5 read"):
        ingest(IngestOptions("numpy", str(tmp_path / "out"), str(tmp_path / "d.npz")))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"source": "tar", "input": "a"}, "one of images, coco, voc, yolo, csv, jsonl, numpy, idx, webdataset"),
        ({"source": "csv"}, "needs an input"),
        ({"source": "csv", "input": ""}, "needs an input"),
        ({"source": "digits", "input": "a"}, "reads no input"),
        ({"source": "csv", "input": "a", "out": "ftp://b/c"}, "s3://bucket/prefix"),
        ({"source": "csv", "input": "s3://b/c", "out": "s3://b/c/d"}, "lies in the input"),
        ({"source": "csv", "input": "a", "out": ""}, "needs a folder to create"),
        ({"source": "parquet", "input": "a"}, "needs no conversion"),
        ({"source": "numpy", "input": "a", "columns": ["b"]}, "only of images, csv, jsonl, webdataset, tfrecord, hf"),
        ({"source": "csv", "input": "a", "out": "a/b"}, "lies in the input"),
        ({"source": "numpy", "input": "a", "label": "y"}, "only of images, csv, jsonl, webdataset, tfrecord, hf"),
        ({"source": "csv", "input": "a", "check": False}, "only of images, coco, voc, yolo, webdataset, tfrecord, hf"),
        ({"source": "csv", "input": "a", "pack": 1 << 31}, "at least 1 and at most 1048576"),
    ],
)
def test_bad_options_are_refused_before_anything_is_read(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ingest(IngestOptions(**{"out": "never-made", **options}))
    assert expected in str(caught.value)


def test_a_source_with_its_own_splits_is_not_split_again(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "in" / f"{split}-00000-of-00001.parquet")
    with pytest.raises(ConfigError, match=r"the source has \['train', 'validation'\]"):
        ingest(IngestOptions("hf", str(tmp_path / "out"), str(tmp_path / "in"), eval_fraction=0.5))


def run_job(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "jobs/ingest.py", *args], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.rest
def test_the_job_succeeds_or_refuses_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("a,y\n1,u\n2,v\n")
    args = ["--source", "csv", "--input", str(tmp_path / "f.csv"), "--out", str(tmp_path / "out"), "--label"]
    done = run_job(*args, "y")
    assert (done.returncode, read_columns(tmp_path / "out")["label"]) == (0, [0, 1])
    assert f"{tmp_path / 'out'}: 2 rows in 1 shard, 2 classes" in done.stdout
    refused = run_job(*args, "z")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "label 'y', now 'z'" in refused.stderr
    assert "Traceback" not in refused.stderr
