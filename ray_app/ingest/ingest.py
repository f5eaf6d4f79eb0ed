"""The ingest: turns raw data into Parquet shards with a `_dataset.json`.

1. A reader (`readers/`) cuts the source into input splits, by its content and not by the number of tasks.
2. Each input split is a task (`splits.py`), in threads or on a cluster. It streams tables with a `row_id`, renames
   columns, makes `label` an int64 without missing values, turns texts into tokens, refuses rows with a reason, and
   assigns each row to `train` or `eval` (`Divider`); tokens may then be packed into blocks.
3. Two stages of tasks put the rows of all input splits into the order of a hash of their ids (`shuffle.py`), unless the
   source has mixed them itself. `Shards` (`shards.py`) cuts them into row groups and files of limited rows and bytes.
4. The descriptions of the input splits are merged (`shards.py`), and the folder becomes the target
   (`output_folder.py`).

`ingest` does all of it; `run_in_threads` and `run_on_cluster` run the tasks and return the results in order;
`preview` reads some rows and writes nothing; `describe` reads what is there; `ingest_arrays` and `ingest_table` make
data sets of the arrays and tables of a notebook or a program.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import pyarrow as pa

from ray_app.data.dataset import DESCRIPTION, FORMAT_VERSION, open_dataset, read_description
from ray_app.errors import ConfigError, DataError, StorageError, remove_addresses
from ray_app.ingest import options as checks
from ray_app.ingest import output_folder as output
from ray_app.ingest.additions import (
    Addition,
    Descriptions,
    begin_addition,
    describe_addition,
    finish_addition,
    is_added,
    make_addition,
    recover_addition,
    stem_of,
    undo_addition,
)
from ray_app.ingest.ids import describe_ids, digest_ids, load_ids, make_id_notes
from ray_app.ingest.leakage import RowHashes, content_digest, find_leaks, keep_hashes, make_leak_notes
from ray_app.ingest.options import FormatTraits, IngestOptions, Source, python_spelling
from ray_app.ingest.output_folder import REFUSED, side_folder
from ray_app.ingest.readers import csv_files, sources
from ray_app.ingest.readers.arrays import Digits, Idx, Numpy
from ray_app.ingest.readers.boxes import Coco, Voc
from ray_app.ingest.readers.csv_files import Csv
from ray_app.ingest.readers.hugging_face import HuggingFace
from ray_app.ingest.readers.image_folders import Images
from ray_app.ingest.readers.json_lines import JsonLines
from ray_app.ingest.readers.tfrecord import TFRecord
from ray_app.ingest.readers.webdataset import WebDataset
from ray_app.ingest.readers.yolo import Yolo
from ray_app.ingest.shards import (
    column_facts,
    count_classes,
    describe_parquet,
    format_refused,
    merge_descriptions,
    put_footers,
    refuse_empty_side,
)
from ray_app.ingest.shuffle import make_bucket_tasks, write_bucket
from ray_app.ingest.splits import (
    Divider,
    InputSplitTask,
    Refusals,
    Texts,
    check_refused_count,
    choose_sides,
    make_tasks,
    read_input_split,
    write_input_split,
)
from ray_app.ingest.summary import (
    ColumnStatistics,
    Counts,
    DatasetSummary,
    PartSummary,
    TextColumns,
    count_missing,
    make_notes,
)
from ray_app.storage.data_files import is_folder, is_within, relative_path
from ray_app.storage.files import Location, list_folders, put_atomic, put_json, remove_tree, to_location
from ray_app.task.texts import TOKENIZER_FILE

_TASKS_PER_CPU = 4
"""Ray tasks per CPU that are submitted before the result of the first one is awaited."""
_CANCEL_S = 60.0
_MAX_TASK_CHARS = 500
"""Length of the description of a task in a message."""


def run_in_threads(
    function: Callable[[Any], Any], items: Sequence[Any], threads: int | None = None
) -> Generator[Any, None, None]:
    """Calls `function` with every item in threads, by default one per CPU, and yields the results in order.

    Threads suffice, because decoding, compressing and reading release the interpreter lock.
    """
    if len(items) == 1:
        yield function(items[0])
        return
    with ThreadPoolExecutor(threads or os.cpu_count(), "ingest") as pool:
        yield from pool.map(function, items)


def run_on_cluster(function: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any, None, None]:
    """Calls `function` with every item in Ray tasks of one CPU each, and yields the results in order.

    A task runs again if its node is lost; if its process dies, it runs three times in all, before ProcessDiedError.
    """
    import ray

    from ray_app.data.ray_tasks import RetriedTask

    task = ray.remote(_call).options(num_cpus=1, max_retries=0)
    max_waiting = max(_TASKS_PER_CPU, _TASKS_PER_CPU * int(ray.cluster_resources().get("CPU", 1)))
    waiting: deque[RetriedTask] = deque()
    try:
        for item in items:
            activity = f"while it ingested {remove_addresses(str(item))[:_MAX_TASK_CHARS]}"
            waiting.append(RetriedTask(partial(task.remote, function, item), partial(str, activity)))
            if len(waiting) >= max_waiting:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        references = [unconsumed.reference for unconsumed in waiting]
        for reference in references:
            ray.cancel(reference)
        # No task may still write when the caller goes on.
        if references:
            ray.wait(references, num_returns=len(references), timeout=_CANCEL_S)


def _call(function: Callable[[Any], Any], item: Any) -> Any:
    return function(item)


__all__ = ["READERS", "DatasetSummary", "IngestOptions", "PartSummary", "ingest"]

logger = logging.getLogger(__name__)

LAYOUT = 7
"""Version of the order of rows, of the input splits and of their records.

