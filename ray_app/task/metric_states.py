"""The states of torchmetrics' metrics: copying them after a chunk of rows, combining them, loading them into a metric.

An evaluation updates a metric with one chunk of rows at a time, resets it after each, and combines the states of all
chunks. So the value does not depend on which process computes a chunk.

A metric may contain others: `1 - accuracy` (`CompositionalMetric`), wrappers such as `MinMaxMetric`, a metric as an
attribute or in a list. The metric itself and those inside it are called its parts. Each has its own states, which are
stored by the path of the part.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ray_app.errors import ConfigError
from ray_app.task.annotations import Metric, MetricCollection
from ray_app.task.base import Task
from ray_app.task.transforms import same_in_each_process
from ray_app.torch_private import registered_buffers

_NESTED = nn.Module, dict, list, tuple
"""Types of attributes that may be or contain modules; a union of them would be made anew for each attribute."""
States = dict[str, Any]
"""The states of a metric and its parts, by the keys of `state_key`."""


def return_false() -> bool:
    """Returns False, in the place of `torch.distributed.is_initialized`: metrics must run no collectives."""
    return False


def make_metrics(task: Task) -> MetricCollection:
    """Makes the metrics of a task, and turns off all that would make their values depend on how rows are divided.

    These are collectives, and the automatic groups of a collection: torchmetrics lets metrics share their states if
    these are equal after the first batch. They may be equal by chance (thresholds of 0.5 and 0.6, and no score between
    them), so only groups that the task defines are used.

    Raises:
        ConfigError: `Task.metrics` does not return a `MetricCollection`.
    """
    from torchmetrics import MetricCollection

    with same_in_each_process():
        metrics = task.metrics()
    if not isinstance(metrics, MetricCollection):
        raise ConfigError(
            f"{type(task).__name__}.metrics returned a {type(metrics).__name__}; it must return a"
            " torchmetrics.MetricCollection, such as MetricCollection({'accuracy': ...})."
        )
    isolate(metrics)
    return metrics


def isolate(module: nn.Module) -> None:
    """Turns off collectives and automatic groups of all metrics in a module, see `make_metrics`."""
    from torchmetrics import Metric, MetricCollection

    for part in dict(_modules_of("", module, set())).values():
        if isinstance(part, MetricCollection) and part._enable_compute_groups is True:
            part._enable_compute_groups = False
        elif isinstance(part, Metric):
            part.distributed_available_fn = return_false
            part.dist_sync_on_step = False


def metric_parts(metric: Metric) -> dict[str, Metric]:
    """Returns all metrics inside a metric, also in lists and dictionaries, by path; "" is the metric itself."""
    from torchmetrics import Metric

    return {path: part for path, part in _modules_of("", metric, set()) if isinstance(part, Metric)}


def is_classification(metric: Metric) -> bool:
    """Returns whether a part of a metric is of `torchmetrics.classification`; metrics of it take probabilities."""
    return any(
        kind.__module__.startswith("torchmetrics.classification")
        for part in metric_parts(metric).values()
        for kind in type(part).__mro__
    )


def _modules_of(path: str, value: Any, visited: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yields all modules in a value with their paths, each module once.

    `nn.Module.named_modules` does not suffice: torch registers modules that are attributes, but not those in plain
    lists and dictionaries.
    """
    children: Mapping[Any, Any] = {}
    if isinstance(value, nn.Module):
        if id(value) in visited:
            return
        visited.add(id(value))
        yield path, value
        # A state of a metric may be a list, but has no modules.
        states = getattr(value, "_defaults", {})
        children = {**{name: member for name, member in vars(value).items() if name not in states}, **value._modules}
    elif isinstance(value, dict):
        children = value
    elif isinstance(value, list | tuple):
        children = dict(enumerate(value))
    for name, child in children.items():
        if not isinstance(child, _NESTED):
            continue
        # These attributes of torch and torchmetrics lead to modules a second time, or to none.
        if name not in ("_modules", "_parameters", "_defaults", "_reductions"):
            yield from _modules_of(f"{path}.{name}" if path else str(name), child, visited)


