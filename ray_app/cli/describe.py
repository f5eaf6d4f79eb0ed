"""The command `ray-app describe`: shows the columns of a data set and what tasks take them for."""

from __future__ import annotations

from jsonargparse import ArgumentParser

from ray_app.cli.ingest import print_summary
from ray_app.cli.main import exit_code
from ray_app.ingest.ingest import describe


def main(arguments: list[str] | None = None, prog: str = "ray-app describe") -> int:
    """Runs `ray-app describe`; see `exit_code`."""
    parser = ArgumentParser(prog=prog, description="Shows the contents of a data set: columns, values, missing values.")
    parser.add_argument("path", help="Folder of Parquet, as `ray-app ingest` writes it; on a disk or in a bucket.")
    path = parser.parse_args(arguments).path
    return exit_code(lambda: print_summary(describe(path)), "The data could not be described")
