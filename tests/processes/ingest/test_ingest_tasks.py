"""Ingest as tasks: the files do not depend on the number of tasks or on kills, every row is written or refused, and
source and target may be on S3.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ray_app.data.dataset import open_dataset
from ray_app.data.parquet_files import FOOTERS_FILE
from ray_app.data.probes import probe
from ray_app.data.reader import Reader, fetch_in_process, plan_all_reads
from ray_app.errors import DataError, StorageError
from ray_app.ingest import shuffle
from ray_app.ingest.ingest import IngestOptions, ingest, run_in_threads
from ray_app.ingest.output_folder import RECORDS, RUNS
from ray_app.ingest.splits import write_input_split
from ray_app.storage.files import list_files, list_tree, put_atomic, read_all
from ray_app.storage.object_stores import ObjectPath
from tests.support.ingest_inputs import RNG, read_columns
from tests.support.ingest_sources import SOURCES, write_tars
from tests.support.paths import ROOT
from tests.support.s3_server import S3Server


def write_csvs(folder: Path, files: int = 6, rows: int = 40) -> Path:
    folder.mkdir()
    for i in range(files):
        lines = "".join(f"{i * rows + j},{'uvw'[j % 3]}\n" for j in range(rows))
        (folder / f"{i}.csv").write_text("a,y\n" + lines)
    return folder


def options_for(folder: Path, out: Any, **more: Any) -> IngestOptions:
    return IngestOptions("csv", str(out), str(folder), label="y", split_bytes=1, **more)


def content(folder: Path | ObjectPath) -> dict[str, bytes]:
    """Returns the bytes of every file by relative path, but of the file with times and ETags of the others."""
    files = {name: location for name, location in list_tree(folder).items() if not name.endswith(FOOTERS_FILE)}
    return dict(zip(files, read_all(files.values()), strict=True))


def test_the_files_do_not_depend_on_the_number_of_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "BUCKET_BYTES", 1000)
    folder = write_csvs(tmp_path / "in")
    contents = []
    for threads in (1, 3, 7):
        out = tmp_path / f"out-{threads}"
        ingest(options_for(folder, out, eval_fraction=0.3), partial(run_in_threads, threads=threads))
        contents.append(content(out))
    assert contents[0] == contents[1] == contents[2]
    rows = [row for side in ("train", "eval") for row in read_columns(tmp_path / "out-1" / side)["a"]]
    assert Counter(rows) == Counter(range(240))
    shards = json.loads(contents[0]["train/_dataset.json"])["shards"]
    assert [shard["path"] for shard in shards] == [f"part-0000{i}.parquet" for i in range(len(shards))]
    assert len(shards) > 2


KILLED = """
import os, signal, sys
from functools import partial
from ray_app.ingest import ingest
from ray_app.ingest import shuffle, splits
from ray_app.ingest.options import IngestOptions
from ray_app.ingest.ingest import run_in_threads

write = {"write_input_split": splits.write_input_split, "write_bucket": shuffle.write_bucket}[sys.argv[3]]

def deadly(task):
    if task.number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(task)

shuffle.BUCKET_BYTES = 1000
setattr(ingest, sys.argv[3], deadly)
ingest.ingest(IngestOptions("csv", sys.argv[2], sys.argv[1], label="y", split_bytes=1), partial(run_in_threads, threads=1))
"""  # noqa: E501


def kill_midway(folder: Path, out: Any, at: str = "write_input_split") -> None:
    """Runs an ingest in a process that is killed when its fourth input split (or bucket) begins."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(out), at], cwd=ROOT, check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.rest
