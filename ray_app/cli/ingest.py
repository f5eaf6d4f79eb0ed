"""The command `ray-app ingest`: ingests raw data in threads or on a cluster, and shows a summary."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

from jsonargparse import ArgumentParser
from rich.console import Console

from ray_app.cli.main import exit_code
from ray_app.ingest.ingest import DatasetSummary, ingest, run_in_threads, run_on_cluster
from ray_app.ingest.options import IngestOptions
from ray_app.plan.manifest import find_similar_names


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
    values = parser.parse_args(arguments).as_dict()
    address = values.pop("ray_address") or os.environ.get("RAY_ADDRESS")
    options = IngestOptions(**values)
    return exit_code(lambda: _print(_ingest(options, address), options.source), "The data was not ingested")


def _ingest(options: IngestOptions, address: str | None) -> DatasetSummary:
    """Ingests in threads of this process or, with an address, on a Ray cluster."""
    if not address:
        return ingest(options, run_in_threads)
    import ray

    from ray_app.cluster.ray_private import job_config

    ray.init(address=address, job_config=job_config(), logging_level=logging.WARNING)
    try:
        return ingest(options, run_on_cluster)
    finally:
        ray.shutdown()


def _print(summary: DatasetSummary, source: str) -> None:
    """Shows the parts of the data set, their columns and warnings."""
    say = partial(Console(soft_wrap=True, highlight=False).print, markup=False)
    for part in summary.parts.values():
        text = f"{part.path}: {part.rows} rows in {len(part.shards)} shards"
        text += f", {len(part.class_counts)} labels" if part.class_counts else ""
        text += f", {part.skipped_files} other files left out (refused.jsonl names them)" if part.skipped_files else ""
        say(text + (f", {part.refused} rows refused (refused.jsonl says why)" if part.refused else ""))
        for names in find_similar_names(part.classes or ()):
            say(
                f"  Warning: the classes {', '.join(map(repr, names))} differ in upper and lower case, blanks or the"
                " form of a character alone. If they are meant to be one, correct the labels and ingest again."
            )
        say(f"  columns: {', '.join(part.columns)}")
        if source == "parquet":
            for name, facts in part.columns.items():
                say(_column_line(name, facts))
    columns = [column for part in summary.parts.values() for column in part.columns.items()]
    unusable = [name for name, facts in columns if facts.get("unusable")]
    usable = f"It can be trained on as it is{', but not by ' + ', '.join(unusable) if unusable else ''}"
    reused = usable if source == "parquet" else "Made before from the same options and files"
    say(f"{reused}: nothing was written." if summary.reused else "Done.")


def _column_line(name: str, facts: dict[str, Any]) -> str:
    """Returns a line with the type, the missing values and the usability of a Parquet column."""
    kind = f"{facts['type']} {facts['dtype']}".rstrip() + (f" {tuple(facts['shape'])}" if facts["shape"] else "")
    nulls = f"{facts['nulls']} rows with a missing value, which are bad rows where a task reads it"
    missing = f", {nulls}" if facts["nulls"] else ""
    return f"    {name}: {kind}{missing}" + (f"; not usable: {facts['unusable']}" if facts["unusable"] else "")
