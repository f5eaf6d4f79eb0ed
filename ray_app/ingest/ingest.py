"""Raw data -> Parquet shards: the raw format's reader, tasks that write shards of their own, and `dataset.json` last.

a. a reader (`readers/`) cuts the source into pieces, by what is in it and not by who will read them b. each piece is a
task (`pieces.py`), in threads or on a cluster (`runners.py`): it streams tables with a `row_id`, renames columns, holds
   `label` to int64 without gaps, makes tokens of texts (`texts.py`), refuses rows with a reason, and lets a keyed hash
   of the row's id choose `train` or `eval`; tokens may be packed into blocks then
c. the rows of all pieces are put into the order of a hash of their ids, in two stages of tasks (`mixing.py`), unless
   the source mixes them itself; `Shards` cuts them into row groups and files bounded in rows and bytes
d. what the pieces say of themselves is put together (`described.py`), and the folder becomes the target (`target.py`)

Running the tasks of an ingest: in threads of this process, or as Ray tasks on any CPU of a cluster. Both give results
in order.

Arrays of a notebook or a program as a data set.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_app.data.parquet_files import read_footers
from ray_app.errors import ConfigError, DataError, StorageError, remove_addresses
from ray_app.ingest import options as checks
from ray_app.ingest import output_folder as output
from ray_app.ingest.options import IngestOptions
from ray_app.ingest.output_folder import side_folder
from ray_app.ingest.readers import base
from ray_app.ingest.readers.arrays import Digits, Idx, Numpy
from ray_app.ingest.readers.cifar import Cifar
from ray_app.ingest.readers.csv_files import Csv
from ray_app.ingest.readers.hugging_face import HuggingFace
from ray_app.ingest.readers.image_folders import Images
from ray_app.ingest.readers.json_lines import JsonLines
from ray_app.ingest.readers.tfrecord import TFRecord
from ray_app.ingest.readers.webdataset import WebDataset
from ray_app.ingest.shards import (
    Counts,
    describe_parquet,
    format_refused,
    make_notes,
    merge_columns,
    merge_descriptions,
)
from ray_app.ingest.shuffle import make_bucket_tasks, write_bucket
from ray_app.ingest.splits import InputSplitTask, check_refused_count, write_input_split
from ray_app.ingest.tokenize import Texts
from ray_app.storage.data_files import DataLocation, files_below, is_within, locate_data, relative_path
from ray_app.storage.files import Location, put_atomic, put_json, to_location

_AHEAD = 4
"""Ray tasks per CPU that are asked for before the first of them is waited for."""
_CANCEL_S = 60.0
_MOST_CHARS = 500


def run_in_threads(function: Callable[[Any], Any], items: Sequence[Any], threads: int | None = None) -> Iterator[Any]:
    """Calls `function` with every item; what takes long (decoding, compressing, reading) does not hold Python's lock.

    Args:
        function: What to do.
        items: With what.
        threads: How many at a time; not given: one per CPU.
    """
    if len(items) == 1:
        yield function(items[0])
        return
    pool = ThreadPoolExecutor(threads or os.cpu_count(), "ingest")
    try:
        for made in [pool.submit(function, item) for item in items]:
            yield made.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def run_on_cluster(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """Calls `function` with every item in tasks of the Ray cluster that this process is connected to, each on a CPU.

    A task whose node is lost is run again, and so is one whose process dies, three times in all.

    Raises:
        ProcessDiedError: The process of a task died again and again.
    """
    import ray

    from ray_app.data.process_deaths import RetriedTask

    task = ray.remote(_call).options(num_cpus=1, max_retries=0)
    most = max(_AHEAD, _AHEAD * int(ray.cluster_resources().get("CPU", 1)))
    waiting: deque[RetriedTask] = deque()
    try:
        for item in items:
            what = f"while it ingested {remove_addresses(str(item))[:_MOST_CHARS]}"
            waiting.append(RetriedTask(partial(task.remote, function, item), partial(str, what)))
            if len(waiting) >= most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        references = [left.reference for left in waiting]
        for reference in references:
            ray.cancel(reference)
        if references:  # they write no more when the caller goes on
            ray.wait(references, num_returns=len(references), timeout=_CANCEL_S)


def _call(function: Callable[[Any], Any], item: Any) -> Any:
    return function(item)


__all__ = ["READERS", "DatasetSummary", "IngestOptions", "PartSummary", "ingest"]

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
LAYOUT = 5
"""Another number wherever the order of rows or the pieces change, so that nobody goes on with what an older version has
begun.
"""

READERS: dict[str, Callable[[str, IngestOptions], base.Reader]] = {
    "images": lambda path, options: Images(
        locate_data(path), options.check, base.Limits(options.shard_rows, options.piece_bytes)
    ),
    "csv": lambda path, options: Csv(
        locate_data(path),
        options.label,
        options.on_bad_row == "skip",
        options.piece_bytes,
        options.delimiter,
        options.column_names,
    ),
    "jsonl": lambda path, options: JsonLines(
        locate_data(path),
        options.label,
        options.columns,
        options.ragged or [],
        options.on_bad_row == "skip",
        options.piece_bytes,
    ),
    "numpy": lambda path, options: Numpy(locate_data(path), options.shard_rows),
    "idx": lambda path, options: Idx(locate_data(path), options.shard_rows),
    "cifar": lambda path, options: Cifar(locate_data(path)),
    "webdataset": lambda path, options: WebDataset(
        path, options.label, options.columns, options.check, options.piece_bytes
    ),
    "tfrecord": lambda path, options: TFRecord(
        path, options.label, options.columns, options.check, options.piece_bytes
    ),
    "hf": lambda path, options: HuggingFace(
        locate_data(path),
        options.label,
        options.columns,
        options.ragged or [],
        options.check,
        options.on_bad_row == "skip",
        options.piece_bytes,
    ),
    "digits": lambda path, options: Digits(options.seed, options.held_out(["train", "eval"])),
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
        skipped_files: Files of the input that are not data and were left out, listed with reasons in `refused.jsonl`.
        refused: Rows that were left out, listed with reasons in `refused.jsonl`.
        notes: What the user should know of how the source was understood, such as which value made a column text.
    """

    path: str
    rows: int
    classes: list[str] | None
    class_counts: dict[str, int] | None
    columns: dict[str, dict[str, Any]]
    shards: list[dict[str, Any]]
    skipped_files: int = 0
    refused: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class DatasetSummary:
    """What `ingest` made or found: one part with the name "", or `train` and `eval`, also `test`, or those that the
    source has.
    """

    path: str
    parts: dict[str, PartSummary]
    reused: bool

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts.values())


