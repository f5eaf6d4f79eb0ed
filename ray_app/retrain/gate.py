"""The gate: decides whether the challenger is better than the champion, on rows that no checkpoint was chosen by.

It has three parts:

- The comparison, pure functions of the metric states of blocks of rows. The interval of the gain is that of the paired
  bootstrap: blocks of consecutive rows are drawn with replacement, the same for both models, and the metric of both is
  computed for each draw (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, percentile interval; Künsch
  1989 for blocks). Rows of a block may depend on each other, blocks may not. The draws are keyed, so the same rows and
  models give the same interval. The rule is a one-sided test at (1 - confidence) / 2: superiority if `min_gain` is at
  least 0, non-inferiority by that margin if it is below 0.
- The scoring of packaged models on the same rows, in one Ray task with the evaluator's resources. A model is scored as
  it is served, from the files of its version in the registry; the directory of its run is not needed.
- The selection of rows: the gate has one half of the evaluation rows, and the best checkpoint is chosen by the other
  one (`evaluate.half`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import safetensors.torch
import torch
from torch import nn

from ray_app.config.sections import EvaluateSection
from ray_app.data.arrays import Columns
from ray_app.data.dataset import open_dataset
from ray_app.data.probes import probe
from ray_app.data.ray_tasks import RetriedTask, fetch_auto
from ray_app.data.reader import RowSource, plan_reads
from ray_app.devices import HOST, assigned_device, kind_of
from ray_app.errors import ConfigError
from ray_app.models import loader
from ray_app.models.package import class_path, digest_sources, sources_of
from ray_app.plan.hashing import hash_array, key
from ray_app.plan.manifest import Manifest
from ray_app.plan.order import Segment
from ray_app.predict.actor import Model, Predict
from ray_app.retrain.options import RetrainSection
from ray_app.task import environment
from ray_app.task.base import Batch, Task
from ray_app.task.configured_arguments import load_loss
from ray_app.task.metrics import Chunk, combine, resample, score
from ray_app.task.module import ModuleTask
from ray_app.task.ragged import Arrays

GUARD_METRIC = "recall"
"""The metric with a value per class that must not fall; only tasks with this metric are checked."""
_RESAMPLES = 1000
"""Bootstrap resamples of an interval, a usual number for one of 95 %."""
_MIN_CLASS_ROWS = 20
"""Rows of a class in the gate's data from which its recall counts; the bound for chance is loose with fewer."""


@dataclass(frozen=True)
class ClassRecall:
    """The recall of one class; `least_drop` is the lower bound of its fall, with confidence for all classes."""

    rows: int
    champion: float
    challenger: float
    least_drop: float


