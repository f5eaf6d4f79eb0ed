"""The command `jobs/ingest.py`: parse, ingest, say what there is now."""

from __future__ import annotations

from jsonargparse import ArgumentParser
from rich.console import Console

from ray_app.data.ingest import DatasetSummary, IngestOptions, ingest
from ray_app.errors import ConfigError, DataError


def main(args: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        args: Command line without the program's name; None takes the process's own.

    Returns:
        Exit code: 0 done, 2 options or input refused. Any other error is raised, which ends a process with 1.
    """
    parser = ArgumentParser(prog="jobs/ingest.py", description="Turns raw data into folders of Parquet shards.")
    parser.add_class_arguments(IngestOptions, None)
    options = IngestOptions(**parser.parse_args(args).as_dict())
    try:
        summary = ingest(options)
    except (ConfigError, DataError) as error:
        Console(stderr=True, soft_wrap=True).print(f"{type(error).__name__}: {error}", markup=False, highlight=False)
        return 2
    _print(summary)
    return 0


def _print(summary: DatasetSummary) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for part in summary.parts.values():
        labels = f", {len(part.class_counts)} labels" if part.class_counts else ""
        skipped = f", {part.skipped_files} other files skipped" if part.skipped_files else ""
        console.print(f"{part.path}: {part.rows} rows in {len(part.shards)} shards{labels}{skipped}", markup=False)
        console.print(f"  columns: {', '.join(part.columns)}", markup=False)
    console.print("Made before from the same options and files: nothing was written." if summary.reused else "Done.")
