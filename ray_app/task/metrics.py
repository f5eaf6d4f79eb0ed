"""Scoring of a model on a data set in chunks of rows, and metrics of the data set and of resampled ones.

`score` computes the losses and metric states of chunks; several processes may share the chunks. The chunks do not
depend on the number of processes, and `combine` adds their results in their order, so the metrics are bit-identical for
any number of processes. `resample` computes metrics of data sets in which chunks occur several times, from the same
states: it runs no model again.
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

from ray_app.devices import kind_of, to_device
from ray_app.errors import BadRowError, ConfigError, DataError
from ray_app.plan.manifest import Manifest
from ray_app.task.annotations import Metric, MetricCollection
from ray_app.task.base import Batch, Mistake, Task
from ray_app.task.losses import Losses
from ray_app.task.metric_states import load_states, make_metrics, metric_parts, state_key, take_states
from ray_app.task.precision import Precision
from ray_app.task.ragged import Arrays, Ragged, to_batch
from ray_app.task.user_code import user_code
from ray_app.torch_private import use_eager_roi_align

_BINCOUNT = "_bincount"
"""Name of torchmetrics' function that counts classes."""
MAX_MISTAKES = 12
_TARGET_CHUNKS = 16
_MAX_CHUNK_ROWS = 8192
_MAX_CHUNK_BYTES = 64_000_000
_MAX_TABLE_NUMBERS = 10_000
"""Size of the largest table that is recorded: a confusion matrix of 100 classes."""
Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Chunk:
    """The results of a range of rows; `states` are those after these rows alone, by metric and state."""

    low: int
    rows: int
    loss: float
    weight: float
    states: dict[str, dict[str, Any]]
    mistakes: list[Mistake]


@dataclass(frozen=True)
class Scores:
    """The metrics of a model on a data set.

    Args:
        values: The task's metrics of one number, and the mean loss unless all weights are 0.
        tables: The task's metrics that are lists (one number per class) or matrices.
    """

    values: dict[str, float]
    tables: dict[str, list[Any]] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def record(self, classes: list[str]) -> dict[str, Any]:
        """Returns the fields of an `Evaluation` that have the results."""
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
    fixed: bool | None = False,
    keep: Container[str] | None = None,
    forward: Callable[[nn.Module, Batch], Any] | None = None,
    manifest: Manifest | None = None,
    precision: Precision = Precision(),
) -> Iterator[Chunk]:
    """Scores a data set, or every `parts`-th chunk of it, and yields the results of each chunk.

    Args:
        model: The model, on the device; it is set to evaluation mode.
        arrays: Every decoded field. Where rows have different lengths a chunk is one forward pass, padded to its
            longest row.
        size: Rows of a forward pass.
        chunk_rows: Rows of a chunk; None: a number that makes scoring fast.
        fixed: Whether each chunk is one forward pass of `size` rows, whatever `chunk_rows` is, see
            `evaluate.fixed_batches`.
        keep: Names of the metrics to keep the states of; None: all.
        forward: Computes the outputs of a model for a batch; None: the task's `eval_outputs`.
        precision: How the model computes.

    Raises:
        DataError: The loss of a row is NaN or infinite, and so is a value of the row.
    """
    model.eval()
    metrics = make_metrics(task).to(device)
    use_direct_bincount()
    is_host = kind_of(device).is_host
    if not is_host:
        use_eager_roi_align()
    rows, worst = len(next(iter(arrays.values()))), list[float]()
    step = size if fixed else chunk_rows or _chunk_rows(arrays, rows, size)
    for low in range(part * step, rows, parts * step):
        # A copy: what the user's code writes into a batch must not be in the rows of the next evaluation.
        source = to_batch(arrays, slice(low, low + step))
        batch = {
            name: torch.empty_like(values) if is_host else to_device(values, device) for name, values in source.items()
        }
        losses, mistakes = list[Losses](), list[Mistake]()
        # Not in inference mode: workers evaluate the model that they train, and backward cannot use tensors that the
        # model would make here and keep.
        with user_code(partial("evaluating rows {} to {}".format, low, min(low + step, rows) - 1)), torch.no_grad():
            for first, some, outputs in _forward_passes(
                partial(precision.outputs, forward or task.eval_outputs, model), batch, size, source if is_host else {}
            ):
                losses.append(Losses.of(task.compute_loss(model, outputs, some)))
                task.update(metrics, outputs, some)
                mistakes += [replace(m, row=first + m.row) for m in task.mistakes(outputs, some, MAX_MISTAKES)]
        worst_mistakes = _choose_worst(task, batch, low, mistakes, worst)
        taken = {str(name): take_states(m) for name, m in metrics.items(keep_base=True, copy_state=False)}
        states = {name: one for name, one in taken.items() if keep is None or name in keep}
        values = torch.cat([one.values for one in losses])
        _refuse_non_finite_row(arrays, low, values, manifest)
        weight = torch.cat([one.row_weights for one in losses]).sum(dtype=torch.float64).item()
        yield Chunk(low, len(values), values.double().sum().item(), weight, states, worst_mistakes)


