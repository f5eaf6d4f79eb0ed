"""Checks that metrics do not depend on how the evaluated rows are divided into chunks, on some rows before the start.

An evaluation scores rows in chunks and combines the states of the chunks. So a metric must be a function of its states,
and a value that a script or a Lightning module logs for a batch must be a mean over the rows of the batch.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ray_app.errors import ConfigError, RayAppError, TaskError
from ray_app.preflight.context import PreflightContext, cut_unevenly
from ray_app.task.annotations import MetricCollection
from ray_app.task.base import Batch, Task
from ray_app.task.metric_states import (
    States,
    attribute_fingerprints,
    is_classification,
    load_states,
    make_metrics,
    metric_parts,
    take_states,
)
from ray_app.task.metrics import compute_values
from ray_app.task.ragged import Arrays, to_batch
from ray_app.task.user_code import user_code
from ray_app.task.whole_batches import BatchTask, count_rows

MAX_ROWS = 16
"""Largest number of rows that are checked."""
MIN_ROWS = 8
"""Number of rows to which fewer rows are repeated."""
_MAX_SECONDS = 3.0
"""Time limit of the forward passes; the rows that were computed by then are checked."""
MAX_PERTURBED = 10_000_000
"""Largest number of parameters of a model for which perturbed parameters are checked, too."""
_RTOL, _ATOL = 1e-3, 1e-5
_FIRST_PART = 3
"""The first of two parts of a batch has one of this number of rows."""
_LOGITS = (
    " torchmetrics treats the outputs of an update as probabilities if all are between 0 and 1, otherwise as logits. If"
    " the outputs are logits, pass outputs.sigmoid() or outputs.softmax(1) in the task's update; for a ModuleTask, set"
    " task.init_args.activation to sigmoid or softmax."
)
Outputs = Sequence[tuple[Any, Batch]]
"""Outputs of forward passes, each with its batch."""
Values = dict[str, Any]
"""Values of metrics by name, with the tables of metrics of several numbers."""


def try_metrics(context: PreflightContext) -> list[str]:
    """Computes the metrics of some rows of the evaluation data, divided in several ways, and returns warnings.

    Raises:
        ConfigError: A metric depends on `evaluate.batch_size`, on the number of chunks, or on the process that
            evaluates.
    """
    task, rows = context.task, context.accepted_rows
    if context.eval_rows is not None:
        rows = cut_unevenly(context.eval_rows) if context.are_short else context.eval_rows
    context.model.eval()
    count = len(next(iter(rows.values())))
    fixed = bool(context.config.evaluate.fixed_batches)
    with user_code(lambda: "evaluating some rows"), torch.no_grad():
        messages = list[str]()
        if isinstance(task, BatchTask) and not fixed:
            cycled = cycle_rows(rows, max(count, MIN_ROWS))
            messages = _check_means(task, context.model, cycled)
            # Metrics of random outputs cannot be compared.
            if not messages and type(task).metrics is not BatchTask.metrics:
                _check_batches(task, context.model, cycled)
        outputs = _forward_rows(task, context.model, rows, count if fixed else 1)
        _check_states(task, outputs)
        if not isinstance(task, BatchTask):
            _check_logits(task, outputs)
    return messages


def _forward_rows(task: Task, model: nn.Module, rows: Arrays, size: int) -> Outputs:
    """Returns the outputs of batches of `size` rows, at least of two batches and until the time limit."""
    start_s, outputs = time.monotonic(), []
    for i in range(0, len(next(iter(rows.values()))), size):
        batch = to_batch({name: values[i : i + size] for name, values in rows.items()})
        outputs.append((task.eval_outputs(model, batch), batch))
        if len(outputs) > 1 and time.monotonic() - start_s > _MAX_SECONDS:
            break
    return outputs


def _join(outputs: Outputs) -> Outputs:
    """Returns the outputs as one batch, as in a chunk, or unchanged if they cannot be joined."""
    tensors, batches = [output for output, _ in outputs], [batch for _, batch in outputs]
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return outputs
    try:
        return [(torch.cat(tensors), {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})]
    except RuntimeError:
        # Rows of different lengths are padded to different sizes.
        return outputs


def _update_metrics(task: Task, outputs: Outputs, metrics: MetricCollection | None = None) -> MetricCollection:
    """Updates metrics, by default new ones, with some outputs, and returns them."""
    metrics = make_metrics(task) if metrics is None else metrics
    for output, batch in _join(outputs):
        task.update(metrics, output, batch)
    return metrics


def _states_of_parts(task: Task, parts: Iterable[Outputs]) -> Iterator[dict[str, States]]:
    """Yields the states after an update with the outputs of each part, by the name of the metric.

    As in an evaluation, the metrics are made once and reset for each part.
    """
    metrics = make_metrics(task)
    for part in parts:
        _update_metrics(task, part, metrics)
        yield {str(name): take_states(metric) for name, metric in metrics.items(keep_base=True, copy_state=False)}


def _combine_states(task: Task, parts: Sequence[dict[str, States]]) -> MetricCollection:
    """Returns metrics that are combined from the states of some parts, as in an evaluation."""
    metrics = make_metrics(task)
    for name, metric in metrics.items(keep_base=True, copy_state=True):
        load_states(metric, [part[str(name)] for part in parts])
    return metrics


def _check_states(task: Task, outputs: Outputs) -> None:
    """Refuses metrics that change attributes other than states, and metrics that are not a function of their states."""
    metrics = make_metrics(task)
    before = {
        str(name): attribute_fingerprints(metric) for name, metric in metrics.items(keep_base=True, copy_state=False)
    }
    _update_metrics(task, outputs, metrics)
    for name, metric in metrics.items(keep_base=True, copy_state=False):
        after = attribute_fingerprints(metric)
        if changed := [key for key, value in after.items() if before[str(name)].get(key) != value]:
            raise ConfigError(
                f"The metric {name!r} ({type(metric).__name__}) changes {', '.join(changed)} in its update, which are"
                " attributes and not states: an evaluation is combined from the states of parts of the rows, so"
                " attributes would be lost. Register each in __init__ with self.add_state(name, torch.tensor(0),"
                " dist_reduce_fx='sum')."
            )
    _check_wrappers(metrics)
    try:
        at_once = _compute_values(metrics)
    except TaskError:
        # The rows may be too few.
        at_once = {}
    states = {str(name): take_states(metric) for name, metric in metrics.items(keep_base=True, copy_state=False)}
    third = max(1, len(outputs) // 3)
    _check_equal(task, at_once, _combine_states(task, [states]), "all of them")
    for cuts in ([0, third, len(outputs)], range(len(outputs) + 1)):
        if (parts := _split_states(task, outputs, cuts)) is not None:
            _check_equal(task, at_once, _combine_states(task, parts), f"{len(parts)} parts")


def _split_states(task: Task, outputs: Outputs, cuts: Sequence[int]) -> list[dict[str, States]] | None:
    """Returns the states of the parts between cuts; None if this takes too long, or an update needs more rows."""
    if any(low >= high for low, high in pairwise(cuts)):
        return None
    start_s, parts = time.monotonic(), []
    try:
        for states in _states_of_parts(task, (outputs[low:high] for low, high in pairwise(cuts))):
            parts.append(states)
            if time.monotonic() - start_s > _MAX_SECONDS:
                return None
    except RayAppError:
        raise
    except Exception:
        return None
    return parts


def _check_batches(task: BatchTask, model: nn.Module, rows: Arrays) -> None:
    """Refuses metrics of a batch that differ from those put together from two parts of it.

    If the metrics of a task get states and not outputs of rows, a batch has other states than its rows.
    """
    count = len(next(iter(rows.values())))
    cut = max(1, count // _FIRST_PART)

    def outputs_of(part: slice) -> Outputs:
        batch = to_batch({name: values[part] for name, values in rows.items()})
        return [(task.eval_outputs(model, batch), batch)]

    whole = _compute_values(_update_metrics(task, outputs_of(slice(count))))
    parts = list(_states_of_parts(task, map(outputs_of, (slice(cut), slice(cut, count)))))
    _check_equal(task, whole, _combine_states(task, parts), "two parts of them")


def _check_wrappers(metrics: MetricCollection) -> None:
    """Refuses wrappers of torchmetrics with a value that depends on the number of updates."""
    reasons = {"BootStrapper": "draws rows at random in each update", "Running": "counts updates, not rows"}
    for name, metric in metrics.items(keep_base=True, copy_state=False):
        kinds = {kind for part in metric_parts(metric).values() for kind in type(part).__mro__}
        names = {kind.__name__ for kind in kinds if kind.__module__.startswith("torchmetrics.wrappers")}
        if wrappers := sorted(reasons.keys() & names):
            raise ConfigError(
                f"The metric {name!r} is a torchmetrics {wrappers[0]}, which {reasons[wrappers[0]]}: its value would"
                " depend on evaluate.batch_size. Use the wrapped metric itself."
            )


def _compute_values(metrics: MetricCollection) -> Values:
    """Computes metrics without showing their warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values, tables = compute_values(metrics)
    return {**values, **tables}


