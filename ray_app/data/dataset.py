"""A Parquet data set as its footers describe it: the manifest of its row groups and the facts of its columns.

Two more things are read from data sets before training: the digests of the files, which identify their content, where
the manifest has only paths and row counts; and the class of every row, from one column.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, permutations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_app.data.arrays import (
    describe_other_columns,
    digest_of_ids,
    is_bytes,
    is_number,
    is_numbers,
    is_read_as_float,
    is_text,
    spec_of_field,
    spec_of_list_type,
)
from ray_app.data.classes import is_unchanged, renumber
from ray_app.data.parquet_files import DataFile, Footers, Range, load_footers, read_footers
from ray_app.data.plain_columns import plain_schema
from ray_app.data.reader import table_to_rows
from ray_app.errors import DataError, join_names
from ray_app.plan.manifest import (
    ColumnFacts,
    DataFacts,
    Manifest,
    class_columns,
    parse_partition_value,
    parse_partitions,
)
from ray_app.storage.data_files import (
    Root,
    file_versions,
    files_below,
    find_file,
    is_folder,
    is_within,
    locate,
    open_data_file,
    relative_path,
)
from ray_app.storage.files import Location, put_json, read_json, to_location
from ray_app.task.texts import TOKENIZER_FILE
from ray_app.version import __version__

logger = logging.getLogger(__name__)

_THREADS = 8
_MIN_AGE_NS = 5_000_000_000
"""Age from which a file on a disk has a reliable version, see `_is_reliable`."""


def hash_files(root: Root, paths: Iterable[str], digest_cache: Location | None = None) -> dict[str, str]:
    """Returns the SHA-256 of files of a data set, by their relative path.

    Where `digest_cache`, a file, keeps their digests, files that did not change since are not read again.
    """
    all_paths = list(paths)
    now_ns = time.time_ns()
    versions_now = dict(zip(all_paths, _versions(root, all_paths), strict=True)) if digest_cache is not None else {}
    cached = _load_digests(digest_cache, root) if digest_cache is not None else {}
    digests = {path: cached[path][1] for path in all_paths if path in cached and cached[path][0] == versions_now[path]}
    unread = [path for path in all_paths if path not in digests]
    with ThreadPoolExecutor(_THREADS) as pool:
        digests |= zip(unread, pool.map(lambda path: sha256(locate(root, path)), unread), strict=True)
    if digest_cache is not None and unread:
        kept = {
            path: [versions_now[path], digests[path]] for path in all_paths if _is_reliable(versions_now[path], now_ns)
        }
        put_json(digest_cache, {"root": str(root), "files": kept})
    return {path: digests[path] for path in all_paths}


def _versions(root: Root, paths: list[str]) -> list[Any]:
    """Returns a value for each file that changes with its content; a copy cannot restore all of it."""
    files = [locate(root, path) for path in paths]
    if not all(isinstance(file, Path) for file in files):
        return file_versions(root, paths)
    stats = [file.stat() for file in files if isinstance(file, Path)]
    return [[stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for stat in stats]


def _is_reliable(version: Any, now_ns: int) -> bool:
    """Returns whether a later change is visible in the version: timestamps of file systems may be seconds coarse."""
    return isinstance(version, str) or now_ns - version[2] > _MIN_AGE_NS


def _load_digests(digest_cache: Location, root: Root) -> dict[str, Any]:
    try:
        values = read_json(digest_cache) or {}
        return dict(values["files"]) if values.get("root") == str(root) else {}
    except (ValueError, KeyError, TypeError, AttributeError):
        # The file is damaged; then all files are read.
        return {}


def sha256(file: Location) -> str:
    """Returns the SHA-256 of a file."""
    with open_data_file(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


def read_labels(root: Root, manifest: Manifest, column: str) -> tuple[list[Any], npt.NDArray[np.unsignedinteger]]:
    """Reads a column of integers or text as classes; raises DataError for another column, or one with missing values.

    Returns the distinct values in ascending order, and for each row, in manifest order, the index of its value, in the
    smallest unsigned type.
    """
    fields = "data.balance_by, data.fold_by, or task.init_args.label"

    def check(path: str, values: pa.ChunkedArray) -> npt.NDArray:
        kind = values.type
        if values.null_count or not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_text(kind)):
            raise DataError(
                f"Column {column!r} of {root} holds {kind} with {values.null_count} missing values; classes must"
                f" be integers or text without missing values. Name another column ({fields}), or convert it."
            )
        return values.to_numpy()

    values = read_column(root, manifest, column, check, f"Name another one ({fields}).")
    labels, label_of_row = np.unique(values, return_inverse=True)
    return labels.tolist(), label_of_row.astype(np.min_scalar_type(len(labels) - 1))


def read_column(
    root: Root, manifest: Manifest, column: str, convert: Callable[[str, pa.ChunkedArray], npt.NDArray], advice: str
) -> npt.NDArray:
    """Returns the values of a column for all rows in manifest order, (rows,).

    Args:
        convert: Makes an array of the column of a file; it gets the path of the file and the column.
        advice: What to do if there is no such column.
    """

    def read(path: str) -> npt.NDArray:
        with DataFile(root, path, manifest.rules) as file:
            if column not in file.schema.names:
                names = ", ".join(sorted(file.schema.names))
                raise DataError(f"{root} has no column {column!r}; its columns are {names}. {advice}")
            return convert(path, file.read([column]).column(0))

    with ThreadPoolExecutor(_THREADS) as pool:
        return np.concatenate(list(pool.map(read, manifest.paths)))


def count_labels(root: Root, manifest: Manifest, column: str) -> dict[int, int]:
    """Returns the number of rows by value of a column of classes; see `read_labels`."""
    labels, label_of_row = read_labels(root, manifest, column)
    return dict(zip(labels, np.bincount(label_of_row, minlength=len(labels)).tolist(), strict=True))


_BLOCK_ROWS = 65_536
"""Maximum rows that `read_rows` converts together, so that only the stored form of a large row group is in memory."""


def read_rows(root: Root, manifest: Manifest, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yields all rows by column, in blocks in manifest order, with missing values; see `table_to_rows`."""
    for number, groups in groupby(range(manifest.num_row_groups), lambda group: int(manifest.file_of[group])):
        with DataFile(root, manifest.paths[number], manifest.rules) as file:
            for index in map(int, manifest.index_in_file[list(groups)]):
                table = file.read_row_group(index, columns)
                for first in range(0, table.num_rows, _BLOCK_ROWS):
                    yield table_to_rows(table.slice(first, _BLOCK_ROWS))


