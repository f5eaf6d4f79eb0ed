"""States of metrics, and of the metrics inside them: taken after some rows, combined, and loaded into metrics that saw
no row.

A metric may consist of others: `1 - accuracy` (`CompositionalMetric`), wrappers such as `MinMaxMetric`, a metric as an
attribute or in a list. Each of these parts has states of its own, which are carried by the path of the part.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ray_app.errors import ConfigError
from ray_app.task.annotations import Metric, MetricCollection
from ray_app.task.base import Task

States = dict[str, Any]
"""States of a metric and its parts: `state` is one of the metric itself, `part.state` one of a part."""


def is_not_distributed() -> bool:
    """Stands for `torch.distributed.is_initialized` in metrics: their states are combined here, never by a collective
    of theirs.
    """
    return False


def make_metrics(task: Task) -> MetricCollection:
    """The metrics of a task, without what would make them depend on how rows are divided.

    torchmetrics lets metrics of a collection share their states if these are equal after the first batch. That may be
    by chance (thresholds of 0.5 and 0.6 on scores of which none is between them), so only groups that the task names
    are used.

    Raises:
        ConfigError: `Task.metrics` returns something else.
    """
    from torchmetrics import MetricCollection

    metrics = task.metrics()
    if not isinstance(metrics, MetricCollection):
        raise ConfigError(
            f"{type(task).__name__}.metrics returned a {type(metrics).__name__}; it must return a"
            " torchmetrics.MetricCollection, such as MetricCollection({'accuracy': ...})."
        )
    isolate(metrics)
    return metrics


def isolate(module: nn.Module) -> None:
    """Keeps all metrics in a module from collectives, and collections from grouping metrics by chance; see
    `make_metrics`.
    """
    from torchmetrics import Metric, MetricCollection

    for part in dict(_modules_of("", module, set())).values():
        if isinstance(part, MetricCollection) and part._enable_compute_groups is True:
            part._enable_compute_groups = False
        elif isinstance(part, Metric):
            part.distributed_available_fn = is_not_distributed
            part.dist_sync_on_step = False


def metric_parts(metric: Metric) -> dict[str, Metric]:
    """The metric itself (path '') and all metrics inside it by their paths, also those in lists and dictionaries."""
    from torchmetrics import Metric

    return {path: part for path, part in _modules_of("", metric, set()) if isinstance(part, Metric)}


def is_classification(metric: Metric) -> bool:
    """Whether a metric, or one inside it, is one of `torchmetrics.classification`, which takes probabilities."""
    return any(
        kind.__module__.startswith("torchmetrics.classification")
        for part in metric_parts(metric).values()
        for kind in type(part).__mro__
    )


def _modules_of(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Modules in a value, each once: torch knows those that are attributes, not those in plain lists and
    dictionaries.
    """
    children: Mapping[Any, Any] = {}
    if isinstance(value, nn.Module):
        if id(value) in seen:
            return
        seen.add(id(value))
        yield path, value
        states = getattr(value, "_defaults", {})
        children = {**{name: each for name, each in vars(value).items() if name not in states}, **value._modules}
    elif isinstance(value, dict):
        children = value
    elif isinstance(value, list | tuple):
        children = dict(enumerate(value))
    for name, child in children.items():
        if isinstance(child, nn.Module | dict | list | tuple) and name not in (
            "_modules",
            "_parameters",
            "_defaults",
            "_reductions",
        ):
            yield from _modules_of(f"{path}.{name}" if path else str(name), child, seen)


def reset_parts(metric: Metric) -> None:
    """Resets a metric and all metrics inside it, which `Metric.reset` leaves to the metric's author."""
    metric.reset()
    for part in metric_parts(metric).values():
        part.reset()


def states_of(metric: Metric) -> States:
    """A copy of the states of a metric and its parts, on the CPU.

    Raises:
        ConfigError: It has none, so nothing of what it counts could be combined.
    """
    parts = metric_parts(metric)
    if not any(part._defaults for part in parts.values()):
        raise ConfigError(
            f"The metric {type(metric).__name__} has no states: what it counts in plain attributes is not in the value"
            " of an evaluation, which is combined from the states of parts of the rows. Register what it counts in"
            " __init__ with self.add_state(name, torch.tensor(0), dist_reduce_fx='sum')."
        )
    return {
        state_key(path, name): _on_cpu(state)
        for path, part in parts.items()
        for name, state in part.metric_state.items()
    }