def _choose_worst(task: Task, batch: Batch, low: int, mistakes: list[Mistake], worst: list[float]) -> list[Mistake]:
    """Returns the mistakes of a chunk, from row `low` on, that may be among the worst, with pictures, which take time.

    `worst` has the highest confidences of all chunks so far, and gets those of this one.
    """
    chosen = []
    for mistake in mistakes:
        if len(worst) < MAX_MISTAKES or mistake.confidence > worst[-1]:
            worst[:] = sorted([*worst, mistake.confidence], reverse=True)[:MAX_MISTAKES]
            chosen.append(replace(mistake, row=low + mistake.row, image=task.picture(batch, mistake.row)))
    return chosen


def _refuse_non_finite_row(arrays: Arrays, low: int, losses: Tensor, manifest: Manifest | None) -> None:
    """Refuses the first row of a chunk, from row `low` on, that has a NaN or infinite value and such a loss.

    The losses of other rows are NaN or infinite because of the model, and no row is refused for them.
    """
    for position in (low + np.flatnonzero(~losses.isfinite().numpy(force=True))).tolist():
        for name, values in arrays.items():
            row = np.asarray(values[position])
            if row.dtype.kind == "f" and not np.isfinite(row).all():
                reason = f"{name!r} is NaN or infinite, and so is its loss; correct the value or drop the row"
                if manifest is None:
                    raise DataError(f"Row {position} of the data: {reason}.")
                raise BadRowError(*manifest.locate(position), reason)


