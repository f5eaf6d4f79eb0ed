"""Scoring a model on a data set in chunks of rows, by one process or by several that share the chunks.

The chunks are the same whoever scores them, and what they gave is added in their order. So the result does not depend, to the last bit, on
how many processes there were.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ray_app.errors import BadRowError, DataError
from ray_app.plan.manifest import Manifest
from ray_app.task.annotations import MetricCollection
from ray_app.task.base import Batch, Mistake, Task
from ray_app.task.losses import Losses
from ray_app.task.own_code import own_code
from ray_app.task.roi_align import use_eager_roi_align
from ray_app.task.rows.ragged import Arrays, Ragged, to_batch
from ray_app.task.score.counting import count_directly
from ray_app.task.score.states import load_states, make_metrics, reset_parts, states_of

MOST_MISTAKES = 12
_WANTED_CHUNKS, _MOST_ROWS, _MOST_BYTES = 16, 8192, 64_000_000
_MOST_NUMBERS = 10_000
"""Largest table that is recorded: a confusion matrix of 100 classes."""


@dataclass(frozen=True)
class Chunk:
    """What the rows [low, high) gave.

    Args:
        low: First row.
        rows: How many.
        loss: Sum of their losses.
        weight: Sum of their weights, which is what the mean loss is over.
        states: The states of the task's metrics after these rows alone, by metric and state.
        mistakes: The worst of the rows that were predicted wrong.
    """

    low: int
    rows: int
    loss: float
    weight: float
    states: dict[str, dict[str, Any]]
    mistakes: list[Mistake]


@dataclass(frozen=True)
class Scores:
    """What a model is worth on a data set.

    Args:
        values: The task's metrics that are one number, and the mean loss, unless no row weighs anything.
        tables: Those that are lists (one number per class) or matrices.
        mistakes: The worst of the rows that were predicted wrong, the surest first.
    """

    values: dict[str, float]
    tables: dict[str, list[Any]] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def record(self, classes: list[str]) -> dict[str, Any]:
        """The fields of an `Evaluation` that say what was found."""
        examples = [asdict(m) | {"image": m.image and "data:image/png;base64," + b64encode(m.image).decode()} for m in self.mistakes]
        return {"metrics": self.values, "tables": self.tables, "classes": classes, "examples": examples}


def score(
    task: Task,
    model: nn.Module,
    arrays: Arrays,
    size: int,
    device: torch.device,
    part: int = 0,
    parts: int = 1,
    chunk_rows: int | None = None,
    keep: Container[str] | None = None,
    forward: Callable[[nn.Module, Batch], Any] | None = None,
    manifest: Manifest | None = None,
) -> Iterator[Chunk]:
    """Scores a data set, or every `parts`-th chunk of it.

    Args:
        task: The prepared task.
        model: The model, on the device; it is put into evaluation mode.
        arrays: Every decoded field; where rows have different lengths a chunk is one forward pass, padded to its longest.
        size: Rows of one forward pass.
        device: Where to compute.
        part: Which of several processes this is.
        parts: How many there are.
        chunk_rows: Rows of a chunk; not given: a number that makes the work quick.
        keep: Names of the metrics whose states are kept; not given: all.
        forward: What runs the model on a batch; not given: the task's `evaluated`.
        manifest: The rows, by which a message names one.

    Raises:
        DataError: The loss of a row is NaN or infinite, and so is something in the row.
    """
    model.eval()
    metrics = make_metrics(task).to(device)
    count_directly()
    if device.type == "cuda":
        use_eager_roi_align()
    rows, worst = len(next(iter(arrays.values()))), list[float]()
    ragged = any(isinstance(values, Ragged) for values in arrays.values())
    step = chunk_rows or size if ragged else chunk_rows or _chunk_rows(rows, sum(values[:1].nbytes for values in arrays.values()), size)
    for low in range(part * step, rows, parts * step):
        batch = {name: values.to(device) for name, values in to_batch(arrays, slice(low, low + step)).items()}
        for _, metric in metrics.items(keep_base=True, copy_state=False):
            reset_parts(metric)
        losses, mistakes = list[Losses](), list[Mistake]()
        # Not in inference mode: workers evaluate the model that they train, and what it makes once and keeps would be useless for backward.
        with own_code(partial("evaluating rows {} to {}".format, low, min(low + step, rows) - 1)), torch.no_grad():
            for first, some, outputs in _passes(partial(forward or task.evaluated, model), batch, size):
                losses.append(Losses.of(task.loss(outputs, some)))
                task.update(metrics, outputs, some)
                mistakes += [replace(m, row=first + m.row) for m in task.mistakes(outputs, some, MOST_MISTAKES)]
        found = []
        for mistake in mistakes:
            if len(worst) < MOST_MISTAKES or mistake.confidence > worst[-1]:  # pictures are made of no others
                worst = sorted([*worst, mistake.confidence], reverse=True)[:MOST_MISTAKES]
                found.append(replace(mistake, row=low + mistake.row, image=task.picture(batch, mistake.row)))
        kept = [(str(name), metric) for name, metric in metrics.items(keep_base=True, copy_state=False) if keep is None or name in keep]
        states = {name: states_of(metric) for name, metric in kept}
        values = torch.cat([each.values for each in losses])
        if not values.isfinite().all():
            _check_rows(arrays, low + np.flatnonzero(~values.isfinite().numpy(force=True)), manifest)
        weights = [each.weights if each.weights is not None else torch.ones_like(each.values) for each in losses]
        weight = torch.cat(weights).sum(dtype=torch.float64).item()
        yield Chunk(low, len(values), values.double().sum().item(), weight, states, found)


def _check_rows(arrays: Arrays, positions: npt.NDArray[np.int64], manifest: Manifest | None) -> None:
    """Refuses the first of some rows in which something is NaN or infinite; of others, the model is to blame for their losses."""
    for position in positions.tolist():
        for name, values in arrays.items():
            row = values.row(position) if isinstance(values, Ragged) else np.asarray(values[position])
            if row.dtype.kind == "f" and not np.isfinite(row).all():
                reason = f"{name!r} is NaN or infinite, and so is its loss; correct the value or drop the row"
                if manifest is None:
                    raise DataError(f"Row {position} of the data: {reason}.")
                raise BadRowError(*manifest.place_of(position), reason)


def _chunk_rows(rows: int, row_bytes: int, size: int) -> int:
    """Rows of a chunk: some forward passes, since a metric's update costs much more than a row, but enough chunks to share."""
    passes = min(rows // (_WANTED_CHUNKS * size), _MOST_ROWS // size, _MOST_BYTES // max(1, row_bytes * size))
    return size * max(1, passes)


def _passes(forward: Callable[[Batch], Any], batch: Batch, size: int) -> list[tuple[int, Batch, Any]]:
    """First row, rows and outputs of each forward pass of `size` rows of a chunk; tensors are put together as one."""
    rows = len(next(iter(batch.values())))
    parts = [(low, {name: values[low : low + size] for name, values in batch.items()}) for low in range(0, rows, size)]
    made = [(low, part, forward(part)) for low, part in parts]
    outputs = [output for _, _, output in made]
    return [(0, batch, torch.cat(outputs))] if len(made) > 1 and all(isinstance(one, Tensor) for one in outputs) else made


def combine(task: Task, chunks: Iterable[Chunk]) -> Scores:
    """Adds up what the chunks of a whole data set gave, in any order of arrival; metrics whose states were not kept are left out.

    Raises:
        ConfigError: A metric of the task cannot be put together from parts.
    """
    ordered = sorted(chunks, key=lambda chunk: chunk.low)
    metrics = kept_metrics(task, ordered)
    count_directly()
    for name, metric in metrics.items(keep_base=True, copy_state=True):
        load_states(metric, [chunk.states[str(name)] for chunk in ordered])
    values, tables = computed_values(metrics)
    weight = math.fsum(chunk.weight for chunk in ordered)
    if weight:
        values["loss"] = math.fsum(chunk.loss for chunk in ordered) / weight
    worst = sorted((m for chunk in ordered for m in chunk.mistakes), key=lambda m: (-m.confidence, m.row))
    return Scores(values, tables, worst[:MOST_MISTAKES])


def computed_values(metrics: MetricCollection) -> tuple[dict[str, float], dict[str, list[Any]]]:
    """What metrics compute from their states: those of one number, and those that are lists or matrices."""
    values: dict[str, float] = {}
    tables: dict[str, list[Any]] = {}
    with own_code(lambda: "the metrics of all evaluated rows"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a metric that draws samples when it is computed gives every process the same
        computed = metrics.compute()
    for key, found in computed.items():
        value = torch.as_tensor(found)
        if value.numel() == 1:
            values[key] = float(value)
        elif value.numel() <= _MOST_NUMBERS:
            tables[key] = value.tolist()
    return values, tables


def kept_metrics(task: Task, chunks: Sequence[Chunk]) -> MetricCollection:
    """The task's metrics whose states the chunks hold; all of them if there is no chunk."""
    metrics = make_metrics(task)
    if not chunks or all(str(name) in chunks[0].states for name in metrics.keys(keep_base=True)):
        return metrics
    known = metrics.items(keep_base=True, copy_state=True)
    return type(metrics)({str(name): metric for name, metric in known if name in chunks[0].states})
