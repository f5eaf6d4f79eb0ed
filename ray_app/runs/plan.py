"""From a configuration and a data set to the order of its rows."""

from __future__ import annotations

from ray_app.config.config import Config
from ray_app.data.dataset.dataset import Dataset
from ray_app.data.dataset.labels import read_labels
from ray_app.errors import DataError
from ray_app.plan.balance import Classes
from ray_app.plan.manifest import Manifest
from ray_app.plan.order import Plan
from ray_app.plan.streams import rows_of_files
from ray_app.record.files import read_json
from ray_app.record.paths import RunPaths


def make_plan(config: Config, manifest: Manifest, classes: Classes | None) -> Plan:
    """Makes the order of a run.

    Raises:
        DataError: The data has less than one step, or too few files.
    """
    data, logical_workers = config.data, config.logical_workers
    files = int((rows_of_files(manifest) > 0).sum())
    if data.shard == "file" and files < logical_workers:
        raise DataError(
            f"data.shard is file, but {data.path} has {files} files with rows for {logical_workers} logical workers; each needs at least"
            " one. Ingest into more files (--shard_rows), lower scaling.logical_workers, or set data.shard to row."
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
    )
    if not plan.steps_per_epoch:
        raise DataError(
            f"{data.path} has {plan.all_rows} rows for an epoch, too few for one global batch of {data.global_batch_size} rows, and"
            " data.last_batch is drop: there is nothing to train on. Set data.last_batch: keep or lower data.global_batch_size."
        )
    return plan


def classes_of(config: Config, dataset: Dataset) -> Classes | None:
    """The classes of all rows, if they are to be balanced.

    Raises:
        DataError: There is no such column, or it holds no classes.
    """
    if config.data.sampling == "none":
        return None
    return Classes.of(dataset.manifest, read_labels(dataset.root, dataset.manifest, config.data.balance_by)[1])


def refuse_other_classes(paths: RunPaths, plan: Plan) -> None:
    """Refuses to go on if rows have other classes than when the run began.

    Raises:
        DataError: They have.
    """
    if plan.classes is not None and (read_json(paths.classes) or {}).get("digest") != plan.classes.digest:
        raise DataError(
            f"Rows have other classes than when the run {paths.name!r} began, so they would be repeated otherwise. Give the data of before,"
            " or another run.name."
        )
