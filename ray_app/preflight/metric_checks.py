"""Whether metrics are the same however the evaluated rows are divided, tried on some of them before the start.

An evaluation scores rows in chunks, and combines what the chunks gave. So a metric must be a function of its states,
and a number that a script or a Lightning module logs for a batch must be a mean over the rows of the batch.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ray_app.errors import ConfigError, RayAppError, TaskError
from ray_app.task.annotations import MetricCollection
from ray_app.task.base import Batch, Task
from ray_app.task.metric_states import (
    States,
    attribute_fingerprints,
    load_states,
    make_metrics,
    metric_parts,
    states_of,
)
from ray_app.task.metrics import compute_values
from ray_app.task.ragged import Arrays, Ragged, to_batch
from ray_app.task.user_code import user_code
from ray_app.task.whole_batches import BatchTask, count_rows

MAX_ROWS = 16
"""Rows that are looked at."""
MIN_ROWS = 8
"""Fewer are taken several times."""
_MAX_SECONDS = 3.0
"""Time for the forward passes of the rows; what was done by then is looked at."""
_MAX_PERTURBED = 10_000_000
"""Parameters of the largest model of which disturbed ones are tried: a new model may give every row the same."""
_RTOL, _ATOL = 1e-3, 1e-5
_WARNING_WORDS = ("samples", "variance")
"""Words of what torchmetrics warns of where rows are too few, or all of one class."""
Outputs = Sequence[tuple[Any, Batch]]
"""Outputs of forward passes, each with its rows."""
Values = dict[str, Any]


def check_metrics(task: Task, model: nn.Module, rows: Arrays, has_all: bool) -> list[str]:
    """Refuses metrics that would depend on `evaluate.batch_size`, on the number of chunks, or on who evaluates.

    Args:
        task: The prepared task.
        model: What it evaluates.
        rows: Some decoded rows of the data to evaluate on.
        has_all: Whether that data has no others.

    Returns:
        What is to be said of the metrics at the start, in sentences.

    Raises:
        ConfigError: There are such metrics, or ones that cannot be computed of as few rows as the data has.
    """
    model.eval()
    count = len(next(iter(rows.values())))
    with user_code(lambda: "evaluating some rows"), torch.no_grad():
        doubts = (
            _check_means(task, model, repeat_rows(rows, max(count, MIN_ROWS))) if isinstance(task, BatchTask) else []
        )
        outputs = _forward_rows(task, model, rows)
        _check_states(task, outputs)
        doubts += _check_computed(task, outputs, has_all and len(outputs) == count)
        if not isinstance(task, BatchTask):
            _check_logits(task, outputs)
    return doubts


def _forward_rows(task: Task, model: nn.Module, rows: Arrays) -> Outputs:
    """The outputs of each row by itself, of at least two rows."""
    begun_s, outputs = time.monotonic(), []
    for i in range(len(next(iter(rows.values())))):
        batch = to_batch({name: values[i : i + 1] for name, values in rows.items()})
        outputs.append((task.eval_outputs(model, batch), batch))
        if len(outputs) > 1 and time.monotonic() - begun_s > _MAX_SECONDS:
            break
    return outputs


def _join(outputs: Outputs) -> Outputs:
    """One batch of all, as a chunk's outputs are; the batches themselves where they cannot be joined."""
    tensors, batches = [output for output, _ in outputs], [batch for _, batch in outputs]
    if not all(isinstance(each, Tensor) for each in tensors):
        return outputs
    try:
        return [(torch.cat(tensors), {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})]
    except RuntimeError:  # rows of different length, padded each by itself
        return outputs


def _update_metrics(task: Task, outputs: Outputs, metrics: MetricCollection | None = None) -> MetricCollection:
    metrics = make_metrics(task) if metrics is None else metrics
    for output, batch in _join(outputs):
        task.update(metrics, output, batch)
    return metrics


