"""Folds and halves of a data set: rows that are chosen by their number, of files that stay where they are.

The folds have the rows of scikit-learn's `KFold`, `GroupKFold`, `StratifiedKFold` and `TimeSeriesSplit` without
shuffling, for rows in the order of the manifest. With times, as in an ingest, rows of one time stay together; where all
times differ, and the rows are sorted by them, the folds are those of `TimeSeriesSplit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.config.config import Config
from ray_app.config.sections import DataSection
from ray_app.data.dataset import Dataset, count_labels, hash_files, open_dataset, read_column, read_labels, read_rows
from ray_app.data.split_times import find_cut, to_times
from ray_app.errors import DataError
from ray_app.plan.hashing import hash_array, key
from ray_app.plan.manifest import Manifest
from ray_app.plan.order import count_rows_by_file, fill_bins
from ray_app.storage.data_files import Root

Mask = npt.NDArray[np.bool_]
_SELECTION_SHARE = 0.5
"""Share of the evaluation rows by which checkpoints and settings are chosen; the others report.

Both parts need many rows: a gain must be distinguished from chance.
"""


def open_training_data(config: Config) -> Dataset:
    """Opens the rows that a run trains on: those of `data.path`, without those of its fold."""
    dataset = _open_all(config.data)
    return dataset if config.data.fold is None else _select(dataset, split_fold(dataset, config.data)[0])


def open_evaluation_data(config: Config, classes: Sequence[str] | None = None) -> Dataset:
    """Opens the rows that a run evaluates on: those of `data.eval_path` or of its fold, and of these `evaluate.half`.

    `classes` number the labels, see `open_dataset`.
    """
    data, half = config.data, config.evaluate.half
    dataset = _open_all(data, classes) if data.fold is not None else open_dataset(str(data.eval_path), classes)
    chosen = np.ones(dataset.manifest.num_rows, np.bool_) if data.fold is None else split_fold(dataset, data)[1]
    if half is not None:
        digests = hash_files(dataset.root, dataset.manifest.paths)
        chosen = chosen & (choose_selection_rows(dataset.manifest, digests) == (half == "selection"))
        if not chosen.any():
            raise DataError(f"{data.evaluation_name} has no row in the half {half!r}. Leave evaluate.half out.")
    return dataset if chosen.all() else _select(dataset, chosen)


def _open_all(data: DataSection, classes: Sequence[str] | None = None) -> Dataset:
    """Opens all rows of `data.path`."""
    return open_dataset(data.path if isinstance(data.path, str) else data.sources, classes)


def fold_configs(config: Config, folds: int | Mapping[str, Any]) -> list[Config]:
    """Returns the configuration of a run for each fold, with the rows of `data.path` alone.

    Args:
        folds: Number of folds; or a mapping with perhaps it (`folds`), and one of the columns `by`, `by_class` and
            `by_time`.
    """
    values = dict(folds) if isinstance(folds, Mapping) else {"folds": folds}
    fields = {f"data__{name if name == 'folds' else f'fold_{name}'}": value for name, value in values.items()}
    config = config.replace(data__eval_path=None, **fields)
    name = config.run.name
    return [
        config.replace(data__fold=fold, run__name=name and f"{name}-fold-{fold}") for fold in range(config.data.folds)
    ]


def split_fold(dataset: Dataset, data: DataSection) -> tuple[Mask, Mask]:
    """Returns masks, (rows,), of the rows to train on and of those to evaluate on with `data.fold`.

    Raises:
        DataError: The column cannot divide the rows, or a fold has no rows.
    """
    root, manifest = dataset.root, dataset.manifest
    fold, folds = data.fold, data.folds
    assert fold is not None
    if data.fold_by_time is not None:
        part = _parts_of_times(_read_times(root, manifest, data.fold_by_time), folds)
        training, evaluation = part <= fold, part == fold + 1
    else:
        if data.fold_by is not None:
            fold_of_row = _folds_of_groups(read_labels(root, manifest, data.fold_by)[1], folds)
        elif data.fold_by_class is not None:
            fold_of_row = _folds_of_classes(read_labels(root, manifest, data.fold_by_class)[1], folds)
        else:
            fold_of_row = np.sort(np.arange(manifest.num_rows) % folds)
        training, evaluation = fold_of_row != fold, fold_of_row == fold
    if not training.any() or not evaluation.any():
        column = data.fold_by or data.fold_by_class or data.fold_by_time
        values = f", or of different values of {column!r}" if column else ""
        raise DataError(
            f"Fold {fold} of {folds} of {data.path} has {np.count_nonzero(training)} rows to train on and"
            f" {np.count_nonzero(evaluation)} to evaluate on: there are too few rows{values}. Lower data.folds."
        )
    return training, evaluation


def choose_selection_rows(manifest: Manifest, digests: Mapping[str, str]) -> Mask:
    """Returns a mask, (rows,), of the half of a whole data set by which checkpoints and settings are chosen.

    It follows from the SHA-256 of each file and the positions of its rows, so the same files have it under any name.
    """
    rows = count_rows_by_file(manifest).tolist()
    hashes = [
        hash_array(key(int(digests[path][:16], 16)), np.arange(count))
        for path, count in zip(manifest.paths, rows, strict=True)
    ]
    mask: Mask = np.concatenate(hashes).astype(np.float64) / 2**64 < _SELECTION_SHARE
    return mask


def _select(dataset: Dataset, chosen: Mask) -> Dataset:
    """Returns the rows of a mask, (rows,), as a data set; ranges of columns stay those of all rows."""
    manifest = dataset.manifest.select(chosen)
    count, read = partial(count_labels, dataset.root, manifest), partial(read_rows, dataset.root, manifest)
    facts = replace(dataset.facts, num_rows=manifest.num_rows, count=count, read=read)
    return replace(dataset, manifest=manifest, facts=facts)


def _folds_of_groups(group_of_row: npt.NDArray[np.unsignedinteger], folds: int) -> npt.NDArray[np.int64]:
    """Returns the fold of each row, (rows,): groups go, the largest first, to the fold with the fewest rows so far."""
    sizes = np.bincount(group_of_row)
    return fill_bins(sizes, np.argsort(sizes, kind="stable")[::-1], folds)[group_of_row]


def _folds_of_classes(class_of_row: npt.NDArray[np.unsignedinteger], folds: int) -> npt.NDArray[np.int64]:
    """Returns the fold of each row, (rows,): the rows of a class, in their order, are cut into a part for each fold."""
    first_rows, classes = np.unique(class_of_row, return_index=True)[1], class_of_row.astype(np.int64)
    # Classes count in the order in which they appear.
    by_class = np.argsort(first_rows[classes], kind="stable")
    fold_of_row = np.arange(len(classes)) % folds
    ends = np.cumsum(np.bincount(classes)[np.argsort(first_rows)])
    fold_of_row[by_class] = np.concatenate([np.sort(part) for part in np.split(fold_of_row, ends[:-1])])
    return fold_of_row


def _read_times(root: Root, manifest: Manifest, column: str) -> npt.NDArray[Any]:
    """Returns the times of all rows, (rows,), in manifest order; raises DataError for a row without one."""

    def convert(path: str, values: pa.ChunkedArray) -> npt.NDArray[Any]:
        if missing := pc.sum(pc.is_null(values, nan_is_null=True)).as_py():
            raise DataError(f"{path} has {missing} rows without a {column!r} (data.fold_by_time). Leave them out.")
        return to_times(values, f"data.fold_by_time {column!r} of {path}")

    return read_column(root, manifest, column, convert, "Name one with times (data.fold_by_time).")


def _parts_of_times(times: npt.NDArray[Any], folds: int) -> npt.NDArray[np.int64]:
    """Returns the part of each row, (rows,): 0 before all folds, otherwise 1 + its fold."""
    values, rows = np.unique(times, return_counts=True)
    if len(values) < 2:
        return np.zeros(len(times), np.int64)
    size = len(times) // (folds + 1)
    cuts = values[[find_cut(rows, part * size) for part in range(folds, 0, -1)]]
    return np.searchsorted(cuts, times, side="right")