def _chunk_rows(arrays: Arrays, rows: int, size: int) -> int:
    """Returns the rows of a chunk, a multiple of the rows of a forward pass (`size`).

    A chunk has several passes, since the update of a metric costs much more than a row, but there are enough chunks for
    several processes to share. Where rows have different lengths it has one.
    """
    if any(isinstance(values, Ragged) for values in arrays.values()):
        return size
    row_bytes = sum(values[:1].nbytes for values in arrays.values())
    passes = min(rows // (_TARGET_CHUNKS * size), _MAX_CHUNK_ROWS // size, _MAX_CHUNK_BYTES // max(1, row_bytes * size))
    return size * max(1, passes)


def _forward_passes(
    forward: Callable[[Batch], Any], batch: Batch, size: int, source: Batch
) -> list[tuple[int, Batch, Any]]:
    """Runs a chunk in passes of `size` rows; returns first row, rows and outputs, tensors as of one pass.

    The rows of each pass are copied from `source` just before it, if it is not empty, so that the forward finds them in
    the cache of the processor.
    """
    rows, passes = len(next(iter(batch.values()))), list[tuple[int, Batch, Any]]()
    for low in range(0, rows, size):
        part = {name: values[low : low + size] for name, values in batch.items()}
        for name, values in source.items():
            part[name].copy_(values[low : low + size])
        passes.append((low, part, forward(part)))
    outputs = [output for _, _, output in passes]
    if len(passes) > 1 and all(isinstance(one, Tensor) for one in outputs):
        return [(0, batch, torch.cat(outputs))]
    return passes


def use_direct_bincount() -> None:
    """Makes the metrics of torchmetrics that are imported count with `torch.bincount`.

    Where kernels must be deterministic, torchmetrics 1.9 compares every row with every bin: rows x classes^2 numbers,
    2 GB for 256 rows of 1,000 classes. That is not needed. The bits of a sum depend on the order of its additions
    because floats are rounded; integers are not, so a count is the same in any order of threads or of the atomic
    additions of a GPU. torch 2.15 itself refuses only weighted counts as not deterministic.
    """
    from torchmetrics.utilities import data

    original = vars(data)[_BINCOUNT]
    if original is _direct_bincount:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("torchmetrics.") and vars(module).get(_BINCOUNT) is original:
            vars(module)[_BINCOUNT] = _direct_bincount


def _direct_bincount(x: Tensor, minlength: Any = None) -> Tensor:
    """Counts as torchmetrics' `_bincount` does, without comparing every row with every bin."""
    return torch.bincount(x, minlength=minlength if minlength is not None else len(torch.unique(x)))


def combine(task: Task, chunks: Iterable[Chunk]) -> Scores:
    """Combines the chunks of a data set into its metrics, except those without states; see `combine_states`."""
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
    """Computes metrics from their states; returns those of one number, and those that are lists or matrices."""
    values: dict[str, float] = {}
    tables: dict[str, list[Any]] = {}
    with user_code(lambda: "the metrics of all evaluated rows"), torch.random.fork_rng(devices=[]):
        # The seed makes a metric that draws samples compute the same in every process.
        torch.manual_seed(0)
        computed = metrics.compute()
    for key, result in computed.items():
        size = _count_numbers(result)
        if size == 1:
            values[key] = float(torch.as_tensor(result))
        elif size <= _MAX_TABLE_NUMBERS:
            tables[key] = _to_lists(result)
    return values, tables


def _count_numbers(result: Any) -> int:
    """Returns how many numbers a result of a metric has: a tensor, or the tensors of a curve, of several lengths."""
    return sum(map(_count_numbers, result)) if isinstance(result, list | tuple) else torch.as_tensor(result).numel()


def _to_lists(result: Any) -> Any:
    return [*map(_to_lists, result)] if isinstance(result, list | tuple) else torch.as_tensor(result).tolist()


def metrics_with_states(task: Task, chunks: Sequence[Chunk]) -> MetricCollection:
    """Returns the task's metrics that the chunks have states of; all metrics if there is no chunk."""
    metrics = make_metrics(task)
    if not chunks or all(str(name) in chunks[0].states for name in metrics.keys(keep_base=True)):
        return metrics
    items = metrics.items(keep_base=True, copy_state=True)
    return type(metrics)({str(name): metric for name, metric in items if name in chunks[0].states})


def mode_of(name: str, metric: Any) -> Mode | None:
    """Returns whether less (of a loss) or more of a metric is better, None if its class does not define it."""
    if name == "loss" or name.endswith("_loss"):
        return "min"
    higher = getattr(metric, "higher_is_better", None)
    return None if higher is None else "max" if higher else "min"


def resolve_mode(task: Task, metric: str | None, mode: str | None) -> str | None:
    """Returns `evaluate.mode`, completed for `evaluate.metric`; raises ConfigError if it is not defined."""
    if task.best_mode not in get_args(Mode):
        raise ConfigError(f"{type(task).__name__}.best_mode is {task.best_mode!r}; it must be min or max.")
    if mode is not None or metric in (None, task.best_metric):
        return mode
    metrics = dict(make_metrics(task).items(keep_base=True, copy_state=False))
    if (resolved := mode_of(metric, metrics.get(metric))) is None:
        raise ConfigError(
            f"evaluate.metric is {metric!r}, but no setting defines whether a lower or a higher value is better. The"
            f" task's metrics are {', '.join(['loss', *map(str, metrics)])}. Name one of them, or set evaluate.mode to"
            " min or max."
        )
    return resolved


def resample(task: Task, chunks: Sequence[Chunk], name: str, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Returns a metric of one number, or `loss`, of data sets in which each chunk occurs a given number of times.

    `counts` has the shape (data sets, chunks), the result (data sets,). Raises ConfigError for a metric that cannot be
    combined from parts.
    """
    if name == "loss":
        losses, weights = np.array([chunk.loss for chunk in chunks]), np.array([chunk.weight for chunk in chunks])
        return (counts @ losses) / (counts @ weights)
    metrics = metrics_with_states(task, chunks)
    if name not in metrics:
        raise ConfigError(
            f"{name!r} is not a single metric of the task, so it cannot be resampled; the metrics are"
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
        result = metric.compute()
        values.append(float(result[name] if isinstance(result, dict) else result))
    return np.array(values)


def _resample_state(metric: Metric, name: str, parts: list[Any], counts: npt.NDArray[np.int64]) -> Sequence[Any]:
    """Returns one state of a metric for each resampled data set."""
    from torchmetrics.utilities import dim_zero_cat, dim_zero_sum

    if isinstance(parts[0], list):
        return [[piece for i in np.repeat(np.arange(len(parts)), row) for piece in parts[i]] for row in counts]
    if metric._reductions[name] is dim_zero_cat:
        return [torch.cat([parts[i] for i in np.repeat(np.arange(len(parts)), row)]) for row in counts]
    if metric._reductions[name] is not dim_zero_sum:
        raise ConfigError(
            f"The metric {type(metric).__name__} cannot be resampled: its state {name!r} is neither a sum nor a list."
            " Set evaluate.metric to another metric, such as loss."
        )
    stacked = torch.stack(parts)
    total = torch.tensordot(torch.from_numpy(counts).double(), stacked.double(), dims=1)
    return total.to(stacked.dtype).unbind()
