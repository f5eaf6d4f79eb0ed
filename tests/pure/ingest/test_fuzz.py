"""Damaged files are read, or refused by a `DataError` or `ConfigError` that names the file, in bounded time and
memory.
"""

import shutil
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ray_app.errors import ConfigError, DataError, StorageError
from ray_app.ingest.ingest import IngestOptions, ingest
from tests.support.ingest_sources import SOURCES
from tests.support.mutations import damage

FEW, MANY = 10, 500
"""Mutants of each reader in `make test`, and in the tests marked `search`."""
_MAX_SECONDS, _MAX_BYTES = 10.0, 512 << 20


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