def _part_states(task: Task, part: Outputs) -> dict[str, States]:
    """The states of metrics that saw a part, as a chunk has them."""
    return {
        str(name): states_of(metric)
        for name, metric in _update_metrics(task, part).items(keep_base=True, copy_state=False)
    }


def _combine_states(task: Task, parts: Sequence[dict[str, States]]) -> MetricCollection:
    """Metrics put together from the states of some parts, as an evaluation does."""
    metrics = make_metrics(task)
    for name, metric in metrics.items(keep_base=True, copy_state=True):
        load_states(metric, [part[str(name)] for part in parts])
    return metrics


def _check_states(task: Task, outputs: Outputs) -> None:
    """Refuses metrics that keep more than their states, or whose value is not a function of these.

    Raises:
        ConfigError: There is one.
    """
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
                f" attributes and not"
                " states: an evaluation is combined from the states of parts of the rows, so they would be lost."
                " Register them in __init__"
                " with self.add_state(name, torch.tensor(0), dist_reduce_fx='sum')."
            )
    _check_wrappers(metrics)
    try:
        at_once = _compute_values(metrics)
    except TaskError:  # of too few rows; see `_check_computed`
        at_once = {}
    carried = {str(name): states_of(metric) for name, metric in metrics.items(keep_base=True, copy_state=False)}
    third = max(1, len(outputs) // 3)
    _check_equal(task, at_once, _combine_states(task, [carried]), "all of them")
    for cuts in ([0, third, len(outputs)], range(len(outputs) + 1)):
        if (parts := _split_states(task, outputs, cuts)) is not None:
            _check_equal(task, at_once, _combine_states(task, parts), f"{len(parts)} parts")


def _split_states(task: Task, outputs: Outputs, cuts: Sequence[int]) -> list[dict[str, States]] | None:
    """The states of parts between cuts; None: it takes too long, or a part has too few rows for an update."""
    begun_s, parts = time.monotonic(), []
    for low, high in pairwise(cuts):
        try:
            parts.append(_part_states(task, outputs[low:high]))
        except RayAppError:
            raise
        except Exception:
            return None
        if time.monotonic() - begun_s > _MAX_SECONDS:
            return None
    return parts if all(low < high for low, high in pairwise(cuts)) else None


def _check_wrappers(metrics: MetricCollection) -> None:
    """Refuses wrappers of torchmetrics whose value depends on how many updates there are.

    Raises:
        ConfigError: There is one.
    """
    reasons = {"BootStrapper": "draws rows at random in each update", "Running": "counts updates, not rows"}
    for name, metric in metrics.items(keep_base=True, copy_state=False):
        for kind in sorted(reasons.keys() & _wrapper_names(metric)):
            raise ConfigError(
                f"The metric {name!r} is a torchmetrics {kind}, which {reasons[kind]}: its value would depend on"
                f" evaluate.batch_size. Use"
                " the metric inside it."
            )


def _wrapper_names(metric: Any) -> set[str]:
    parts = metric_parts(metric).values()
    return {
        kind.__name__
        for part in parts
        for kind in type(part).__mro__
        if kind.__module__.startswith("torchmetrics.wrappers")
    }


def _compute_values(metrics: MetricCollection) -> Values:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values, tables = compute_values(metrics)
    return {**values, **tables}


def _check_equal(task: Task, expected: Values, combined: MetricCollection, parts: str) -> None:
    """Refuses values that are not those of all rows at once.

    Raises:
        ConfigError: They are not.
    """
    found = _compute_values(combined) if expected else {}
    for name, value in expected.items():
        if name in found and are_close(value, found[name]):
            continue
        kinds = ", ".join(f"{key} ({type(each).__name__})" for key, each in combined.items(keep_base=True))
        raise ConfigError(
            f"The metric {name!r} of {type(task).__name__} is {_format_value(value)} where it saw some rows at once, and"
            f" {_format_value(found.get(name))}"
            f" put together from the states of {parts}: an evaluation scores rows in chunks, so its value would depend"
            f" on"
            " evaluate.batch_size. Its states (add_state) must hold all that compute needs, as sums or lists over rows"
            " and not as means"
            f" over updates. The metrics are {kinds}."
        )


def are_close(a: Any, b: Any) -> bool:
    """Whether values are equal but for rounding; NaN equals NaN."""
    first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return first.shape == second.shape and bool(np.allclose(first, second, _RTOL, _ATOL, equal_nan=True))


def _format_value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:60]