It increases with every change of these, so that no ingest continues what an older version has begun.
"""

READERS: dict[str, type[sources.SourceReader]] = {
    "images": Images,
    "coco": Coco,
    "voc": Voc,
    "yolo": Yolo,
    "csv": Csv,
    "jsonl": JsonLines,
    "numpy": Numpy,
    "idx": Idx,
    "webdataset": WebDataset,
    "tfrecord": TFRecord,
    "hf": HuggingFace,
    "digits": Digits,
}
_UNCOMPARED = ("input", "out", "append", "new_classes")
"""Options that do not decide the rows of a data set."""
FORMATS = {name: reader.traits for name, reader in READERS.items()} | {"parquet": FormatTraits(has_output=False)}


def ingest(options: IngestOptions, run: sources.Run = run_in_threads) -> DatasetSummary:
    """Turns raw data into one or more folders of Parquet shards, each with a `_dataset.json`.

    Memory is bounded by a row group and a block of the source for each task at a time, not by the data; with
    `split_by` the different values of that column are in memory, too. The target
    folder appears complete or not at all. After an interruption the same call does what is left.

    Args:
        run: Runs the tasks, by default in threads of this process; the files do not depend on it.

    Raises:
        ConfigError: The options are refused, or the target folder holds something else.
        DataError: The input is missing, empty, damaged or inconsistent; nothing that was written is left then.
        StorageError: A disk, the network or an object store failed; what is finished is kept.
    """
    traits = checks.check_options(options, FORMATS)
    if not traits.has_output:
        return _summary(str(options.input), {"": describe_parquet(str(options.input))}, reused=True)
    reader, out = READERS[options.source](options.input or "", options), to_location(options.out)
    made_from = _made_from(options, reader)
    if options.append and output.load_existing(out, made_from, is_addition=True):
        with output.locked(out):
            return _append(reader, options, made_from, out, run)
    if described := output.load_existing(out, made_from):
        return _summary(str(out), described, reused=True)
    parts, options, sides = _read_parts(reader, options, run)
    with output.work_folder(out, made_from, sorted({side for part in sides.values() for side in part})) as folder:
        # Another process may have had the folder and finished it.
        if described := output.load_existing(out, made_from):
            return _summary(str(out), described, reused=True)
        try:
            for side, description in _write_all(parts, sides, options, made_from, folder, run).items():
                put_json(side_folder(folder, side) / DESCRIPTION, description)
        except (StorageError, OSError) as error:
            # On S3 two processes may write the same, and the other one may have finished it.
            if described := output.load_existing(out, made_from):
                return _summary(str(out), described, reused=True)
            raise _continuable(error) from error
        except (ConfigError, DataError):
            # The options or the source are refused, so nothing that was written can be used.
            remove_tree(folder)
            raise
        output.finish_output(folder, out, [side for part in sides.values() for side in part])
    written = output.load_existing(out, made_from)
    assert written is not None
    return _summary(str(out), written, reused=False)


def _append(
    reader: sources.SourceReader, options: IngestOptions, made_from: dict[str, Any], out: Location, run: sources.Run
) -> DatasetSummary:
    """Adds the rows of a source to the data sets in a folder; see `ingest`."""
    described = output.load_existing(out, made_from, is_addition=True)
    assert described is not None
    described = recover_addition(out, described, made_from)
    if is_added(described, "source_digest", made_from["source_digest"]):
        return _summary(str(out), described, reused=True)
    parts, options, sides = _read_parts(reader, options, run)
    if (names := sorted({side for part in sides.values() for side in part})) != sorted(described):
        raise ConfigError(
            f"{options.input} has the data sets {names}, but {out} has {sorted(described)}. Use the same."
        )
    addition, classes = make_addition(parts, described, options, out)
    parts = [replace(part, classes=classes) for part in parts]
    begin_addition(out, described, addition.number, made_from)
    try:
        added = _write_all(parts, sides, options, made_from, out, run, addition, described)
        if not is_added(described, "content", next(iter(added.values()))["added"][-1]["content"]):
            finish_addition(out, added, addition.number, made_from)
            return _summary(str(out), recover_addition(out, described, made_from), reused=False)
    except (ConfigError, DataError):
        undo_addition(out, described, addition.number)
        raise
    except (StorageError, OSError) as error:
        raise _continuable(error) from error
    undo_addition(out, described, addition.number)
    logger.warning(
        "%s has the same rows as an earlier delivery (with other names or times), so no rows were added.", options.input
    )
    return _summary(str(out), described, reused=True)


def _continuable(error: Exception) -> StorageError:
    """Returns the error of an ingest that the storage has interrupted."""
    return StorageError(f"{str(error).rstrip('.')}. Fix this, then start the same command again to continue.")


def preview(options: IngestOptions, run: sources.Run = run_in_threads, rows: int = 1000) -> DatasetSummary:
    """Reads what an ingest reads before it writes, and some rows; returns the data sets as these rows show them.

    Nothing is written. Without `options.out` the paths of the summary are the names of the data sets.

    Args:
        run: See `ingest`.
        rows: Number of rows of each part of the source that suffice; the first ones of its first input splits.

    Raises:
        ConfigError: The options are refused.
        DataError: The input is missing, empty, or one of these rows cannot be used.
    """
    traits = checks.check_options(options, FORMATS, needs_output=False)
    if not traits.has_output:
        return ingest(options)
    reader = READERS[options.source](options.input or "", options)
    parts, options, sides = _read_parts(reader, options, run)
    described: dict[str, dict[str, Any]] = {}
    tasks = make_tasks(parts, sides, options, to_location("."), run)
    for part in parts:
        of_part = [task for task in tasks if task.part == part.name]
        described |= _preview_part(part, sides[part.name], of_part, options, rows)
    if not any(facts["rows"] for facts in described.values()):
        raise DataError(f"{options.input}: source {options.source!r} has no rows. Add data.")
    return _summary(options.out, described, reused=True)


def _read_parts(
    reader: sources.SourceReader, options: IngestOptions, run: sources.Run
) -> tuple[list[sources.Part], IngestOptions, dict[str, tuple[str, ...]]]:
    """Returns the data sets of a source, the options for their tasks, and the data sets that their rows go to.

    The options have the part of the rows to hold out, and lack what the reader does itself.
    """
    parts = [replace(part, keeps_order=part.keeps_order or not options.shuffle) for part in reader.parts(run)]
    held_out = reader.held_out([part.name for part in parts])
    options = replace(options, eval_fraction=held_out, drop=reader.columns_to_drop())
    return parts, options, choose_sides(parts, options, reader.traits.divides_rows)


def _preview_part(
    part: sources.Part, sides: Sequence[str], tasks: Sequence[InputSplitTask], options: IngestOptions, max_rows: int
) -> dict[str, dict[str, Any]]:
    """Returns the facts of the first rows of each side of a part, which may have no input split."""
    refusals, texts = Refusals(options), TextColumns(options.decimal or ".")
    statistics = {side: ColumnStatistics() for side in sides}
    columns: dict[str, dict[str, dict[str, Any]]] = {side: {} for side in sides}
    labels: dict[str, Counter[int]] = {side: Counter() for side in sides}
    for divider, table in _first_rows(tasks, max_rows, refusals):
        texts.add(table)
        for side, rows in divider.divide(table, refusals).items():
            statistics[side].add(rows)
            labels[side].update(rows["label"].to_pylist() if "label" in rows.column_names else [])
            for column in rows.schema:
                facts = columns[side].setdefault(column.name, column_facts(column))
                facts["nulls"] += count_missing(rows[column.name])
    return {
        side: {
            "rows": statistics[side].rows,
            "classes": part.classes,
            "class_counts": count_classes(part.classes, labels[side]),
            "columns": columns[side],
            "statistics": statistics[side].columns,
            "index_columns": _index_columns(part, options, columns[side]),
            "shards": [],
            "skipped_files": len(part.skipped_files),
            "refused": len(refusals.rows) if side == sides[0] else 0,
            "notes": [
                *part.notes,
                *make_notes([texts.counts], options.decimal),
                *make_id_notes(describe_ids(tasks[0].ids, options) if tasks else {}),
            ],
            "is_sample": True,
        }
        for side in sides
    }


def _first_rows(
    tasks: Sequence[InputSplitTask], max_rows: int, refuse: sources.Refuse
) -> Iterator[tuple[Divider, pa.Table]]:
    """Yields the first rows of a part as they would be stored, with what divides those of their input split."""
    num_rows = 0
    for task in tasks:
        divider = Divider(task)
        for table in read_input_split(task, refuse):
            yield divider, table.slice(0, max_rows - num_rows)
            num_rows += table.num_rows
            if num_rows >= max_rows:
                return


def describe(path: str) -> DatasetSummary:
    """Returns what is in a data set: rows, and the type, missing values and values of each column.

    Args:
        path: A file or folder of Parquet, or a folder that an ingest made with data sets in it (`train`, `eval`); on a
            disk or in a bucket. Rows are read unless an ingest has described them.

    Raises:
        DataError: There is no data set, or a file is damaged.
    """
    folder = to_location(path)
    if not is_folder(folder):
        for source, suffixes in (("csv", csv_files.SUFFIXES), ("jsonl", (".jsonl", ".jsonl.gz", ".ndjson"))):
            if folder.name.endswith(suffixes):
                raise DataError(
                    f"{path} is a text file; allowed are Parquet and a folder that an ingest wrote. To show the file:"
                    f" ray-app ingest --source {source} --input {path} --dry_run true."
                )
        return _summary(path, {"": describe_parquet(path)}, reused=True)
    inner = [side for side in sorted(list_folders(folder)) if read_description(folder / side)]
    described: dict[str, dict[str, Any]] = {}
    for side in inner or [""]:
        facts = read_description(side_folder(folder, side))
        # Opening compares the shards with the description.
        is_known = facts and "statistics" in facts and not open_dataset(_path(path, side)).unlisted
        described[side] = facts if facts and is_known else describe_parquet(_path(path, side))
    return _summary(path, described, reused=True)


def _summary(out: str, described: dict[str, dict[str, Any]], reused: bool) -> DatasetSummary:
    """Returns the content of each `_dataset.json` as a summary, `train` before `eval`, and logs its notes."""
    names = {f.name for f in fields(PartSummary)} - {"path"}
    parts = {}
    for side in sorted(described, reverse=True):
        facts = {name: value for name, value in described[side].items() if name in names}
        parts[side] = PartSummary(_path(out, side), **facts)
    for note in dict.fromkeys(note for part in parts.values() for note in part.notes):
        logger.warning("%s: %s", out or "data set", note)
    return DatasetSummary(out, parts, reused)


def _path(out: str, side: str) -> str:
    """Returns the folder of a data set; of one without a folder its name."""
    if not out:
        return side or "data set"
    return str(side_folder(to_location(out), side)) if side else out


def _made_from(options: IngestOptions, reader: sources.SourceReader) -> dict[str, Any]:
    """Returns all that decides the output: options without paths, names, sizes and times of files, the layout."""
    chosen = {name: value for name, value in asdict(options).items() if name not in _UNCOMPARED}
    if reader.traits.has_named_parts:
        chosen["eval_fraction"] = reader.held_out(["train"])
    if options.tokenizer:
        chosen["tokenizer"] = Texts(options).digest
    if options.ids_of:
        chosen["ids_of"] = {name: digest_ids(values) for name, values in load_ids(options).items()}
    sha = hashlib.sha256()
    root = to_location(str(options.input))
    for file in reader.files():
        line = f"{_relative_name(file.location, root)}\0{file.size}\0{file.changed_ns}\n"
        sha.update(line.encode(errors="surrogateescape"))
    return {"options": chosen, "source_digest": sha.hexdigest(), "layout": LAYOUT}


def _relative_name(file: Location, root: Location) -> str:
    """Returns a file's name below the input: "." for the input itself, its last part for a pattern."""
    if file == root:
        return "."
    return relative_path(file, root) if is_within(file, root) else file.name


