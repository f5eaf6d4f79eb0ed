"""Damaged files are read, or refused by a `DataError` or `ConfigError` that names the file, in bounded time and
memory.
"""

from __future__ import annotations

import gzip
import json
import shutil
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_app.errors import ConfigError, DataError, StorageError
from ray_app.ingest.ingest import IngestOptions, ingest
from tests.support.ingest_inputs import write_idx, write_images, write_tar
from tests.support.mutations import damage
from tests.support.paths import SUPPORT

FEW, MANY = 10, 500
"""Mutants of each reader in `make test`, and in the tests marked `search`."""
_MAX_SECONDS, _MAX_BYTES = 10.0, 512 << 20


def write_csv(folder: Path) -> None:
    folder.mkdir()
    lines = [f"{i},{i / 8},{'uvw'[i % 3]}\n" for i in range(12)]
    (folder / "a.csv").write_text("n,x,kind\n" + "".join(lines))
    (folder / "b.csv.gz").write_bytes(gzip.compress(("n,x,kind\n" + "".join(lines)).encode()))


def write_jsonl(folder: Path) -> None:
    folder.mkdir()
    lines = [
        json.dumps({"n": i, "v": [[i, 1.5], [2, 3]], "kind": "uvw"[i % 3], "day": "2024-01-01"}) + "\n"
        for i in range(12)
    ]
    (folder / "a.jsonl").write_text("".join(lines))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))


def write_numpy(folder: Path, packed: bool) -> None:
    folder.mkdir()
    arrays = {"x": np.arange(48.0).reshape(12, 4), "y": np.arange(12)}
    if packed:
        np.savez_compressed(folder / "a.npz", **arrays)
    else:
        for name, values in arrays.items():
            np.save(folder / f"{name}.npy", values)


def write_tars(folder: Path) -> None:
    for i, end in enumerate(("tar", "tar.gz")):
        members = {
            f"{row}.{kind}": value
            for row in range(4)
            for kind, value in (("cls", b"%d" % row), ("txt", b"some text"), ("json", b'{"a": 1}'))
        }
        write_tar(folder / f"{i}.{end}", members, "w:gz" if end.endswith("gz") else "w")


TFRECORD_COLUMNS = ["image/encoded", "image/class/label", "floats", "integers"]


def write_tfrecord(folder: Path) -> None:
    """Copies the files of TensorFlow; `make.py` there says how they were written."""
    shutil.copytree(SUPPORT / "tfrecord", folder, ignore=shutil.ignore_patterns("*.py"))


def write_hf(folder: Path, kind: str) -> None:
    shutil.copytree(SUPPORT / "hf" / kind, folder)


SOURCES: dict[str, tuple[Callable[[Path], Any], str, dict[str, Any]]] = {
    "images": (write_images, "", {}),
    "csv": (write_csv, "", {"label": "kind"}),
    "jsonl": (write_jsonl, "", {"label": "kind"}),
    "numpy, folder": (partial(write_numpy, packed=False), "", {}),
    "numpy, npz": (partial(write_numpy, packed=True), "a.npz", {}),
    "idx": (partial(write_idx, prefix="train", rows=5, packed=False), "", {"eval_fraction": 0}),
    "idx, packed": (partial(write_idx, prefix="t10k", rows=5, packed=True), "", {}),
    "webdataset": (write_tars, "", {}),
    "tfrecord": (write_tfrecord, "", {"columns": TFRECORD_COLUMNS}),
    "hf, saved": (partial(write_hf, kind="saved"), "", {}),
    "hf, parquet": (partial(write_hf, kind="parquet"), "", {}),
    "parquet": (
        lambda folder: (folder.mkdir(), pq.write_table(pa.table({"a": [1, 2], "b": ["u", "v"]}), folder / "a.parquet")),
        "",
        {},
    ),
}


_ABORTS = {"parquet": {292, 484}}
"""Mutants with a footer that ends the process in pyarrow 25: `RowGroupMetaData.column` declares no C++ exception."""


def read_mutant(folder: Path, name: str, seed: int | None) -> str:
    """Ingests a damaged copy of a source (None: an intact one); returns "read", "refused", or what is wrong."""
    write, relative_path, options = SOURCES[name]
    source: Any = name.partition(",")[0]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write(folder / "in")
    damaged = damage(folder / "in", seed) if seed is not None else folder
    out = "" if source == "parquet" else str(folder / "out")
    start = time.monotonic()
    try:
        ingest(IngestOptions(source, out, str(folder / "in" / relative_path), **options))
    except (ConfigError, DataError) as error:
        if isinstance(error, StorageError):
            return f"a storage is blamed: {error}"
        message = str(error)
        names_file = any(part in message for part in (damaged.name, damaged.parent.name, str(folder / "in")))
        result = "refused" if names_file else f"no file is named: {message}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    else:
        result = "read"
    return result if time.monotonic() - start < _MAX_SECONDS else "it takes too long"


def check_mutants(tmp_path: Path, name: str, seeds: range) -> None:
    # Imports take long on a busy machine, so the first ingest may exceed the limit.
    assert read_mutant(tmp_path / "intact", name, None) in ("read", "it takes too long")
    results = {
        seed: read_mutant(tmp_path / "mutant", name, seed) for seed in seeds if seed not in _ABORTS.get(name, ())
    }
    failures = {seed: result for seed, result in results.items() if result not in ("read", "refused")}
    assert not failures, f"{len(failures)} of {len(seeds)} mutants failed, such as {dict(list(failures.items())[:5])}"
    assert "refused" in results.values()


@pytest.mark.parametrize("name", SOURCES)
def test_damaged_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    check_mutants(tmp_path, name, range(FEW))


@pytest.mark.search
@pytest.mark.parametrize("name", SOURCES)
def test_many_damaged_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    tracemalloc.start()
    try:
        check_mutants(tmp_path, name, range(FEW, FEW + MANY))
        assert tracemalloc.get_traced_memory()[1] < _MAX_BYTES
    finally:
        tracemalloc.stop()