def ingest(options: IngestOptions, run: base.Run = run_in_threads) -> DatasetSummary:
    """Turns raw data into one or more folders of Parquet shards, each with a `dataset.json`.

    Memory is bounded by a row group and a block of the source for each task at a time, not by the data. The target
    folder appears complete or not at all. After an interruption the same call does what is left.

    Args:
        options: What to do.
        run: How tasks run; they give the same files in any way. Not given: in threads of this process.

    Raises:
        ConfigError: The options are refused, or the target folder holds something else.
        DataError: The input is missing, empty, damaged or inconsistent; then nothing is left of what was made.
        StorageError: A disk, the network or S3 failed; what is finished is kept.
    """
    checks.check_options(options, [*READERS, "parquet"])
    if options.source == "parquet":
        return _summary(str(options.input), {"": describe_parquet(str(options.input))}, reused=True)
    reader, out = READERS[options.source](options.input or "", options), to_location(options.out)
    made_from = _made_from(options, reader)
    if found := output.load_existing(out, made_from):
        return _summary(str(out), found, reused=True)
    parts = reader.parts(run)
    options = replace(options, eval_fraction=options.held_out([part.name for part in parts]))
    sides = _sides(parts, options)
    with output.work_folder(out, made_from, sorted({side for part in sides.values() for side in part})) as folder:
        if found := output.load_existing(out, made_from):  # another process had the folder and has finished it
            return _summary(str(out), found, reused=True)
        try:
            _write_all(parts, sides, options, made_from, folder, run)
        except (StorageError, OSError) as error:
            if found := output.load_existing(
                out, made_from
            ):  # on S3, where two may write the same, the other one has finished it
                return _summary(str(out), found, reused=True)
            raise StorageError(
                f"{str(error).rstrip('.')}. Once that is mended, start the same again: it does what is left."
            ) from error
        except (ConfigError, DataError):
            output.discard(folder)
            raise
        output.finish_output(folder, out, [side for part in sides.values() for side in part])
    made = output.load_existing(out, made_from)
    assert made is not None
    return _summary(str(out), made, reused=False)