def test_finished_input_splits_are_kept_after_a_kill(tmp_path: Path) -> None:
    folder, out = write_csvs(tmp_path / "in"), tmp_path / "out"
    kill_midway(folder, out)
    assert not out.exists()
    [left] = tmp_path.glob("out.partial-*")
    assert len(list_files(left / RECORDS)) == 3
    before = {path.name: path.stat().st_mtime_ns for path in (left / RUNS).iterdir()}
    assert sorted(before) == ["-00000-000.arrow", "-00001-000.arrow", "-00002-000.arrow"]
    # A kill during a write leaves such a temporary file.
    (left / "._dataset.json.0123.tmp").write_bytes(b"half")
    # A finished input split with a changed file is written again.
    (left / RUNS / "-00001-000.arrow").write_bytes(b"damaged")
    after: dict[str, int] = {}

    def run(work: Any, tasks: Any) -> Any:
        if work is shuffle.write_bucket:
            after.update({path.name: path.stat().st_mtime_ns for path in (left / RUNS).iterdir()})
        return run_in_threads(work, tasks)

    ingest(options_for(folder, out), run)
    assert len(after) == 6
    assert sorted(name for name in before if before[name] == after[name]) == ["-00000-000.arrow", "-00002-000.arrow"]
    ingest(options_for(folder, tmp_path / "undisturbed"))
    assert content(out) == content(tmp_path / "undisturbed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "undisturbed"]
    assert [path for path in out.rglob(".*")] == []


@pytest.mark.rest
def test_finished_buckets_are_kept_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "BUCKET_BYTES", 1000)
    folder, out = write_csvs(tmp_path / "in"), tmp_path / "out"
    kill_midway(folder, out, "write_bucket")
    [left] = tmp_path.glob("out.partial-*")
    before = {path.name: path.stat().st_mtime_ns for path in left.glob("*.parquet")}
    assert sorted(before) == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    (left / "part-00001.parquet").write_bytes(b"damaged")
    ingest(options_for(folder, out))
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    assert sorted(name for name in before if before[name] == after[name]) == [
        "part-00000.parquet",
        "part-00002.parquet",
    ]
    ingest(options_for(folder, tmp_path / "undisturbed"))
    assert content(out) == content(tmp_path / "undisturbed")
    assert Counter(read_columns(out)["a"]) == Counter(range(240))


