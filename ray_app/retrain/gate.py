"""Is the challenger better than the champion? Pure functions of what the blocks of the evaluation rows gave for the
two.

The interval of the gain is that of the paired bootstrap: blocks of consecutive rows are drawn with replacement, the
same for both models, and the metric of both is computed for each draw (Efron and Tibshirani, "An Introduction to the
Bootstrap", 1993, percentile interval; Künsch 1989 for blocks). Rows of a block may depend on each other, blocks may
not. The draws are keyed, so the same rows and models give the same interval. The rule is that of a one-sided test at (1
- confidence) / 2: superiority if `min_gain` is at least 0, non-inferiority by that margin below it.

Scoring packaged models on the same rows, by one Ray task with the evaluator's resources.

A model is scored as it is served: from the files of its version in the registry, so the directory of the run that made
it is not needed.

Rows that are chosen by a hash of their file's content and their place in it: a sample of old ones, and those of the
gate.

The same files give the same rows, whatever the files are called.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import ray
import torch
from torch import Tensor, nn

from ray_app.config.sections import EvaluateSection
from ray_app.data.arrays import Columns
from ray_app.data.dataset import Dataset
from ray_app.data.memory_cache import fetch_auto
from ray_app.data.parquet_files import DataFile
from ray_app.data.process_deaths import RetriedTask
from ray_app.data.reader import RowSource, plan_reads
from ray_app.errors import ConfigError
from ray_app.ingest.shards import Shards
from ray_app.models import loader
from ray_app.models.export import exported_module
from ray_app.plan.hashing import hash_array, key
from ray_app.plan.manifest import Manifest
from ray_app.plan.order import Segment
from ray_app.retrain.options import RetrainSection
from ray_app.storage.files import remove_tree, to_json
from ray_app.task import device as environment
from ray_app.task.base import Batch, Task
from ray_app.task.metrics import Chunk, combine, resample, score
from ray_app.task.ragged import Arrays

if TYPE_CHECKING:
    pass

GUARD = "recall"
"""The metric of one number per class that is watched, where the task has it."""


@dataclass(frozen=True)
class ClassRecall:
    """The recall of one class.

    Args:
        rows: Evaluation rows of the class.
        champion: Its recall.
        challenger: Its recall.
        least_drop: Lower bound of the interval of the fall, which holds for all classes together.
    """

    rows: int
    champion: float
    challenger: float
    least_drop: float


@dataclass(frozen=True)
class GateFigures:
    """What was found about a challenger.

    Args:
        metric: The metric that decides.
        mode: Whether more (`max`) or less (`min`) of it is better.
        rows: Rows that both were scored on.
        challenger: Its value.
        champion: The champion's; None: there is no champion.
        gain: How much better the challenger is, in the metric's unit; below 0: worse.
        low: Lower bound of the interval of the gain.
        high: Its upper bound.
        recalls: Of every class with enough rows, by its name.
    """

    metric: str
    mode: str
    rows: int
    challenger: float
    champion: float | None = None
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    recalls: dict[str, ClassRecall] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """What the gate says.

    Args:
        promote: Whether the challenger becomes the champion.
        reason: Why, with the figures.
    """

    promote: bool
    reason: str


def draws(seed: int, resamples: int, blocks: int) -> npt.NDArray[np.int64]:
    """How often each block occurs in each bootstrap resample, shape (resamples, blocks); a function of the arguments
    only.
    """
    chosen = hash_array(key(seed, 0x67617465), np.arange(resamples * blocks).reshape(resamples, blocks)) % np.uint64(
        blocks
    )
    return np.stack([np.bincount(row, minlength=blocks) for row in chosen.astype(np.int64)])


def figures(
    task: Task,
    metric: str,
    mode: str,
    challenger: Sequence[Chunk],
    champion: Sequence[Chunk] | None,
    seed: int,
    section: RetrainSection,
) -> GateFigures:
    """Compares two models on the same rows.

    Args:
        task: The prepared task; its metrics are those of the chunks.
        metric: The metric that decides.
        mode: Whether more (`max`) or less (`min`) of it is better.
        challenger: What each block of the rows gave for it.
        champion: The same for the champion; None: there is none.
        seed: Chooses the draws.
        section: Resamples, confidence and the fewest rows of a class.
    """
    scores, rows = combine(task, challenger), sum(chunk.rows for chunk in challenger)
    if champion is None:
        return GateFigures(metric, mode, rows, scores.values[metric])
    before = combine(task, champion)
    sign = 1 if mode == "max" else -1
    counts = draws(seed, section.resamples, len(challenger))
    gains = sign * (resample(task, challenger, metric, counts) - resample(task, champion, metric, counts))
    low, high = np.quantile(gains, [(1 - section.confidence) / 2, (1 + section.confidence) / 2]).tolist()
    recalls = {
        task.classes[i]: recall
        for i, recall in _recalls(challenger, champion, counts, section).items()
        if i < len(task.classes)
    }
    gain = sign * (scores.values[metric] - before.values[metric])
    return GateFigures(metric, mode, rows, scores.values[metric], before.values[metric], gain, low, high, recalls)


def judge(found: GateFigures, section: RetrainSection) -> Decision:
    """Says whether a challenger becomes the champion."""
    problems = []
    worst = section.min_metric
    if worst is not None and not (
        found.challenger >= worst if found.mode == "max" else found.challenger <= worst
    ):  # also NaN
        problems.append(
            f"its {found.metric} of {found.challenger:.4f} is not as good as retrain.min_metric = {worst:g}"
        )
    if not math.isfinite(found.challenger):
        problems.append(
            f"its {found.metric} is no number to judge it by; look at the rows of the gate (one class, a constant"
            f" target?)"
        )
    if found.champion is None or not math.isfinite(found.champion):
        other = (
            "no champion to compare with"
            if found.champion is None
            else f"the champion's is {found.champion}, which nothing compares with"
        )
        said = f"{found.metric} {found.challenger:.4f} on {found.rows:,} rows, {other}"
        return Decision(not problems, "; ".join([said, *problems]))
    assert found.gain is not None
    assert found.low is not None
    said = (
        f"{found.metric} {found.challenger:.4f} against the champion's {found.champion:.4f} on {found.rows:,} rows:"
        f" gain {found.gain:+.4f}"
        f" ({section.confidence:.0%} interval {found.low:+.4f} to {found.high:+.4f})"
    )
    if not found.low > section.min_gain:
        problems.append(f"the lower bound is not above retrain.min_gain = {section.min_gain:g}, so it may be no better")
    for name, recall in found.recalls.items():
        if recall.least_drop > section.max_recall_drop:
            problems.append(
                f"the recall of class {name} falls from {recall.champion:.3f} to {recall.challenger:.3f} ({recall.rows}"
                f" rows), by at least"
                f" {recall.least_drop:.3f} beyond chance; allowed are {section.max_recall_drop:g}"
                f" (retrain.max_recall_drop)"
            )
    return Decision(not problems, "; ".join([said, *problems]))


def _recalls(
    challenger: Sequence[Chunk], champion: Sequence[Chunk], counts: npt.NDArray[np.int64], section: RetrainSection
) -> dict[int, ClassRecall]:
    """The recalls of the classes with enough rows, by their numbers, from the states of the guard metric; none if it
    keeps others.

    Both models are drawn alike, so what they agree on does not count. The bound is normal, with the standard deviation
    of the draws, at (1 - confidence) / 2 over the number of classes (Bonferroni): draws alone do not reach so far into
    the tail for many classes.
    """
    states: list[list[dict[str, Any]]] = [
        [chunk.states.get(GUARD, {}) for chunk in chunks] for chunks in (challenger, champion)
    ]
    if not all({"tp", "fn"} <= state.keys() for found in states for state in found):
        return {}
    new, old = (
        np.stack([state["tp"].numpy() for state in found]).astype(np.float64) for found in states
    )  # (blocks, classes)
    rows = np.stack([(state["tp"] + state["fn"]).numpy() for state in states[0]]).astype(np.float64)
    watched = np.flatnonzero(rows.sum(0) >= section.min_class_rows).tolist()
    if not watched:
        return {}
    far = NormalDist().inv_cdf(1 - (1 - section.confidence) / 2 / len(watched))
    drops = (counts @ (old - new)[:, watched]) / np.maximum(1, counts @ rows[:, watched])  # (draws, classes)
    total = rows.sum(0)
    return {
        i: ClassRecall(int(total[i]), float(was), float(now), float(was - now - far * spread))
        for i, was, now, spread in zip(
            watched,
            (old.sum(0) / np.maximum(1, total))[watched],
            (new.sum(0) / np.maximum(1, total))[watched],
            drops.std(0),
            strict=True,
        )
    }


MOST_BLOCKS = 1000
Files = dict[str, bytes]
"""The files of a package that hold its model, by name."""


@dataclass(frozen=True)
class Request:
    """Rows to score models on.

    Args:
        source: The data set.
        segments: Its rows.
        models: The packages by any name.
        blocks: Into how many chunks the rows are cut at least, as far as there are rows; not given: as is quick.
        chosen: Which of the rows count, shape (rows of the segments,); not given: all.
    """

    source: RowSource
    segments: list[Segment]
    models: dict[str, Files]
    blocks: int | None = None
    chosen: npt.NDArray[np.bool_] | None = None


class PackagedModule(nn.Module):
    """A loaded package, which is in evaluation mode for good: an exported one refuses to be asked for it.

    Args:
        module: What the loader returned.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._held = [module]  # no submodule, so that modes do not reach it

    def forward(self, *fields: Tensor) -> Any:
        """Runs it on its inputs, each (rows, ...)."""
        return self._held[0](*fields)


