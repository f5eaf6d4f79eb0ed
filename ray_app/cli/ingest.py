"""The command `ray-app ingest`: ingests raw data in threads or on a cluster, and shows its progress and a summary."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from typing import IO, Any, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentParser
from rich.padding import Padding
from rich.table import Table

from ray_app.cli.main import exit_code
from ray_app.errors import escape_controls
from ray_app.ingest.ingest import READERS, ingest, preview, run_in_threads, run_on_cluster
from ray_app.ingest.options import IngestOptions
from ray_app.ingest.readers import sources
from ray_app.ingest.shuffle import write_bucket
from ray_app.ingest.splits import InputSplitTask, count_times, find_ids, write_input_split
from ray_app.ingest.summary import HEADER, DatasetSummary
from ray_app.plan.manifest import find_similar_names
from ray_app.runlog.output import TextConsole

_MAX_WIDTH, _MAX_LABELS = 200, 20
"""Characters of a line without a terminal, and labels that a message lists."""
_TERMINAL_S, _LOG_S = 0.5, 15.0
"""Seconds between two updates of the progress, on a terminal and elsewhere."""
_STAGES: dict[Callable[..., Any], str] = {
    count_times: "Reading the times",
    find_ids: "Reading the ids",
    write_input_split: "Reading rows",
    write_bucket: "Shuffling and writing rows",
}
"""Names of the stages by the functions that do them; others learn types and classes."""


def main(arguments: list[str] | None = None, prog: str = "ray-app ingest") -> int:
    """Runs `ray-app ingest`; see `exit_code`."""
    parser = ArgumentParser(prog=prog, description="Turns raw data into folders of Parquet shards.")
    parser.add_class_arguments(IngestOptions, None)
    parser.add_argument(
        "--ray_address",
        type=str | None,
        default=None,
        help="Address of the Ray cluster that does the work, or auto; its nodes must see input and out under the same"
        " paths. Default: RAY_ADDRESS if it is set (as in a Ray job), otherwise threads of this process. The"
        " written files are the same.",
    )
    parser.add_argument(
        "--dry_run",
        type=bool,
        default=False,
        help="Writes no files, but shows the columns of 1,000 rows of each part.",
    )
    rewritten, texts = _read_as_written(sys.argv[1:] if arguments is None else arguments)
    values = parser.parse_args(rewritten).as_dict() | texts
    # One spelling is one text, as in Python: the data set remembers the options that it was made with.
    if isinstance(values["null"], list) and len(values["null"]) == 1:
        [values["null"]] = values["null"]
    address = values.pop("ray_address") or os.environ.get("RAY_ADDRESS")
    work = preview if values.pop("dry_run") else ingest
    options = IngestOptions(**values)
    return exit_code(lambda: _print(_call(work, options, address), options, work), "The data could not be ingested")


def _read_as_written(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments with lists and dictionaries as JSON, and the values of the options of text.

    As YAML, which `jsonargparse` reads, `#` and `~` would be nothing, and the class `no` a truth value. Lists and
    dictionaries may lack their brackets: `a,b` and `a=b,c=d`.
    """
    types = get_type_hints(IngestOptions)
    rewritten, texts = list[str](), dict[str, str]()
    waiting = deque(arguments)
    while waiting:
        argument = waiting.popleft()
        option, mark, value = argument.partition("=")
        name = option.removeprefix("--").removesuffix("+")
        kind = types.get(name) if option.startswith("--") else None
        kinds = {kind, *(get_args(kind) if kind != dict[str, str] else ())}
        is_given = mark or (waiting and not waiting[0].startswith("--"))
        if not is_given or kinds.isdisjoint((str, list[str], dict[str, str])):
            rewritten.append(argument)
            continue
        value = value if mark else waiting.popleft()
        if list[str] in kinds:
            # An option of one text or several is one text unless it has brackets: null may be a comma.
            value = _to_json(value, "" if str in kinds else ",", pairs=False)
        elif dict[str, str] in kinds:
            value = _to_json(value, ",", pairs=True)
        else:
            texts[name], value = value, "text"
        rewritten.append(f"{option}={value}")
    return rewritten, texts


