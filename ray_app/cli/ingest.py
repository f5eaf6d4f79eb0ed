"""The command `ray-app ingest`: ingests raw data in threads or on a cluster, and shows a summary."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from ray_app.cli.main import exit_code
from ray_app.ingest.ingest import ingest, preview, run_in_threads, run_on_cluster
from ray_app.ingest.options import IngestOptions
from ray_app.ingest.progress import ShownProgress
from ray_app.ingest.summary import HEADER, DatasetSummary
from ray_app.plan.manifest import find_similar_names

_MAX_WIDTH = 200


def main(arguments: list[str] | None = None, prog: str = "ray-app ingest") -> int:
    """Runs `ray-app ingest`; see `exit_code`."""
    parser = ArgumentParser(prog=prog, description="Turns raw data into folders of Parquet shards.")
    parser.add_class_arguments(IngestOptions, None)
    parser.add_argument(
        "--ray_address",
        type=str | None,
        default=None,
        help="Ray cluster on whose CPUs to work (auto or an address), which sees input and out under the same path."
        " Default: RAY_ADDRESS if that is set (as in a Ray job), otherwise threads of this process. The files are the"
        " same.",
    )
    parser.add_argument(
        "--dry_run",
        type=bool,
        default=False,
        help="Write nothing: read what an ingest reads first, and show the columns of 1,000 rows of each part.",
    )
    values = parser.parse_args(arguments).as_dict()
    address = values.pop("ray_address") or os.environ.get("RAY_ADDRESS")
    work = preview if values.pop("dry_run") else ingest
    options = IngestOptions(**values)
    return exit_code(lambda: _print(_call(work, options, address), options, work), "The data was not ingested")


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
        print("The first rows, as an ingest would store them; nothing is written.")
    print_summary(summary)
    if options.drop:
        print(f"Columns left out: {', '.join(options.drop)}")
    unusable = [
        name for part in summary.parts.values() for name, facts in part.columns.items() if facts.get("unusable")
    ]
    if options.source == "parquet":
        others = f", but not by {', '.join(unusable)}" if unusable else ""
        print(f"It can be trained on as it is{others}: nothing was written.")
    elif work is not preview:
        print("Made before from the same options and files: nothing was written." if summary.reused else "Done.")


def print_summary(summary: DatasetSummary) -> None:
    """Shows each data set as a table of its columns, and classes that may be meant to be one."""
    # Without a terminal a line is as long as its text.
    console = Console(
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
                f"  Warning: the classes {', '.join(map(repr, names))} differ in upper and lower case, blanks or the"
                " form of a character alone. If they are meant to be one, correct the labels and ingest again."
            )