def _check_computed(task: Task, outputs: Outputs, has_all: bool) -> list[str]:
    """What is to be said of the values: warnings of torchmetrics of too few rows or classes, where these are all rows.

    Raises:
        ConfigError: They cannot be computed of all rows there are.
    """
    if not has_all:
        return []
    count = len(outputs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            values, _ = compute_values(_update_metrics(task, outputs))
        except TaskError as error:
            raise ConfigError(
                f"The metrics of {type(task).__name__} cannot be computed of the {count} row{'s' * (count > 1)} of"
                f" data.eval_path:"
                f" {str(error).splitlines()[0]} Give it more rows, or leave the metric out."
            ) from error
    undefined = sorted(name for name, value in values.items() if math.isnan(value))
    if undefined and count == 1:
        raise ConfigError(
            f"{', '.join(map(repr, undefined))} of {type(task).__name__} {'is' if len(undefined) == 1 else 'are'} not a"
            f" number for the only"
            " row of data.eval_path; such metrics need two rows or more. Give it more rows, or leave the metric out."
        )
    told = (
        [f"Of the {count} rows of data.eval_path {', '.join(undefined)} cannot be told: not a number."]
        if undefined
        else []
    )
    said = dict.fromkeys(
        " ".join(str(each.message).split()) for each in caught if issubclass(each.category, UserWarning)
    )
    return [
        *told,
        *(
            f"torchmetrics says of the {count} rows of data.eval_path: {text}"
            for text in said
            if any(each in text for each in _WARNING_WORDS)
        ),
    ]


def _check_logits(task: Task, outputs: Outputs) -> None:
    """Refuses scores that torchmetrics would take for probabilities in one batch, and for logits in another.

    It decides by the values of each update whether they are between 0 and 1. Tried are outputs of the model's shape of
    which some are.

    Raises:
        ConfigError: A metric depends on that.
    """
    [(scores, batch), *more] = _join(outputs)
    if (
        more
        or not isinstance(scores, Tensor)
        or not scores.is_floating_point()
        or bool(((scores >= 0) & (scores <= 1)).all())
    ):
        return
    generator = torch.Generator().manual_seed(0)
    count = max(len(scores), MIN_ROWS)
    taken = torch.arange(count) % len(scores)
    shape = (count, *scores.shape[1:])
    mixed = torch.randn(shape, generator=generator) * 3
    mixed[::2] = torch.rand(shape, generator=generator)[::2]
    rows = [
        (mixed[i : i + 1].to(scores.dtype), {name: values[taken[i : i + 1]] for name, values in batch.items()})
        for i in range(count)
    ]
    try:
        expected, found = (
            _compute_values(_update_metrics(task, rows)),
            _compute_values(_combine_states(task, [_part_states(task, [each]) for each in rows])),
        )
    except Exception:  # metrics may want more of outputs than their shape, and raise what they like
        return
    if different := [name for name, value in expected.items() if name in found and not are_close(value, found[name])]:
        raise ConfigError(
            f"The metric {different[0]!r} of {type(task).__name__} gets outputs that are not probabilities:"
            f" torchmetrics takes those of a"
            " batch for probabilities if all are between 0 and 1, so the value would depend on evaluate.batch_size."
            " Give it"
            " outputs.sigmoid() or outputs.softmax(1) in the task's update; of a ModuleTask set"
            " task.init_args.activation to sigmoid or"
            " softmax."
        )


def repeat_rows(rows: Arrays, count: int) -> Arrays:
    """So many rows, in turn."""
    have = len(next(iter(rows.values())))
    if have >= count:
        return rows
    places = [i % have for i in range(count)]
    return {
        name: Ragged.of(
            (values.row(i) for i in places), values.values.dtype, values.fill, values.multiple, values.row_shape
        )
        if isinstance(values, Ragged)
        else values[places]
        for name, values in rows.items()
    }


def _check_means(task: BatchTask, model: nn.Module, rows: Arrays) -> list[str]:
    """Refuses numbers logged of a batch that are no means over its rows, by comparing a batch with two parts of it.

    Returns:
        Which numbers are drawn at random, in sentences; of these a comparison says nothing.

    Raises:
        ConfigError: There is one.
    """
    count = len(next(iter(rows.values())))
    cut = max(1, count // 3)
    batches = [
        to_batch({name: values[part] for name, values in rows.items()})
        for part in (slice(count), slice(cut), slice(cut, count))
    ]
    drawn: set[str] = set()
    for trial in range(num_perturbations(model)):
        with perturbed(model, trial):
            again, whole, *parts = (task.eval_outputs(model, batch) for batch in (batches[0], *batches))
        repeats = {**again.logged, "loss": again.loss}
        for name, value in (whole.logged if whole.weight is not None else {**whole.logged, "loss": whole.loss}).items():
            if name not in repeats or not np.array_equal(float(value), float(repeats[name]), equal_nan=True):
                drawn.add(name)
                continue
            known = [each.loss if name == "loss" else each.logged.get(name) for each in parts]
            if any(each is None for each in known):
                continue
            mean = (
                sum(
                    float(each) * count_rows(batch)
                    for each, batch in zip(known, batches[1:], strict=True)
                    if each is not None
                )
                / count
            )
            if np.isfinite(float(value)) and not are_close(float(value), mean):
                raise ConfigError(_not_a_mean_message(type(task).__name__, name, float(value), mean, count, cut))
    return [
        f"{name!r}, as the evaluation of {type(task).__name__} gives it, is another number each time that the same rows"
        f" are evaluated: what"
        " it draws at random makes it depend on evaluate.batch_size. Draw only where self.training is true."
        for name in sorted(drawn)
    ]


def _not_a_mean_message(task: str, name: str, value: float, mean: float, count: int, cut: int) -> str:
    return (
        f"{name!r}, as the evaluation of {task} gives it, is not a mean over rows: of a batch of {count} rows it is"
        f" {value:.6g}, and"
        f" {mean:.6g} as the mean over two parts of it of {cut} and {count - cut} rows. Averaged over batches it would"
        f" depend on"
        " evaluate.batch_size. Give the torchmetrics object itself, whose states are combined over all rows:"
        " self.log(name, self.metric)"
        " in a Lightning module, the object in the dictionary that a script's evaluate returns"
        " (torchmetrics.MeanMetric, updated with"
        " weights, for a mean over tokens; MeanSquaredError(squared=False) for a root)."
    )


def num_perturbations(model: nn.Module) -> int:
    """How many sets of parameters are tried: of a large model its own alone."""
    return 3 if sum(p.numel() for p in model.parameters()) <= _MAX_PERTURBED else 1


@contextmanager
def perturbed(model: nn.Module, trial: int) -> Iterator[None]:
    """The model with other parameters inside the block, in the first trial with its own."""
    kept = [p.detach().clone() for p in model.parameters()] if trial else []
    generator = torch.Generator().manual_seed(trial)
    try:
        if trial:
            for p in model.parameters():
                if p.is_floating_point():
                    p.add_(torch.randn(p.shape, generator=generator).to(p) * (0.5 * trial))
        yield
    finally:
        for p, value in zip(model.parameters(), kept, strict=False):
            p.copy_(value)
