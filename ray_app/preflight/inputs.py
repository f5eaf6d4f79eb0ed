"""What a run is made of: its name, the task, the order of the rows, a first row, evaluation data, parameters."""

from __future__ import annotations

import logging
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ray_app.checkpoint.format import is_model_file, params_digest, unpack_model
from ray_app.checkpoint.store import COMMIT, CheckpointStore
from ray_app.config.config import Config, default_tracking_uri
from ray_app.config.import_paths import load_class
from ray_app.data.dataset import Dataset, read_labels
from ray_app.data.probes import decode_first_row
from ray_app.errors import CheckpointError, ConfigError, DataError
from ray_app.models.export import is_export
from ray_app.models.loader import DESCRIPTION, WEIGHTS
from ray_app.models.registry import download_version, load_parameters, resolve_version
from ray_app.plan.manifest import Manifest
from ray_app.plan.order import Classes, Mixture, Plan, count_rows_by_file
from ray_app.runlog.evaluations import read_scores
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.storage.files import read_json, to_location
from ray_app.task.base import Rows, Task
from ray_app.task.ragged import Arrays
from ray_app.task.schema import named_classes
from ray_app.task.transforms import same_in_each_process
from ray_app.train.state.parameters import check_parameters_digest, read_parameters, unreadable_parameters_error

logger = logging.getLogger(__name__)

_ADJECTIVES = (
    *("amber", "bold", "brave", "bright", "calm", "clear", "crisp", "eager"),
    *("fair", "glad", "keen", "kind", "mild", "neat", "quiet"),
)
_NOUNS = (
    *("alder", "aspen", "beech", "birch", "cedar", "cliff", "coast", "creek"),
    *("delta", "elm", "fern", "fjord", "grove", "heath", "lake"),
)


def make_run_name() -> str:
    """Returns a readable run name that sorts by time, such as `20261120-140512-calm-birch-3f9c02`.

    The random suffix keeps the names different if a thousand runs start in the same second.
    """
    words = f"{secrets.choice(_ADJECTIVES)}-{secrets.choice(_NOUNS)}"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{words}-{secrets.token_hex(3)}"


def make_task(config: Config) -> Task:
    """Instantiates and returns the configured task.

    Raises:
        ConfigError: The class cannot be imported or instantiated, or is not a subclass of `Task`.
    """
    try:
        task_class = load_class(config.task)
        with same_in_each_process():
            task = task_class(**config.task.init_args)
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"task.class_path {config.task.class_path!r} with init_args {config.task.init_args} cannot be created:"
            f" {error}. Name an importable subclass of ray_app.task.base.Task and its arguments."
        ) from error
    if not isinstance(task, Task):
        raise ConfigError(
            f"task.class_path {config.task.class_path!r} is not a subclass of ray_app.task.base.Task; derive it."
        )
    return task


def make_plan(config: Config, manifest: Manifest, classes: Classes | None) -> Plan:
    """Returns the order of the rows of a run.

    Raises:
        DataError: The data has less than one step, or too few files.
    """
    data, logical_workers = config.data, config.logical_workers
    files = int((count_rows_by_file(manifest) > 0).sum())
    if data.shard == "file" and files < logical_workers:
        raise DataError(
            f"data.shard is file, but {data.path} has {files} files with rows for {logical_workers} logical workers;"
            " each logical worker needs at least one file. Ingest into more files (--shard_rows), lower"
            " scaling.logical_workers, or set data.shard to row."
        )
    plan = Plan(
        manifest,
        config.seed,
        logical_workers,
        data.global_batch_size,
        data.shuffle_window_rows,
        data.last_batch == "keep",
        data.shard,
        classes,
        data.by_length,
        data.shuffle,
        Mixture.of(manifest, data.weights) if data.weights is not None else None,
    )
    if not plan.steps_per_epoch:
        raise DataError(
            f"{data.path} has {plan.all_rows} rows for an epoch, too few for one global batch of"
            f" {data.global_batch_size} rows, and data.last_batch is drop: there is nothing to train on. Set"
            " data.last_batch: keep or lower data.global_batch_size."
        )
    return plan


