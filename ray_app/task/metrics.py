"""Counts of classes where kernels must be deterministic.

torchmetrics 1.9 compares every row with every bin then: rows x classes^2 numbers, 2 GB for 256 rows of 1,000 classes,
for nothing. The bits of a sum depend on the order of its additions because floats are rounded; whole numbers are not,
so a count is the same in whatever order threads, or the atomic additions of a GPU, make it. torch 2.15 itself counts as
not deterministic only what is weighted.

Scoring a model on a data set in chunks of rows, by one process or by several that share the chunks.

The chunks are the same whoever scores them, and what they gave is added in their order. So the result does not depend,
to the last bit, on how many processes there were.

Whether less or more of a metric is better, where nobody said so.

Metrics of resampled data sets, from the states that chunks of rows left: nothing is scored again.
"""

from __future__ import annotations

import math
import sys
from base64 import b64encode
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ray_app.errors import BadRowError, ConfigError, DataError
from ray_app.plan.manifest import Manifest
from ray_app.task.annotations import Metric, MetricCollection
from ray_app.task.base import Batch, Losses, Mistake, Task
from ray_app.task.metric_states import load_states, make_metrics, metric_parts, reset_parts, state_key, states_of
from ray_app.task.ragged import Arrays, Ragged, to_batch
from ray_app.task.roi_align import use_eager_roi_align
from ray_app.task.user_code import user_code

_BINCOUNT = "_bincount"


def use_direct_bincount() -> None:
    """Lets the metrics of torchmetrics that are imported by now count with `torch.bincount`, whatever kernels may do
    otherwise.
    """
    from torchmetrics.utilities import data

    theirs = vars(data)[_BINCOUNT]
    if theirs is _direct_bincount:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("torchmetrics.") and vars(module).get(_BINCOUNT) is theirs:
            vars(module)[_BINCOUNT] = _direct_bincount


def _direct_bincount(x: Tensor, minlength: Any = None) -> Tensor:
    """As torchmetrics' `_bincount` without the comparing."""
    return torch.bincount(x, minlength=minlength if minlength is not None else len(torch.unique(x)))


