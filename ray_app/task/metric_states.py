"""States of metrics and of the metrics inside them: copied after some rows, combined, and loaded into new metrics.

A metric may contain others: `1 - accuracy` (`CompositionalMetric`), wrappers such as `MinMaxMetric`, a metric as an
attribute or in a list. Each of these parts has its own states, stored by the path of the part.
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
"""States of a metric and its parts by name: `state` for the metric itself, `part.state` for a part."""


def is_not_distributed() -> bool:
    """Returns False; replaces `torch.distributed.is_initialized` in metrics, which must not run collectives: their
    states are combined by `combine_states`.
    """
    return False


def make_metrics(task: Task) -> MetricCollection:
    """Makes the metrics of a task, with everything off that would make them depend on how rows are divided.

    torchmetrics lets metrics of a collection share their states if these are equal after the first batch. They may be
    equal by chance (thresholds of 0.5 and 0.6, and no score between them), so only groups that the task defines are
    used.

    Raises:
        ConfigError: `Task.metrics` does not return a `MetricCollection`.
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
    """Turns off the collectives of all metrics in a module, and the automatic groups of collections; see
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
    """Returns the metric itself (path '') and all metrics inside it by path, also those in lists and dictionaries."""
    from torchmetrics import Metric

    return {path: part for path, part in _modules_of("", metric, set()) if isinstance(part, Metric)}


def is_classification(metric: Metric) -> bool:
    """Whether a metric, or one inside it, is of `torchmetrics.classification`, which takes probabilities."""
    return any(
        kind.__module__.startswith("torchmetrics.classification")
        for part in metric_parts(metric).values()
        for kind in type(part).__mro__
    )


def _modules_of(path: str, value: Any, visited: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yields all modules in a value with their paths, each once.

    torch registers modules that are attributes, but not those in plain lists and dictionaries.
    """
    children: Mapping[Any, Any] = {}
    if isinstance(value, nn.Module):
        if id(value) in visited:
            return
        visited.add(id(value))
        yield path, value
        states = getattr(value, "_defaults", {})
        children = {**{name: member for name, member in vars(value).items() if name not in states}, **value._modules}
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
            yield from _modules_of(f"{path}.{name}" if path else str(name), child, visited)


def reset_parts(metric: Metric) -> None:
    """Resets a metric and all metrics inside it, which `Metric.reset` leaves to the metric's author."""
    metric.reset()
    for part in metric_parts(metric).values():
        part.reset()


def states_of(metric: Metric) -> States:
    """Copies the states of a metric and its parts to the CPU.

    Raises:
        ConfigError: The metric has no states, so its results could not be combined.
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
    """Loads the states of several chunks into a metric, as if it had been updated with their rows in that order.

    Raises:
        ConfigError: A state cannot be combined, or the metric has other parts than the states.
    """
    parts = metric_parts(metric)
    expected = {state_key(path, name) for path, part in parts.items() for name in part._defaults}
    for chunk_states in states:
        if chunk_states.keys() != expected:
            different = sorted(chunk_states.keys() ^ expected)
            raise ConfigError(
                f"The metric {type(metric).__name__} has other states after an update than when it is made:"
                f" {', '.join(different)}. Make all of its metrics, and call add_state, in __init__."
            )
    for path, part in parts.items():
        for name in part._defaults:
            key = state_key(path, name)
            setattr(part, name, combine_states(part, name, [chunk_states[key] for chunk_states in states]))
        part._update_count, part._computed = len(states), None


def state_key(path: str, state: str) -> str:
    """Returns the key of a state of the part at a path."""
    return f"{path}.{state}" if path else state


def _on_cpu(state: Any) -> Any:
    return [part.detach().cpu() for part in state] if isinstance(state, list) else state.detach().cpu().clone()


def combine_states(metric: Metric, name: str, values: Sequence[Any]) -> Any:
    """Combines one state of a metric over all chunks, as if it had been updated with one chunk after the other.

    `Metric.merge_state` concatenates lists in reverse order, and refuses metrics that do not define how they
    synchronize. Tensors without a reduction are refused: `PearsonCorrCoef` and `ConcordanceCorrCoef` add up stacks of
    them, and give NaN if one is of a single row.

    Raises:
        ConfigError: The reduction of the state cannot combine parts of different size.
    """
    from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

    reduction = metric._reductions[name]
    if isinstance(values[0], list):
        return [piece for value in values for piece in value]
    if reduction is dim_zero_cat:
        return torch.cat(list(values))
    if len(values) == 1:
        return values[0]
    for supported, add in ((dim_zero_sum, torch.add), (dim_zero_max, torch.maximum), (dim_zero_min, torch.minimum)):
        if reduction is supported:
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
    """Returns pickles of the attributes of a metric and its parts other than states, by path.

    Attributes that cannot be pickled are left out.
    """
    fingerprints: dict[str, bytes] = {}
    for path, part in metric_parts(metric).items():
        if type(part).__module__.partition(".")[0] == "torchmetrics":
            continue
        excluded = _BOOKKEEPING | part._defaults.keys()
        attributes = {name: value for name, value in vars(part).items() if name not in excluded}
        for name, value in {**attributes, **part._buffers}.items():
            try:
                fingerprints[state_key(path, name)] = pickle.dumps(value)
            except Exception:
                # Locks, generators and objects of users raise errors of any type.
                continue
    return fingerprints


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
