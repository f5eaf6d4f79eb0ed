"""Registration and export of a run's models.

`register_best` makes the best checkpoint a version in MLflow's model registry. `export_run` writes the model of a
checkpoint to a folder, for machines without Ray and registry.
"""

from __future__ import annotations

import getpass
import logging
import shlex
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_app.checkpoint.format import is_model_file
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config.checks import check_config
from ray_app.config.config import Config, default_tracking_uri
from ray_app.config.rules import PositiveFloat
from ray_app.data.probes import read_stored_rows
from ray_app.driver.trained_run import best_commit, choose_checkpoint, load_model, load_trained_job, read_tokenizer
from ray_app.errors import ConfigError, RegistryError
from ray_app.models.export import refuse_taken, write_export, write_parameters
from ray_app.models.package import make_package
from ray_app.models.registry import Registered, find, promote, register, request_timeout_s
from ray_app.preflight.prepare import prepare
from ray_app.runlog.evaluations import Evaluation, read_evaluations
from ray_app.runlog.journal import put_event
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.runlog.stored_config import read_config
from ray_app.storage.files import put_json, read_json, to_location
from ray_app.track.mlflow_client import connect
from ray_app.track.tracker import check_available
from ray_app.train.job import Job

logger = logging.getLogger(__name__)

_REGISTER_TIMEOUT_S = 120.0
"""Seconds that registration has at the end of a run, without those for the transfer of the model."""
REGISTRABLE = ("finished", "stopped_early")
"""Statuses of runs with a best checkpoint that will not change."""


@dataclass(frozen=True)
class RegisterOptions:
    """The options of `ray-app register`.

    Args:
        run: Directory of a finished run.
        name: Name of the model. Default: the run's `tracking.registered_model`.
        promote: Reason why the version becomes the champion. Default: the version is the challenger, or the champion if
            it is the first one.
        uri: MLflow tracking URI. Default: the run's.
    """

    run: str
    name: str | None = None
    promote: str | None = None
    uri: str | None = None


def register_best(
    job: Job, name: str, uri: str, tags: dict[str, str] | None = None, first_serves: bool = True
) -> Registered:
    """Makes the run's best checkpoint a version of a model, unless it is one already, and records the version.

    Args:
        uri: MLflow tracking URI of the run.
        tags: Additional tags of the version.
        first_serves: Whether the first version of all becomes the champion at once.

    Raises:
        RegistryError: MLflow does not have the run yet, or the model cannot be packaged.
        CheckpointError: There is no intact checkpoint.
        Exception: Any error of MLflow, mostly because it cannot be reached.
    """
    tracking = read_json(job.paths.tracking) or {}
    if not tracking.get("run_id"):
        raise RegistryError(
            f"MLflow does not have the run {job.paths.name!r} yet; start the run again to send its record."
        )
    commit, best = best_commit(job)
    client = connect(uri)
    version = find(client, name, tracking["run_uuid"], commit.params_digest)
    if version is None:
        version = register(
            client,
            name,
            tracking["run_id"],
            tracking["run_uuid"],
            commit.params_digest,
            version_tags(job, commit, best) | (tags or {}),
            lambda folder: make_package(
                job.task, load_model(job, commit), read_stored_rows(job.paths.example), folder, read_tokenizer(job)
            ),
            user_name(),
            first_serves,
        )
    put_event(job.paths, "registered", job.fence, **_describe_version(version))
    return version


def try_to_register(job: Job, limit_s: float | None = None) -> Registered | None:
    """Calls `register_best` at the end of a run, with a time limit, and returns the version.

    An error is only a warning, with the command that registers the model later; the result is None then. By default the
    limit is two minutes and the time for uploading the model and reading it back.
    """
    if limit_s is None:
        limit_s = _REGISTER_TIMEOUT_S + 2 * request_timeout_s(_model_bytes(job))
    name, uri = str(job.config.tracking.registered_model), default_tracking_uri(job.config)
    result: list[Registered | Exception] = []

    def register_in_thread() -> None:
        try:
            result.append(register_best(job, name, uri))
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=register_in_thread, name="register", daemon=True)
    thread.start()
    thread.join(limit_s)
    if result and isinstance(result[0], Registered):
        return result[0]
    why = redact(f"{type(result[0]).__name__}: {result[0]}") if result else f"not registered within {limit_s:g} s"
    command = shlex.join(["ray-app", "register", "--run", str(job.paths.root), "--name", name])
    problem = f"The best checkpoint did not become a version of the model {name!r}: {why}"
    logger.warning("%s\nThe run itself is complete. To register its model later: %s", problem, command)
    return None


def _model_bytes(job: Job) -> int:
    """Returns the bytes of the newest checkpoint's parameters; 0 if the storage does not answer."""
    with suppress(OSError):
        if commits := CheckpointStore(job.paths).commits():
            return sum(int(file["bytes"]) for name, file in commits[-1].files.items() if is_model_file(name))
    return 0


def version_tags(job: Job, commit: Commit, best: Evaluation | None) -> dict[str, str]:
    """Returns the tags of a version: its run, the digests, and its evaluation."""
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