def _summary(out: str, described: dict[str, dict[str, Any]], reused: bool) -> DatasetSummary:
    """The content of each `dataset.json` as a summary, `train` before `eval`; logs the notes in it."""
    names = {f.name for f in fields(PartSummary)} - {"path"}
    parts = {}
    for side in sorted(described, reverse=True):
        facts = {name: value for name, value in described[side].items() if name in names}
        parts[side] = PartSummary(_path(out, side), **facts)
    for note in dict.fromkeys(note for part in parts.values() for note in part.notes):
        logger.warning("%s: %s", out, note)
    return DatasetSummary(out, parts, reused)


def _path(out: str, side: str) -> str:
    return str(side_folder(to_location(out), side)) if side else out


def _made_from(options: IngestOptions, reader: base.Reader) -> dict[str, Any]:
    """What decides the output: the options without paths, a digest of the files' names, sizes and times, and how this
    version writes.
    """
    chosen = {name: value for name, value in asdict(options).items() if name not in ("input", "out")}
    chosen["row_group_rows"] = options.limits[1]
    if options.source in ("digits", "idx", "cifar"):
        chosen["eval_fraction"] = options.held_out(["train"])
    if options.tokenizer:
        chosen["tokenizer"] = Texts(options).digest
    sha = hashlib.sha256()
    for file in reader.files():
        sha.update(
            f"{_name_in(file.location, options)}\0{file.size}\0{file.changed_ns}\n".encode(errors="surrogateescape")
        )
    return {"options": chosen, "source_digest": sha.hexdigest(), "layout": LAYOUT}


def _name_in(place: DataLocation, options: IngestOptions) -> str:
    """The name of a source's file below the input; "." for the input itself; its own name where the input is a
    pattern.
    """
    root = locate_data(str(options.input))
    if place == root:
        return "."
    return relative_path(place, root) if is_within(place, root) else place.name


def _sides(parts: list[base.Part], options: IngestOptions) -> dict[str, tuple[str, ...]]:
    """The data sets that each part goes to."""
    names = [part.name for part in parts]
    if not options.eval_fraction or options.source == "digits":
        return {name: (name,) for name in names}
    if not set(names) <= {"", "train", "test"}:
        raise ConfigError(f"eval_fraction is {options.eval_fraction}, but the source itself has {names}. Leave it out.")
    return {name: (name,) if name == "test" else ("train", "eval") for name in names}


def _write_all(
    parts: list[base.Part],
    sides: dict[str, tuple[str, ...]],
    options: IngestOptions,
    made_from: dict[str, Any],
    folder: Location,
    run: base.Run,
) -> None:
    """Writes the shards of all parts, then each `dataset.json`."""
    made, text_columns = _write_pieces(parts, sides, options, folder, run)
    part_of = {side: part for part in parts for side in sides[part.name]}
    refused = {side: [row for piece in made[side] for row in piece["refused"]] for side in made}
    for side, part in part_of.items():
        files = "shards" if part.keeps_order else "runs"
        merge_columns(made[side], files)
        if not any(piece[files] for piece in made[side]):
            kept = sum(file["rows"] for other in sides[part.name] for piece in made[other] for file in piece[files])
            rows = kept + sum(len(refused[other]) for other in sides[part.name])
            where = (
                f"the side {side!r} of the split gets"
                if len(sides[part.name]) > 1 and rows
                else f"source {options.source!r} has"
            )
            raise DataError(f"{options.input}: {where} no rows of {rows}. Give more data or another fraction.")
    mixed = _mix({side: made[side] for side, part in part_of.items() if not part.keeps_order}, options, folder, run)
    for side, part in part_of.items():
        facts = merge_descriptions(
            part, mixed.get(side, made[side]), len(refused[side]), make_notes(text_columns[part.name])
        )
        index = [options.rename.get(name, name) for name in part.index_columns]
        facts["index_columns"] = [name for name in index if name in facts["columns"]]
        if options.pack:
            facts["rows_in"] = sum(piece["texts"] for piece in made[side]) + len(refused[side])
        place = side_folder(folder, side)
        if refused[side] or part.skipped_files:
            put_atomic(place / "refused.jsonl", format_refused([*refused[side], *part.skipped_files]))
        about = {
            "format_version": FORMAT_VERSION,
            "source": options.source,
            **facts,
            "parts": sorted(part_of),
            "made_from": made_from,
        }
        shards = {shard["path"] for shard in facts["shards"]}
        read_footers(
            place,
            [file for file in files_below(place, ".parquet") if relative_path(file, place) in shards],
            trusted=True,
        ).put(place)
        put_json(place / "dataset.json", about)