DESCRIPTION = "_dataset.json"
"""File in which an ingest describes a data set: its classes, columns, shards and source."""
FORMAT_VERSION = 1
"""The version of `_dataset.json`; a new meaning of an existing field needs a new one."""
UNFINISHED_MARKER = "_ingest.json"
"""File in a data set in a bucket that an ingest is writing, or in one to which it is adding rows.

The ingest writes `_dataset.json` last.
"""
ADDED_PREFIX = "part-added-"
"""Beginning of the names of shards that were added to a data set, which come after those of its first ingest."""
_INDEX_NAMES = re.compile(r"|__index_level_\d+__|Unnamed: \d+")


@dataclass(frozen=True)
class Dataset:
    """A folder of Parquet files, or several.

    Args:
        root: The folder (path or URI) to which the paths of the manifest are relative, see `Root`.
        unlisted: The files that an ingest has not written, see `find_unlisted`.
    """

    root: Root
    manifest: Manifest
    facts: DataFacts
    unlisted: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Source:
    """One data set as its files describe it; see `Dataset` and `read_description`."""

    root: Location
    footers: Footers
    description: Mapping[str, Any]
    unlisted: tuple[str, ...]


def open_dataset(path: str | Sequence[str], classes: Sequence[str] | None = None) -> Dataset:
    """Opens a Parquet file, or all `*.parquet` files below a folder, or several of these as one data set.

    It uses the footers file of an ingest for the files that have not changed since, and reads the other footers.

    Args:
        path: The file or folder, or a list of them.
        classes: The names of classes to number the labels by, such as those of the data that a model was trained on;
            they count if they have the names of all classes of this data set.

    Raises:
        DataError: The path does not exist, a file is not Parquet, the files have different columns or classes, a shard
            of the ingest is missing, there are no rows, or `read_description` refuses `_dataset.json`.
    """
    names = [path] if isinstance(path, str) else path
    sources = [_read_source(name) for name in names]
    root: Root
    if isinstance(path, str):
        [source] = sources
        root, footers = str(source.root), source.footers
        description = source.description
    else:
        _check_joinable(names, sources)
        root = tuple(str(source.root) for source in sources)
        footers = _join_footers([source.footers for source in sources], names)
        class_lists = [json.loads(text) for text in dict.fromkeys(footers.classes) if text]
        description = {
            "index_columns": [name for s in sources for name in s.description.get("index_columns", ())],
            "classes": list(dict.fromkeys(str(name) for names in class_lists for name in names)),
        }
    numbering = _number_files(root, footers, description, classes)
    for name, source in zip(names, sources, strict=True):
        if source.unlisted:
            logger.warning("%s", describe_unlisted(name, source.unlisted))
    manifest = replace(footers.manifest, class_maps=numbering.class_maps)
    facts = _facts(", ".join(names), root, footers, manifest, numbering.classes, description)
    return Dataset(root, manifest, facts, sum((source.unlisted for source in sources), ()))