def read_classes(config: Config, dataset: Dataset) -> Classes | None:
    """Returns the classes of all rows if `data.balance_by` names them, otherwise None.

    Raises:
        DataError: The column `data.balance_by` does not exist or does not hold classes.
    """
    if config.data.balance_by is None:
        return None
    return Classes.of(dataset.manifest, read_labels(dataset.root, dataset.manifest, config.data.balance_by)[1])


def read_training_row(config: Config, dataset: Dataset, task: Task) -> tuple[Rows, Arrays]:
    """Returns the first training row that can be decoded, before and after decoding, each field of shape (1, ...).

    Raises:
        BadRowError: More rows before it cannot be decoded than the configuration allows to skip.
    """
    max_bad_rows = config.data.max_bad_rows if config.data.on_bad_row == "skip" else 0
    undecoded = list[Rows]()

    def decode(rows: Rows) -> Arrays:
        undecoded.append(rows)
        return task.decode(rows)

    decoded = decode_first_row(dataset, task.columns(), decode, max_bad_rows)
    return undecoded[-1], decoded


def check_evaluation_data(paths: RunPaths, config: Config, digest: str) -> None:
    """Refuses to change the evaluation data of a run with early stopping, since its result depends on the evaluations.

    Raises:
        DataError: The digest of the data differs from that of earlier evaluations.
    """
    before = {e.data_digest for e in read_scores(paths)} - {digest}
    if before and config.evaluate.patience is not None:
        raise DataError(
            f"{config.data.evaluation_name} (digest {digest}) differs from the data of this run's earlier evaluations"
            f" ({', '.join(before)}), and with evaluate.patience the result depends on it. Restore the earlier data, or"
            " choose another run.name."
        )


_REGISTRY_SCHEME = "models:/"
_MODEL_ARGUMENTS = ("model", "model_args", "module", "detector")
"""Arguments of tasks that declare the model."""
_PRETRAINED_ARGUMENTS = ("weights", "weights_backbone", "pretrained")
"""Arguments of models (torchvision, timm) that request pretrained parameters."""


@dataclass(frozen=True)
class InitialParameters:
    """The initial parameters of a run.

    Args:
        config: The configuration, with the digest of the parameters of `train.init_from`.
        params: The parameters; None without `train.init_from`, or if the existing run has stored them.
        classes: Names of the classes that they were trained on, if they come from a model package with class names.
    """

    config: Config
    params: dict[str, Tensor] | None = None
    classes: Sequence[str] | None = None


def load_initial_parameters(config: Config, before: Config | None) -> InitialParameters:
    """Reads the parameters of `train.init_from`, unless the run exists and has stored them at its first start.

    Args:
        config: The configuration of this start.
        before: The stored configuration, if the run exists.

    Raises:
        ConfigError: The parameters cannot be read, or do not have the digest `train.init_digest`.
    """
    if config.train.init_from is None:
        return InitialParameters(config)
    source = config.train.init_from
    if not source.startswith(_REGISTRY_SCHEME):
        # A run may be resumed elsewhere, so the path is absolute.
        source = str(to_location(source) / "data" / "model" / WEIGHTS if is_export(source) else to_location(source))
    config = config.replace(train__init_from=source)
    if before is not None and before.train.init_from == source:
        return InitialParameters(
            config.replace(train__init_digest=config.train.init_digest or before.train.init_digest)
        )
    if source.startswith(_REGISTRY_SCHEME):
        params, classes = _fetch_registered(config, source)
    else:
        try:
            params, classes = _read_source(source)
        except OSError as error:
            # An error of the storage refuses the start, unlike errors later in the run.
            raise unreadable_parameters_error(source, error) from error
    check_parameters_digest(params, source, config.train.init_digest)
    return InitialParameters(config.replace(train__init_digest=params_digest(params)), params, classes)