def _write_pieces(
    parts: list[base.Part], sides: dict[str, tuple[str, ...]], options: IngestOptions, folder: Location, run: base.Run
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[dict[str, Counts]]]]:
    """Reads the source; returns what each side's pieces have written, and what is in each part's columns of text, in
    their order.
    """
    tasks = [
        InputSplitTask(part.name, number, piece, sides[part.name], options, folder, part.keeps_order)
        for part in parts
        for number, piece in enumerate(part.pieces)
    ]
    made: dict[str, list[dict[str, Any]]] = {side: [] for part in parts for side in sides[part.name]}
    text_columns: dict[str, list[dict[str, Counts]]] = {part.name: [] for part in parts}
    refused = 0
    for task, record in zip(tasks, run(write_input_split, tasks), strict=True):
        text_columns[task.part].append(record["text_columns"])
        for side, piece in record["sides"].items():
            made[side].append(piece)
            refused += len(piece["refused"])
            if piece["refused"]:
                check_refused_count(refused, options, *piece["refused"][-1])
    return made, text_columns


def _mix(
    made: dict[str, list[dict[str, Any]]], options: IngestOptions, folder: Location, run: base.Run
) -> dict[str, list[dict[str, Any]]]:
    """Makes shards of the runs of sides; returns what each side's shards are, in their order.

    Raises:
        StorageError: Not all rows came back.
    """
    tasks = [task for side, pieces in made.items() for task in make_bucket_tasks(side, pieces, options, folder)]
    mixed: dict[str, list[dict[str, Any]]] = {side: [] for side in made}
    for task, shards in zip(tasks, run(write_bucket, tasks), strict=True):
        mixed[task.side].append(shards)
    for side, pieces in made.items():
        put = sum(run["rows"] for piece in pieces for run in piece["runs"])
        got = sum(shard["rows"] for bucket in mixed[side] for shard in bucket["shards"])
        if put != got:
            raise StorageError(
                f"{folder}: of {put} rows that were written to be mixed {got} came back. Remove it and start again."
            )
    return mixed


def ingest_arrays(
    folder: str, *, eval_fraction: float | None = None, seed: int = 0, **arrays: npt.ArrayLike
) -> DatasetSummary:
    """Makes a data set of arrays, as `ray-app ingest --source numpy` does of files: `ingest_arrays("datasets/mine",
    x=x, y=y)`.

    The same call with the same arrays returns what is there. For a moment the arrays are also in files of the temporary
    folder.

    Args:
        folder: What to create, on a disk or on s3://; it holds the data set, or the data sets `train` and `eval`, also
            `test`.
        eval_fraction: See `IngestOptions.eval_fraction`.
        seed: See `IngestOptions.seed`.
        **arrays: Of shape (rows, ...): `x` becomes the column `image` (3 or more axes) or `features`, `y` the column
            `label` (integers) or `target`, others keep their names. With `x_train`, `y_train`, `x_test`, `y_test` the
            data sets are `train`, `eval` and `test`.

    Raises:
        ConfigError: The folder holds something else.
        DataError: The arrays differ in rows, or hold no numbers.
    """
    with tempfile.TemporaryDirectory(prefix="ray_app-arrays-") as place:
        for name, values in arrays.items():
            file = Path(place) / f"{name}.npy"
            np.save(file, _numbers(name, values), allow_pickle=False)
            same_s = int.from_bytes(hashlib.blake2b(file.read_bytes(), digest_size=7).digest(), "big")
            os.utime(file, ns=(same_s, same_s))  # by its time an ingest knows a file again
        return ingest(IngestOptions("numpy", folder, place, eval_fraction=eval_fraction, seed=seed))


def _numbers(name: str, values: npt.ArrayLike) -> npt.NDArray:
    """The values as an array of numbers, rows first.

    Raises:
        DataError: Some are missing, or they are no numbers.
    """
    try:
        array = np.ma.asarray(values) if isinstance(values, np.ma.MaskedArray) else np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise DataError(f"{name}: {error}. Give an array with one entry for each row, all of one shape.") from error
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise DataError(
            f"{name}: {int(np.ma.count_masked(array))} values are masked. Fill them or leave their rows out."
        )
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{name}: an array of {array.dtype}; allowed are bool, integers and floats without missing values. Convert"
            f" it to numbers,"
            " labels by numpy.unique(y, return_inverse=True)[1]."
        )
    return np.ascontiguousarray(array)