def _write_all(
    parts: list[sources.Part],
    sides: dict[str, tuple[str, ...]],
    options: IngestOptions,
    made_from: dict[str, Any],
    folder: Location,
    run: sources.Run,
    addition: Addition | None = None,
    described: Descriptions | None = None,
) -> dict[str, dict[str, Any]]:
    """Writes the shards of all parts, and returns the content of each `_dataset.json`.

    Args:
        addition: The data set to which the rows are added, if there is one.
        described: The descriptions of that data set.
    """
    tasks = make_tasks(parts, sides, options, folder, run, addition)
    ids = describe_ids(tasks[0].ids, options) if tasks else {}
    written = _write_input_splits(tasks, parts, sides, options, run)
    records, refused = written.records, written.refused
    part_of = {side: part for part in parts for side in sides[part.name]}
    for side, part in part_of.items():
        refuse_empty_side(side, part, sides[part.name], records, refused, options, addition is not None)
    runs = {side: records[side] for side, part in part_of.items() if not part.keeps_order}
    shuffled = _shuffle(runs, part_of, options, folder, run, addition)
    number = addition.number if addition else 1
    hashes = {side: keep_hashes(side_folder(folder, side), rows, number) for side, rows in written.hashes.items()}
    leaks = find_leaks(hashes, written.overlaps, len(part_of) > len(parts), described or {})
    descriptions = {}
    for side, part in part_of.items():
        before = described[side] if described else None
        notes = [*make_notes(written.text_columns[part.name], options.decimal), *make_id_notes(ids)]
        notes += make_leak_notes(side, leaks.get(side))
        if before is not None:
            stale = {*make_leak_notes(side, before.get("leaks")), *make_id_notes(ids)}
            before = {**before, "notes": [note for note in before["notes"] if note not in stale]}
        facts = merge_descriptions(part, shuffled.get(side, records[side]), len(refused[side]), notes, before)
        facts["index_columns"] = _index_columns(part, options, facts["columns"])
        if options.pack:
            texts = sum(record["texts"] for record in records[side])
            facts["rows_in"] = texts + len(refused[side]) + (before["rows_in"] if before else 0)
        target = side_folder(folder, side)
        if refused[side] or part.skipped_files:
            name = f"_refused-{addition.number:05d}.jsonl" if addition else REFUSED
            put_atomic(target / name, format_refused([*refused[side], *part.skipped_files]))
        delivery = {"content": content_digest(written.hashes.values())}
        description = {"format_version": FORMAT_VERSION, "source": options.source, **facts}
        description |= {"parts": sorted(part_of), "made_from": made_from, "leaks": leaks.get(side), **delivery}
        description |= {"ids": ids} if ids else {}
        if before is not None:
            description |= describe_addition(before, facts, made_from, delivery)
        if tasks and tasks[0].first_eval_time is not None:
            description["first_eval_time"] = tasks[0].first_eval_time
        put_footers(target, facts["shards"], addition is not None)
        if options.tokenizer:
            put_json(target / TOKENIZER_FILE, Texts(options).encoder.stored)
        descriptions[side] = description
    return descriptions