@pytest.mark.rest
def test_an_ingest_begun_by_another_version_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows may be in another order, so that some rows would be doubled and others missing."""
    folder, out = write_csvs(tmp_path / "in"), tmp_path / "out"
    kill_midway(folder, out)
    monkeypatch.setattr("ray_app.ingest.ingest.LAYOUT", 99)
    ingest(options_for(folder, tmp_path / "undisturbed"))
    begun: list[list[str]] = []

    def run(work: Any, tasks: Any) -> Any:
        [left] = tmp_path.glob("out.partial-*")
        begun.append(list_files(left / RECORDS))
        return run_in_threads(work, tasks)

    ingest(options_for(folder, out), run)
    assert begun[-2] == [], "the input splits must be written again"
    assert content(out) == content(tmp_path / "undisturbed")
    monkeypatch.undo()
    assert ingest(options_for(folder, out)).reused, "a complete data set of another version must be reused"


def test_links_are_followed_and_files_are_ordered_as_on_s3(
    tmp_path: Path, s3_folder: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a-b/x.parquet", "a/x.parquet", "a/z.parquet", "linked/x.parquet", "tables.parquet/part.parquet"]
    for i, name in enumerate(names):
        path = (tmp_path / "elsewhere" / "x.parquet") if name.startswith("linked") else tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"a": [i]}), path)
        put_atomic(s3_folder / name, path.read_bytes())
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "lost+found").mkdir()
    (tmp_path / "in" / ".Trash").mkdir()
    closed = {".Trash", "lost+found"}
    scandir = os.scandir

    def refusing(folder: Path) -> Any:
        # Permissions do not stop root, so the test raises the error itself.
        if folder.name in closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr("ray_app.storage.data_files.os.scandir", refusing)
    assert open_dataset(str(tmp_path / "in")).manifest.paths == tuple(names)
    assert open_dataset(str(s3_folder)).manifest.paths == tuple(names)
    (tmp_path / "in" / "latest").symlink_to(tmp_path / "in" / "a")
    with pytest.raises(DataError, match=r"in/a/x.parquet and .*in/latest/x.parquet are the same file by a link"):
        open_dataset(str(tmp_path / "in"))
    (tmp_path / "in" / "latest").unlink()
    closed.add("a-b")
    with pytest.raises(DataError, match="a-b may not be listed"):
        open_dataset(str(tmp_path / "in"))


def test_every_input_row_is_written_or_refused(tmp_path: Path) -> None:
    folder = write_csvs(tmp_path / "in", files=3, rows=5)
    (folder / "1.csv").write_text("a,y\n5,u\n6\n7,\n8,v,9\n9,w\n")
    with pytest.raises(DataError, match=r"1\.csv: .*Row #3: Expected 2 columns, got 1"):
        ingest(options_for(folder, tmp_path / "out"))
    ingest(options_for(folder, tmp_path / "out", on_bad_row="skip", max_bad_rows=3))
    about = json.loads((tmp_path / "out" / "_dataset.json").read_text())
    assert (about["rows_in"], about["rows"], about["refused"], about["classes"]) == (15, 12, 3, ["u", "v", "w"])
    assert read_columns(tmp_path / "out")["row_id"][5:7] == ["1.csv:2", "1.csv:6"]
    refused = [json.loads(line) for line in (tmp_path / "out" / "_refused.jsonl").read_text().splitlines()]
    assert {row["row_id"]: row["reason"] for row in refused} == {
        "1.csv:3": "1 values where 2 are expected",
        "1.csv:4": "no label, or none of the classes; every row needs an integer or a class",
        "1.csv:5": "3 values where 2 are expected",
    }


@pytest.mark.parametrize("split_bytes", [1, 1 << 20])
def test_more_than_max_bad_rows_fail_an_ingest(tmp_path: Path, split_bytes: int) -> None:
    for name in [f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(5)]:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(RNG.integers(0, 255, (9, 7, 3), dtype=np.uint8)).save(tmp_path / "in" / name)
    for name in ("cat/1.png", "dog/2.png"):
        (tmp_path / "in" / name).write_bytes(b"broken")
    options = {"on_bad_row": "skip", "split_bytes": split_bytes, "eval_fraction": 0.5}
    with pytest.raises(DataError, match=r"more than --max_bad_rows 1 rows .* the next is dog/2\.png: not an image"):
        ingest(IngestOptions("images", str(tmp_path / "out"), str(tmp_path / "in"), max_bad_rows=1, **options))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    summary = ingest(IngestOptions("images", str(tmp_path / "out"), str(tmp_path / "in"), max_bad_rows=2, **options))
    assert (summary.rows, sum(part.refused for part in summary.parts.values())) == (8, 2)
    listed = [
        json.loads(line)["row_id"]
        for path in (tmp_path / "out").rglob("_refused.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert sorted(listed) == ["cat/1.png", "dog/2.png"]


def upload(folder: Path, target: ObjectPath) -> None:
    for name, data in content(folder).items():
        put_atomic(target / name, data)


CASES = {
    **{name: SOURCES[name] for name in ("images", "csv", "numpy, folder", "hf, saved", "jsonl", "idx", "webdataset")},
    "webdataset, star": (write_tars, "*.tar*", {}),
    "webdataset, braces": (write_tars, "{1.tar.gz,0.tar}", {}),
}
QUICK = ("images", "hf, saved", "webdataset, braces")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.rest) for name in CASES]
)
def test_ingest_from_and_to_s3_writes_the_same_bytes(
    tmp_path: Path, s3_folder: ObjectPath, s3_server: S3Server, name: str
) -> None:
    source: Any = name.partition(",")[0]
    write, path, more = CASES[name]
    input_path = f"in/{path}".rstrip("/")
    options = {"split_bytes": 1000, "shard_rows": 3, **more}
    write(tmp_path / "in")
    upload(tmp_path / "in", s3_folder / "in")
    ingest(IngestOptions(source, str(tmp_path / "out"), str(tmp_path / input_path), **options))
    s3_server.reset()
    summary = ingest(IngestOptions(source, str(s3_folder / "out"), str(s3_folder / input_path), **options))
    requests = Counter(re.sub(r"\?.*", "", request) for request in s3_server.requests(r"^GET .*/in/\w"))
    assert 1 <= max(requests.values()) <= 8, "an object was fetched with too many small requests"
    local_files, remote_files = content(tmp_path / "out"), content(s3_folder / "out")
    for file in [file for file in local_files if file.endswith("_dataset.json")]:
        local_facts, remote_facts = json.loads(local_files.pop(file)), json.loads(remote_files.pop(file))
        assert local_facts.pop("made_from")["options"] == remote_facts.pop("made_from")["options"]
        assert local_facts == remote_facts
    assert local_files == remote_files
    assert not summary.reused
    assert ingest(IngestOptions(source, str(s3_folder / "out"), str(s3_folder / input_path), **options)).reused
    assert ingest(IngestOptions("parquet", input=summary.parts[sorted(summary.parts)[-1]].path)).rows > 0


@pytest.mark.rest
def test_an_interrupted_ingest_to_s3_is_no_data_set_and_can_continue(
    tmp_path: Path, s3_folder: ObjectPath, s3_server: S3Server
) -> None:
    folder, out = write_csvs(tmp_path / "in"), s3_folder / "out"
    kill_midway(folder, out)
    with pytest.raises(DataError, match="is being written by an ingest, or an ingest was interrupted there"):
        open_dataset(str(out))
    s3_server.reset()
    ingest(options_for(folder, out))
    written = {re.sub(r".*/|\?.*", "", request) for request in s3_server.requests(r"^(PUT|POST) .*-000\.arrow")}
    assert written == {f"-0000{i}-000.arrow" for i in (3, 4, 5)}
    ingest(options_for(folder, tmp_path / "out"))
    assert content(out) == content(tmp_path / "out")


@pytest.mark.rest
@pytest.mark.parametrize("target", ["disk", "s3"])
def test_finished_input_splits_are_kept_after_a_storage_error(
    tmp_path: Path, s3_folder: ObjectPath, s3_server: S3Server, target: str
) -> None:
    upload(write_csvs(tmp_path / "in"), s3_folder / "in")
    out = tmp_path / "out" if target == "disk" else s3_folder / "out"
    options = IngestOptions("csv", str(out), str(s3_folder / "in"), label="y", split_bytes=1)

    def run(function: Any, items: Any) -> Any:
        if function is write_input_split:
            s3_server.fail(r"GET .*/in/5\.csv", status=403)
        return run_in_threads(function, items, threads=1)

    with pytest.raises(StorageError, match=r"5\.csv.*Fix this, then start the same command again"):
        ingest(options, run)
    [left] = tmp_path.glob("out.partial-*") if target == "disk" else [out]
    assert len(list_files(left / RECORDS)) == 5
    s3_server.reset()
    ingest(options)
    reads = [len(s3_server.requests(rf"GET .*/in/{i}\.csv")) for i in range(6)]
    once = reads[1]
    expected = [4 + once, *[once] * 4, 2 * once]
    assert reads == expected, (
        "titles, quote, delimiter, decimal take the first file, the first pass all files, the second the missing one"
    )
    ingest(options_for(tmp_path / "in", tmp_path / "undisturbed"))
    assert read_all([out / "part-00000.parquet"]) == read_all([tmp_path / "undisturbed" / "part-00000.parquet"])


def test_data_on_s3_reads_like_data_on_a_disk(
    tmp_path: Path, s3_folder: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_app.ingest.options.ROW_GROUP_ROWS", 7)
    folder = write_csvs(tmp_path / "in")
    ingest(options_for(folder, tmp_path / "out", shard_rows=40))
    upload(tmp_path / "out", s3_folder / "data")
    for hidden in (
        "._part-00000.parquet",
        ".ipynb_checkpoints/part-00000.parquet",
        "_temporary/0/part-00000.parquet",
        "_part.parquet",
    ):
        put_atomic(tmp_path / "out" / hidden, b"no Parquet")
        put_atomic(s3_folder / "data" / hidden, b"no Parquet")
    local_data, remote_data = open_dataset(str(tmp_path / "out")), open_dataset(str(s3_folder / "data"))
    assert local_data.manifest.digest == remote_data.manifest.digest
    assert local_data.facts.columns == remote_data.facts.columns
    assert remote_data.facts.classes == ("u", "v", "w")
    columns = ["a", "label"]
    [local, remote] = [
        [
            table.to_pydict()
            for table in fetch_in_process(
                Reader(d.root, columns, dict, probe(d, columns, dict)), plan_all_reads(d.manifest, 50)
            )
        ]
        for d in (local_data, remote_data)
    ]
    assert local == remote
    one = open_dataset(str(s3_folder / "data" / "part-00000_002.parquet"))
    assert (one.manifest.num_rows, one.facts.classes) == (40, ("u", "v", "w"))
    for name, expected in (
        ("absent", "does not exist"),
        ("", "holds several data sets: data"),
        ("data/_dataset.json", "cannot be read as Parquet"),
    ):
        with pytest.raises(DataError, match=expected):
            open_dataset(str(s3_folder / name if name else s3_folder))


def test_each_footer_on_s3_costs_one_request_or_none(
    tmp_path: Path, s3_folder: ObjectPath, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_app.ingest.options.ROW_GROUP_ROWS", 7)
    out = s3_folder / "out"
    ingest(options_for(write_csvs(tmp_path / "in"), out, shard_rows=40))
    s3_server.reset()
    warm = open_dataset(str(out))
    assert s3_server.requests(r"\.parquet") == []
    (out / FOOTERS_FILE).unlink()
    cold = open_dataset(str(out))
    # The columns of the data set are read from its first file.
    paths = [*cold.manifest.paths, cold.manifest.paths[0]]
    assert len(set(paths)) > 1
    assert sorted(re.sub(r" .*/|\?.*", " ", request).strip() for request in s3_server.requests(r"\.parquet")) == [
        f"GET {path}" for path in sorted(paths)
    ]
    assert (warm.manifest.digest, warm.facts.columns) == (cold.manifest.digest, cold.facts.columns)


def test_refused_access_to_s3_is_a_data_error(s3_folder: ObjectPath, s3_server: S3Server) -> None:
    s3_server.fail(".*", times=-1, status=403)
    with pytest.raises(DataError, match=r"s3://runs/.* cannot be read: .*access is refused .*Check the credentials"):
        open_dataset(str(s3_folder / "data"))
