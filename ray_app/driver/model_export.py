"""From the best checkpoint of a run to a version in MLflow's model registry: at the end of a run, and by `ray-app
register`.

From a checkpoint of a run to a folder with its model, for machines without Ray and registry: `ray-app export`,
`Result.export`.
"""

from __future__ import annotations

import getpass
import logging
import shlex
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray_app.checkpoint.format import MODEL
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config.checks import check_config
from ray_app.config.config import Config, default_tracking_uri
from ray_app.data.probes import decode_first_rows
from ray_app.driver.trained_run import best_commit, chosen, load_model, trained_job
from ray_app.errors import ConfigError, RegistryError
from ray_app.models.export import refuse_taken, write_export
from ray_app.models.package import make_package
from ray_app.models.registry import Registered, find, promote, register, request_timeout_s
from ray_app.preflight.prepare import open_evaluation_source, prepare
from ray_app.runlog.endings import put_summary
from ray_app.runlog.evaluations import Evaluation, read_evaluations
from ray_app.runlog.journal import put_event
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.runlog.stored_config import read_config
from ray_app.storage.files import Location, read_json, to_location
from ray_app.storage.object_stores import S3Path
from ray_app.track.mlflow_client import connect
from ray_app.track.tracker import check_available
from ray_app.train.job import Job

logger = logging.getLogger(__name__)

_EXAMPLE_ROWS = 2
_LIMIT_S = 120.0
REGISTRABLE = ("finished", "stopped_early")


@dataclass(frozen=True)
class RegisterOptions:
    """What the command registers.

    Args:
        run: Directory of a finished run.
        name: Name of the model; not given: the run's `tracking.registered_model`.
        promote: Makes the version the champion for this reason; not given: it is the challenger, or the champion if it
            is the first.
        uri: MLflow tracking URI; not given: where the run was tracked.
    """

    run: str
    name: str | None = None
    promote: str | None = None
    uri: str | None = None


def register_best(
    job: Job, name: str, uri: str, tags: dict[str, str] | None = None, first_serves: bool = True
) -> Registered:
    """Makes the run's best checkpoint a version of a model, unless it is one already, and records that in the run.

    Args:
        job: The run.
        name: Name of the model.
        uri: Where the run was tracked.
        tags: More tags of the version.
        first_serves: Whether the first version of all becomes the champion at once.

    Raises:
        RegistryError: MLflow does not have the run yet, or the model cannot be packaged.
        CheckpointError: There is no intact checkpoint.
        Exception: Whatever MLflow raises, mostly because it cannot be reached.
    """
    tracking = read_json(job.paths.tracking) or {}
    if not tracking.get("run_id"):
        raise RegistryError(
            f"MLflow does not have the run {job.paths.name!r} yet; start the run again, which sends its record."
        )
    commit, best = best_commit(job)
    client = connect(uri)
    done = find(client, name, tracking["run_uuid"], commit.params_digest)
    if done is None:
        done = register(
            client,
            name,
            tracking["run_id"],
            tracking["run_uuid"],
            commit.params_digest,
            tags_of(job, commit, best) | (tags or {}),
            lambda folder: make_package(job.task, load_model(job, commit), example_of(job), folder),
            user(),
            first_serves,
        )
    put_event(job.paths, "registered", job.fence, name=done.name, version=done.version, aliases=list(done.aliases))
    return done


def try_to_register(job: Job, limit_s: float | None = None) -> Registered | None:
    """`register_best` at the end of a run, bounded in time; whatever goes wrong is a warning that says how to do it
    later.

    Args:
        job: The run, with `tracking.registered_model` set.
        limit_s: Seconds to wait; not given: two minutes, and what uploading the model and reading it back may take.
    """
    if limit_s is None:
        limit_s = _LIMIT_S + 2 * request_timeout_s(_model_bytes(job))
    name, uri = str(job.config.tracking.registered_model), default_tracking_uri(job.config)
    result: list[Registered | Exception] = []

    def work() -> None:
        try:
            result.append(register_best(job, name, uri))
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=work, name="register", daemon=True)
    thread.start()
    thread.join(limit_s)
    if result and isinstance(result[0], Registered):
        return result[0]
    why = redact(f"{type(result[0]).__name__}: {result[0]}") if result else f"it was not done within {limit_s:g} s"
    logger.warning(
        "The best checkpoint did not become a version of the model %r: %s\nThe run itself is complete. To do it later:"
        " %s",
        name,
        why,
        shlex.join(["ray-app", "register", "--run", str(job.paths.root), "--name", name]),
    )
    return None


def _model_bytes(job: Job) -> int:
    """Bytes of the newest checkpoint's parameters."""
    commits = CheckpointStore(job.paths).commits()
    return int(commits[-1].files.get(MODEL, {}).get("bytes", 0)) if commits else 0


