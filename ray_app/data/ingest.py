"""Raw data -> Parquet shards: the raw format's reader, one check of every row, shards, and `dataset.json` last.

a. a reader (`raw_files.py`, `raw_arrays.py`) streams tables with a `row_id`
b. `_finished` renames columns and holds `label` to int64 without gaps
c. a keyed hash of the row's id may choose `train` or `eval`
d. `Shards` cuts the stream into row groups and files bounded in rows and bytes
e. everything is written into a folder beside the target, which gets its name by one rename at the end (`output.py`)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data import output
from ray_app.data.raw import Part, Reader
from ray_app.data.raw_arrays import Digits, Idx, Numpy
from ray_app.data.raw_files import Csv, Images
from ray_app.data.shards import Shards
from ray_app.errors import ConfigError, DataError
from ray_app.record.files import put_json

FORMAT_VERSION = 1
DIGITS_EVAL_FRACTION = 0.2


@dataclass(frozen=True)
class IngestOptions:
    """What to read and how to write it; checked by `ingest`.

    Args:
        source: Raw format. images: a folder with one sub-folder a class. csv: a .csv or .csv.gz file, or a folder of
            them. numpy: an .npz file or a folder with x.npy and y.npy. idx: a folder with MNIST-format files. digits:
            scikit-learn's bundled 8x8 images.
        out: Folder to create. One that was made with the same options from the same files is returned as it is;
            anything else that is not empty is refused.
        input: File or folder to read; not for digits.
        label: For csv: the column that becomes `label`; strings become class indices in sorted order.
        rename: New name by the name that a column would have, such as {"y": "target"}.
        eval_fraction: Part of the rows, above 0 and below 1, that goes to a data set `eval` beside `train`, chosen by
            a keyed hash of the row's id: not exactly this fraction, nor exactly the same in each class. Not for idx
            with both pairs of files. For digits exactly stratified, and 0.2 where not given.
        seed: Key of that hash.
        check: For images: decode each one now, so that a damaged file is refused here and not in training.
        shard_rows: Most rows of one Parquet file.
        row_group_rows: Most rows of one row group.
        row_group_bytes: Most bytes of one row group before compression; a larger single row has one of its own.
    """

    source: Literal["images", "csv", "numpy", "idx", "digits"]
    out: str
    input: str | None = None
    label: str | None = None
    rename: dict[str, str] = field(default_factory=dict)
    eval_fraction: float | None = None
    seed: int = 0
    check: bool = True
    shard_rows: int = 100_000
    row_group_rows: int = 5_000
    row_group_bytes: int = 32 << 20


READERS: dict[str, Callable[[Path, IngestOptions], Reader]] = {
    "images": lambda path, options: Images(path, options.check),
    "csv": lambda path, options: Csv(path, options.label),
    "numpy": lambda path, options: Numpy(path),
    "idx": lambda path, options: Idx(path),
    "digits": lambda path, options: Digits(options.seed, options.eval_fraction or DIGITS_EVAL_FRACTION),
}


@dataclass(frozen=True)
class PartSummary:
    """One data set: a folder of shards and what its `dataset.json` says.

    Args:
        path: Folder of the shards.
        rows: Number of rows.
        classes: Class names by label, or None.
        class_counts: Rows by class name (by label where classes have no names), or None without labels.
        columns: By name: type, shape of one row, dtype, missing values.
        shards: File name, rows, row groups and bytes of each shard.
        skipped_files: Files of the input that were not data.
    """

    path: str
    rows: int
    classes: list[str] | None
    class_counts: dict[str, int] | None
    columns: dict[str, dict[str, Any]]
    shards: list[dict[str, Any]]
    skipped_files: int


@dataclass(frozen=True)
class DatasetSummary:
    """What `ingest` made or found: one part with the name "", or `train` and `eval`."""

    path: str
    parts: dict[str, PartSummary]
    reused: bool

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts.values())


def ingest(options: IngestOptions) -> DatasetSummary:
    """Turns raw data into one or two folders of Parquet shards, each with a `dataset.json`.

    Memory is bounded by the row group and one block of the source, not by the data. The target folder appears complete
    or not at all.

    Raises:
        ConfigError: The options are refused, or the target folder holds something else.
        DataError: The input is missing, empty, damaged or inconsistent.
    """
    _check(options)
    reader = READERS[options.source](Path(options.input or ""), options)
    made_from = _made_from(options, reader)
    out = Path(os.path.abspath(options.out))
    if found := output.existing(out, made_from):
        return _summary(out, found, reused=True)
    reused = False
    with output.partial_folder(out) as partial:
        _write_all(reader.parts(), options, made_from, partial)
        try:
            os.rename(partial, out)
        except OSError:
            reused = bool(output.existing(out, made_from))  # another process was quicker
            if not reused:
                raise
    made = output.existing(out, made_from)
    assert made is not None
    return _summary(out, made, reused)


def _summary(out: Path, described: dict[str, dict[str, Any]], reused: bool) -> DatasetSummary:
    """The content of each `dataset.json` as a summary, `train` before `eval`."""
    names = [f.name for f in fields(PartSummary) if f.name != "path"]
    parts = {name: PartSummary(str(out / name), **{key: described[name][key] for key in names}) for name in sorted(described, reverse=True)}
    return DatasetSummary(str(out), parts, reused)


def _check(options: IngestOptions) -> None:
    """Refuses options that cannot be meant.

    Raises:
        ConfigError: With the option, what was given, what is allowed.
    """
    if options.source not in READERS:
        raise ConfigError(f"source is {options.source!r}; allowed are {', '.join(READERS)}.")
    if (options.source == "digits") == bool(options.input):
        needs = "reads no input; leave it out" if options.source == "digits" else "needs an input; give a file or folder"
        raise ConfigError(f"input is {options.input!r}: source {options.source!r} {needs}.")
    if not options.out or "://" in options.out:
        raise ConfigError(f"out is {options.out!r}; allowed is a folder on a local or mounted file system. Copy it up later.")
    if options.input and Path(options.out).resolve().is_relative_to(Path(options.input).resolve()):
        raise ConfigError(f"out {options.out!r} lies in the input {options.input!r}; give a folder beside it.")
    if options.label is not None and options.source != "csv":
        raise ConfigError(f"label is {options.label!r}: only csv has it; for {options.source!r} use rename={{NAME: 'label'}}.")
    if not options.check and options.source != "images":
        raise ConfigError(f"check is False: only images has it; leave it out for {options.source!r}.")
    if options.eval_fraction is not None and not 0 < options.eval_fraction < 1:
        raise ConfigError(f"eval_fraction is {options.eval_fraction}; allowed is above 0 and below 1, or leave it out.")
    for name, most in (("shard_rows", None), ("row_group_rows", None), ("row_group_bytes", 1 << 30)):
        if (value := getattr(options, name)) < 1 or (most and value > most):
            raise ConfigError(f"{name} is {value}; allowed is 1 or more{f', up to {most}' if most else ''}.")


def _made_from(options: IngestOptions, reader: Reader) -> dict[str, Any]:
    """What decides the output: the options without paths, and a digest of the files' names, sizes and times."""
    chosen = {name: value for name, value in asdict(options).items() if name not in ("input", "out")}
    if options.source == "digits" and options.eval_fraction is None:
        chosen["eval_fraction"] = DIGITS_EVAL_FRACTION
    sha = hashlib.sha256()
    for path in reader.files():
        stat = path.stat()
        sha.update(f"{os.path.relpath(path, options.input)}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return {"options": chosen, "source_digest": sha.hexdigest()}


def _write_all(parts: list[Part], options: IngestOptions, made_from: dict[str, Any], root: Path) -> None:
    """Writes the shards of all parts, then each `dataset.json`."""
    split = options.eval_fraction is not None and options.source != "digits"
    if split and len(parts) > 1:
        names = [part.name for part in parts]
        raise ConfigError(f"eval_fraction is {options.eval_fraction}, but the source itself has {names}. Leave it out.")
    written = [(part, side, shards) for part in parts for side, shards in _write_part(part, split, options, root).items()]
    names = sorted(side for _, side, _ in written)
    for part, side, shards in written:
        described = {"format_version": FORMAT_VERSION, "source": options.source, **shards.description(part.classes)}
        described |= {"skipped_files": part.skipped_files, "parts": names, "made_from": made_from}
        put_json(root / side / "dataset.json", described)


def _write_part(part: Part, split: bool, options: IngestOptions, root: Path) -> dict[str, Shards]:
    """Writes one part, or its rows' two sides; every row that the source has is in one of them.

    Raises:
        DataError: There are no rows, a side has none, or the source changed while it was read.
    """
    sides = ("train", "eval") if split else (part.name,)
    limits = (options.shard_rows, options.row_group_rows, options.row_group_bytes)
    shards = {side: Shards(root / side, *limits) for side in sides}
    rows = 0
    for raw in part.tables():
        table = _finished(raw, options.rename)
        rows += table.num_rows
        in_eval = _in_eval(table["row_id"], options.seed, options.eval_fraction or 0) if split else None
        for side in sides:
            chosen = table if in_eval is None else table.filter(pa.array(in_eval == (side == "eval")))
            shards[side].write(chosen)
    for side, made in shards.items():
        made.close()
        if not made.rows:
            where = f"the side {side!r} of the split gets" if rows else f"source {options.source!r} has"
            raise DataError(f"{options.input}: {where} no rows of {rows}. Give more data or another fraction.")
    if not rows == part.rows == sum(made.rows for made in shards.values()):
        raise DataError(f"{options.input}: {part.rows} rows expected, {rows} read. The files changed meanwhile: start again.")
    return shards


def _finished(table: pa.Table, rename: dict[str, str]) -> pa.Table:
    """The table under its final names, with `label` as int64 without gaps.

    Raises:
        ConfigError: A name is unknown or used twice.
        DataError: A label is missing or not an integer.
    """
    before = table.column_names[1:]
    names = ["row_id", *(rename.get(name, name) for name in before)]
    if not rename.keys() <= set(before):
        raise ConfigError(f"rename names {sorted(rename.keys() - set(before))}; the columns are {before}. Name these.")
    if len(set(names)) < len(names):
        raise ConfigError(f"two columns of one name in {names}; `row_id` is ours. Give one of them another name by rename.")
    table = pa.table(table.columns, pa.schema([f.with_name(n) for f, n in zip(table.schema, names, strict=True)]))
    if "label" not in names:
        return table
    labels = table["label"]
    if labels.null_count:
        row = table["row_id"][pc.index(labels.is_null(), True).as_py()]
        raise DataError(f"row {row}: no label; every row needs an integer. Remove the row or give it one.")
    if not (pa.types.is_integer(labels.type) or pa.types.is_boolean(labels.type)):
        raise DataError(
            f"the column `label` is of type {labels.type}; allowed are integers. Name a column of strings with the option "
            "label (csv), or rename a column of numbers to 'target' for regression."
        )
    final = pa.field("label", pa.int64(), nullable=False)
    return table.set_column(names.index("label"), final, labels.cast(pa.int64()))


def _in_eval(row_ids: pa.ChunkedArray, seed: int, fraction: float) -> npt.NDArray[np.bool_]:
    """Whether each row goes to `eval`: a function of the seed and the row's own id, shape (rows,)."""
    key, limit = str(seed).encode(), int(fraction * 2**64)
    hashes = (hashlib.blake2b(row.encode(), digest_size=8, key=key).digest() for row in row_ids.to_pylist())
    return np.array([int.from_bytes(digest, "big") < limit for digest in hashes], dtype=np.bool_)