def load_states(metric: Metric, states: Sequence[States]) -> None:
    """Loads into a metric what updating it with the rows of all states, in their order, would have left in it.

    Raises:
        ConfigError: A state cannot be combined, or the metric has other parts than the states are of.
    """
    parts = metric_parts(metric)
    expected = {state_key(path, name) for path, part in parts.items() for name in part._defaults}
    for found in states:
        if found.keys() != expected:
            different = sorted(found.keys() ^ expected)
            raise ConfigError(
                f"The metric {type(metric).__name__} has other states after an update than when it is made:"
                f" {', '.join(different)}. Make all of its metrics, and call add_state, in __init__."
            )
    for path, part in parts.items():
        for name in part._defaults:
            key = state_key(path, name)
            setattr(part, name, combine_states(part, name, [found[key] for found in states]))
        part._update_count, part._computed = len(states), None


def state_key(path: str, state: str) -> str:
    """The name of a state of the part at a path."""
    return f"{path}.{state}" if path else state


def _on_cpu(state: Any) -> Any:
    return [part.detach().cpu() for part in state] if isinstance(state, list) else state.detach().cpu().clone()


def combine_states(metric: Metric, name: str, values: Sequence[Any]) -> Any:
    """One state of a metric after all chunks: what updating it with one chunk after the other would have given.

    `Metric.merge_state` puts lists together the other way around, and refuses metrics that do not say how they sync.
    Tensors without a reduction are refused: `PearsonCorrCoef` and `ConcordanceCorrCoef` add up stacks of them, and give
    NaN if one is of a single row.

    Raises:
        ConfigError: The state has a reduction that does not go with parts of different size.
    """
    from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

    reduction = metric._reductions[name]
    if isinstance(values[0], list):
        return [piece for value in values for piece in value]
    if reduction is dim_zero_cat:
        return torch.cat(list(values))
    if len(values) == 1:
        return values[0]
    for known, add in ((dim_zero_sum, torch.add), (dim_zero_max, torch.maximum), (dim_zero_min, torch.minimum)):
        if reduction is known:
            total: Tensor = values[0]
            for value in values[1:]:
                total = add(total, value)
            return total
    raise ConfigError(
        f"The metric {type(metric).__name__} cannot be put together from parts: the reduction of its state {name!r} is"
        f" {getattr(reduction, '__name__', type(reduction).__name__)}. Use metrics whose states are sums, minima,"
        " maxima or lists, such as R2Score or SpearmanCorrCoef in the place of PearsonCorrCoef."
    )


def attribute_fingerprints(metric: Metric) -> dict[str, bytes]:
    """Fingerprints of what a metric and its parts keep beside their states, by path; without what cannot be pickled."""
    found: dict[str, bytes] = {}
    for path, part in metric_parts(metric).items():
        if type(part).__module__.partition(".")[0] == "torchmetrics":
            continue
        known = _BOOKKEEPING | part._defaults.keys()
        held = {**{name: value for name, value in vars(part).items() if name not in known}, **part._buffers}
        for name, value in held.items():
            try:
                found[state_key(path, name)] = pickle.dumps(value)
            except Exception:  # a lock, a generator: whatever raises what it likes
                continue
    return found


_TORCHMETRICS_ATTRIBUTES = (
    "_update_count",
    "_computed",
    "_forward_cache",
    "_cache",
    "_is_synced",
    "_to_sync",
    "_should_unsync",
    "_enable_grad",
    "_device",
    "_dtype_convert",
    "_update_signature",
    "_defaults",
    "_persistent",
    "_reductions",
    "compute",
    "distributed_available_fn",
    "update",
)
_BOOKKEEPING = frozenset([*vars(nn.Module()), *_TORCHMETRICS_ATTRIBUTES])
"""Attributes that torch and torchmetrics change by themselves."""