def _check_equal(task: Task, expected: Values, combined: MetricCollection, parts: str, remedy: str = "") -> None:
    """Refuses metrics that differ if they are combined from `parts` from those of all rows at once (`expected`)."""
    values = _compute_values(combined) if expected else {}
    for name, value in expected.items():
        if name in values and are_close(value, values[name]):
            continue
        kinds = ", ".join(f"{key} ({type(metric).__name__})" for key, metric in combined.items(keep_base=True))
        if any(map(is_classification, combined.values(copy_state=False))):
            remedy = _LOGITS
        raise ConfigError(
            f"The metric {name!r} of {type(task).__name__} is {_format_value(value)} computed from all rows at once,"
            f" but {_format_value(values.get(name))} combined from the states of {parts}. An evaluation scores rows in"
            " chunks, so the value would depend on evaluate.batch_size. The metric's states (add_state) must hold"
            " everything that compute needs, as sums or lists over rows and not as means over updates. The metrics are"
            f" {kinds}.{remedy}"
        )


def are_close(a: Any, b: Any) -> bool:
    """Returns whether two values have the same shape and are equal except for rounding; NaN equals NaN."""
    # The rows of a table may have several lengths.
    if isinstance(a, list) and isinstance(b, list) and any(isinstance(row, list) for row in (*a, *b)):
        return len(a) == len(b) and all(map(are_close, a, b))
    first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return first.shape == second.shape and bool(np.allclose(first, second, _RTOL, _ATOL, equal_nan=True))