def files_of(data: Path) -> Files:
    """The files of the folder with `package.json`: a model that needs its task's code gets the one that is here, if
    that is the same.
    """
    return {file.name: file.read_bytes() for file in sorted(data.iterdir()) if file.is_file()}


def sample(manifest: Manifest, most_rows: int) -> list[Segment]:
    """About `most_rows` rows of all row groups, some consecutive ones of each, chosen by a keyed hash; all if there are
    no more.
    """
    share = min(1.0, most_rows / manifest.num_rows)
    luck = hash_array(key(2), np.arange(manifest.num_row_groups))
    segments = []
    for group, rows in enumerate(manifest.rows.tolist()):
        whole, part = divmod(rows * share, 1)
        take = int(whole) + (float(luck[group]) / 2**64 < part)
        if take:
            segments.append(Segment(group, int(luck[group]) % (rows - take + 1), take))
    return segments


def score_packages(
    task: Task, metrics: Sequence[str], requests: list[Request], section: EvaluateSection
) -> list[dict[str, list[Chunk]]]:
    """Scores models on rows, in one Ray task on the connected cluster.

    Args:
        task: The prepared task of now, which decodes the rows and measures all the models.
        metrics: The metrics that are looked at besides the loss; the task need not have all.
        requests: Which models on which rows.
        section: The evaluator's resources and batch size.

    Returns:
        For each request what the chunks of its rows gave, by the model's name, in the order of the rows.

    Raises:
        BadRowError: A row cannot be decoded.
        ConfigError: A model takes fields that the task does not decode.
        ProcessDiedError: The process of the task died again and again.
    """
    options = {"num_cpus": section.num_cpus, "num_gpus": section.num_gpus, "max_retries": 0}
    submit = partial(ray.remote(_score_all).options(**options).remote, task, metrics, requests, section)
    rows = "; ".join(
        f"{sum(segment.rows for segment in request.segments):,} rows of {request.source.reader.root}"
        for request in requests
    )
    return RetriedTask(submit, lambda: f"while it scored models on {rows}").result()