MAX_MISTAKES = 12
_TARGET_CHUNKS, _MAX_CHUNK_ROWS, _MAX_CHUNK_BYTES = 16, 8192, 64_000_000
_MAX_TABLE_NUMBERS = 10_000
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
        examples = [
            asdict(m) | {"image": m.image and "data:image/png;base64," + b64encode(m.image).decode()}
            for m in self.mistakes
        ]
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
        arrays: Every decoded field; where rows have different lengths a chunk is one forward pass, padded to its
            longest.
        size: Rows of one forward pass.
        device: Where to compute.
        part: Which of several processes this is.
        parts: How many there are.
        chunk_rows: Rows of a chunk; not given: a number that makes the work quick.
        keep: Names of the metrics whose states are kept; not given: all.
        forward: What runs the model on a batch; not given: the task's `eval_outputs`.
        manifest: The rows, by which a message names one.

    Raises:
        DataError: The loss of a row is NaN or infinite, and so is something in the row.
    """
    model.eval()
    metrics = make_metrics(task).to(device)
    use_direct_bincount()
    if device.type == "cuda":
        use_eager_roi_align()
    rows, worst = len(next(iter(arrays.values()))), list[float]()
    ragged = any(isinstance(values, Ragged) for values in arrays.values())
    step = (
        chunk_rows or size
        if ragged
        else chunk_rows or _chunk_rows(rows, sum(values[:1].nbytes for values in arrays.values()), size)
    )
    for low in range(part * step, rows, parts * step):
        batch = {name: values.to(device) for name, values in to_batch(arrays, slice(low, low + step)).items()}
        for _, metric in metrics.items(keep_base=True, copy_state=False):
            reset_parts(metric)
        losses, mistakes = list[Losses](), list[Mistake]()
        # Not in inference mode: workers evaluate the model that they train, and what it makes once and keeps would be
        # useless for backward.
        with user_code(partial("evaluating rows {} to {}".format, low, min(low + step, rows) - 1)), torch.no_grad():
            for first, some, outputs in _forward_passes(partial(forward or task.eval_outputs, model), batch, size):
                losses.append(Losses.of(task.loss(outputs, some)))
                task.update(metrics, outputs, some)
                mistakes += [replace(m, row=first + m.row) for m in task.mistakes(outputs, some, MAX_MISTAKES)]
        found = []
        for mistake in mistakes:
            if len(worst) < MAX_MISTAKES or mistake.confidence > worst[-1]:  # pictures are made of no others
                worst = sorted([*worst, mistake.confidence], reverse=True)[:MAX_MISTAKES]
                found.append(replace(mistake, row=low + mistake.row, image=task.picture(batch, mistake.row)))
        kept = [
            (str(name), metric)
            for name, metric in metrics.items(keep_base=True, copy_state=False)
            if keep is None or name in keep
        ]
        states = {name: states_of(metric) for name, metric in kept}
        values = torch.cat([each.values for each in losses])
        if not values.isfinite().all():
            _refuse_non_finite_row(arrays, low + np.flatnonzero(~values.isfinite().numpy(force=True)), manifest)
        weights = [each.weights if each.weights is not None else torch.ones_like(each.values) for each in losses]
        weight = torch.cat(weights).sum(dtype=torch.float64).item()
        yield Chunk(low, len(values), values.double().sum().item(), weight, states, found)


def _refuse_non_finite_row(arrays: Arrays, positions: npt.NDArray[np.int64], manifest: Manifest | None) -> None:
    """Refuses the first of some rows in which something is NaN or infinite; of others, the model is to blame for their
    losses.
    """
    for position in positions.tolist():
        for name, values in arrays.items():
            row = values.row(position) if isinstance(values, Ragged) else np.asarray(values[position])
            if row.dtype.kind == "f" and not np.isfinite(row).all():
                reason = f"{name!r} is NaN or infinite, and so is its loss; correct the value or drop the row"
                if manifest is None:
                    raise DataError(f"Row {position} of the data: {reason}.")
                raise BadRowError(*manifest.place_of(position), reason)


def _chunk_rows(rows: int, row_bytes: int, size: int) -> int:
    """Rows of a chunk: some forward passes, since a metric's update costs much more than a row, but enough chunks to
    share.
    """
    passes = min(rows // (_TARGET_CHUNKS * size), _MAX_CHUNK_ROWS // size, _MAX_CHUNK_BYTES // max(1, row_bytes * size))
    return size * max(1, passes)


def _forward_passes(forward: Callable[[Batch], Any], batch: Batch, size: int) -> list[tuple[int, Batch, Any]]:
    """First row, rows and outputs of each forward pass of `size` rows of a chunk; tensors are put together as one."""
    rows = len(next(iter(batch.values())))
    parts = [(low, {name: values[low : low + size] for name, values in batch.items()}) for low in range(0, rows, size)]
    made = [(low, part, forward(part)) for low, part in parts]
    outputs = [output for _, _, output in made]
    return (
        [(0, batch, torch.cat(outputs))] if len(made) > 1 and all(isinstance(one, Tensor) for one in outputs) else made
    )


def combine(task: Task, chunks: Iterable[Chunk]) -> Scores:
    """Adds up what the chunks of a whole data set gave, in any order of arrival; metrics whose states were not kept are
    left out.

    Raises:
        ConfigError: A metric of the task cannot be put together from parts.
    """
    ordered = sorted(chunks, key=lambda chunk: chunk.low)
    metrics = metrics_with_states(task, ordered)
    use_direct_bincount()
    for name, metric in metrics.items(keep_base=True, copy_state=True):
        load_states(metric, [chunk.states[str(name)] for chunk in ordered])
    values, tables = compute_values(metrics)
    weight = math.fsum(chunk.weight for chunk in ordered)
    if weight:
        values["loss"] = math.fsum(chunk.loss for chunk in ordered) / weight
    worst = sorted((m for chunk in ordered for m in chunk.mistakes), key=lambda m: (-m.confidence, m.row))
    return Scores(values, tables, worst[:MAX_MISTAKES])


def compute_values(metrics: MetricCollection) -> tuple[dict[str, float], dict[str, list[Any]]]:
    """What metrics compute from their states: those of one number, and those that are lists or matrices."""
    values: dict[str, float] = {}
    tables: dict[str, list[Any]] = {}
    with user_code(lambda: "the metrics of all evaluated rows"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a metric that draws samples when it is computed gives every process the same
        computed = metrics.compute()
    for key, found in computed.items():
        value = torch.as_tensor(found)
        if value.numel() == 1:
            values[key] = float(value)
        elif value.numel() <= _MAX_TABLE_NUMBERS:
            tables[key] = value.tolist()
    return values, tables


def metrics_with_states(task: Task, chunks: Sequence[Chunk]) -> MetricCollection:
    """The task's metrics whose states the chunks hold; all of them if there is no chunk."""
    metrics = make_metrics(task)
    if not chunks or all(str(name) in chunks[0].states for name in metrics.keys(keep_base=True)):
        return metrics
    known = metrics.items(keep_base=True, copy_state=True)
    return type(metrics)({str(name): metric for name, metric in known if name in chunks[0].states})


