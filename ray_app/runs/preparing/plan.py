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
        data.by_length,
    )
    if not plan.steps_per_epoch:
        raise DataError(
            f"{data.path} has {plan.all_rows} rows for an epoch, too few for one global batch of {data.global_batch_size} rows, and"
            " data.last_batch is drop: there is nothing to train on. Set data.last_batch: keep or lower data.global_batch_size."
        )
    return plan


def mixing_doubts(config: Config, dataset: Dataset, plan: Plan) -> list[str]:
    """What the footers say against the mixing of the rows, for people, each a sentence or two with its figures."""
    rows = dataset.manifest.rows[dataset.manifest.rows > 0]
    window, name = plan.window_rows, config.data.balance_by
    if window >= plan.manifest.num_rows:
        return []
    doubts = []
    facts = dataset.facts.columns.get(name)
    if facts is not None and facts.group_span is not None and facts.minimum is not None and facts.maximum is not None:
        values, groups = facts.maximum - facts.minimum + 1, window / float(rows.mean()) + 1
        if groups * facts.group_span < 0.5 * min(values, window):
            doubts.append(
                f"{config.data.path} looks sorted by {name!r}: a row group spans {facts.group_span:,.1f} of {values:,.0f} values on an"
                f" average, and a shuffle window of {window:,} rows mixes about {groups:.1f} row groups, so at most about"
                f" {groups * facts.group_span:,.0f} values. Ingest it again (ray-app ingest mixes), or raise data.shuffle_window_rows."
            )
    if (largest := int(rows.max())) > window:
        doubts.append(
            f"{config.data.path} has row groups of up to {largest:,} rows, more than a shuffle window of {window:,} rows, which then mixes"
            " the rows of one or two. Where rows that are near each other are alike, ingest it (ray-app ingest mixes), or raise"
            " data.shuffle_window_rows."
        )
    return doubts


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