def _read_source(path: str) -> _Source:
    target = to_location(path)
    is_file = not is_folder(target)
    if is_file and not find_file(target):
        raise DataError(
            f"data path {path!r} does not exist (looked at {target}); ingest the data first: ray-app ingest --help."
        )
    root = target.parent if is_file else target
    files = [target] if is_file else files_below(target, ".parquet")
    description = _read_finished_description(path, root)
    if not is_file:
        files = leave_out_unfinished(root, files, description)
    paths = [relative_path(file, root) for file in files]
    folders = dict.fromkeys(path.partition("/")[0] for path in paths if "/" in path)
    nested = [name for name in folders if find_file(root / name / DESCRIPTION)]
    if nested:
        raise DataError(
            f"data path {path!r} holds several data sets: {', '.join(nested)}. Name one of them, such as"
            f" {root / nested[0]}."
        )
    if not files:
        raise DataError(f"data path {path!r} holds no *.parquet file; ingest the data first: ray-app ingest --help.")
    footers = read_footers(root, files, None if is_file else load_footers(root))
    if not footers.manifest.num_rows:
        raise DataError(f"data path {path!r} holds {len(files)} Parquet files, but no row to train on.")
    return _Source(root, footers, description, () if is_file else find_unlisted(root, paths, description))


def _check_joinable(names: Sequence[str], sources: Sequence[_Source]) -> None:
    """Raises DataError for data sets that share files or have texts of different tokenizers.

    Warns if labels of one have no names and are therefore matched by number.
    """
    for one, two in permutations(names, 2):
        if is_within(to_location(one), to_location(two)):
            raise DataError(f"{one} is {two} or in it, so its rows would count twice. Name each data set once.")
    files = [find_file(source.root / TOKENIZER_FILE) for source in sources]
    if len({file and file.location.read_bytes() for file in files}) > 1:
        raise DataError(f"{join_names(names)} have texts of different tokenizers. Ingest them with the same options.")
    unnamed = [name for name, source in zip(names, sources, strict=True) if not any(source.footers.classes)]
    if unnamed and len(unnamed) < len(names):
        logger.warning(
            "%s has no names of classes, and other data sets have: its labels are matched by number.", unnamed[0]
        )


def _join_footers(parts: Sequence[Footers], names: Sequence[str]) -> Footers:
    """Returns the facts of several data sets with these names; a path begins with the index of its data set.

    Raises DataError if they have different columns.
    """
    tables = []
    for index, part in enumerate(parts):
        if others := describe_other_columns(part.schema, parts[0].schema):
            raise DataError(
                f"{names[index]} has other columns than {names[0]}: {others}. Data sets that are used together need"
                " the same columns. Ingest them with the same options."
            )
        paths = pa.array([f"{index}/".encode() + path for path in part.table["path"].to_pylist()], pa.binary())
        table = part.table.set_column(part.table.schema.get_field_index("path"), "path", paths)
        classes = pa.array(part.classes, pa.string())
        tables.append(table.set_column(table.schema.get_field_index("classes"), "classes", classes))
    return Footers(parts[0].schema, pa.concat_tables(tables))


def _read_finished_description(path: str, root: Location) -> dict[str, Any]:
    """Returns the content of `_dataset.json`; refuses a folder on S3 that an ingest has begun and not finished.

    On a disk an ingest creates the folder last.
    """
    description = read_description(root)
    if description is None and find_file(root / UNFINISHED_MARKER):
        raise DataError(
            f"data path {path!r} is being written by an ingest, or an ingest was interrupted there. Wait for it, or"
            " start the same ray-app ingest again to continue."
        )
    return description or {}