def take_states(metric: Metric) -> States:
    """Returns copies of a metric's states on the CPU and resets it; raises ConfigError for a metric without states."""
    parts = metric_parts(metric)
    if not any(part._defaults for part in parts.values()):
        raise ConfigError(
            f"The metric {type(metric).__name__} has no states, but an evaluation is combined from the states of parts"
            " of the rows, so plain attributes are lost. Register each value in __init__ with self.add_state(name,"
            " torch.tensor(0), dist_reduce_fx='sum')."
        )
    # An update changes a tensor in place; to a list it appends others.
    states = {
        state_key(path, name): [tensor.detach().cpu() for tensor in state]
        if isinstance(state, list)
        else state.detach().cpu().clone()
        for path, part in parts.items()
        for name, state in part.metric_state.items()
    }
    # `Metric.reset` leaves the metrics inside it to the author of the metric.
    for part in parts.values():
        part.reset()
    return states


def load_states(metric: Metric, states: Sequence[States]) -> None:
    """Loads the states of chunks, at least one, into a metric, as if it had been updated with their rows in that order.

    Raises ConfigError if a state cannot be combined, or the metric has other states than a chunk.
    """
    parts = metric_parts(metric)
    expected = {state_key(path, name) for path, part in parts.items() for name in part._defaults}
    for chunk_states in states:
        if chunk_states.keys() != expected:
            different = sorted(chunk_states.keys() ^ expected)
            raise ConfigError(
                f"The metric {type(metric).__name__} changes its states in an update: {', '.join(different)}. Create"
                " all of its metrics, and call add_state, in __init__."
            )
    for path, part in parts.items():
        for name in part._defaults:
            key = state_key(path, name)
            setattr(part, name, combine_states(part, name, [chunk_states[key] for chunk_states in states]))
        # Without an update torchmetrics warns when it computes; a cached value would hide the states.
        part._update_count, part._computed = len(states), None


def state_key(path: str, state: str) -> str:
    """Returns the key in `States` of a state of the part at a path: `state`, or `path.state` if the path is not ""."""
    return f"{path}.{state}" if path else state


def combine_states(metric: Metric, name: str, values: Sequence[Any]) -> Any:
    """Combines one state of a metric over all chunks, as if it had been updated with one chunk after the other.

    `Metric.merge_state` is not used, since it concatenates lists in reverse order, and refuses metrics that do not
    define how they synchronize. Raises ConfigError for several tensors unless their reduction is a sum, a minimum, a
    maximum or a concatenation. Without a reduction torchmetrics would stack them: `PearsonCorrCoef` and
    `ConcordanceCorrCoef` add up such a stack themselves, and give NaN if a chunk has a single row.
    """
    from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

    reduction = metric._reductions[name]
    if isinstance(values[0], list):
        return [tensor for value in values for tensor in value]
    if reduction is dim_zero_cat:
        return torch.cat(list(values))
    if len(values) == 1:
        return values[0]
    for supported, combine in ((dim_zero_sum, torch.add), (dim_zero_max, torch.maximum), (dim_zero_min, torch.minimum)):
        if reduction is supported:
            combined: Tensor = values[0]
            for value in values[1:]:
                combined = combine(combined, value)
            return combined
    raise ConfigError(
        f"The metric {type(metric).__name__} cannot be combined from parts: the reduction of its state {name!r} is"
        f" {getattr(reduction, '__name__', type(reduction).__name__)}. Use metrics whose states are sums, minima,"
        " maxima or lists, such as R2Score or SpearmanCorrCoef instead of PearsonCorrCoef."
    )


def attribute_fingerprints(metric: Metric) -> dict[str, bytes]:
    """Returns the attributes of a user's metric that are not states, each as its pickle, by the keys of `state_key`.

    Preflight compares them before and after an update: what an update changes here is lost, since only states are
    combined. Attributes that cannot be pickled and parts that have a class of torchmetrics are left out.
    """
    fingerprints: dict[str, bytes] = {}
    for path, part in metric_parts(metric).items():
        if type(part).__module__.partition(".")[0] == "torchmetrics":
            continue
        excluded = _library_attributes() | part._defaults.keys()
        attributes = {name: value for name, value in vars(part).items() if name not in excluded}
        for name, value in {**attributes, **registered_buffers(part)}.items():
            try:
                fingerprints[state_key(path, name)] = pickle.dumps(value)
            except Exception:
                # Locks, generators and objects of a user's classes raise errors of any type.
                continue
    return fingerprints


@cache
def _library_attributes() -> frozenset[str]:
    """Returns the attributes that each metric has from torch and torchmetrics, which change them."""
    from torchmetrics import Metric

    plain = type("PlainMetric", (Metric,), {"update": lambda metric: None, "compute": lambda metric: None})
    return frozenset(vars(plain()))