def tags_of(job: Job, commit: Commit, best: Evaluation | None) -> dict[str, str]:
    """Where a version comes from: the run, its digests, and what the evaluation said."""
    tags = {
        "ray_app.run_name": job.paths.name,
        "ray_app.step": str(commit.step),
        "ray_app.config_digest": commit.config_digest,
        "ray_app.manifest_digest": commit.manifest_digest,
    }
    if best is not None:
        tags |= {"ray_app.metric": job.best_metric, "ray_app.metric_value": repr(best.metrics[job.best_metric])}
        tags |= {"ray_app.eval_data_digest": best.data_digest} if best.data_digest else {}
    return tags


def example_of(job: Job) -> dict[str, Any]:
    """Some decoded rows of the evaluation data, or of the training data if there is none."""
    source = job.evaluation or job.source
    return decode_first_rows(source.reader, source.manifest, _EXAMPLE_ROWS)


def register_run(options: RegisterOptions) -> Registered:
    """Registers the best checkpoint of a run that ended; Ray is not started.

    Raises:
        ConfigError: There is no such run, it has not ended, or there is no name for the model.
        DataError: The run's data is not what it was.
        Exception: See `register_best`.
    """
    if options.promote is not None and not options.promote.strip():
        raise ConfigError("--promote needs a reason: why is this version better than what serves now?")
    paths = RunPaths(to_location(options.run))
    config, summary = _config_of(paths, options), read_json(paths.summary)
    status = (summary or {}).get("status", "without a summary")
    if summary is None or status not in REGISTRABLE:
        raise ConfigError(
            f"The run {paths.name!r} is {status}; its best checkpoint is known at its end. Start it again to finish it."
        )
    prepared = prepare(config)
    name, uri = str(config.tracking.registered_model), default_tracking_uri(config)
    done = register_best(prepared.job, name, uri)
    if options.promote is not None and promote(connect(uri), name, done.version, options.promote, user()):
        done = Registered(done.name, done.version, tuple(sorted({*done.aliases, "champion"})))
        put_event(paths, "registered", 0, name=done.name, version=done.version, aliases=list(done.aliases))
    put_summary(paths, summary | {"model": {"name": done.name, "version": done.version, "aliases": list(done.aliases)}})
    return done


def user() -> str:
    """Who this process works for."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container whose user has no name
        return "unknown"


def _config_of(paths: RunPaths, options: RegisterOptions) -> Config:
    """The run's configuration as this process needs it: where the run is now, and where it was tracked."""
    config = read_config(paths)
    tracked = (read_json(paths.tracking) or {}).get("uri", "")
    known = tracked if tracked and "***" not in tracked else config.tracking.uri
    config = config.replace(
        run__name=paths.name,
        run__storage_path=str(_parent(paths.root)),
        tracking__enabled=True,
        tracking__uri=options.uri or known,
        tracking__registered_model=options.name or config.tracking.registered_model,
    )
    if not config.tracking.registered_model:
        raise ConfigError(
            "The run has no tracking.registered_model; say with --name which model its best checkpoint is to be a"
            " version of."
        )
    check_config(config)
    check_available(config)
    return config


def _parent(root: Location) -> Location:
    return root.parent if isinstance(root, Path) else S3Path(root.bucket, root.key.rpartition("/")[0], root.query)


@dataclass(frozen=True)
class ExportOptions:
    """What the command exports.

    Args:
        run: Directory of a run, or its s3:// URI; it may still train.
        out: Folder that the model becomes, on this machine.
        checkpoint: `best` by the evaluation metric, `newest`, or the name of one below `checkpoints`, such as
            `step-00000120-0003` or `step-120`.
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
        raise ConfigError(
            f"--out is {options.out!r}; an export is made in a folder of this machine. Copy it from there."
        )
    paths, out = RunPaths(to_location(options.run)), Path(options.out).expanduser().resolve()
    refuse_taken(out, options.overwrite)
    job = trained_job(paths)
    commit = chosen(job, options.checkpoint)
    data = job.config.data
    if data.eval_path is not None:
        job = replace(job, evaluation=open_evaluation_source(job.task, data.eval_path, data.read_task_mb))
    return write_export(
        job.task, load_model(job, commit), example_of(job), out, _source(job, commit), options.overwrite
    )


def _source(job: Job, commit: Commit) -> dict[str, Any]:
    """Where a model comes from."""
    digests = {
        "params_digest": commit.params_digest,
        "config_digest": commit.config_digest,
        "manifest_digest": commit.manifest_digest,
    }
    evaluations = [
        e for e in read_evaluations(job.paths) if (e.step, e.params_digest) == (commit.step, commit.params_digest)
    ]
    metrics = {name: value for e in evaluations for name, value in e.metrics.items() if isinstance(value, int | float)}
    return {"run": job.paths.name, "step": commit.step, **digests, "metrics": metrics}
