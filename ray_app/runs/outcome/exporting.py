"""From a checkpoint of a run to a folder with its model, for machines without Ray and registry: `ray-app export`, `Result.export`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray_app.checkpoint.commit import Commit
from ray_app.errors import ConfigError
from ray_app.models.exported import refuse_taken, write_export
from ray_app.record.evaluations import read_evaluations
from ray_app.record.files import location
from ray_app.record.paths import RunPaths
from ray_app.runs.outcome.registering import example_of
from ray_app.runs.outcome.stored import chosen, load_model, trained_job
from ray_app.runs.preparing.prepare import evaluation_source
from ray_app.train.job import Job


@dataclass(frozen=True)
class ExportOptions:
    """What the command exports.

    Args:
        run: Directory of a run, or its s3:// URI; it may still train.
        out: Folder that the model becomes, on this machine.
        checkpoint: `best` by the evaluation metric, `newest`, or the name of one below `checkpoints`, such as `step-00000120-0003` or
            `step-120`.
        overwrite: Replace `out` if it is an export.
    """

    run: str
    out: str
    checkpoint: str = "best"
    overwrite: bool = False


def export_run(options: ExportOptions) -> dict[str, Any]:
    """Writes the model of a checkpoint to a folder; neither Ray nor MLflow is started or asked.

    Returns:
        The content of `export.json`.

    Raises:
        ConfigError: There is no such run or checkpoint, or the folder is taken.
        DataError: The run's data is not what it was; its task cannot be made again.
        CheckpointError: The checkpoint is damaged.
        RegistryError: The model cannot be stored without pickle.
    """
    if "://" in options.out:
        raise ConfigError(f"--out is {options.out!r}; an export is made in a folder of this machine. Copy it from there.")
    paths, out = RunPaths(location(options.run)), Path(options.out).expanduser().resolve()
    refuse_taken(out, options.overwrite)
    job = trained_job(paths)
    commit = chosen(job, options.checkpoint)
    data = job.config.data
    if data.eval_path is not None:
        job = replace(job, evaluation=evaluation_source(job.task, data.eval_path, data.read_task_mb))
    return write_export(job.task, load_model(job, commit), example_of(job), out, _source(job, commit), options.overwrite)


def _source(job: Job, commit: Commit) -> dict[str, Any]:
    """Where a model comes from."""
    digests = {"params_digest": commit.params_digest, "config_digest": commit.config_digest, "manifest_digest": commit.manifest_digest}
    evaluations = [e for e in read_evaluations(job.paths) if (e.step, e.params_digest) == (commit.step, commit.params_digest)]
    metrics = {name: value for e in evaluations for name, value in e.metrics.items() if isinstance(value, int | float)}
    return {"run": job.paths.name, "step": commit.step, **digests, "metrics": metrics}