Mode = Literal["min", "max"]


def mode_of(name: str, metric: Any) -> Mode | None:
    """What a metric says of itself; None if it says nothing.

    Args:
        name: What it is recorded under; less of a loss is better.
        metric: The `torchmetrics.Metric`, or None.
    """
    if name == "loss" or name.endswith("_loss"):
        return "min"
    higher = getattr(metric, "higher_is_better", None)
    return None if higher is None else "max" if higher else "min"


def resolve_mode(task: Task, metric: str | None, mode: str | None) -> str | None:
    """`evaluate.mode`, where `evaluate.metric` is another metric than the task's own, and nothing says whether less or
    more is better.

    Args:
        task: The prepared task.
        metric: `evaluate.metric`.
        mode: `evaluate.mode`.

    Raises:
        ConfigError: The metric does not say so either, or the task's own `best_mode` is none.
    """
    if task.best_mode not in get_args(Mode):
        raise ConfigError(f"{type(task).__name__}.best_mode is {task.best_mode!r}; it must be min or max.")
    if mode is not None or metric in (None, task.best_metric):
        return mode
    known = dict(make_metrics(task).items(keep_base=True, copy_state=False))
    if (found := mode_of(metric, known.get(metric))) is None:
        raise ConfigError(
            f"evaluate.metric is {metric!r}, and nothing says whether less or more of it is better. The task's metrics"
            f" are {', '.join(['loss', *map(str, known)])}. Name one of them, or set evaluate.mode to min or max."
        )
    return found


def resample(task: Task, chunks: Sequence[Chunk], name: str, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A metric of data sets in which each chunk occurs so many times.

    Args:
        task: The prepared task.
        chunks: What the chunks of a data set gave, in their order.
        name: A metric of one number, or `loss`.
        counts: How often each chunk occurs in each data set, shape (data sets, chunks).

    Returns:
        Its values, shape (data sets,).

    Raises:
        ConfigError: The metric cannot be put together from parts.
    """
    if name == "loss":
        losses, weights = np.array([chunk.loss for chunk in chunks]), np.array([chunk.weight for chunk in chunks])
        return (counts @ losses) / (counts @ weights)
    metrics = metrics_with_states(task, chunks)
    if name not in metrics:
        raise ConfigError(
            f"{name!r} is no metric of its own of the task, so it cannot be resampled; there are"
            f" {', '.join(map(str, metrics))}."
        )
    metric = metrics[name]
    parts = {
        key: (part, state)
        for path, part in metric_parts(metric).items()
        for state in part._defaults
        for key in [state_key(path, state)]
    }
    states = {
        key: _resample_state(part, state, [chunk.states[name][key] for chunk in chunks], counts)
        for key, (part, state) in parts.items()
    }
    values = []
    for i in range(len(counts)):
        for key, (part, state) in parts.items():
            setattr(part, state, states[key][i])
            part._update_count, part._computed = len(chunks), None
        found = metric.compute()
        values.append(float(found[name] if isinstance(found, dict) else found))
    return np.array(values)


def _resample_state(metric: Metric, name: str, parts: list[Any], counts: npt.NDArray[np.int64]) -> Sequence[Any]:
    """One state of a metric for each data set."""
    from torchmetrics.utilities import dim_zero_cat, dim_zero_sum

    if isinstance(parts[0], list):
        return [[piece for i in np.repeat(np.arange(len(parts)), row) for piece in parts[i]] for row in counts]
    if metric._reductions[name] is dim_zero_cat:
        return [torch.cat([parts[i] for i in np.repeat(np.arange(len(parts)), row)]) for row in counts]
    if metric._reductions[name] is not dim_zero_sum:
        raise ConfigError(
            f"The metric {type(metric).__name__} cannot be resampled: its state {name!r} is neither a sum nor a list."
            " Set evaluate.metric to another one, such as loss."
        )
    stacked = torch.stack(parts)
    total = torch.tensordot(torch.from_numpy(counts).double(), stacked.double(), dims=1)
    return total.to(stacked.dtype).unbind()