def leave_out_unfinished(root: Location, files: list[Location], description: Mapping[str, Any]) -> list[Location]:
    """Returns the files without those that an ingest is adding, which the description does not list yet."""
    listed = {shard["path"] for shard in description.get("shards", ())}
    kept = [f for f in files if not f.name.startswith(ADDED_PREFIX) or relative_path(f, root) in listed]
    return kept if listed and len(kept) < len(files) and find_file(root / UNFINISHED_MARKER) else files


def find_unlisted(root: Location, paths: Sequence[str], description: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the files of a data set that its description does not list; raises DataError if a listed one is missing.

    A description without shards lists nothing.
    """
    listed = [shard["path"] for shard in description.get("shards", ())]
    if missing := sorted(set(listed) - set(paths)):
        raise DataError(
            f"{root / missing[0]} is missing: {DESCRIPTION} lists {len(listed)} shards, but {len(missing)} of them are"
            f" missing. Restore them; or, to train without their rows, remove {root / DESCRIPTION}: each shard also"
            " stores the names of its classes."
        )
    return tuple(sorted(set(paths) - set(listed))) if listed else ()


def describe_unlisted(path: str, unlisted: Sequence[str]) -> str:
    """Returns a note on the files of `find_unlisted`."""
    others = f"{unlisted[0]} and {len(unlisted) - 1} more files" if len(unlisted) > 1 else f"the file {unlisted[0]}"
    return (
        f"{path}: {DESCRIPTION} does not list {others}, but their rows are used. Their classes are matched by name if"
        " the file has names, otherwise by number. Add rows with ray-app ingest --append true, which lists the files."
    )


@dataclass(frozen=True)
class _Numbering:
    """The classes of a data set, and the class maps of its files, see `ReadRules`."""

    classes: tuple[str, ...] | None
    class_maps: dict[str, tuple[int, ...]]


def _number_files(
    root: Root, footers: Footers, description: Mapping[str, Any], preferred: Sequence[str] | None
) -> _Numbering:
    """Returns the numbers of the classes in all files: those of the description, or of the longest list in a file.

    A file without names has the classes of the data set. `preferred` counts if all labels can be numbered so.

    Raises:
        DataError: A file has other classes, or labels that cannot be numbered in another way.
    """
    stored = {text: tuple(map(str, json.loads(text))) if text else () for text in set(footers.classes)}
    described = tuple(description.get("classes") or ())
    names = described or max(stored.values(), key=len)
    if not names:
        return _Numbering(None, {})
    has_none = not described and "classes" in description
    for classes in dict.fromkeys([tuple(preferred or names), names]):
        maps = {
            text: renumber(file_classes or names, classes, footers.schema.names)
            for text, file_classes in stored.items()
        }
        if None not in maps.values() and not has_none:
            new_numbers = {text: numbers for text, numbers in maps.items() if numbers and not is_unchanged(numbers)}
            texts = zip(footers.paths, footers.classes, strict=True)
            return _Numbering(classes, {path: new_numbers[text] for path, text in texts if text in new_numbers})
    bad = {text for text, numbers in maps.items() if numbers is None or (has_none and text)}
    file, text = next(pair for pair in zip(footers.paths, footers.classes, strict=True) if pair[1] in bad)
    origin = DESCRIPTION if description and isinstance(root, str) else "another file"
    raise DataError(
        f"{locate(root, file)} has the classes {join_names(stored[text])}; the data set has"
        f" {join_names(() if has_none else names)} ({origin}). Classes are"
        f" matched by name{', and classes of masks also by number' * ('mask' in footers.schema.names)}. Correct the"
        " labels and ingest the file again, or add its rows with ray-app ingest --append true --new_classes true."
    )


def _facts(
    path: str,
    root: Root,
    footers: Footers,
    manifest: Manifest,
    classes: tuple[str, ...] | None,
    description: Mapping[str, Any],
) -> DataFacts:
    fields = plain_schema(footers.schema)
    ranges = {field.name: footers.range_of(field) for field in fields}
    for name in class_columns(footers.schema.names) if classes and manifest.class_maps else ():
        ranges[name] = replace(ranges[name], min=0, max=len(classes or ()) - 1)
    columns = {field.name: _column_facts(field, ranges[field.name]) for field in fields}
    columns |= {name: facts for name, facts in _partition_facts(manifest).items() if name not in columns}
    count = partial(count_labels, root, manifest)
    index = tuple(dict.fromkeys([*index_columns(footers.schema), *description.get("index_columns", [])]))
    read = partial(read_rows, root, manifest)
    return DataFacts(path, manifest.num_rows, columns, classes, count, index, read)


def read_description(root: Location) -> dict[str, Any] | None:
    """Returns the content of a data set's `_dataset.json`; None if it has none.

    Raises:
        DataError: The file is damaged, or a newer version of this application wrote it.
    """
    file, advice = root / DESCRIPTION, "ingest the data again: ray-app ingest --help"
    try:
        description = read_json(file)
    except ValueError as error:
        raise DataError(f"{error}. Restore it, or {advice}.") from error
    if description is None:
        old = root / DESCRIPTION.removeprefix("_")
        if find_file(old) and "format_version" in (read_json(old) or {}):
            raise DataError(f"{old} was written by an earlier version of ray_app. Rename it to {DESCRIPTION}.")
        return None
    if not isinstance(description, dict):
        content = f"it must contain a mapping, but contains a {type(description).__name__}"
        raise DataError(f"{file} is damaged, {content}. Restore it, or {advice}.")
    version = description.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise DataError(
            f"{file} has format version {version}; this version of ray_app ({__version__}) reads {FORMAT_VERSION}. Use"
            f" the version that wrote it, or {advice}."
        )
    return description


def index_columns(schema: pa.Schema) -> tuple[str, ...]:
    """Returns the names of the columns of a table that number its rows.

    These are the index that pandas names in the metadata of its files, an index without a name (pandas writes it as
    `__index_level_0__`), and a column without a name, which `to_csv` and R's `write.csv` make of the row numbers and
    pandas reads as `Unnamed: 0`.
    """
    try:
        pandas = json.loads((schema.metadata or {}).get(b"pandas", b"{}"))
    except ValueError:
        pandas = {}
    index = pandas.get("index_columns") if isinstance(pandas, dict) else None
    pandas_index = index if isinstance(index, list) else []
    return tuple(name for name in schema.names if name in pandas_index or _INDEX_NAMES.fullmatch(name))


def _partition_facts(manifest: Manifest) -> dict[str, ColumnFacts]:
    """Returns the facts of the columns that are in the names of folders."""
    texts = [parse_partitions(path) for path in manifest.paths] if manifest.partitions else []
    rows = np.bincount(manifest.file_of, manifest.rows, len(manifest.paths))
    facts = {}
    for name, kind in manifest.partitions.items():
        values = [parse_partition_value(text[name], kind) for text in texts]
        present = [value for value in values if value is not None]
        nulls = int(sum(count for value, count in zip(values, rows, strict=True) if value is None))
        if kind == "string":
            facts[name] = ColumnFacts("text", nulls=nulls)
        else:
            span = 1.0 if kind == "int64" else None
            dtype: tuple[Literal["integer", "number"], str] = (
                ("integer", "int64") if kind == "int64" else ("number", "float64")
            )
            low, high = (float(min(present)), float(max(present))) if present else (None, None)
            facts[name] = ColumnFacts(*dtype, (), low, high, nulls, span)
    return facts


def _column_facts(field: pa.Field, values: Range) -> ColumnFacts:
    spec = spec_of_field(field) or spec_of_list_type(field.type)
    if spec is not None:
        return ColumnFacts("array" if spec.padding is None else "list", spec.dtype, spec.shape, values.min, values.max)
    kind = pa.float64() if is_read_as_float(field.type) else field.type
    if is_number(kind):
        dtype = str(kind.to_pandas_dtype().__name__)
        is_float = pa.types.is_floating(kind)
        return ColumnFacts(
            "number" if is_float else "integer",
            dtype,
            (),
            values.min,
            values.max,
            values.nulls,
            values.group_span,
            digest_of_ids(field),
        )
    if is_bytes(kind):
        return ColumnFacts("bytes")
    if is_text(kind):
        return ColumnFacts("text")
    if is_numbers(kind):
        return ColumnFacts("list", str(kind), (), values.min, values.max)
    return ColumnFacts("other", str(kind))