def _format_value(value: Any) -> str:
    """Returns a value of a metric as short text."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:60]


def _check_logits(task: Task, outputs: Outputs) -> None:
    """Refuses scores that torchmetrics would treat as probabilities in one batch and as logits in another.

    It does so by whether all of an update are between 0 and 1. The check has random outputs with both kinds of rows.
    """
    [(scores, batch), *more] = _join(outputs)
    if more or not isinstance(scores, Tensor) or not scores.is_floating_point() or not scores.ndim:
        return
    if bool(((scores >= 0) & (scores <= 1)).all()):
        return
    generator = torch.Generator().manual_seed(0)
    count = max(len(scores), MIN_ROWS)
    row_indices = torch.arange(count) % len(scores)
    shape = (count, *scores.shape[1:])
    mixed = torch.randn(shape, generator=generator) * 3
    mixed[::2] = torch.rand(shape, generator=generator)[::2]
    rows = [
        (mixed[i : i + 1].to(scores.dtype), {name: values[row_indices[i : i + 1]] for name, values in batch.items()})
        for i in range(count)
    ]
    try:
        expected = _compute_values(_update_metrics(task, rows))
        combined = _combine_states(task, list(_states_of_parts(task, ([row] for row in rows))))
        values = _compute_values(combined)
    except Exception:
        # Metrics may need more than the shape of the outputs, and raise any error.
        return
    expected = {name: value for name, value in expected.items() if name in values}
    _check_equal(task, expected, combined, f"{count} parts", _LOGITS)


def cycle_rows(rows: Arrays, count: int) -> Arrays:
    """Returns at least `count` rows, by repeating the rows in their order."""
    num_rows = len(next(iter(rows.values())))
    return rows if num_rows >= count else {name: values[np.arange(count) % num_rows] for name, values in rows.items()}


def _check_means(task: BatchTask, model: nn.Module, rows: Arrays) -> list[str]:
    """Refuses logged values that are not means over the rows of a batch; returns warnings about random values."""

    def means_of(part: Part, seed: int) -> Means:
        del seed
        batch = to_batch({name: values[part] for name, values in rows.items()})
        result = task.eval_outputs(model, batch)
        means = result.logged if result.weight is not None else {**result.logged, "loss": result.loss}
        return {name: (float(value) * count_rows(batch), count_rows(batch)) for name, value in means.items()}

    count = len(next(iter(rows.values())))
    unequal, random_values = compare_means(model, means_of, count, is_exact=True)
    cut = max(1, count // _FIRST_PART)
    for name, (value, mean) in unequal.items():
        raise ConfigError(
            f"{name!r}, as the evaluation of {type(task).__name__} computes it, is not a mean over rows: for a batch of"
            f" {count} rows it is {value:.6g}, for two parts of {cut} and {count - cut} rows it is {mean:.6g} on"
            " average. Its mean over batches would depend on evaluate.batch_size. Return the torchmetrics object"
            " itself, whose states are combined over all rows: self.log(name, self.metric) in a Lightning module, the"
            " object in the dictionary that a script's evaluate returns (torchmetrics.MeanMetric, updated with weights,"
            " for a mean over tokens; MeanSquaredError(squared=False) for a root). If the mean over batches of"
            " evaluate.batch_size rows is intended, set evaluate.fixed_batches: true."
        )
    return [
        f"{name!r}, as the evaluation of {type(task).__name__} computes it, changes if the same rows are evaluated"
        " again or in another order: random numbers make it depend on evaluate.batch_size. Draw random numbers only if"
        " self.training is true."
        for name in sorted(random_values)
    ]


Part = slice | npt.NDArray[np.int64]
"""Some of the rows of a batch."""
Means = dict[str, tuple[float, float]]
"""Values of a batch by name, each as its sum over rows and its weight."""


def compare_means(
    model: nn.Module, means_of: Callable[[Part, int], Means], count: int, is_exact: bool
) -> tuple[Means, set[str]]:
    """Compares the means over `count` rows with those over two parts of them, for some values of the parameters.

    Args:
        model: The model.
        means_of: Returns the values of a part of the rows, computed with a seed.
        count: Number of rows.
        is_exact: Whether values that are repeated with another seed must be bit-identical, or else are random; and
            whether values of the rows in reverse order must be equal, since random numbers that are the same in every
            batch are others at each place in it.

    Returns:
        The values that differ, each with its mean over the parts, and the names of random values, which are not
        compared.
    """
    cut = max(1, count // _FIRST_PART)
    unequal, random_values = Means(), set[str]()
    num_parameters = sum(p.numel() for p in model.parameters())
    for perturbation in range(3 if num_parameters <= MAX_PERTURBED else 1):
        with perturbed(model, perturbation):
            whole, repetition, *parts = (
                means_of(part, seed)
                for seed, part in enumerate((slice(count), slice(count), slice(cut), slice(cut, count)))
            )
            in_reverse = means_of(np.arange(count)[::-1], 0) if is_exact else whole
        for name, (total, weight) in whole.items():
            repeated = repetition.get(name, (total, weight))[0]
            is_same = np.array_equal(total, repeated, equal_nan=True) if is_exact else are_close(total, repeated)
            if not is_same or not are_close(total, in_reverse.get(name, (total, weight))[0]):
                random_values.add(name)
                continue
            sums = [part[name] for part in parts if name in part]
            part_weight = sum(part[1] for part in sums)
            if len(sums) < len(parts) or not weight or not part_weight:
                continue
            value, mean = total / weight, sum(part[0] for part in sums) / part_weight
            if np.isfinite(value) and not are_close(value, mean):
                unequal.setdefault(name, (value, mean))
    return {name: values for name, values in unequal.items() if name not in random_values}, random_values


@contextmanager
def perturbed(model: nn.Module, perturbation: int) -> Iterator[None]:
    """Perturbs the parameters of a model in the block; perturbation 0 leaves them as they are.

    A new model may give the same output for every row, so that its own parameters alone would show no difference.
    """
    saved = [p.detach().clone() for p in model.parameters()] if perturbation else []
    generator = torch.Generator().manual_seed(perturbation)
    try:
        if perturbation:
            for p in model.parameters():
                if p.is_floating_point():
                    p.add_(torch.randn(p.shape, generator=generator).to(p) * (0.5 * perturbation))
        yield
    finally:
        for p, value in zip(model.parameters(), saved, strict=False):
            p.copy_(value)