def _read_source(source: str) -> tuple[dict[str, Tensor], Sequence[str] | None]:
    """Returns the parameters and the class names of a run, of a folder with `model.safetensors`, or of a file."""
    location = to_location(source)
    if RunPaths(location).config.exists():
        return _read_best_checkpoint(RunPaths(location)), _read_run_classes(RunPaths(location))
    commit = (read_json(location / COMMIT) if (location / COMMIT).exists() else None) or {}
    if not commit:
        weights = str(location / WEIGHTS) if (location / WEIGHTS).exists() else source
        return read_parameters(weights, None), _read_package_classes(weights)
    names = filter(is_model_file, commit.get("files", {}))
    params = unpack_model({name: (location / f"{commit.get('prefix', '')}{name}").read_bytes() for name in names})
    if commit.get("params_digest") != params_digest(params):
        raise ConfigError(f"train.init_from {source!r} is damaged: its parameters do not match its {COMMIT}.")
    return params, _read_run_classes(RunPaths(location.parent.parent))


def _read_best_checkpoint(paths: RunPaths) -> dict[str, Tensor]:
    """Returns the parameters of the best checkpoint of a run that has ended, or of the newest that is intact."""
    store, best = CheckpointStore(paths), (read_json(paths.summary) or {}).get("best") or {}
    for commit in sorted(store.commits(), key=lambda c: (c.step == best.get("step"), c.step, c.fence), reverse=True):
        try:
            params = store.load_model(commit)
        except CheckpointError as error:
            logger.warning("The checkpoint of step %d of %s is skipped: %s", commit.step, paths.root, error)
            continue
        logger.info("The initial parameters are read from step %d of %s.", commit.step, paths.root)
        return params
    raise ConfigError(f"train.init_from {str(paths.root)!r} is a run without an intact checkpoint. Name another run.")


def _read_run_classes(paths: RunPaths) -> Sequence[str] | None:
    """Returns the class names that a run has stored, or None if there are none."""
    schema = read_json(paths.schema) or {}
    return named_classes(schema.get("classes") or schema.get("class_names") or [])


def replaced_weights_warnings(config: Config) -> list[str]:
    """Returns warnings about pretrained parameters of a model that `train.init_from` replaces."""
    if config.train.init_from is None:
        return []
    arguments = config.task.init_args
    names = [
        name for key in _MODEL_ARGUMENTS for name in _pretrained_arguments(arguments.get(key), f"task.init_args.{key}")
    ]
    return [f"{name} has no effect: the parameters come from train.init_from. Set {name} to null." for name in names]


def _pretrained_arguments(value: Any, name: str) -> list[str]:
    """Returns the names of the arguments that request pretrained parameters, at any depth of `value`."""
    if isinstance(value, list):
        return [argument for i, item in enumerate(value) for argument in _pretrained_arguments(item, f"{name}[{i}]")]
    if not isinstance(value, dict):
        return []
    names = [
        f"{name}.{key}" for key in _PRETRAINED_ARGUMENTS if isinstance(value.get(key), str) or value.get(key) is True
    ]
    for key, item in value.items():
        names += _pretrained_arguments(item, f"{name}.{key}")
    return names


def _read_package_classes(source: str) -> Sequence[str] | None:
    """Returns the class names of the model package that a file of parameters belongs to, or None if there are none."""
    file = to_location(source)
    if not isinstance(file, Path):
        return None
    try:
        description = read_json(file.parent / DESCRIPTION)
    except ValueError:
        # Another program has written a file of the same name.
        return None
    return named_classes(description.get("classes") or []) if isinstance(description, dict) else None


def _fetch_registered(config: Config, model: str) -> tuple[dict[str, Tensor], Sequence[str] | None]:
    """Downloads a registered model and returns its parameters and class names."""
    uri = default_tracking_uri(config)
    try:
        with tempfile.TemporaryDirectory() as folder:
            data = download_version(uri, resolve_version(uri, model), Path(folder))
            return load_parameters(data), _read_package_classes(str(data / WEIGHTS))
    except ConfigError:
        raise
    except Exception as error:  # MLflow raises many types of errors, mostly because it cannot be reached.
        raise ConfigError(
            f"train.init_from {model!r} cannot be loaded from {redact(uri)}: {type(error).__name__}: {error}. Check"
            " tracking.uri, or name model.safetensors of an export."
        ) from error
