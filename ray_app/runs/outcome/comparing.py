"""Runs side by side, for a notebook."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ray_app.errors import ConfigError
from ray_app.record.files import location
from ray_app.record.paths import RunPaths
from ray_app.report.comparison import Comparison
from ray_app.report.facts import read_facts
from ray_app.runs.outcome.result import Result


def compare_runs(runs: Sequence[Result | str | os.PathLike[str]]) -> Comparison:
    """Reads some runs, in whatever state they are, to be compared.

    Args:
        runs: What `run_training` returned, or directories of runs, also on s3://.

    Raises:
        ConfigError: There is none, or something is no run.
        OSError: The storage does not answer.
    """
    if isinstance(runs, str) or not runs:
        raise ConfigError(f"compare_runs got {runs!r}; give a list of results or of run directories: compare_runs([first, second]).")
    roots = [run.path if isinstance(run, Result) else location(os.fspath(run)) for run in runs]
    return Comparison(tuple(read_facts(RunPaths(root), with_earlier=False) for root in roots))