def _score_all(
    task: Task, metrics: Sequence[str], requests: list[Request], section: EvaluateSection
) -> list[dict[str, list[Chunk]]]:
    """Runs in the Ray task."""
    environment.pin(section.threads, True, refuses=False)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    device = environment.gpu_of(ray.get_gpu_ids(), visible) if section.num_gpus else torch.device("cpu")
    environment.use_device(device)
    found = []
    for request in requests:
        arrays = _arrays(request)
        rows = len(next(iter(arrays.values())))
        chunk_rows = -(-rows // request.blocks) if request.blocks else None
        scored = {}
        for name, files in request.models.items():
            with tempfile.TemporaryDirectory() as folder:
                model, inputs = _load(files, Path(folder), device)
            if not set(inputs) <= arrays.keys():
                raise ConfigError(
                    f"The {name} takes the fields {', '.join(inputs)}, but the task decodes {', '.join(arrays)}; they"
                    f" cannot be compared."
                    " Use another tracking.registered_model for a task with other inputs."
                )
            run, packaged = partial(run_packaged, inputs), PackagedModule(model)
            asked = score(
                task, packaged, arrays, section.batch_size, device, chunk_rows=chunk_rows, keep=metrics, forward=run
            )
            scored[name] = list(asked)
        found.append(scored)
    return found


def run_packaged(inputs: list[str], model: nn.Module, batch: Batch) -> Any:
    """Runs a package on the fields that it takes, in its order."""
    return model(*(batch[name] for name in inputs))


def _arrays(request: Request) -> Arrays:
    """The decoded rows of a request."""
    source = request.source
    columns = Columns(source.fields, sum(segment.rows for segment in request.segments))
    for table in fetch_auto(source.reader, plan_reads(source.manifest, request.segments, source.task_rows)):
        columns.add(table)
    arrays = columns.all()
    return arrays if request.chosen is None else {name: values[request.chosen] for name, values in arrays.items()}


def _load(files: Files, folder: Path, device: torch.device) -> tuple[nn.Module, list[str]]:
    """The module of a package on a device, and the fields that it takes."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    description = loader.describe(folder)
    if description["format"] == "torch.export":
        model = exported_module(loader.load_exported(folder / loader.EXPORTED), device)
    else:
        model = loader.load(folder).to(device)
    return model, [spec["name"] for spec in description["inputs"]]


_SHARD_ROWS, _ROW_GROUP_ROWS, _ROW_GROUP_BYTES = 1_000_000, 10_000, 16_000_000
_DESCRIPTION = "dataset.json"
_SELECTION_SHARE = 0.5
"""Of the evaluation rows: by these the best checkpoint is chosen. Both parts need rows, the gate to tell a gain from
luck.
"""


def old_files(delivery: dict[str, str], before: dict[str, str]) -> set[str]:
    """The paths of a delivery whose content was in another one, under whatever name."""
    known = set(before.values())
    return {path for path, digest in delivery.items() if digest in known}


def in_share(content: str, first: int, rows: int, share: float) -> npt.NDArray[np.bool_]:
    """Which of some rows of a file are in a share of them, shape (rows,); what a smaller share has, a larger one has,
    too.

    Args:
        content: SHA-256 of the file's content.
        first: Place of the first of them in the file.
        rows: How many.
        share: From 0 to 1.
    """
    chosen: npt.NDArray[np.bool_] = (
        hash_array(key(int(content[:16], 16)), np.arange(first, first + rows)).astype(np.float64) / 2**64 < share
    )
    return chosen


def gate_rows(manifest: Manifest, delivery: dict[str, str]) -> npt.NDArray[np.bool_]:
    """Which evaluation rows the gate judges on, shape (rows of the manifest,): those that are not in `selection_part`.

    The best of several checkpoints is the luckier one, on the rows that chose it: judged by them, two equally good
    models differ.

    Args:
        manifest: The evaluation data.
        delivery: SHA-256 of the content of its files by path.
    """
    rows = np.bincount(manifest.file_of, weights=manifest.rows, minlength=len(manifest.paths)).astype(np.int64)
    return ~np.concatenate(
        [
            in_share(delivery[path], 0, many, _SELECTION_SHARE)
            for path, many in zip(manifest.paths, rows.tolist(), strict=True)
        ]
    )


def selection_part(dataset: Dataset, columns: list[str], delivery: dict[str, str], out: Path) -> Path:
    """Writes the evaluation rows by which the best checkpoint is chosen, unless that was done before; returns `out`."""
    return put_together(dataset, columns, delivery, set(dataset.manifest.paths), _SELECTION_SHARE, out)


def put_together(
    dataset: Dataset, columns: list[str], delivery: dict[str, str], old: set[str], fraction: float, out: Path
) -> Path:
    """Writes all rows of new files and a share of the rows of old ones, unless that was done before.

    Args:
        dataset: The delivered data.
        columns: The columns that the task reads.
        delivery: SHA-256 of the content of its files by path.
        old: Paths of its old files.
        fraction: Share of their rows; a row is chosen by a hash of its file's content and its place in it.
        out: The new data set, there whole or not at all.

    Returns:
        `out`.
    """
    if (out / _DESCRIPTION).is_file():
        return out
    partial, scratch = out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.scratch")
    for left in (partial, scratch):  # of a start that was stopped in the middle; the round's lease lets only one write
        remove_tree(left)
    partial.mkdir(parents=True)
    shards = Shards(partial, "part-00000", scratch, _SHARD_ROWS, _ROW_GROUP_ROWS, _ROW_GROUP_BYTES)
    for table in _rows(dataset, columns, delivery, old, fraction):
        shards.write(table)
    shards.close()
    made_from = {"files": delivery, "old": sorted(old), "old_fraction": fraction}
    described = shards.description() | {"rows": shards.rows, "classes": dataset.facts.classes, "made_from": made_from}
    (partial / _DESCRIPTION).write_text(to_json(described, indent=1))
    remove_tree(scratch)
    os.rename(partial, out)
    return out


def _rows(
    dataset: Dataset, columns: list[str], delivery: dict[str, str], old: set[str], fraction: float
) -> Iterator[pa.Table]:
    manifest = dataset.manifest
    for index, path in enumerate(manifest.paths):
        first = 0
        with DataFile(dataset.root, path, manifest.partitions) as file:
            for group in np.flatnonzero(manifest.file_of == index).tolist():
                table = file.read_row_group(int(manifest.index_in_file[group]), columns)
                kept = (
                    table.filter(pa.array(in_share(delivery[path], first, table.num_rows, fraction)))
                    if path in old
                    else table
                )
                first += table.num_rows
                if kept.num_rows:
                    yield kept