def _index_columns(part: sources.Part, options: IngestOptions, columns: Collection[str]) -> list[str]:
    """Returns the columns that no task uses unless it names them: those that number the rows, and the group."""
    names = [*part.index_columns, *([options.group] if options.group else [])]
    return [name for name in (options.rename.get(name, name) for name in names) if name in columns]


@dataclass
class _Written:
    """What the tasks of the input splits return, in their order, by data set or (`text_columns`) by part."""

    records: dict[str, list[dict[str, Any]]]
    refused: dict[str, list[Any]]
    hashes: dict[str, RowHashes]
    text_columns: dict[str, list[dict[str, Counts]]]
    overlaps: list[dict[str, list[int]]]


def _write_input_splits(
    tasks: list[InputSplitTask],
    parts: list[sources.Part],
    sides: dict[str, tuple[str, ...]],
    options: IngestOptions,
    run: sources.Run,
) -> _Written:
    """Runs the tasks of all input splits."""
    names = [side for part in parts for side in sides[part.name]]
    written = _Written({side: [] for side in names}, {side: [] for side in names}, {}, {p.name: [] for p in parts}, [])
    hashes = {side: RowHashes.merge([]) for side in names}
    # After a refusal no task may still write, and a pool of threads that is left to the garbage collector can block it.
    with closing(run(write_input_split, tasks)) as results:
        for task, record in zip(tasks, results, strict=True):
            written.text_columns[task.part].append(record["text_columns"])
            written.overlaps.append(record["overlaps"])
            for side, side_record in record["sides"].items():
                hashes[side] = RowHashes.merge([hashes[side], RowHashes.load(task.hashes(side))])
                written.records[side].append(side_record)
                written.refused[side] += side_record["refused"]
                if side_record["refused"]:
                    count = sum(map(len, written.refused.values()))
                    check_refused_count(count, options, *side_record["refused"][-1])
    written.hashes = hashes
    return written