def _to_json(value: str, separator: str, pairs: bool) -> str:
    """Returns a list of texts, or a dictionary of pairs of them, as JSON; what is neither is unchanged."""
    if value.startswith(("[", "{")):
        try:
            # This loader leaves every value a text.
            items = yaml.load(value, yaml.BaseLoader)
            if isinstance(items, list) and any(isinstance(item, dict) for item in items):
                # `[?, NA]`, in which YAML takes the first mark for a key.
                items = [item.strip() for item in value.removeprefix("[").removesuffix("]").split(",")]
            return json.dumps(items)
        except yaml.YAMLError:
            return value
    items = [item.strip() for item in value.split(separator)] if separator else [value]
    if not pairs:
        return json.dumps(items)
    return json.dumps(dict(item.split("=", 1) for item in items)) if all("=" in item for item in items) else value


def _call(work: Callable[..., DatasetSummary], options: IngestOptions, address: str | None) -> DatasetSummary:
    """Calls `ingest` or `preview` with threads of this process or, with an address, with a Ray cluster."""
    if not address:
        return work(options, ShownProgress(run_in_threads))
    import ray

    from ray_app.cluster.ray_private import job_config

    ray.init(address=address, job_config=job_config(), logging_level=logging.WARNING)
    try:
        return work(options, ShownProgress(run_on_cluster))
    finally:
        ray.shutdown()


def _print(summary: DatasetSummary, options: IngestOptions, work: Callable[..., DatasetSummary]) -> None:
    """Shows the data sets, their columns and warnings, and the outcome."""
    if work is preview and options.source != "parquet":
        print("The first rows, as an ingest would store them; no files are written.")
    print_summary(summary)
    _warn_of_labels(summary, options)
    if options.drop:
        print(escape_controls(f"Columns left out: {', '.join(options.drop)}"))
    unusable = [
        name for part in summary.parts.values() for name, facts in part.columns.items() if facts.get("unusable")
    ]
    if options.source == "parquet":
        others = f", but not by {', '.join(unusable)}" if unusable else ""
        print(escape_controls(f"A run can train on the data as it is{others}: no files were written."))
    elif work is not preview:
        before = "These rows were added before" if options.append else "The same options and files were ingested before"
        print(f"{before}: no files were written." if summary.reused else "Done.")


def _warn_of_labels(summary: DatasetSummary, options: IngestOptions) -> None:
    """Says how labels of numbers become classes, where they do not count from 0 and the option `classes` names them."""
    parts = summary.parts.values()
    if options.label is None or any(part.classes is not None for part in parts):
        return
    labels = sorted({int(label) for part in parts for label in part.class_counts or ()})
    # The first rows need not have every label.
    is_whole = not any(part.is_sample for part in parts)
    is_other = labels != list(range(len(labels))) and (is_whole or labels[0] < 0)
    if is_other and len(labels) > 1 and "classes" in READERS[options.source].traits.options:
        names = ",".join(map(str, labels)) if len(labels) <= _MAX_LABELS else "LABEL,LABEL,..."
        print(
            f"Warning: the labels are {sources.format_items(labels, _MAX_LABELS)}. Training needs numbers from 0 on:"
            f" --classes {names} renumbers them."
        )


