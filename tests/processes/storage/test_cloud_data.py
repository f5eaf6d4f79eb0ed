"""Data on Google Cloud Storage and Azure Blob Storage, read from emulators, and their URIs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ray_app.data.dataset import hash_files, open_dataset
from ray_app.data.probes import probe
from ray_app.data.reader import Reader, RowSource, fetch_in_process, load_all
from ray_app.errors import ConfigError, DataError, StorageError
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.storage.data_files import file_versions, find_file, is_within
from ray_app.storage.files import to_location
from tests.support.azure_server import AzureServer
from tests.support.encoded_images import encode
from tests.support.gcs_server import GoogleServer

Server = GoogleServer | AzureServer
PHOTO = Image.fromarray(np.full((6, 8, 3), 90, np.uint8))


@pytest.fixture(scope="module", params=["gs_server", "az_server"])
def cloud(request: pytest.FixtureRequest) -> Server:
    server: Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture(scope="module")
def rows(cloud: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same files on a disk and below `rows`, one of them in a subfolder."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "more").mkdir()
    for number, name in enumerate(["a.parquet", "b.parquet", "more/c.parquet"]):
        table = pa.table({"x": np.arange(500.0) + 1000 * number, "y": np.arange(500) % 3})
        pq.write_table(table, folder / name, row_group_size=120)
        cloud.put(f"rows/{name}", (folder / name).read_bytes())
    return folder


def load_rows(path: str | list[str]) -> dict[str, np.ndarray]:
    dataset = open_dataset(path)
    reader = Reader(dataset.root, ["x", "y"], dict, probe(dataset, ["x", "y"], dict))
    source = RowSource(reader, dataset.manifest, 300)
    return {name: np.asarray(values) for name, values in load_all(fetch_in_process, source).arrays.items()}


def test_a_data_set_in_a_bucket_equals_the_one_on_a_disk(cloud: Server, rows: Path) -> None:
    remote_path = str(cloud.path("rows"))
    local, remote = open_dataset(str(rows)), open_dataset(remote_path)
    assert (remote.manifest.digest, remote.manifest.paths) == (local.manifest.digest, local.manifest.paths)
    assert remote.root == remote_path
    expected, read = load_rows(str(rows)), load_rows(remote_path)
    assert read.keys() == expected.keys()
    assert all(np.array_equal(read[name], expected[name]) for name in expected)
    paths = local.manifest.paths
    assert hash_files(remote_path, paths) == hash_files(str(rows), paths)


def test_data_sets_on_a_disk_and_in_a_bucket_are_read_together(cloud: Server, rows: Path) -> None:
    sources = [str(rows), str(cloud.path("rows"))]
    dataset = open_dataset(sources)
    alone, read = load_rows(sources[0]), load_rows(sources)
    assert all(np.array_equal(read[name], np.concatenate([alone[name]] * 2)) for name in alone)
    paths = open_dataset(str(rows)).manifest.paths
    expected = [*file_versions(sources[0], paths), *file_versions(sources[1], paths)]
    assert file_versions(dataset.root, dataset.manifest.paths) == expected
    assert (
        list(hash_files(dataset.root, dataset.manifest.paths).values()) == [*hash_files(sources[0], paths).values()] * 2
    )


def test_files_of_other_formats_in_a_bucket_of_images_are_listed(cloud: Server, tmp_path: Path) -> None:
    for label in "ab":
        cloud.put(f"photos/{label}/1.jpg", encode(PHOTO, "jpeg"))
        cloud.put(f"photos/{label}/2", encode(PHOTO, "png"))
        cloud.put(f"photos/{label}/1.xml", b"<annotation>")
    part = ingest(IngestOptions("images", str(tmp_path / "out"), str(cloud.path("photos")))).parts[""]
    assert (part.rows, part.skipped_files) == (4, 2)
    lines = (tmp_path / "out" / "_refused.jsonl").read_text().splitlines()
    assert [json.loads(line)["row_id"] for line in lines] == ["a/1.xml", "b/1.xml"]


def test_a_changed_file_is_another_version(cloud: Server) -> None:
    cloud.put("changing/a.parquet", b"one")
    before = file_versions(str(cloud.path("changing")), ["a.parquet"])
    cloud.put("changing/a.parquet", b"another")
    assert file_versions(str(cloud.path("changing")), ["a.parquet"]) != before
    with pytest.raises(FileNotFoundError):
        file_versions(str(cloud.path("changing")), ["b.parquet"])


def test_missing_data_sets_and_files_are_reported(cloud: Server, rows: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        open_dataset(str(cloud.path("nothing")))
    assert find_file(cloud.path("rows")) is None
    with pytest.raises(FileNotFoundError):
        cloud.path("nothing").read_bytes()
    cloud.put("several/train/_dataset.json", b"{}")
    cloud.put("several/train/a.parquet", (rows / "a.parquet").read_bytes())
    with pytest.raises(DataError, match=r"holds several data sets: train"):
        open_dataset(str(cloud.path("several")))


def test_raw_data_is_ingested_from_a_bucket(cloud: Server, tmp_path: Path) -> None:
    cloud.put("raw/rows.csv", b"size,label\n" + b"".join(b"%d,%d\n" % (i, i % 2) for i in range(100)))
    summary = ingest(IngestOptions("csv", str(tmp_path / "out"), str(cloud.path("raw/rows.csv")), label="label"))
    assert sum(part.rows for part in summary.parts.values()) == 100
    assert open_dataset(str(tmp_path / "out")).manifest.num_rows == 100


def test_a_data_set_is_written_to_a_bucket(cloud: Server, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"size,label\n" + b"".join(b"%d,%d\n" % (i, i % 2) for i in range(100)))
    folders = [str(tmp_path / "out"), str(cloud.path("out"))]
    options = [IngestOptions("csv", out, str(tmp_path / "rows.csv"), label="label", split_bytes=300) for out in folders]
    assert not any(ingest(option).reused for option in options)
    local, remote = map(open_dataset, folders)
    assert local.manifest.digest == remote.manifest.digest
    assert all(ingest(option).reused for option in options)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("gs://key@bucket/x", "must not hold credentials"),
        ("gs://bucket/x?region=eu", "'region' is unknown"),
        ("az:///x", "is not a location on az://"),
        ("abfs://container/x", "uses abfs://"),
    ],
)
def test_invalid_uris_are_refused(uri: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        to_location(uri)


def test_azure_needs_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT", raising=False)
    location = to_location("az://container/rows")
    with pytest.raises(StorageError, match="needs the name of the storage account"):
        find_file(location)
    assert (
        str(to_location("az://container/rows?account_name=mine") / "a.parquet")
        == "az://container/rows/a.parquet?account_name=mine"
    )
    assert is_within(location / "a" / "b", location / "a")
    assert not is_within(location / "a", to_location("gs://container/rows"))