def register_run(options: RegisterOptions) -> Registered:
    """Registers the best checkpoint of a run that has ended, without starting Ray; see also `register_best`.

    Raises:
        ConfigError: There is no such run, it has not ended, or a name for the model is missing.
        DataError: The run's data has changed since.
    """
    if options.promote is not None and not options.promote.strip():
        raise ConfigError("--promote needs a reason: why is this version better than the one that serves now?")
    paths = RunPaths(to_location(options.run))
    config, summary = _config_of(paths, options), read_json(paths.summary)
    status = (summary or {}).get("status", "without a summary")
    if summary is None or status not in REGISTRABLE:
        raise ConfigError(
            f"The run {paths.name!r} is {status}; its best checkpoint is known at its end. Start it again to finish it."
        )
    name, uri = str(config.tracking.registered_model), default_tracking_uri(config)
    version = register_best(prepare(config).job, name, uri)
    if options.promote is not None and promote(connect(uri), name, version.version, options.promote, user_name()):
        version = Registered(version.name, version.version, tuple(sorted({*version.aliases, "champion"})))
        put_event(paths, "registered", 0, **_describe_version(version))
    put_json(paths.summary, summary | {"model": _describe_version(version)})
    return version


def _describe_version(version: Registered) -> dict[str, Any]:
    return {"name": version.name, "version": version.version, "aliases": list(version.aliases)}


def user_name() -> str:
    """Returns the name of the user of this process."""
    try:
        return getpass.getuser()
    # The user of a container may be without a name.
    except (OSError, KeyError):
        return "unknown"


def _config_of(paths: RunPaths, options: RegisterOptions) -> Config:
    """Returns the run's configuration with the directory where the run is now and the address where it was tracked."""
    config = read_config(paths)
    tracked = (read_json(paths.tracking) or {}).get("uri", "")
    # The secrets in a stored address are replaced by `***`, and an address without its secrets cannot be used.
    stored_uri = tracked if tracked and "***" not in tracked else config.tracking.uri
    config = config.replace(
        run__name=paths.name,
        run__storage_path=str(paths.root.parent),
        tracking__enabled=True,
        tracking__uri=options.uri or stored_uri,
        tracking__registered_model=options.name or config.tracking.registered_model,
    )
    if not config.tracking.registered_model:
        raise ConfigError(
            "The run has no tracking.registered_model; name the registered model for its best checkpoint with --name."
        )
    check_config(config)
    check_available(config)
    return config


@dataclass(frozen=True)
class ExportOptions:
    """The options of `ray-app export`.

    Args:
        run: Directory of a run, or its URI in a bucket; it may still train.
        out: Local folder of the export.
        checkpoint: `best` by the evaluation metric, `newest`, or the name of a checkpoint below `checkpoints`, such as
            `step-00000120-0003` or `step-120`.
        overwrite: Replaces `out` if it is an export.
        max_file_gb: Writes only the parameters, in files of at most this many GB with an index for Transformers,
            without memory for all of them. Default: the model is written as one program or file.
    """

    run: str
    out: str
    checkpoint: str = "best"
    overwrite: bool = False
    max_file_gb: PositiveFloat | None = None


def export_run(options: ExportOptions) -> dict[str, Any]:
    """Writes the model of a checkpoint to a folder, without Ray and MLflow; returns the content of `export.json`.

    Raises:
        ConfigError: There is no such run or checkpoint, or the folder is taken.
        DataError: The task is made again from the run's data, since JSON does not keep its settings, and that has
            changed.
        CheckpointError: The checkpoint is damaged.
        RegistryError: The model cannot be stored without pickle.
    """
    if "://" in options.out:
        raise ConfigError(f"--out is {options.out!r}; an export is written to a local folder. Copy it from there.")
    paths, out = RunPaths(to_location(options.run)), Path(options.out).expanduser().resolve()
    refuse_taken(out, options.overwrite)
    job = load_trained_job(paths)
    commit = choose_checkpoint(job, options.checkpoint)
    source = _source(job, commit)
    if options.max_file_gb is not None:
        parameters: dict[str, Any] = CheckpointStore(paths).open_verified(commit).model
        return write_parameters(parameters, out, source, int(options.max_file_gb * 1e9), options.overwrite)
    model = load_model(job, commit)
    example = read_stored_rows(paths.example)
    return write_export(job.task, model, example, out, source, options.overwrite, read_tokenizer(job))


def _source(job: Job, commit: Commit) -> dict[str, Any]:
    """Returns the run, the step, the digests and the metrics of an exported model."""
    digests = {name: getattr(commit, name) for name in ("params_digest", "config_digest", "manifest_digest")}
    metrics = {
        name: value
        for evaluation in read_evaluations(job.paths)
        if (evaluation.step, evaluation.params_digest) == (commit.step, commit.params_digest)
        for name, value in evaluation.metrics.items()
        if isinstance(value, int | float)
    }
    return {"run": job.paths.name, "step": commit.step, **digests, "metrics": metrics}