@dataclass(frozen=True)
class GateFigures:
    """The comparison of a challenger with the champion.

    Args:
        champion: The champion's value; None without a champion.
        gain: How much better the challenger is, in the metric's unit; below 0: worse.
        recalls: Recalls of each class with enough rows, by its name.
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
    """The decision of the gate."""

    promote: bool
    reason: str


def bootstrap_counts(seed: int, resamples: int, blocks: int) -> npt.NDArray[np.int64]:
    """Returns how often each block occurs in each resample, (resamples, blocks), by the arguments alone."""
    hashes = hash_array(key(seed, 0x67617465), np.arange(resamples * blocks).reshape(resamples, blocks))
    drawn_blocks = hashes % np.uint64(blocks)
    return np.stack([np.bincount(row, minlength=blocks) for row in drawn_blocks.astype(np.int64)])


def compare_models(
    task: Task,
    metric: str,
    mode: str,
    challenger: Sequence[Chunk],
    champion: Sequence[Chunk] | None,
    seed: int,
    section: RetrainSection,
) -> GateFigures:
    """Compares two models on the same rows, by their metric states of each block of rows.

    `section` has the confidence; `champion` is None without a champion.
    """
    scores, rows = combine(task, challenger), sum(chunk.rows for chunk in challenger)
    if champion is None:
        return GateFigures(metric, mode, rows, scores.values[metric])
    champion_scores = combine(task, champion)
    sign = 1 if mode == "max" else -1
    counts = bootstrap_counts(seed, _RESAMPLES, len(challenger))
    gains = sign * (resample(task, challenger, metric, counts) - resample(task, champion, metric, counts))
    low, high = np.quantile(gains, [(1 - section.confidence) / 2, (1 + section.confidence) / 2]).tolist()
    recalls = {
        task.classes[i]: recall
        for i, recall in compare_recalls(challenger, champion, counts, section).items()
        if i < len(task.classes)
    }
    gain = sign * (scores.values[metric] - champion_scores.values[metric])
    return GateFigures(
        metric, mode, rows, scores.values[metric], champion_scores.values[metric], gain, low, high, recalls
    )


def decide_promotion(figures: GateFigures, section: RetrainSection) -> Decision:
    """Decides whether a challenger becomes the champion."""
    problems = []
    min_metric = section.min_metric
    # The comparisons are negated so that NaN is a problem, too.
    if min_metric is not None and not (
        figures.challenger >= min_metric if figures.mode == "max" else figures.challenger <= min_metric
    ):
        problems.append(
            f"the {figures.metric} of {figures.challenger:.4f} is not as good as retrain.min_metric = {min_metric:g}"
        )
    if not math.isfinite(figures.challenger):
        problems.append(
            f"the {figures.metric} is not a number; check the rows of the gate (one class, or a constant target?)"
        )
    if figures.champion is None or not math.isfinite(figures.champion):
        comparison = (
            "no champion to compare with"
            if figures.champion is None
            else f"the champion's is {figures.champion}, which is not comparable"
        )
        summary = f"{figures.metric} {figures.challenger:.4f} on {figures.rows:,} rows, {comparison}"
        return Decision(not problems, "; ".join([summary, *problems]))
    assert figures.gain is not None
    assert figures.low is not None
    summary = (
        f"{figures.metric} {figures.challenger:.4f} against the champion's {figures.champion:.4f} on {figures.rows:,}"
        f" rows: gain {figures.gain:+.4f} ({section.confidence:.0%} interval {figures.low:+.4f} to {figures.high:+.4f})"
    )
    if not figures.low > section.min_gain:
        problems.append(f"the lower bound is not above retrain.min_gain = {section.min_gain:g}, so it may be no better")
    for name, recall in figures.recalls.items():
        if recall.least_drop > section.max_recall_drop:
            problems.append(
                f"the recall of class {name} falls from {recall.champion:.3f} to {recall.challenger:.3f} ({recall.rows}"
                f" rows), by at least {recall.least_drop:.3f} beyond chance; allowed are {section.max_recall_drop:g}"
                " (retrain.max_recall_drop)"
            )
    return Decision(not problems, "; ".join([summary, *problems]))


def compare_recalls(
    challenger: Sequence[Chunk], champion: Sequence[Chunk], counts: npt.NDArray[np.int64], section: RetrainSection
) -> dict[int, ClassRecall]:
    """Returns the recalls of the classes with enough rows, by class number, from the states of the guard metric.

    The result is empty if that metric lacks the states `tp` and `fn`, or if no class has enough rows.

    Both models have the same draws, so rows on which they agree do not count. The bound is normal, with the standard
    deviation of the draws, at (1 - confidence) / 2 over the number of classes (Bonferroni): the draws alone do not
    reach that far into the tail for many classes.
    """
    states: list[list[dict[str, Any]]] = [
        [chunk.states.get(GUARD_METRIC, {}) for chunk in chunks] for chunks in (challenger, champion)
    ]
    if not all({"tp", "fn"} <= state.keys() for model_states in states for state in model_states):
        return {}
    # The shapes are (blocks, classes).
    new, old = (np.stack([state["tp"].numpy() for state in model_states]).astype(np.float64) for model_states in states)
    rows = np.stack([(state["tp"] + state["fn"]).numpy() for state in states[0]]).astype(np.float64)
    watched = np.flatnonzero(rows.sum(0) >= _MIN_CLASS_ROWS).tolist()
    if not watched:
        return {}
    quantile = NormalDist().inv_cdf(1 - (1 - section.confidence) / 2 / len(watched))
    # The shape is (draws, classes).
    drops = (counts @ (old - new)[:, watched]) / np.maximum(1, counts @ rows[:, watched])
    total = rows.sum(0)
    before, after = (recalled.sum(0) / np.maximum(1, total) for recalled in (old, new))
    return {
        i: ClassRecall(int(total[i]), float(was), float(now), float(was - now - quantile * spread))
        for i, was, now, spread in zip(watched, before[watched], after[watched], drops.std(0), strict=True)
    }


MAX_BLOCKS = 1000
Files = dict[str, bytes]
"""The files of a package that hold its model, by name."""


@dataclass(frozen=True)
class ScoringRequest:
    """Rows, and the models to score on them.

    Args:
        blocks: Minimum number of chunks into which the rows are divided, if there are enough rows; by default the
            fastest number. With `evaluate.fixed_batches` a chunk is a batch.
    """

    source: RowSource
    segments: list[Segment]
    models: dict[str, Files]
    blocks: int | None = None


def read_package_files(data: Path) -> Files:
    """Returns the files of a package without the code of the task, which the installed one must equal."""
    return {file.name: file.read_bytes() for file in sorted(data.iterdir()) if file.is_file()}


def sample_segments(manifest: Manifest, max_rows: int) -> list[Segment]:
    """Returns segments, ranges of row groups by a keyed hash, of about `max_rows` rows in total."""
    share = min(1.0, max_rows / manifest.num_rows)
    hashes = hash_array(key(2), np.arange(manifest.num_row_groups))
    segments = []
    for group, rows in enumerate(manifest.rows.tolist()):
        whole, part = divmod(rows * share, 1)
        count = int(whole) + (float(hashes[group]) / 2**64 < part)
        if count:
            segments.append(Segment(group, int(hashes[group]) % (rows - count + 1), count))
    return segments


def score_packages(
    task: Task, metrics: Sequence[str], requests: list[ScoringRequest], section: EvaluateSection
) -> list[dict[str, list[Chunk]]]:
    """Scores models on rows, in one Ray task on the connected cluster; metrics that the task lacks are ignored.

    Returns for each request the chunks of metric states in the order of the rows, by the model's name.

    Raises:
        BadRowError: A row cannot be decoded.
        ConfigError: A model takes fields that the task does not decode.
        ProcessDiedError: The process of the task died in every attempt.
    """
    options = {"num_cpus": section.num_cpus, "num_gpus": section.num_gpus, "max_retries": 0}
    submit = partial(ray.remote(_score_all).options(**options).remote, task, metrics, requests, section)
    description = "; ".join(
        f"{sum(segment.rows for segment in request.segments):,} rows of {request.source.reader.root}"
        for request in requests
    )
    return RetriedTask(submit, lambda: f"while it scored models on {description}").result()


def _score_all(
    task: Task, metrics: Sequence[str], requests: list[ScoringRequest], section: EvaluateSection
) -> list[dict[str, list[Chunk]]]:
    """Scores the models of all requests; runs in the Ray task."""
    environment.set_threads_and_kernels(section.threads, True, refuses=False)
    device = assigned_device(ray.get_gpu_ids()) if section.num_gpus else HOST
    kind_of(device).use(device)
    results = []
    for request in requests:
        shared = _read_arrays(request.source, request)
        rows = len(next(iter(shared.values())))
        chunk_rows = -(-rows // request.blocks) if request.blocks else None
        scored = {}
        for name, files in request.models.items():
            package = PackageFiles(name, files, task)
            predict, source = package.load(device), package.source(request.source)
            arrays = shared if source is request.source else _read_arrays(source, request)
            if not set(package.inputs) <= arrays.keys():
                raise ConfigError(
                    f"The {name} accepts the fields {', '.join(package.inputs)}, but the task decodes"
                    f" {', '.join(arrays)}, so the models cannot be compared. Use another tracking.registered_model for"
                    " a task with other inputs."
                )
            losses = nn.Module()
            if isinstance(task, ModuleTask) and type(task).loss is ModuleTask.loss:
                load_loss(losses, task.loss_spec, safetensors.torch.load(files[loader.WEIGHTS]))
            chunks = score(
                task,
                losses.to(device),
                arrays,
                section.batch_size,
                device,
                chunk_rows=chunk_rows,
                fixed=section.fixed_batches,
                keep=metrics,
                forward=partial(predict_without_losses, predict),
            )
            scored[name] = list(chunks)
        results.append(scored)
    return results


def predict_without_losses(predict: Predict, losses: nn.Module, batch: Batch) -> Any:
    """Returns the outputs of a package for a batch; the module in the place of its model has the loss alone."""
    del losses
    return predict(batch)


class PackageFiles:
    """The files of a package, of which the code is that of the configured task.

    Args:
        called: The role of its model, such as `champion`.
    """

    def __init__(self, called: str, files: Files, task: Task) -> None:
        self._called, self._files = called, files
        self._task = task
        self._described = json.loads(files[loader.DESCRIPTION])
        self.inputs: list[str] = [spec["name"] for spec in self._described["inputs"]]

    def restore(self) -> Task:
        """Returns the task with the settings of the package."""
        return self._task.restore(self._described["task"]["settings"], f"The package of the {self._called}")

    def source(self, source: RowSource) -> RowSource:
        """Returns the source that decodes rows as the package was trained: what its task computed is its own."""
        settings = self._described["task"]["settings"] or {}
        if not self._task.fitted or settings.get("fitted") in (None, self._task.fitted):
            return source
        other = self.restore()
        fields = probe(open_dataset(source.reader.root), other.columns(), other.decode)
        reader = replace(source.reader, columns=other.columns(), decode=other.decode, fields=fields)
        return replace(source, reader=reader)

    def load(self, device: torch.device) -> Predict:
        """Loads the model onto a device; raises ConfigError for one of other code than is installed."""
        described, digest = self._described, self._described["params_digest"]
        if described["format"] == "torch.export":
            return Model(self._task, self._files[loader.EXPORTED], self.inputs, digest).load(device)
        code = json.loads(self._files[loader.TASK])["code"]
        is_same = described["task"]["class_path"] == class_path(self._task)
        if not is_same or code != digest_sources(sources_of(type(self._task).__module__)):
            raise ConfigError(
                f"The {self._called} has the task {described['task']['class_path']}, whose code differs from the"
                f" installed {class_path(self._task)}, so its model cannot be rebuilt. Install the code of its"
                " training, or use another tracking.registered_model."
            )
        return Model(self.restore(), self._files[loader.WEIGHTS], None, digest).load(device)


def _read_arrays(source: RowSource, request: ScoringRequest) -> Arrays:
    """Reads and decodes the rows of a request."""
    columns = Columns(source.fields, sum(segment.rows for segment in request.segments))
    for table in fetch_auto(source.reader, plan_reads(source.manifest, request.segments, source.task_rows)):
        columns.add(table)
    return columns.all()


def find_old_files(delivery: dict[str, str], before: dict[str, str]) -> set[str]:
    """Returns the paths of the files with content that an earlier delivery had, under any name."""
    digests_before = set(before.values())
    return {path for path, digest in delivery.items() if digest in digests_before}