def _shuffle(
    records: dict[str, list[dict[str, Any]]],
    part_of: dict[str, sources.Part],
    options: IngestOptions,
    folder: Location,
    run: sources.Run,
    addition: Addition | None,
) -> dict[str, list[dict[str, Any]]]:
    """Writes the rows of the runs of each side as shards in the order of their hashes."""
    stem = stem_of(addition)
    tasks = [
        task
        for side in records
        for task in make_bucket_tasks(side, records[side], options, folder, part_of[side].classes, stem)
    ]
    buckets: dict[str, list[dict[str, Any]]] = {side: [] for side in records}
    with closing(run(write_bucket, tasks)) as results:
        for task, shards in zip(tasks, results, strict=True):
            buckets[task.side].append(shards)
    for side, side_records in records.items():
        rows_in = sum(run["rows"] for record in side_records for run in record["runs"])
        rows_out = sum(shard["rows"] for bucket in buckets[side] for shard in bucket["shards"])
        if rows_in != rows_out:
            raise StorageError(
                f"{folder}: {rows_in} rows were written for mixing, but {rows_out} were read back. Remove the folder"
                " and start again."
            )
    return buckets


def ingest_files(folder: str, source: Source, path: str | None = None, **options: Any) -> DatasetSummary:
    """Makes a data set of files, as `ray-app ingest` does.

    An example is `ingest_files("datasets/flowers", "csv", "flowers.csv", label="species")`. After an interruption the
    same call does what is left, and once more it reuses the data set.

    Args:
        folder: Folder to create, on a disk or in a bucket.
        source: Format of the files, see `IngestOptions.source`.
        path: A file, a folder or a pattern of names; None for the embedded digits.
        **options: The other fields of `IngestOptions`, such as `label`, `columns` or `eval_fraction`; None is the
            default.

    Raises:
        TypeError: `IngestOptions` has no such field.
        ConfigError: The options are refused, or the folder holds something else.
        DataError: The input is missing, empty, damaged or inconsistent.
        StorageError: A disk, the network or an object store failed; what is finished is kept.
    """
    changed = {name: value for name, value in options.items() if value is not None}
    with python_spelling():
        return ingest(IngestOptions(source, folder, path, **changed))