def print_summary(summary: DatasetSummary) -> None:
    """Shows each data set as a table of its columns, and classes that may be meant to be one."""
    # Without a terminal a line is as long as its text.
    console = TextConsole(
        soft_wrap=True, highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else _MAX_WIDTH
    )
    for part in summary.parts.values():
        console.print(str(part))
        table = Table(*HEADER, box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for row in part.table():
            table.add_row(*row)
        console.print(Padding.indent(table, 2))
        for names in find_similar_names(part.classes or ()):
            console.print(
                f"  Warning: the classes {', '.join(map(repr, names))} differ only in case, blanks or the form of a"
                " character. If they mean the same class, correct the labels and ingest again."
            )


class ShownProgress:
    """Runs the tasks of an ingest by `run`, and shows the progress of each of its stages.

    A terminal has a line that changes in place. Elsewhere a line is written every `_LOG_S` seconds.

    Args:
        run: What runs the tasks. Rows of unfinished tasks count, too, if these run in this process.
        stream: Where to; a stream that cannot be written to ends no ingest.
    """

    def __init__(self, run: sources.Run, stream: IO[str] | None = None) -> None:
        self._run = run
        # A standard stream that was closed before the start is None.
        self._stream: IO[str] | None = sys.stderr if stream is None else stream
        self._is_terminal = False
        # `isatty` of a closed stream raises it.
        with suppress(ValueError):
            self._is_terminal = self._stream is not None and self._stream.isatty() and os.environ.get("TERM") != "dumb"

    def __call__(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any, None, None]:
        """Calls `function` with every item; see `sources.Run`."""
        stage = _Stage(function, items)
        ended = threading.Event()
        thread = threading.Thread(target=self._show, args=(stage, ended), name="ingest-progress", daemon=True)
        thread.start()
        try:
            with closing(self._run(function, items)) as results:
                for result in results:
                    stage.finish(result)
                    yield result
        finally:
            ended.set()
            thread.join()

    def _show(self, stage: _Stage, ended: threading.Event) -> None:
        while not ended.wait(_TERMINAL_S if self._is_terminal else _LOG_S):
            self._write(f"\r\x1b[2K{stage.line()}" if self._is_terminal else f"{stage.line()}\n")
        if self._is_terminal:
            self._write("\r\x1b[2K")

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # The terminal or the disk of a log is gone; the ingest does not need it.
            self._is_terminal = False


class _Stage:
    """The progress of one call of the tasks: a pass that learns types, the writing of rows, or their shuffle."""

    def __init__(self, function: Callable[[Any], Any], items: Sequence[Any]) -> None:
        self._tasks = len(items)
        self._finished = self._rows_finished = 0
        self._total: int | None = None
        self._name = _STAGES.get(function, "Reading types and classes")
        if items and isinstance(items[0], InputSplitTask):
            rows = [task.input_split.rows for task in items]
            self._total = sum(count for count in rows if count is not None) if None not in rows else None
        self._read_before, self._stored_before = sources.ROWS_READ.read, sources.ROWS_READ.stored
        self._start = time.monotonic()

    def finish(self, result: Any) -> None:
        """Counts a finished task by its result."""
        self._finished += 1
        if isinstance(result, dict) and "rows" in result:
            self._rows_finished += result["rows"]

    def line(self) -> str:
        """Returns the progress, such as `Reading rows: 1,000 of 4,000 (25%), 500 rows/s, 6 s left`."""
        elapsed_s = max(time.monotonic() - self._start, 1e-9)
        stored = sources.ROWS_READ.stored - self._stored_before
        # The rows of tasks in other processes are known once the tasks are finished.
        rows = max(sources.ROWS_READ.read - self._read_before + stored, self._rows_finished)
        texts = []
        if self._total:
            done, total = rows, self._total
            texts.append(f"{rows:,} of {total:,} ({rows / total:.0%})")
        else:
            done, total = self._finished, self._tasks
            texts += [f"{rows:,} rows"] * bool(rows) + [f"{done} of {total} tasks"] * (total > 1)
        if rows > stored:
            texts.append(f"{(rows - stored) / elapsed_s:,.0f} rows/s")
        # What an earlier ingest has done took no time now.
        before = stored if self._total else 0
        if before < done < total:
            texts.append(f"{elapsed_s * (total - done) / (done - before):.0f} s left")
        else:
            texts.append(f"{elapsed_s:.0f} s")
        return f"{self._name}: {', '.join(texts)}"
